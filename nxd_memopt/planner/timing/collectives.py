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
the reductions of linear layers, neither the all-gathers nor the reductions of experts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from nxd_memopt.architectures.experts import MoESizes
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.sizes.rank_sizes import FP32_BYTES, RankSizes
from nxd_memopt.planner.techniques.buckets import GRADIENT_BUCKET_BYTES, packed
from nxd_memopt.planner.techniques.recomputation import Recomputation

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
class StepShape:
    """Sizes that determine the collectives of a step.

    Args:
        sizes: sizes of the rank's tensors.
        blocks: for each decoder layer, its blocks with one column input and one row output: 2, or 1
            if attention and MLP of the layer are merged; each group of heads is a block. The last block
            of a layer with experts is the mixture of experts.
        head_groups: groups of heads of a layer, which are recomputed one by one; 0 without groups.
        tiles_mlp: the MLP is computed by tiles. It saves its input before the all-gather, at which a
            recomputation that stops early then stops.
        kv_replicas: r; 1 without replicas.
        kv_gradient_bytes: bytes of each K and V parameter's gradient of a layer on one rank.
        tagged_gradient_bytes: bytes of the gradients that the hook sums, in the model's order.
        head_chunks: tokens of each chunk of the fused loss.
    """

    sizes: RankSizes
    blocks: tuple[int, ...]
    head_groups: int = 0
    tiles_mlp: bool = False
    kv_replicas: int = 1
    kv_gradient_bytes: tuple[int, ...] = ()
    tagged_gradient_bytes: tuple[int, ...] = ()
    head_chunks: tuple[int, ...] = ()

    def activation_bytes(self, tokens: int) -> int:
        """Return the bytes of the hidden states of ``tokens``."""
        return tokens * self.sizes.hidden * self.sizes.element_bytes

    def layer_gather(self) -> Counter[Collective]:
        """Return the all-gather of a linear layer: of float8 rows if all linear layers of the middle layer round."""
        rounded = self.sizes.fp8_linears(self.sizes.num_layers // 2)
        if self.sizes.shards == 1 or len(rounded) < len(self.sizes.linear_elements):
            return self.gather()
        return self._one("all_gather", self.sizes.tokens * self.sizes.hidden)

    def gather(self, tokens: int | None = None) -> Counter[Collective]:
        """Return the all-gather of the activation of ``tokens``, by default all, with SP.

        With SP a column-parallel input is gathered in forward and, for the weight gradient, in backward, and so is
        the gradient of a row-parallel output. Without SP every rank has all tokens already.
        """
        if self.sizes.shards == 1:
            return Counter()
        return self._one("all_gather", self.activation_bytes(tokens or self.sizes.tokens))

    def reduction(self, tokens: int | None = None, *, wide: bool = True) -> Counter[Collective]:
        """Return the reduction of partial sums: a reduce-scatter with SP, else an all-reduce.

        Args:
            tokens: of which tokens; by default all.
            wide: reduce in ``reduce_dtype`` instead of the dtype of activations.
        """
        kind = "all_reduce"
        if self.sizes.shards > 1:
            kind = "reduce_scatter"
        # The partial sums are cast to reduce_dtype before they are sent, so that fp32 doubles the
        # bytes of a bf16 reduction. Only sums of matmuls need it: in the embedding's output each
        # row has one non-zero summand.
        element_bytes = self.sizes.element_bytes
        if wide:
            element_bytes = self.sizes.reduced_element_bytes
        return self._one(kind, (tokens or self.sizes.tokens) * self.sizes.hidden * element_bytes)

    def _one(self, kind: str, full_bytes: int, group_size: int | None = None) -> Counter[Collective]:
        """Return one collective of the tensor-parallel group, or of a group of ``group_size``."""
        return Counter({Collective(kind, full_bytes, group_size or self.sizes.tensor_model_parallel_size): 1})


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
        # A ring of n ranks cuts the tensor into n parts. A gather or a reduction passes n - 1 of them on; an
        # all-reduce is a reduce-scatter and an all-gather.
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
    moe = shape.sizes.moe
    if moe is not None:
        # A shared expert is one more dense block.
        dense += int(moe.shared_width > 0) - 1
        total += _experts_forward(shape, moe) + _experts_output(shape, moe) + _experts_backward(shape, moe)
    for _ in range(dense):
        total += shape.layer_gather() + shape.reduction()
        total += shape.layer_gather() + shape.reduction() + shape.layer_gather()
    # The backward of each group of heads runs the group again up to its output projection.
    total += _times(shape.gather(), shape.head_groups)
    # Merged branches without SP: the gradients of weight and bias ([H], fp32) of two norms are
    # partial sums on each rank, all-reduced as one tensor of 2 * 2 * H * 4 bytes.
    if blocks == 1 and shape.sizes.shards == 1:
        total += shape._one("all_reduce", 2 * 2 * shape.sizes.hidden * FP32_BYTES)
    # The r replicas of a KV head serve different query heads, so that each has a part of the sum
    # that is the gradient of K and V: all-reduced over these r ranks only.
    if shape.kv_replicas > 1:
        for gradient_bytes in shape.kv_gradient_bytes:
            total += shape._one("all_reduce", gradient_bytes, shape.kv_replicas)
    return _issued(total)


def _experts_forward(shape: StepShape, moe: MoESizes) -> Counter[Collective]:
    """Return the forward collectives of a mixture of experts before the reductions of its output."""
    total = _dispatch(shape, moe)
    options = moe.options
    # global_aux_loss adds up the numbers of choices of all ranks.
    if options.moe_router_load_balancing_type == "global_aux_loss" and options.has_aux_loss:
        total += shape._one("all_reduce", (1 + moe.num_experts) * moe.number_bytes, moe.expert_ranks)
    # Without SP every rank has all tokens, and routes them.
    if shape.sizes.shards == 1:
        return total
    choices = shape.sizes.tokens * moe.top_k
    sums = shape.sizes.micro_batch_size * (2 + 3 * moe.num_experts)
    total += shape.gather()
    total += shape._one("all_gather", choices * moe.number_bytes)
    total += shape._one("all_gather", choices * _INT64_BYTES)
    total += shape._one("all_reduce", sums * moe.number_bytes)
    # Sinkhorn balances the tokens of all tensor-parallel ranks together.
    if options.moe_router_load_balancing_type == "sinkhorn":
        total += shape._one("all_gather", shape.sizes.tokens * moe.num_experts * moe.number_bytes)
    return total


def _dispatch(shape: StepShape, moe: MoESizes) -> Counter[Collective]:
    """Return what expert-parallel ranks exchange in forward, without the reduction of gathered tokens."""
    ranks = moe.expert_ranks
    if ranks == 1:
        return Counter()
    if moe.sends_rows:
        sent = shape._one("all_to_all", _sent_bytes(shape, moe), ranks)
        return sent + sent
    choices = ranks * shape.sizes.tokens * moe.top_k
    total = shape._one("all_gather", shape.activation_bytes(ranks * shape.sizes.tokens), ranks)
    total += shape._one("all_gather", choices * moe.number_bytes, ranks)
    total += shape._one("all_gather", choices * _INT64_BYTES, ranks)
    if moe.options.moe_expert_capacity_factor is not None:
        # The place of each choice in the queue of its expert.
        total += shape._one("all_gather", choices * _INT32_BYTES, ranks)
    return total


def _sent_bytes(shape: StepShape, moe: MoESizes) -> int:
    """Return the bytes of the rows of all experts: each padded to its capacity, or of a balanced routing."""
    return shape.activation_bytes(moe.rows(shape.sizes.tokens))


def _experts_output(shape: StepShape, moe: MoESizes) -> Counter[Collective]:
    """Return the reductions of the experts' outputs, which a recomputation that stops early omits."""
    total = shape.reduction(wide=False)
    if moe.gathers_tokens:
        gathered = shape.activation_bytes(moe.expert_ranks * shape.sizes.tokens)
        total += shape._one("reduce_scatter", gathered, moe.expert_ranks)
    return total


def _experts_backward(shape: StepShape, moe: MoESizes) -> Counter[Collective]:
    """Return the backward collectives of a mixture of experts.

    With SP dY is gathered. The gradients of tokens and of the choices' weights are partial sums of
    the ranks, which have other columns of the experts. X is not gathered again: the experts save it.
    """
    kind = "all_reduce"
    if shape.sizes.shards > 1:
        kind = "reduce_scatter"
    weights = shape._one(kind, shape.sizes.tokens * moe.top_k * moe.number_bytes)
    total = shape.gather() + shape.reduction(wide=False) + weights
    ranks = moe.expert_ranks
    if moe.sends_rows:
        sent = shape._one("all_to_all", _sent_bytes(shape, moe), ranks)
        total += sent + sent
    elif moe.gathers_tokens:
        gathered = shape.activation_bytes(ranks * shape.sizes.tokens)
        total += shape._one("all_gather", gathered, ranks) + shape._one("reduce_scatter", gathered, ranks)
        total += shape._one("reduce_scatter", ranks * shape.sizes.tokens * moe.top_k * moe.number_bytes, ranks)
    return total


def _around_layers(shape: StepShape) -> Counter[Collective]:
    """Return the collectives of the embedding and of the head with its loss."""
    total: Counter[Collective] = Counter()
    if shape.sizes.has_embedding:
        total += shape.reduction(wide=False) + shape.gather()
    # Each chunk of the fused loss is a column-parallel input whose gradient is computed in forward.
    # Its all-gather carries two fp32 numbers per token from each of T ranks.
    for tokens in shape.head_chunks:
        sums_bytes = 2 * FP32_BYTES * tokens * shape.sizes.tensor_model_parallel_size
        forward = shape.gather(tokens) + shape._one("all_gather", sums_bytes)
        total += forward + shape.reduction(tokens)
        # In fp16 the loss runs again in backward: its scale must enter before rounding.
        if shape.sizes.is_fp16:
            total += forward
    return total


def _gradient_hook(shape: StepShape) -> Counter[Collective]:
    """Return the all-reduces of gradients that are partial sums, one per flat bucket."""
    total: Counter[Collective] = Counter()
    for bucket_bytes in packed(shape.tagged_gradient_bytes, GRADIENT_BUCKET_BYTES):
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
    parts = [(shape.layer_gather(), dense[0]), (shape.reduction(), dense[1])]
    moe = shape.sizes.moe
    if moe is not None:
        parts += [(_experts_forward(shape, moe), experts[0]), (_experts_output(shape, moe), experts[1])]
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
    layers = memory.num_selective_layers(shape.sizes.num_layers)
    # Each region has one column input and ends in its row output, the part that a recomputation
    # which stops early omits. Layers with experts have no dense MLP.
    moe = shape.sizes.moe
    regions = layers * len(named & {"attn", "mlp"})
    expert_regions = 0
    if moe is not None:
        regions = layers * len(named & {"attn"})
        expert_regions = layers * len(named & {"moe"})
    if moe is not None and moe.shared_width:
        # The shared expert is the last part of its region, so that the reduction of the others comes before it.
        # A gate saves its output.
        gathered = reduced = regions + expert_regions
        if stops_early:
            reduced = expert_regions * int(moe.options.moe_shared_expert_gate)
        return (gathered, reduced), (expert_regions, expert_regions)
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

    A forward that stops early omits its last row output, in layers with experts the experts' output,
    unless dropout saves a mask after it.
    """
    recomputation = Recomputation.of(memory, shape.sizes.num_layers)
    forwards = 0
    blocks = 0
    for index in range(recomputation.first, recomputation.stop):
        runs = recomputation.forwards_of(index, stops_early=stops_early)
        forwards += runs
        blocks += runs * shape.blocks[index]
    omitted = 0
    if stops_early and not shape.sizes.hidden_dropout:
        omitted = recomputation.stopped
    moe = shape.sizes.moe
    if moe is None:
        # A tiled MLP needs no collective at all to restore what it saves, which is its input.
        return (blocks - omitted * int(shape.tiles_mlp), blocks - omitted), (0, 0)
    dense = blocks - forwards
    if not moe.shared_width:
        return (dense, dense), (forwards, forwards - omitted)
    # The shared expert comes last. A gate saves its output.
    if moe.options.moe_shared_expert_gate:
        omitted = 0
    return (dense + forwards, dense + forwards - omitted), (forwards, forwards)
