"""The tensors that the operations of a decoder layer keep for backward: which saves which, and their bytes.

A layer is a tree of parts (``memory/layer_parts.py``). A part has the tensors that a checkpoint around it keeps (its
inputs), those that it saves without recomputation, and the parts inside it. A tensor that several parts save has one
name and counts once, as its storage exists once. Sources: the ``save_for_backward`` calls in
``ops/``, ``modules/`` and ``parallel_layers/functional/``; ``tests/planner/test_activations.py``
compares the sums with the storages that exist, as integers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from nxd_memopt.architectures.adapters import QKV
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.sizes.fp8_layers import ALIGNMENT
from nxd_memopt.planner.sizes.rank_sizes import FP32_BYTES, RankSizes

MODEL_TYPES_WITH_QK_NORM = ("qwen3", "qwen3_moe")
"""Architectures with a norm over each head of query and key."""
Tensors = dict[str, int]
"""Name of a storage -> bytes."""
ROUTER_STATISTICS = "router statistics"
"""Name of the storage with the statistics of the routers of all layers before."""
WINDOWED_KERNELS = ("tiled", "math")
"""Implementations of attention with a sliding window that save no mask (``ops/attention.py``)."""
KEEPABLE_ATTENTION = ("sdpa", "flash4", "cudnn", "flash", "efficient")
"""Attention as one operator of torch, which a policy of recompute can name."""
SINGLE_KERNELS = (*KEEPABLE_ATTENTION, "nki")
"""Attention as one operator: saves query, key, value, its result and the log-sum-exps."""


@dataclass(frozen=True)
class Kernels:
    """What computes the operations between matmuls.

    Args:
        fused: the device is a CUDA GPU, with the Triton kernels of ``ops/cuda``: they save the inputs of norms
            and activations only, and rotate queries and keys in place. Otherwise plain PyTorch operations.
        attention: implementation of attention, one of ``config.ATTENTION_BACKENDS`` but ``auto``.
        compiles_steps: steps or layers are compiled programs, whose compiler computes chains of elementwise
            operations without their intermediate results.
        in_graphs: each step runs as graphs of torch_xla (trn1), the update as well.
        masks_windows: the user chose ``sdpa``: windows become masks of S x S, which are saved.
    """

    fused: bool
    attention: str
    compiles_steps: bool = False
    in_graphs: bool = False
    masks_windows: bool = False


@dataclass(frozen=True)
class Part:
    """A module of a layer.

    Args:
        name: name in ``config.RECOMPUTE_MODULES``, or any other.
        inputs: what a checkpoint around it keeps.
        saves: what its own operations save.
        parts: modules inside it.
        results: what attention returns, which ``recompute_keep_core_attn`` keeps.
    """

    name: str
    inputs: Tensors = field(default_factory=dict)
    saves: Tensors = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    results: Tensors = field(default_factory=dict)

    def kept(self, recomputed: Collection[str] = ()) -> Tensors:
        """Return the storages that exist between forward and backward.

        Args:
            recomputed: names of the parts that run under a checkpoint.
        """
        if self.name in recomputed:
            return dict(self.inputs)
        tensors = dict(self.saves)
        for part in self.parts:
            tensors |= part.kept(recomputed)
        return tensors

    def kept_results(self) -> Tensors:
        """Return the results of attention in this part and those inside it."""
        tensors = dict(self.results)
        for part in self.parts:
            tensors |= part.kept_results()
        return tensors


def merges_branches(sizes: RankSizes, memory: MemoryConfig) -> bool:
    """Return whether layers run attention and MLP as one block, as GPT-NeoX's parallel residual can.

    A branch that is recomputed by itself or computed by tiles or groups of heads has a forward of its own, which the
    merged block would not call (``models/gpt_neox.py``, ``merged_branches``).
    """
    if sizes.model_type != "gpt_neox" or not sizes.mergeable:
        return False
    is_separate = {"attn", "mlp"} & set(memory.recompute_modules or ())
    return not is_separate and memory.mlp_tile_tokens is None and memory.attention_head_groups is None


def saved_input(sizes: RankSizes, inputs: Tensors, *, rounds: bool) -> Tensors:
    """Return what column-parallel layers save of their input ``[s, H]``: in float8 its columns, and their scales.

    Merged branches, without such an input, save none.
    """
    if not rounds or sizes.fp8 is None or not inputs:
        return inputs
    (name,) = inputs
    padded = -(-sizes.shard_tokens // ALIGNMENT) * ALIGNMENT
    scales = sizes.hidden if sizes.fp8.is_rowwise else 1
    return {f"{name} in float8": sizes.hidden * padded, f"{name} scales": scales * FP32_BYTES}


def merges_inputs(sizes: RankSizes, memory: MemoryConfig, index: int) -> bool:
    """Return whether merged branches of layer ``index`` share one normalised input: none of them alone rounds it."""
    rounded = sizes.fp8_linears(index) & {"qkv", "mlp in"}
    return merges_branches(sizes, memory) and sizes.adapters is None and len(rounded) != 1


def fp8_magnitudes(sizes: RankSizes, memory: MemoryConfig, index: int) -> Tensors:
    """Return the magnitudes that layer ``index`` keeps, whatever is recomputed: of what is rounded twice.

    All weights are. Row-parallel layers round their inputs for forward and again for backward, as merged branches do
    theirs, and experts the tokens.
    """
    if sizes.fp8 is None:
        return {}
    # Numbers with rowwise scales; tensorwise there is one, or one for each expert.
    numbers: dict[str, int] = {}
    fp8 = sizes.fp8_linears(index)
    if merges_inputs(sizes, memory, index) and "qkv" in fp8:
        numbers["normalised"] = sizes.shard_tokens + sizes.hidden
    for name in fp8:
        outputs = sizes.linear_elements[name] // sizes.hidden
        numbers[name] = sizes.hidden + outputs
        if name in ("attention output", "mlp out"):
            numbers[f"{name} input"] = sizes.tokens + outputs
    of_experts: dict[str, int] = {}
    experts = 0
    if sizes.moe is not None and sizes.fp8_experts(index):
        experts, width = sizes.moe.local_experts, sizes.moe.width
        of_experts = {
            "the experts' tokens": sizes.moe.rows(sizes.tokens) + experts * sizes.hidden,
            "gate and up": experts * (2 * width + sizes.hidden),
            "down": experts * (sizes.hidden + width),
        }
    if not sizes.fp8.is_rowwise:
        numbers, of_experts = dict.fromkeys(numbers, 1), dict.fromkeys(of_experts, experts)
    return {f"magnitudes of {name}": FP32_BYTES * count for name, count in (numbers | of_experts).items()}


def layer_runs(memory: MemoryConfig, num_layers: int) -> list[tuple[int, MemoryConfig]]:
    """Return consecutive layers that are computed alike: how many, and their techniques, in order.

    Selective recompute of the first layers leaves the others without recompute: GPT-NeoX merges
    the branches of those, and kernels rotate their queries and keys in place. Full recompute may
    keep the attention results of its last layers only.

    Args:
        memory: techniques of the model.
        num_layers: number of decoder layers.

    Raises:
        ValueError: ``recompute_num_layers`` or ``recompute_keep_core_attn`` exceeds the number of layers.
    """
    if memory.recompute_keep_core_attn not in (False, "all"):
        keeping = memory.layers_keeping_attention(num_layers)
        all_keep = replace(memory, recompute_keep_core_attn="all")
        none_keeps = replace(all_keep, recompute_keep_core_attn=False)
        runs = ((keeping.start, none_keeps), (len(keeping), all_keep), (num_layers - keeping.stop, none_keeps))
        return [run for run in runs if run[0]]
    # All layers are alike.
    if memory.recompute_granularity != "selective":
        return [(num_layers, memory)]
    selective = replace(memory, recompute_method=None, recompute_num_layers=None)
    plain = replace(selective, recompute_granularity=None, recompute_modules=None)
    first = memory.num_selective_layers(num_layers)
    return [run for run in ((first, selective), (num_layers - first, plain)) if run[0]]


def layer_kernels(sizes: RankSizes, kernels: Kernels, index: int) -> Kernels:
    """Return the kernels of layer ``index``: tiles of attention if the implementation has no windows."""
    # A layer whose queries see all keys runs the implementation that was chosen.
    if sizes.window(index) is None:
        return replace(kernels, masks_windows=False)
    if kernels.masks_windows or kernels.attention in WINDOWED_KERNELS:
        return kernels
    return replace(kernels, attention=WINDOWED_KERNELS[0])


def norm_tensors(sizes: RankSizes, kernels: Kernels, name: str, norm: str = "") -> Part:
    """Return what the norm of ``name`` saves: RMSNorm, or with GPT-NeoX LayerNorm, whose statistics ``norm`` names."""
    if not sizes.is_gated:
        return layer_norm_tensors(sizes, kernels, name, norm)
    return _rms_norm_tensors(sizes, kernels, name)


def _rms_norm_tensors(sizes: RankSizes, kernels: Kernels, name: str) -> Part:
    """Return what an RMSNorm of ``name`` saves.

    Plain operations save the input in fp32 (no copy if it is fp32) and the normalised input, which the gradient of the
    weight needs. The kernel and compilers save the input only and compute both again: of LLaMA-2-7B on one of 8
    ranks, XLA's graph keeps 4 MiB of each norm besides the statistics, where plain operations keep 12.
    """
    inputs = {name: sizes.residual_bytes}
    is_fused = kernels.fused or kernels.compiles_steps
    return Part("norm", inputs, _rms_norm_saves(sizes, name, sizes.shard_tokens, sizes.hidden, is_fused=is_fused))


def _rms_norm_saves(sizes: RankSizes, name: str, rows: int, width: int, *, is_fused: bool) -> Tensors:
    """Return what an RMSNorm of ``name``, ``rows`` of ``width`` elements, saves."""
    saves = {f"{name} rstd": rows * FP32_BYTES}
    if is_fused or sizes.element_bytes == FP32_BYTES:
        saves[name] = rows * width * sizes.element_bytes
    else:
        saves[f"{name} in fp32"] = rows * width * FP32_BYTES
    # With adapters the weight is frozen.
    if not is_fused and sizes.adapters is None:
        saves[f"{name} normalised"] = rows * width * sizes.element_bytes
    return saves


def layer_norm_tensors(sizes: RankSizes, kernels: Kernels, name: str, norm: str = "") -> Part:
    """Return what LayerNorm of ``name`` saves: its input, and mean and rstd of each token.

    PyTorch's CPU kernel stores both in the dtype of the input, its CUDA kernel in fp32.
    """
    inputs = {name: sizes.residual_bytes}
    number_bytes = FP32_BYTES if kernels.fused else sizes.element_bytes
    statistics = sizes.shard_tokens * number_bytes
    return Part("norm", inputs, inputs | {f"{name} mean{norm}": statistics, f"{name} rstd{norm}": statistics})


def core_attention(sizes: RankSizes, kernels: Kernels, query: Tensors, key: Tensors, value: Tensors) -> Part:
    """Return what the attention kernel saves.

    Args:
        sizes: sizes of the rank.
        kernels: implementation of attention.
        query: storage of the rotated queries.
        key: storage of the rotated keys.
        value: storage of the values.
    """
    inputs = query | key | value
    # S x S scores, which every other implementation avoids.
    if kernels.attention == "math":
        return Part("core_attn", inputs, _math_attention(sizes))
    # Kernels of GPUs draw the same numbers again in backward.
    if sizes.attention_dropout and not kernels.fused:
        raise ValueError(
            f"attention_dropout with {kernels.attention!r} attention in plain operations is not planned: set "
            "attention_backend to 'math', or attention_dropout to 0"
        )
    log_sum_exps = {"log-sum-exps": sizes.tokens * sizes.heads * FP32_BYTES}
    # Kernels of GPUs write [B, S, h, d]: the input of the next projection is a view. Tiles are joined as
    # [B, h, S, d], which the projection copies. PyTorch's CPU kernel returns the layout of the queries, and these
    # have [B, h, S, d] if a part of each head was rotated and the rest appended. With one head both are the same.
    results = {"attention": sizes.column_bytes(sizes.query)}
    appends = sizes.rotary_dim < sizes.head_dim and not kernels.fused
    if sizes.heads > 1 and (kernels.attention == "tiled" or appends):
        results = {"attention by heads": sizes.column_bytes(sizes.query)}
    results |= log_sum_exps
    # A kernel without grouped heads gets copies of the KV heads. Of the projections' outputs only the storage of
    # the queries stays, which has keys and values too if one projection computes all three.
    if repeats_kv_heads(sizes, kernels):
        copies = {name: sizes.column_bytes(sizes.query) for name in ("key by heads", "value by heads")}
        return Part("core_attn", inputs, query | copies | results, results=results)
    saved = inputs | results
    if kernels.masks_windows:
        # PyTorch adds the mask to the scores, and so keeps it in their dtype.
        saved |= {"window": sizes.sequence_length**2 * sizes.element_bytes}
    # A checkpoint keeps the results of one operator only.
    if kernels.attention not in SINGLE_KERNELS:
        results = {}
    return Part("core_attn", inputs, saved, results=results)


def repeats_kv_heads(sizes: RankSizes, kernels: Kernels) -> bool:
    """Return whether attention gets copies of the KV heads, because the kernel has no grouped heads."""
    return kernels.fused and kernels.attention == "efficient" and sizes.kv < sizes.query


def _math_attention(sizes: RankSizes) -> Tensors:
    """Return what attention with S x S scores saves: the batched matmuls' operands and the softmax."""
    scores = sizes.micro_batch_size * sizes.heads * sizes.sequence_length**2
    heads = sizes.column_bytes(sizes.query)
    tensors = {
        "query by heads": heads,
        "key by heads": heads,
        "value by heads": heads,
        "causal mask": sizes.sequence_length**2,
        "softmax": scores * FP32_BYTES,
    }
    if sizes.element_bytes != FP32_BYTES or sizes.attention_dropout:
        tensors["attention weights"] = scores * sizes.element_bytes
    if sizes.attention_dropout:
        tensors["dropout of the weights"] = scores * sizes.element_bytes
    return tensors


def rotated(sizes: RankSizes, memory: MemoryConfig, kernels: Kernels, *, shares: bool) -> tuple[Tensors, ...]:
    """Return the storages of query, key and value after RoPE.

    Args:
        sizes: sizes of the rank.
        memory: if ``core_attn`` is recomputed, RoPE must not overwrite its inputs.
        kernels: fused kernels rotate in place.
        shares: one projection computes all three, so that the values are a view of its output.
    """
    projected = {"query, key, value": sizes.column_bytes(sizes.query + 2 * sizes.kv)}
    # Qwen3's norms come between the projections and RoPE. An adapter with dropout adds its output to a projection's,
    # as does every adapter of GPT-NeoX's projection for RoPE.
    in_place = "core_attn" not in (memory.recompute_modules or ()) and sizes.model_type not in MODEL_TYPES_WITH_QK_NORM
    if sizes.adapters is not None and sizes.adapters.on(*QKV):
        in_place = in_place and sizes.is_gated and not sizes.adapters.has_dropout
    if kernels.fused and in_place:
        return projected, projected, projected
    value = {"value": sizes.column_bytes(sizes.kv)}
    if shares and not kernels.fused:
        value = projected
    return {"query": sizes.column_bytes(sizes.query)}, {"key": sizes.column_bytes(sizes.kv)}, value


def head_norm_tensors(sizes: RankSizes, kernels: Kernels, name: str, heads: int) -> Tensors:
    """Return what an RMSNorm over each head of query or key saves, as ``_rms_norm_tensors``."""
    return _rms_norm_saves(sizes, f"projected {name}", sizes.tokens * heads, sizes.head_dim, is_fused=kernels.fused)


def dropout_bytes(sizes: RankSizes, kernels: Kernels) -> int:
    """Return the bytes that dropout of the residual stream saves.

    PyTorch's CPU operators save factors in the dtype of their input, its CUDA kernel a boolean each.
    """
    if kernels.fused:
        return sizes.shard_tokens * sizes.hidden
    return sizes.residual_bytes
