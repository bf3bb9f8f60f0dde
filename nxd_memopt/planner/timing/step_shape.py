"""Sizes that determine the collectives of a training step, from a Hugging Face config or from a rank's sizes."""

from __future__ import annotations

import math
from dataclasses import replace

from nxd_memopt.architectures.model_spec import ModelSpec
from nxd_memopt.architectures.parameters import parameters
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.planner.memory.layer_tensors import layer_runs, merges_branches
from nxd_memopt.planner.sizes.rank_sizes import FP32_BYTES, RankSizes
from nxd_memopt.planner.techniques.loss_chunks import DEFAULT_LOGITS_BYTES, chunk_ranges
from nxd_memopt.planner.timing.collectives import RouterShape, StepShape


def step_shape(
    spec: ModelSpec,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    *,
    sequence_length: int,
    micro_batch_size: int,
    element_bytes: int,
    loss_in_backward: bool = False,
    moe: MoEConfig | None = None,
) -> StepShape:
    """Return the sizes of a training step of LLaMA, GPT-NeoX, Mixtral or Qwen3-MoE.

    Args:
        spec: the model.
        parallel: T, sequence parallelism and the dtype of reductions.
        memory: parts of a layer that are recomputed separately.
        sequence_length: S, tokens per sequence.
        micro_batch_size: B, sequences per micro-batch.
        element_bytes: bytes per element of parameters and activations.
        loss_in_backward: see ``StepShape``.
        moe: options of a model whose layers all have experts; None for a dense model.
    """
    for name in ("mlp_tile_tokens", "attention_head_groups"):
        value = getattr(memory, name)
        if value is not None:
            raise ValueError(f"{name} {value!r}: the collectives of tiles and groups are not planned: leave it out")
    size = parallel.tensor_model_parallel_size
    # With T greater than the number of KV heads g, r = T / g ranks have a replica of each KV head
    # and all-reduce its gradients. GPT-NeoX has no grouped-query attention, so r = 1.
    replicas = spec.kv_replicas(size)
    # models/gpt_neox.py merges in training without dropout after the branches.
    has_dropout = spec.hidden_dropout > 0
    blocks: list[int] = []
    for count, techniques in layer_runs(memory, spec.num_layers):
        merged = merges_branches(spec.model_type, techniques, parallel_residual=spec.has_parallel_residual)
        blocks += [1 if merged and not has_dropout else 2] * count
    reduce_dtype_bytes = element_bytes
    if parallel.reduce_dtype == "float32":
        reduce_dtype_bytes = 4
    tokens = sequence_length * micro_batch_size
    return StepShape(
        blocks=tuple(blocks),
        hidden_size=spec.hidden_size,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        element_bytes=element_bytes,
        tensor_model_parallel_size=size,
        sequence_parallel_enabled=parallel.sequence_parallel_enabled,
        reduce_dtype_bytes=reduce_dtype_bytes,
        kv_replicas=replicas,
        kv_gradient_bytes=_kv_gradient_bytes(spec, size, replicas, element_bytes),
        tagged_gradient_bytes=tuple(
            math.prod(parameter.shape) * element_bytes
            for parameter in parameters(spec)
            # Without SP the rank has all tokens, but of the heads still its own only.
            if (parameter.is_sequence_partial if parallel.sequence_parallel_enabled else parameter.is_head_partial)
        ),
        head_chunks=_head_chunks(spec, parallel, tokens, element_bytes),
        row_output_dropout=has_dropout,
        loss_in_backward=loss_in_backward,
        router=None if moe is None else _router_shape(moe, parallel.expert_model_parallel_size),
    )


def micro_batch_shape(sizes: RankSizes, memory: MemoryConfig) -> StepShape:
    """Return the sizes of a micro-batch of one rank, of which a planned time needs the bytes of collectives.

    The gradients of norms and of replicated KV heads are left out: they are a thousandth of the
    activations, and those of norms are summed once a step.

    Args:
        sizes: sizes of the rank's tensors.
        memory: recompute, tiles and groups of heads.

    Raises:
        ValueError: recompute does not fit the number of layers.
    """
    groups = memory.attention_head_groups
    num_groups = groups if isinstance(groups, int) else 0
    blocks: list[int] = []
    for count, techniques in layer_runs(memory, sizes.num_layers):
        merged = merges_branches(sizes.model_type, techniques, parallel_residual=sizes.mergeable)
        blocks += [1 if merged else 1 + max(1, num_groups)] * count
    router = None
    if sizes.moe is not None:
        router = _router_shape(sizes.moe.options, sizes.moe.expert_ranks)
        # Without padding the rows that are sent depend on the routing, which is taken as balanced.
        if sizes.moe.sends_rows:
            router = replace(router, sent_rows=sizes.moe.rows(sizes.tokens))
    return StepShape(
        blocks=tuple(blocks),
        hidden_size=sizes.hidden,
        sequence_length=sizes.sequence_length,
        micro_batch_size=sizes.micro_batch_size,
        element_bytes=sizes.element_bytes,
        tensor_model_parallel_size=sizes.tensor_model_parallel_size,
        sequence_parallel_enabled=sizes.shards > 1,
        reduce_dtype_bytes=FP32_BYTES if sizes.reduces_in_fp32 else sizes.element_bytes,
        kv_replicas=1,
        kv_gradient_bytes=(),
        tagged_gradient_bytes=(),
        # The bytes of all chunks together are those of one.
        head_chunks=(sizes.tokens,),
        row_output_dropout=sizes.hidden_dropout,
        loss_in_backward=sizes.is_fp16,
        router=router,
        head_groups=num_groups,
        tiles_mlp=memory.mlp_tile_tokens is not None,
    )


def _router_shape(moe: MoEConfig, expert_ranks: int) -> RouterShape:
    score_bytes = 8 if moe.moe_router_dtype == "fp64" else 4
    counts_globally = moe.moe_router_load_balancing_type == "global_aux_loss" and moe.has_aux_loss
    has_shared_expert = moe.moe_shared_expert_intermediate_size is not None
    return RouterShape(
        moe.num_moe_experts,
        moe.moe_router_topk,
        score_bytes=score_bytes,
        gathers_logits=moe.moe_router_load_balancing_type == "sinkhorn",
        shared_blocks=int(has_shared_expert),
        saves_shared_output=moe.moe_shared_expert_gate,
        expert_ranks=expert_ranks,
        sends_rows=moe.moe_token_dispatcher_type == "alltoall",
        capacity_factor=moe.moe_expert_capacity_factor,
        counted_bytes=(1 + moe.num_moe_experts) * score_bytes if counts_globally else 0,
    )


def _kv_gradient_bytes(
    spec: ModelSpec,
    size: int,
    replicas: int,
    element_bytes: int,
) -> tuple[int, ...]:
    """Return the bytes of each K and V gradient of a layer on one rank; none without replicas."""
    if replicas == 1:
        return ()
    # Layer 0 stands for every layer: their parameters have equal shapes.
    return tuple(
        math.prod(parameter.local_shape(size, replicas)) * element_bytes
        for parameter in parameters(spec)
        if parameter.sharding == "kv_column" and ".layers.0." in parameter.name
    )


def _head_chunks(
    spec: ModelSpec,
    parallel: ParallelConfig,
    tokens: int,
    element_bytes: int,
) -> tuple[int, ...]:
    """Return the tokens of each chunk of the fused loss, of all ranks whose tokens are gathered."""
    size = parallel.tensor_model_parallel_size
    gathered = 1
    if parallel.sequence_parallel_enabled:
        gathered = size
    # Per token of a chunk: gathered input, partial dX and reduced dX. The arguments are those with
    # which the fused loss itself calls chunk_ranges.
    exchanged = 0
    if size > 1:
        exchanged = 3 * spec.hidden_size
    ranges = chunk_ranges(
        tokens // gathered,
        gathered=gathered,
        vocab=-(-spec.vocab_size // size),
        exchanged=exchanged,
        logits_bytes=DEFAULT_LOGITS_BYTES,
        element_bytes=element_bytes,
    )
    # The ranges are of local rows; SP gathers the rows of all T ranks into each chunk.
    return tuple((stop - start) * gathered for start, stop in ranges)
