"""The temporary tensors of a layer's backward pass, moment by moment.

Each moment lists what exists besides the tensors that forward kept: gradients of activations, gathered
inputs, and the gradient of the weights that is being computed. The sizes follow the code in
``parallel_layers/functional/``, ``modules/parallel_residual.py`` and ``ops/cuda/``.
"""

from __future__ import annotations

from dataclasses import replace

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.memory.expert_tensors import expert_tensors
from nxd_memopt.planner.memory.fp8_operands import with_expert_operands, with_operands
from nxd_memopt.planner.memory.layer_moment import LayerBytes, Moment
from nxd_memopt.planner.memory.layer_tensors import Kernels, Tensors, merges_branches, repeats_kv_heads
from nxd_memopt.planner.memory.mlp_backward import mlp_moments
from nxd_memopt.planner.sizes.rank_sizes import FP32_BYTES, RankSizes
from nxd_memopt.planner.techniques.gpu_attention import COPIES_KV_GRADIENTS
from nxd_memopt.planner.techniques.tiling import head_group_bytes

_FLASH4_BLOCK = 128
"""Tokens to whose multiple FlashAttention-4's buffers are rounded."""
_OPERANDS = ("query, key, value", "query", "key", "value", "key by heads", "value by heads")
ATTENTION_SAVED = frozenset((*_OPERANDS, "attention", "attention by heads", "log-sum-exps"))
"""Storages that attention keeps."""


def layer_moments(sizes: RankSizes, memory: MemoryConfig, kernels: Kernels, index: int = 0) -> list[Moment]:
    """Return the moments of the backward of decoder layer ``index`` at which most memory is in use."""
    fp8 = sizes.fp8_linears(index)
    # Merged branches have other tensors than one after the other.
    if merges_branches(sizes, memory):
        return with_operands(_merged_moments(sizes, kernels), sizes, kernels, fp8)
    moments = with_operands(_sequential_moments(sizes, memory, kernels), sizes, kernels, fp8)
    if sizes.fp8_experts(index):
        moments = with_expert_operands(moments, sizes, kernels)
    if not sizes.scales_blocks:
        return moments
    # The gradient of a block's output is a multiple of the gradient of the residual stream, and exists next to it
    # until the block's last projection has read it. Counted at every moment: an upper bound.
    scaled = {"scaled gradient": LayerBytes(sizes).stream}
    return [replace(each, temporary={**each.temporary, **scaled}) for each in moments]


def _attention_scratch(sizes: RankSizes, kernels: Kernels) -> int:
    """Return the scratch of attention's backward.

    Flash kernels accumulate dQ in fp32 and store the row sums of dO * O. FlashAttention-4 also stores a copy
    of the log-sum-exps and accumulates dK and dV of grouped heads in fp32; it rounds the sequence length up to
    a multiple of its block size (``flash_attn/cute/interface.py``). cuDNN and PyTorch's flash kernel write the
    gradients of grouped keys and values for each query head. Attention with S x S scores has the gradients of
    softmax and scores.
    """
    if kernels.attention == "math":
        return 2 * sizes.micro_batch_size * sizes.heads * sizes.sequence_length**2 * FP32_BYTES
    if kernels.attention != "flash4":
        copies_gradients = kernels.attention in COPIES_KV_GRADIENTS and sizes.kv < sizes.query
        by_heads = 2 * sizes.column_bytes(sizes.query) * int(copies_gradients)
        return sizes.tokens * (sizes.query + sizes.heads) * FP32_BYTES + by_heads
    # Per token and head: d numbers of dQ, one row sum and one copy of the log-sum-exp, all of them fp32.
    blocks = -(-sizes.sequence_length // _FLASH4_BLOCK)
    columns = sizes.query + 2 * sizes.heads
    # Grouped heads have sums of their own.
    if sizes.kv < sizes.query:
        columns += 2 * sizes.kv
    return sizes.micro_batch_size * blocks * _FLASH4_BLOCK * columns * FP32_BYTES


def _sequential_moments(sizes: RankSizes, memory: MemoryConfig, kernels: Kernels) -> list[Moment]:
    """Return the moments of a layer whose MLP follows its attention."""
    # Backward runs from the MLP to attention, so that whatever the MLP kept is free when attention's turn comes, and
    # its weight gradients are complete: one of the last projection and one of each first projection.
    b = LayerBytes(sizes)
    columns = sizes.mlp_inputs
    mlp_saved = {"gate, up", "gate", "up", "activated gate", "mlp activation", "expanded", "normed mlp input"}
    mlp_saved.add("normed mlp input in float8")
    if sizes.moe is not None:
        mlp_saved |= expert_tensors(sizes, sizes.moe, fused=kernels.fused).keys()
    after_mlp = frozenset(mlp_saved | {"mlp input", "mlp input in fp32", "mlp input normalised"})
    mlp_gradients = (columns + 1) * b.width_weight
    moments = [replace(each, before_attention=True) for each in mlp_moments(sizes, memory, kernels, b, columns)]
    # One group exists at a time, with its tensors and their gradients.
    if isinstance(memory.attention_head_groups, int):
        return [*moments, _head_group_moment(sizes, kernels, b, memory.attention_head_groups, after_mlp)]
    # The gradient of the residual connection exists next to the gradient that the branch's output gets from it.
    output = {
        "gradients of the stream": 2 * b.stream,
        "gathered": b.gathered,
        "dO": b.query,
        "dW": b.output_weight + b.adapters,
    }
    core = {
        "gradients of the stream": b.stream,
        "dO": b.query,
        "dQ, dK, dV": b.qkv,
        "scratch of the kernel": _attention_scratch(sizes, kernels),
    }
    # Copies of the KV heads have gradients of their own, each as large as the gradient of the queries.
    if repeats_kv_heads(sizes, kernels):
        core["dQ, dK, dV"] = 3 * b.query
    projections = {
        "gradients of the stream": b.stream + b.reduced,
        "gathered": b.gathered,
        "dQ, dK, dV": b.qkv,
        "dX": b.full,
        "dW": b.qkv_weight + b.adapters,
    }
    after_output = mlp_gradients + b.output_weight
    return [
        *moments,
        Moment("attention output projection", output, after_mlp, mlp_gradients),
        Moment("attention", core, after_mlp, after_output),
        Moment("query, key and value projections", projections, after_mlp | ATTENTION_SAVED, after_output),
    ]


def _head_group_moment(sizes: RankSizes, kernels: Kernels, b: LayerBytes, groups: int, freed: frozenset[str]) -> Moment:
    """Return the backward of one group of heads: its tensors, and their gradients.

    The gradient of a slice of a weight has the size of the weight, next to the sum of the groups.
    """
    group = head_group_bytes(
        sizes.tokens,
        query_size=sizes.query,
        kv_size=sizes.kv,
        num_heads=sizes.heads,
        element_bytes=sizes.element_bytes,
        num_groups=groups,
    )
    temporary = {
        "gradients of the stream": 3 * b.stream + b.reduced,
        "gathered": b.gathered,
        "tensors and gradients of the group": group,
        "dX": b.full,
        "dW": 2 * (b.qkv_weight + b.output_weight),
    }
    if kernels.attention == "math":
        temporary["scores"] = _attention_scratch(sizes, kernels) // groups
    return Moment("group of heads", temporary, freed)


def _merged_moments(sizes: RankSizes, kernels: Kernels) -> list[Moment]:
    """Return the moments of GPT-NeoX's layer with merged branches."""
    b = LayerBytes(sizes)
    row_weights = b.output_weight + b.width_weight
    after_rows = frozenset({"mlp activation"})
    # For the gradients of the norms' weights XLA multiplies both branches' gradients with the
    # normalised rows, in fp32, before it sums over the tokens: f32[2048,6144] in GPT-NeoX-20B's graph.
    gradients: Tensors = {"dX": b.full, "gradient of normalised": b.stream}
    if kernels.compiles_steps:
        gradients = {"dX": 2 * b.full, "dX * normalised": 2 * b.full // sizes.element_bytes * FP32_BYTES}
    # Both row-parallel layers have one output, and so one gradient of it; dO and dA are the gradients of their inputs.
    outputs = {"gradients of the stream": b.stream, "dO": b.query, "dA": b.width}
    core = {
        "gradients of the stream": b.stream,
        "dO": b.query,
        "gradient of expanded": b.width,
        "dQ, dK, dV": b.qkv,
        "scratch of the kernel": _attention_scratch(sizes, kernels),
    }
    inputs = {
        "gradients of the stream": b.stream + b.reduced,
        "gradient of expanded": b.width,
        "dQ, dK, dV": b.qkv,
        # The normalised rows, and both branches' inputs or their gradients.
        "normalised": b.stream + b.gathered,
        "inputs of the branches": 2 * b.full,
        "dW": b.qkv_weight + b.width_weight,
    }
    rows = outputs | {"gathered": b.gathered, "dW": row_weights}
    activation = outputs | {"gradient of expanded": b.width}
    before_inputs = after_rows | ATTENTION_SAVED | {"expanded"}
    return [
        Moment("output projections", rows, returned=frozenset({"dA"})),
        Moment("activation", activation, after_rows, row_weights, before_attention=True),
        Moment("attention", core, after_rows | {"expanded"}, row_weights),
        Moment("input projections", inputs | gradients, before_inputs, row_weights),
    ]
