"""How many collectives of which size one training step must issue.

``a`` is the bytes of one full activation ``[S, B, H]``, ``T`` the tensor-parallel size, and
``r = T/g`` the number of ranks with a replica of the same KV head, for g KV heads. Sequence
parallelism (SP): arXiv:2205.05198, figure 5; without SP: arXiv:1909.08053, figure 3.

=================================  =======================  ==================================
part                               forward                  backward
=================================  =======================  ==================================
column input (attention; MLP up)   SP all-gather a          SP all-gather a, reduce-scatter a
                                   else none                else all-reduce a
row output (attention; MLP down)   SP reduce-scatter a      SP all-gather a
                                   else all-reduce a        else none
merged branches (GPT-NeoX)         attention and MLP have one column input and one row output
 weights and biases of the norms   none                     SP none, else all-reduce 16 H
embedding                          as a row output          as a row output
KV replicas, r > 1                 none                     all-reduce over r of each K and V weight
                                                            (and bias) gradient of this rank
head with its loss, in chunks      SP all-gather a,         none: forward computes its gradients
of tokens                          reduce-scatter a
                                   else all-reduce a
                                   all-gather 8 S B T       (two fp32 sums a token of each rank)
 in fp16                           as above, no reduction   its all-gathers again, and the reduction
gradient hook, SP                  --                       all-reduce of norms, row biases, routers
 without SP                                                 all-reduce of the norms of heads
mixture of experts, k of E         SP all-gathers a, 4 N k  SP all-gather a, reduce-scatters a, 4 N k
                                   and 8 N k (weights and   else all-reduces a, 4 N k
                                   indices of the choices),
                                   all-reduce 4 B (2 + 3 E)
                                   (sums of the router),
                                   reduce-scatter a
                                   else all-reduce a
 shared expert                     as a column input and a row output
 EP ranks, all-gather              all-gathers EP a, EP 4 N k,  all-gather EP a, reduce-scatters
                                   EP 8 N k, EP 4 N k with      EP a, EP 4 N k
                                   capacities,
                                   reduce-scatter EP a
 EP ranks, all-to-all              2 all-to-alls E C H      2 all-to-alls E C H
=================================  =======================  ==================================

Here C is the capacity of an expert, N is S B, and the group's size in the last two rows is EP instead of T.

Recomputation issues the forward collectives of its region again. PyTorch's eager checkpoint stops
at the last tensor that backward needs, so a region that ends in a row-parallel layer omits the last
reduction; on XLA collectives are chained and the reduction stays. ``nested`` runs all layers of a chunk
but the last one more time, to the end. Each group of heads is a block of its own, whose backward
gathers its input once more. ``reduce_dtype="float32"`` widens
the reductions of linear layers, not the all-gathers, and not those of experts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from nxd_memopt.architectures.experts import expert_capacity
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.techniques.buckets import GRADIENT_BUCKET_BYTES
from nxd_memopt.planner.techniques.recomputation import Recomputation

_FP32_BYTES = 4
_INT32_BYTES = 4
_INT64_BYTES = 8


@dataclass(frozen=True, order=True)
class Collective:
    """Kind and size of a collective.

    Args:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.
        full_bytes: bytes of the unsharded tensor: the result of an all-gather, the input of a
            reduce-scatter or all-reduce. With a ring each of n ranks sends ``(n - 1) / n`` of it
            for an all-gather or reduce-scatter, and twice that for an all-reduce.
        group_size: n, the number of ranks.
    """

    kind: str
    full_bytes: int
    group_size: int


@dataclass(frozen=True)
class RouterShape:
    """Sizes of a router that determine the collectives of its layer.

    Args:
        num_experts: E.
        top_k: k.
        score_bytes: bytes per element of scores and weights: 4, or 8 for a router in fp64.
        gathers_logits: Sinkhorn balances the tokens of all tensor-parallel ranks together.
        shared_blocks: 1 with a shared expert, which is one more dense block.
        saves_shared_output: a gate scales the output of the shared expert, and saves it.
        expert_ranks: EP, ranks over which the experts are divided.
        sends_rows: rows are sent to the ranks of their experts, instead of all tokens to all ranks.
        capacity_factor: rows of an expert, if they are padded to its capacity; None for blocks.
        sent_rows: rows that a rank sends, if they are not those of all experts' capacities.
        counted_bytes: numbers of choices that the ranks add up for ``global_aux_loss``; 0 for other losses.
    """

    num_experts: int
    top_k: int
    score_bytes: int = _FP32_BYTES
    gathers_logits: bool = False
    shared_blocks: int = 0
    saves_shared_output: bool = False
    expert_ranks: int = 1
    sends_rows: bool = False
    capacity_factor: float | None = None
    counted_bytes: int = 0
    sent_rows: int | None = None


@dataclass(frozen=True)
class StepShape:
    """Sizes that determine the collectives of a step.

    Args:
        blocks: for each decoder layer, its blocks with one column input and one row output: 2, or 1
            if attention and MLP of the layer are merged; each group of heads is a block.
        hidden_size: H.
        sequence_length: S.
        micro_batch_size: B.
        element_bytes: bytes per element of activations and parameters.
        tensor_model_parallel_size: T.
        sequence_parallel_enabled: SP.
        reduce_dtype_bytes: bytes per element in reductions of linear layers.
        kv_replicas: r; 1 without replicas.
        kv_gradient_bytes: bytes of each K and V parameter's gradient of a layer on one rank.
        tagged_gradient_bytes: bytes of the gradients that the hook sums, in the model's order.
        head_chunks: tokens of each chunk of the fused loss.
        row_output_dropout: whether dropout follows the last row output of a layer; its mask is
            saved.
        loss_in_backward: the fused loss runs again in backward, where its gradients are computed: in
            fp16, whose loss scale must enter before rounding.
        router: of every layer, whose last block is then a mixture of experts; None for dense layers.
        head_groups: groups of heads of a layer, which are recomputed one by one; 0 without groups.
        tiles_mlp: the MLP is computed by tiles. It saves its input before the all-gather, at which a
            recomputation that stops early then stops.
    """

    blocks: tuple[int, ...]
    hidden_size: int
    sequence_length: int
    micro_batch_size: int
    element_bytes: int
    tensor_model_parallel_size: int
    sequence_parallel_enabled: bool
    reduce_dtype_bytes: int
    kv_replicas: int
    kv_gradient_bytes: tuple[int, ...]
    tagged_gradient_bytes: tuple[int, ...]
    head_chunks: tuple[int, ...]
    row_output_dropout: bool
    loss_in_backward: bool = False
    router: RouterShape | None = None
    head_groups: int = 0
    tiles_mlp: bool = False

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.blocks)

    @property
    def layer_input_bytes(self) -> int:
        """Bytes of a layer's input on one rank, which full recomputation keeps of each layer."""
        # Between the blocks SP shards the activations over the T ranks along the sequence; without
        # SP every rank has all tokens.
        full_bytes = self.tokens * self.hidden_size * self.element_bytes
        if self.sequence_parallel_enabled:
            return full_bytes // self.tensor_model_parallel_size
        return full_bytes

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, S * B."""
        return self.sequence_length * self.micro_batch_size

    def gather(self) -> Counter[Collective]:
        """Return the all-gather of one activation."""
        return self._one("all_gather", self.tokens * self.hidden_size * self.element_bytes)

    def reduction(self, *, wide: bool = True) -> Counter[Collective]:
        """Return the reduction of partial sums: a reduce-scatter with SP, else an all-reduce.

        Args:
            wide: reduce in ``reduce_dtype`` instead of the dtype of activations.
        """
        kind = "all_reduce"
        if self.sequence_parallel_enabled:
            kind = "reduce_scatter"
        # The partial sums are cast to reduce_dtype before they are sent, so that fp32 doubles the
        # bytes of a bf16 reduction. Only sums of matmuls need it: in the embedding's output each
        # row has one non-zero summand.
        element_bytes = self.element_bytes
        if wide:
            element_bytes = self.reduce_dtype_bytes
        return self._one(kind, self.tokens * self.hidden_size * element_bytes)

    def column_forward(self) -> Counter[Collective]:
        """Return the forward collectives of a column-parallel input: with SP X is gathered."""
        return self._gather_with_sequence_parallel()

    def column_backward(self) -> Counter[Collective]:
        """Return the backward collectives of a column-parallel input.

        With SP the input is gathered again for the weight gradient; dX is reduced.
        """
        return self.column_forward() + self.reduction()

    def row_backward(self) -> Counter[Collective]:
        """Return the backward collectives of a row-parallel output: with SP dY is gathered."""
        return self._gather_with_sequence_parallel()

    def _gather_with_sequence_parallel(self) -> Counter[Collective]:
        # Without SP every rank already has all tokens of the activation.
        if self.sequence_parallel_enabled:
            return self.gather()
        return Counter()

    def _one(
        self,
        kind: str,
        full_bytes: int,
        group_size: int | None = None,
    ) -> Counter[Collective]:
        """Return one collective of the tensor-parallel group, or of a group of ``group_size``."""
        return Counter({Collective(kind, full_bytes, group_size or self.tensor_model_parallel_size): 1})


def expected_collectives(
    shape: StepShape,
    memory: MemoryConfig,
    *,
    stops_early: bool,
) -> Counter[Collective]:
    """Return the collectives of one micro-batch's forward and backward, and of the gradient hook.

    Args:
        shape: sizes of the step.
        memory: regions that are recomputed.
        stops_early: whether a recomputation ends with the last tensor that backward needs, as in
            PyTorch's eager checkpoint.

    Raises:
        ValueError: ``nested`` on XLA, or recompute does not fit the number of layers.
    """
    if memory.recompute_method == "nested" and not stops_early:
        raise ValueError(
            "the collectives of recompute_method 'nested' were not compared with XLA's: use 'uniform', which has "
            "one recomputation instead of two"
        )
    return micro_batch_collectives(shape, memory, stops_early=stops_early) + _issued(_gradient_hook(shape))


def micro_batch_collectives(shape: StepShape, memory: MemoryConfig, *, stops_early: bool) -> Counter[Collective]:
    """Return the collectives of one micro-batch's forward and backward; arguments as ``expected_collectives``.

    Raises:
        ValueError: recompute does not fit the number of layers.
    """
    total = _around_layers(shape)
    for blocks, layers in Counter(shape.blocks).items():
        total += _times(per_layer(shape, blocks), layers)
    return _issued(total + _recomputed(shape, memory, stops_early=stops_early))


def sent_bytes(collectives: Counter[Collective]) -> float:
    """Return the bytes that a rank sends in ``collectives``, over rings.

    Of n ranks each sends (n - 1) / n of the full tensor, and twice that in an all-reduce. In an
    all-to-all a rank sends all of its tensor but its own part.
    """
    total = 0.0
    for each, count in collectives.items():
        share = (each.group_size - 1) / each.group_size
        if each.kind == "all_reduce":
            share *= 2
        total += count * share * each.full_bytes
    return total


def _times(collectives: Counter[Collective], count: int) -> Counter[Collective]:
    """Return each of ``collectives`` ``count`` times."""
    return Counter({each: count * number for each, number in collectives.items() if count * number})


def _issued(collectives: Counter[Collective]) -> Counter[Collective]:
    """Return ``collectives`` without those in groups of one rank, which send nothing."""
    return Counter({each: count for each, count in collectives.items() if each.group_size > 1})


def per_layer(shape: StepShape, blocks: int) -> Counter[Collective]:
    """Return the collectives of forward and backward, without recomputation, of a layer of ``blocks`` blocks."""
    total: Counter[Collective] = Counter()
    dense = blocks
    if shape.router is not None:
        dense += shape.router.shared_blocks - 1
        total += _experts_forward(shape, shape.router) + _experts_output(shape, shape.router)
        total += _experts_backward(shape, shape.router)
    for _ in range(dense):
        total += shape.column_forward() + shape.reduction()
        total += shape.column_backward() + shape.row_backward()
    # The backward of each group of heads runs the group again up to its output projection.
    total += _times(shape.column_forward(), shape.head_groups)
    # Merged branches without SP: the gradients of weight and bias ([H], fp32) of two norms are
    # partial sums on each rank, all-reduced as one tensor of 2 * 2 * H * 4 bytes.
    if blocks == 1 and not shape.sequence_parallel_enabled:
        total += shape._one("all_reduce", 2 * 2 * shape.hidden_size * _FP32_BYTES)
    # The r replicas of a KV head serve different query heads, so that each has a part of the sum
    # that is the gradient of K and V: all-reduced over these r ranks only.
    if shape.kv_replicas > 1:
        for gradient_bytes in shape.kv_gradient_bytes:
            total += shape._one("all_reduce", gradient_bytes, shape.kv_replicas)
    return _issued(total)


def _experts_forward(shape: StepShape, router: RouterShape) -> Counter[Collective]:
    """Return the forward collectives of a mixture of experts before those of its output."""
    total = _dispatch(shape, router)
    if router.counted_bytes:
        total += shape._one("all_reduce", router.counted_bytes, router.expert_ranks)
    # Without SP every rank has all tokens, and routes them.
    if not shape.sequence_parallel_enabled:
        return total
    choices = shape.tokens * router.top_k
    sums = shape.micro_batch_size * (2 + 3 * router.num_experts)
    total += shape.gather()
    total += shape._one("all_gather", choices * router.score_bytes)
    total += shape._one("all_gather", choices * _INT64_BYTES)
    total += shape._one("all_reduce", sums * router.score_bytes)
    if router.gathers_logits:
        total += shape._one("all_gather", shape.tokens * router.num_experts * router.score_bytes)
    return total


def _dispatch(shape: StepShape, router: RouterShape) -> Counter[Collective]:
    """Return what expert-parallel ranks exchange in forward, without the reduction of gathered tokens."""
    ranks = router.expert_ranks
    if ranks == 1:
        return Counter()
    if router.sends_rows:
        sent = shape._one("all_to_all", _sent_bytes(shape, router), ranks)
        return sent + sent
    choices = ranks * shape.tokens * router.top_k
    total = shape._one("all_gather", _gathered_bytes(shape, router), ranks)
    total += shape._one("all_gather", choices * router.score_bytes, ranks)
    total += shape._one("all_gather", choices * _INT64_BYTES, ranks)
    if router.capacity_factor is not None:
        # The place of each choice in the queue of its expert.
        total += shape._one("all_gather", choices * _INT32_BYTES, ranks)
    return total


def _sent_bytes(shape: StepShape, router: RouterShape) -> int:
    """Return the bytes of the rows of all experts, each padded to its capacity."""
    if router.sent_rows is not None:
        return router.sent_rows * shape.hidden_size * shape.element_bytes
    assert router.capacity_factor is not None, "rows are sent in the padded form alone"
    capacity = expert_capacity(shape.tokens, router.top_k, router.num_experts, router.capacity_factor)
    return router.num_experts * capacity * shape.hidden_size * shape.element_bytes


def _gathered_bytes(shape: StepShape, router: RouterShape) -> int:
    """Return the bytes of the tokens of all expert-parallel ranks."""
    return router.expert_ranks * shape.tokens * shape.hidden_size * shape.element_bytes


def _experts_output(shape: StepShape, router: RouterShape) -> Counter[Collective]:
    """Return the reductions of the experts' outputs, which a recomputation that stops early omits."""
    total = shape.reduction(wide=False)
    if router.expert_ranks > 1 and not router.sends_rows:
        total += shape._one("reduce_scatter", _gathered_bytes(shape, router), router.expert_ranks)
    return total


def _experts_backward(shape: StepShape, router: RouterShape) -> Counter[Collective]:
    """Return the backward collectives of a mixture of experts.

    With SP dY is gathered. The gradients of tokens and of the choices' weights are partial sums of
    the ranks, which have other columns of the experts. X is not gathered again: the experts save it.
    """
    kind = "reduce_scatter" if shape.sequence_parallel_enabled else "all_reduce"
    weights = shape._one(kind, shape.tokens * router.top_k * router.score_bytes)
    total = shape.row_backward() + shape.reduction(wide=False) + weights
    ranks = router.expert_ranks
    if ranks > 1 and router.sends_rows:
        sent = shape._one("all_to_all", _sent_bytes(shape, router), ranks)
        total += sent + sent
    elif ranks > 1:
        gathered = _gathered_bytes(shape, router)
        total += shape._one("all_gather", gathered, ranks) + shape._one("reduce_scatter", gathered, ranks)
        choices = ranks * shape.tokens * router.top_k
        total += shape._one("reduce_scatter", choices * router.score_bytes, ranks)
    return total


def _around_layers(shape: StepShape) -> Counter[Collective]:
    """Return the collectives of the embedding and of the head with its loss."""
    # Each chunk of the fused loss is a column-parallel input whose gradient is computed in forward.
    # Its all-gather carries two fp32 numbers per token from each of T ranks.
    embedding = shape.reduction(wide=False) + shape.row_backward()
    total = embedding
    for tokens in shape.head_chunks:
        chunk = replace(shape, sequence_length=tokens, micro_batch_size=1)
        sums_bytes = 2 * _FP32_BYTES * tokens * shape.tensor_model_parallel_size
        forward = chunk.column_forward() + shape._one("all_gather", sums_bytes)
        total += forward + chunk.reduction()
        if shape.loss_in_backward:
            total += forward
    return total


def _gradient_hook(shape: StepShape) -> Counter[Collective]:
    """Return the all-reduces of gradients that are partial sums, one per flat bucket."""
    # Gradients fill buckets in order. A gradient that does not fit starts a new bucket, so a
    # gradient larger than a bucket has one alone.
    buckets: list[int] = []
    for gradient_bytes in shape.tagged_gradient_bytes:
        if buckets and buckets[-1] + gradient_bytes <= GRADIENT_BUCKET_BYTES:
            buckets[-1] += gradient_bytes
        else:
            buckets.append(gradient_bytes)
    total: Counter[Collective] = Counter()
    for bucket_bytes in buckets:
        total += shape._one("all_reduce", bucket_bytes)
    return total


def _recomputed(
    shape: StepShape,
    memory: MemoryConfig,
    *,
    stops_early: bool,
) -> Counter[Collective]:
    """Return the collectives that recomputation issues again."""
    # A recomputed block issues its forward collectives again: one column input and one row output.
    dense, experts = _recomputed_parts(shape, memory, stops_early=stops_early)
    parts = [(shape.column_forward(), dense[0]), (shape.reduction(), dense[1])]
    if shape.router is not None:
        output = _experts_output(shape, shape.router)
        parts += [(_experts_forward(shape, shape.router), experts[0]), (output, experts[1])]
    total: Counter[Collective] = Counter()
    for part, count in parts:
        total += _times(part, count)
    return total


def _recomputed_parts(
    shape: StepShape,
    memory: MemoryConfig,
    *,
    stops_early: bool,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how many column inputs are gathered again and how many row outputs reduced again.

    The first pair counts dense blocks, the second one mixtures of experts.
    """
    if memory.recompute_granularity == "full":
        return _fully_recomputed_parts(shape, memory, stops_early=stops_early)
    # Selective recomputation: only regions with a projection have collectives. core_attn, norm and
    # mlp_act run without communication.
    named = set(memory.recompute_modules or ())
    layers = memory.num_selective_layers(shape.num_layers)
    # Each region has one column input and ends in its row output, the part that a recomputation
    # which stops early omits. Layers with experts have no dense MLP.
    regions = layers * len(named & ({"attn", "mlp"} if shape.router is None else {"attn"}))
    expert_regions = layers if shape.router is not None and "moe" in named else 0
    if shape.router is not None and shape.router.shared_blocks:
        # The shared expert is the last part of its region, so that the reduction of the others comes before it.
        gathered = regions + expert_regions
        reduced = expert_regions if shape.router.saves_shared_output else 0
        return (gathered, reduced if stops_early else gathered), (expert_regions, expert_regions)
    if stops_early:
        return (regions, 0), (expert_regions, 0)
    return (regions, regions), (expert_regions, expert_regions)


def _fully_recomputed_parts(
    shape: StepShape,
    memory: MemoryConfig,
    *,
    stops_early: bool,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the parts of ``_recomputed_parts`` under full recompute.

    A forward that stops early omits its last row output, in layers with experts that of the experts,
    unless dropout saves a mask after it.
    """
    recomputation = Recomputation.of(memory, shape.num_layers)
    forwards = 0
    blocks = 0
    for index in range(recomputation.first, recomputation.stop):
        runs = recomputation.forwards_of(index, stops_early=stops_early)
        forwards += runs
        blocks += runs * shape.blocks[index]
    omitted = 0
    if stops_early and not shape.row_output_dropout:
        omitted = recomputation.stopped
    if shape.router is None:
        # A tiled MLP needs no collective at all to restore what it saves, which is its input.
        omitted_inputs = omitted if shape.tiles_mlp else 0
        return (blocks - omitted_inputs, blocks - omitted), (0, 0)
    dense = blocks - forwards
    shared = shape.router.shared_blocks * forwards
    if not shared:
        return (dense, dense), (forwards, forwards - omitted)
    # The shared expert comes last. A gate saves its output.
    if shape.router.saves_shared_output:
        omitted = 0
    return (dense + shared, dense + shared - omitted), (forwards, forwards)
