"""The temporary tensors of a layer's backward pass, moment by moment.

Each moment lists what exists besides the tensors that forward kept: gradients of activations, gathered
inputs, and the gradient of the weights that is being computed. Sizes are those of the code in
``parallel_layers/functional/``, ``modules/parallel_residual.py`` and ``ops/cuda/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.expert_tensors import expert_tensors, has_expert_kernels
from nxd_memopt.planner.gpu_attention import COPIES_KV_GRADIENTS
from nxd_memopt.planner.layer_tensors import Kernels, Tensors, merges_branches, repeats_kv_heads
from nxd_memopt.planner.moe_sizes import MoESizes, copied_columns, copies_rows
from nxd_memopt.planner.rank_sizes import FP32_BYTES, RankSizes
from nxd_memopt.planner.tiling import auto_tile_tokens, head_group_bytes, mlp_tile_bytes

ACTIVATION_TILE_BYTES = 256 << 20
"""Largest gradient of a gated activation; each further tile adds one pass over dW."""
_ROWS_OF_ONE_EXPERT = 3
"""An expert may have so many times the mean of rows (twice measured, in random routers of eight experts)."""
_FLASH4_BLOCK = 128
"""Tokens to whose multiple FlashAttention-4's buffers are rounded."""


@dataclass(frozen=True)
class Moment:
    """A point of a layer's backward.

    Args:
        name: what runs.
        temporary: temporary tensors.
        freed: storages of the layer that forward kept and that are free by now.
        finished_gradients: bytes of this layer's weight gradients that are complete, in the dtype
            of the weights, without the one in ``temporary``.
    """

    name: str
    temporary: Mapping[str, int]
    freed: frozenset[str] = field(default_factory=frozenset)
    finished_gradients: int = 0


ATTENTION_SAVED = frozenset(
    {
        "query, key, value",
        "query",
        "key",
        "value",
        "key by heads",
        "value by heads",
        "attention",
        "attention by heads",
        "log-sum-exps",
    }
)
"""Storages that attention keeps."""
_BEFORE_ATTENTION = ("MLP", "shared expert", "tiles of the MLP", "rounding", "activation")


def precedes_attention(moment: Moment) -> bool:
    """Return whether a moment of a layer whose MLP follows its attention is before attention's backward."""
    return moment.name.startswith(_BEFORE_ATTENTION)


def layer_moments(sizes: RankSizes, memory: MemoryConfig, kernels: Kernels) -> list[Moment]:
    """Return the moments of a decoder layer's backward at which most memory is in use."""
    if merges_branches(sizes.model_type, memory, parallel_residual=sizes.mergeable):
        return _merged_moments(sizes, kernels)
    return _sequential_moments(sizes, memory, kernels)


_FREED_WITH_NODE = frozenset(
    {
        "gathered",
        "gathered gradient",
        "copied rows",
        "dA",
        "dA of the rows",
        "gradients of the columns",
        "gradients of the rows",
        "dQ, dK, dV",
        "gradient of expanded",
        "normalised",
        "inputs of the branches",
        "gradient of normalised",
        "dX * normalised",
        "dW in fp32",
        "tensors and gradients of the group",
        "parts of dW",
    }
)
"""Temporary tensors that are free when the function that has computed a weight's gradient returns."""
_RETURNED = {
    "MLP, last projection": frozenset({"dA", "gradients of the columns"}),
    "output projections": frozenset({"dA"}),
    "shared expert, last projection": frozenset({"dA"}),
}
"""Moment -> those of them that the function returns."""
_FREED_LATER = frozenset({"mlp input", "mlp input in fp32", "mlp input normalised"})
"""Storages of the norm, whose backward follows."""


def with_fp32_sums(moments: Sequence[Moment], *, routes: bool) -> list[Moment]:
    """Return ``moments``, each that computes weight gradients followed by their cast to fp32 sums.

    The hooks that cast run as soon as the function has returned: its saved and temporary tensors are free by
    then, what it returns is not.

    Args:
        moments: the moments in their order.
        routes: a router, whose backward follows that of the experts, has the same input.
    """
    freed_later = _FREED_LATER | {"normed mlp input"} if routes else _FREED_LATER
    found: list[Moment] = []
    for i, moment in enumerate(moments):
        found.append(moment)
        weight = moment.temporary.get("dW", 0)
        if not weight:
            continue
        freed_names = _FREED_WITH_NODE - _RETURNED.get(moment.name, frozenset())
        temporary = {name: size for name, size in moment.temporary.items() if name not in freed_names}
        freed = moment.freed
        if i + 1 < len(moments):
            freed |= moments[i + 1].freed - freed_later
        found.append(Moment(f"{moment.name}, sums", temporary, freed, moment.finished_gradients + weight))
    return found


class _Bytes:
    """Bytes of the tensors that several moments have in common."""

    def __init__(self, sizes: RankSizes) -> None:
        element = sizes.element_bytes
        self.stream = sizes.shard_tokens * sizes.hidden * element
        self.full = sizes.tokens * sizes.hidden * element
        # Sequence parallelism gathers a copy; without it every rank has all tokens.
        self.gathered = self.full if sizes.shards > 1 else 0
        # A reduction over ranks writes its result next to the partial sum; in fp32 both are copies,
        # of which the result is cast back.
        self.reduced = self.stream if sizes.tensor_model_parallel_size > 1 else 0
        if self.reduced and sizes.reduces_in_fp32 and element < FP32_BYTES:
            self.reduced += (self.stream + self.full) // element * FP32_BYTES
        self.query = sizes.tokens * sizes.query * element
        self.qkv = sizes.tokens * (sizes.query + 2 * sizes.kv) * element
        # Of experts: rows instead of tokens, and the weights of all experts.
        rows, width, num_weights = sizes.tokens, sizes.width, 1
        self.rows = 0
        self.expert_tokens = self.full
        self.gathered_gradient = self.gathered
        self.router = 0
        if sizes.moe is not None:
            rows, width, num_weights = sizes.moe.rows(sizes.tokens), sizes.moe.width, sizes.moe.local_experts
            self.rows = rows * sizes.hidden * element
            self.router = 3 * sizes.shard_tokens * sizes.moe.num_experts * sizes.moe.number_bytes
            # The gradient of the tokens of all expert-parallel ranks, before it is reduced.
            if sizes.moe.gathers_tokens:
                self.expert_tokens = sizes.moe.expert_ranks * self.full
                self.gathered_gradient = self.expert_tokens
        self.width = rows * width * element
        # Frozen weights have no gradient; those of the adapters, and what their backward adds, are in ``adapters``.
        trains = int(sizes.adapters is None)
        self.adapters = _adapter_bytes(sizes)
        num_weights *= trains
        self.qkv_weight = trains * (sizes.query + 2 * sizes.kv) * sizes.hidden * element
        self.output_weight = trains * sizes.query * sizes.hidden * element
        self.width_weight = num_weights * width * sizes.hidden * element


def _adapter_bytes(sizes: RankSizes) -> int:
    """Return what the backward of a linear layer's adapters has besides the layer's own tensors.

    The gradient of the adapter's input, which is added to that of the layer, and with dropout one more;
    those of the results of A, gathered, and of A and B.
    """
    if sizes.adapters is None:
        return 0
    widest = max(sizes.hidden, sizes.query, sizes.width)
    inputs = (2 + sizes.adapters.has_dropout) * sizes.tokens * widest
    factors = sizes.adapters.rank * (2 * sizes.tokens + sizes.hidden + widest)
    return (inputs + factors) * sizes.element_bytes


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
        by_heads = 2 * sizes.tokens * sizes.query * sizes.element_bytes if copies_gradients else 0
        return sizes.tokens * (sizes.query + sizes.heads) * FP32_BYTES + by_heads
    blocks = -(-sizes.sequence_length // _FLASH4_BLOCK)
    columns = sizes.query + 2 * sizes.heads + (2 * sizes.kv if sizes.kv < sizes.query else 0)
    return sizes.micro_batch_size * blocks * _FLASH4_BLOCK * columns * FP32_BYTES


def _sequential_moments(sizes: RankSizes, memory: MemoryConfig, kernels: Kernels) -> list[Moment]:
    """Return the moments of a layer whose MLP follows its attention."""
    b = _Bytes(sizes)
    columns = 2 if sizes.is_gated else 1
    mlp_saved = {"gate, up", "gate", "up", "activated gate", "mlp activation", "expanded", "normed mlp input"}
    if sizes.moe is not None:
        mlp_saved |= expert_tensors(sizes, sizes.moe, fused=kernels.fused).keys()
    after_mlp = frozenset(mlp_saved | {"mlp input", "mlp input in fp32", "mlp input normalised"})
    mlp_gradients = (columns + 1) * b.width_weight
    moments = _mlp_moments(sizes, memory, kernels, b, columns)
    if isinstance(memory.attention_head_groups, int):
        return [*moments, _head_group_moment(sizes, kernels, b, memory.attention_head_groups, after_mlp)]
    moments.append(
        Moment(
            "attention output projection",
            {
                "gradients of the stream": 2 * b.stream,
                "gathered": b.gathered,
                "dO": b.query,
                "dW": b.output_weight + b.adapters,
            },
            after_mlp,
            mlp_gradients,
        )
    )
    moments.append(
        Moment(
            "attention",
            {
                "gradients of the stream": b.stream,
                "dO": b.query,
                # Copies of the KV heads have gradients of their own.
                "dQ, dK, dV": 3 * b.query if repeats_kv_heads(sizes, kernels) else b.qkv,
                "scratch of the kernel": _attention_scratch(sizes, kernels),
            },
            after_mlp,
            mlp_gradients + b.output_weight,
        )
    )
    moments.append(
        Moment(
            "query, key and value projections",
            {
                "gradients of the stream": b.stream + b.reduced,
                "gathered": b.gathered,
                "dQ, dK, dV": b.qkv,
                "dX": b.full,
                "dW": b.qkv_weight + b.adapters,
            },
            after_mlp | ATTENTION_SAVED,
            mlp_gradients + b.output_weight,
        )
    )
    return moments


def _head_group_moment(sizes: RankSizes, kernels: Kernels, b: _Bytes, groups: int, freed: frozenset[str]) -> Moment:
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


def _mlp_moments(sizes: RankSizes, memory: MemoryConfig, kernels: Kernels, b: _Bytes, columns: int) -> list[Moment]:
    """Return the moments of the MLP's backward."""
    if memory.mlp_tile_tokens is not None:
        tile = memory.mlp_tile_tokens
        per_token = mlp_tile_bytes(
            1,
            hidden_size=sizes.hidden,
            columns_per_partition=columns * sizes.width,
            width_per_partition=sizes.width,
            element_bytes=sizes.element_bytes,
            gathers=sizes.tensor_model_parallel_size > 1,
            overwrites=kernels.fused and columns == 2,
        )
        tokens = auto_tile_tokens(None, per_token) if isinstance(tile, str) else tile
        # The tiles' weight gradients are summed in fp32 and rounded once.
        sums = (columns + 1) * sizes.width * sizes.hidden * FP32_BYTES
        rounded = 0
        if sizes.element_bytes != FP32_BYTES:
            rounded = (columns + 1) * b.width_weight
        stream = {"gradients of the stream": 2 * b.stream, "dW in fp32": sums}
        rows = min(tokens, sizes.tokens)
        # Of the two gathered tensors the input is copied out of its slot of peer memory.
        gathered = rows * sizes.hidden * sizes.element_bytes if sizes.shards > 1 else 0
        return [
            Moment("tiles of the MLP", {**stream, "gathered": gathered, "tile": rows * per_token - gathered}),
            Moment("rounding of the MLP's gradients", {**stream, "dW": rounded}),
        ]
    if sizes.moe is not None and kernels.fused and has_expert_kernels(sizes, sizes.moe):
        return [*_shared_expert_moments(sizes, b, columns), *_expert_kernel_moments(b, sizes.hidden, sizes.moe)]
    if sizes.moe is not None and kernels.fused and sizes.moe.options.moe_expert_block_size is None:
        return [*_shared_expert_moments(sizes, b, columns), *_expert_loop_moments(b, columns, sizes.moe.local_experts)]
    # The gated kernel needs the activation's gradient for one tile of rows at a time, and writes the
    # gradients of gate and up over them. Plain operations have all of these at once.
    activation = min(b.width, max(sizes.width * sizes.element_bytes, ACTIVATION_TILE_BYTES))
    written: Tensors = {}
    # An adapter on the last projection needs the activation, which the kernel does not have.
    is_adapted = sizes.adapters is not None and sizes.adapters.on("down_proj")
    if kernels.fused and columns == 1 and sizes.moe is None and not is_adapted:
        return _activation_moments(b)
    if is_adapted or not (kernels.fused and columns == 2 and sizes.moe is None):
        activation = b.width
        written = {"gradients of the columns": columns * b.width}
    down = {
        "gradients of the stream": b.stream,
        "gathered": b.gathered,
        "dA": activation,
        "dW": b.width_weight + b.adapters,
    }
    if sizes.moe is not None:
        # The gradients of the weighted rows and of the experts' outputs.
        down |= {"gradients of the rows": 2 * b.rows}
        if sizes.moe.options.moe_expert_block_size is not None:
            # Blocks add up in fp32, which is rounded once.
            down |= {"dW in fp32": b.width_weight // sizes.element_bytes * FP32_BYTES}
    up = {
        "gradients of the stream": b.stream + b.reduced,
        "gathered": b.gathered,
        "dX": b.expert_tokens + b.rows,
        "dW": columns * b.width_weight + b.adapters,
    }
    return [
        *_shared_expert_moments(sizes, b, columns),
        Moment("MLP, last projection", down | written),
        Moment("MLP, first projections", up | written, frozenset({"mlp activation"}), b.width_weight),
    ]


def _activation_moments(b: _Bytes) -> list[Moment]:
    """Return the moments of an MLP without a gate, whose activation is a kernel of its own."""
    down = {
        "gradients of the stream": b.stream,
        "gathered": b.gathered,
        "dA": b.width,
        "dW": b.width_weight + b.adapters,
    }
    activation = {"gradients of the stream": b.stream, "dA": b.width, "gradients of the columns": b.width}
    up = {
        "gradients of the stream": b.stream + b.reduced,
        "gathered": b.gathered,
        "gradients of the columns": b.width,
        "dX": b.full,
        "dW": b.width_weight + b.adapters,
    }
    after_down = frozenset({"mlp activation"})
    return [
        Moment("MLP, last projection", down),
        Moment("activation", activation, after_down, b.width_weight),
        Moment("MLP, first projections", up, after_down, b.width_weight),
    ]


def _expert_kernel_moments(b: _Bytes, hidden: int, moe: MoESizes) -> list[Moment]:
    """Return the moments of ``ops/cuda/experts.py``, whose gradient of gate and up overwrites them."""
    # The copies of rows that wide matmuls read: of the output's gradient, and of a part of the tokens.
    copied_gradients = b.rows if copies_rows(moe.width) else 0
    copied_tokens = b.rows // hidden * copied_columns(hidden) if copies_rows(2 * moe.width) else 0
    # Three numbers for each token and expert, of the router: scores, and the gradients of scores and logits.
    stream = {"gradients of the stream": b.stream, "gradients of the router": b.router}
    gradients = stream | {"gradient of the tokens": b.expert_tokens}
    down = stream | {
        "gathered gradient": b.gathered_gradient,
        "copied rows": copied_gradients,
        # The kernel's own: what it returns has the memory of gate and up.
        "dA of the rows": b.width,
        "dW": b.width_weight,
    }
    tokens = gradients | {"gradients of the rows": b.rows}
    up = gradients | {"copied rows": copied_tokens, "dW": 2 * b.width_weight}
    return [
        Moment("MLP, last projection", down),
        Moment("MLP, gradient of the tokens", tokens, finished_gradients=b.width_weight),
        Moment("MLP, first projections", up, finished_gradients=b.width_weight),
    ]


def _expert_loop_moments(b: _Bytes, columns: int, local_experts: int) -> list[Moment]:
    """Return the moments of experts that are computed one after the other, on GPUs without ``has_expert_kernels``.

    The gradients of the experts' weights, and of their rows, exist in parts before they are joined: that of the rows of
    all experts but one is zero in each part, so that there are two of full size, and one expert's.
    """
    stream = {"gradients of the stream": b.stream}
    in_down = frozenset({"outputs of the rows", "weighted rows"})
    after_down = in_down | {"activation of the rows"}
    after_up = after_down | {"rows", "gate, up of the rows", "activated gate of the rows", "expanded rows"}
    parts_of_down = {
        "gradients of the outputs": b.rows,
        "dA": 2 * b.width,
        "dA of one expert": min(b.width, _ROWS_OF_ONE_EXPERT * b.width // local_experts),
        "parts of dW": b.width_weight,
    }
    down = {"dA": 2 * b.width, "parts of dW": b.width_weight, "dW": b.width_weight}
    activation = {"dA": b.width, "gradients of the columns": columns * b.width}
    weights = columns * b.width_weight
    up = {"gradients of the stream": b.stream + b.reduced, "dX": b.rows, "parts of dW": weights, "dW": weights}
    # The last expert's part of dX, with a guard of one more mean.
    more = {"dX of one expert": min(b.rows, (_ROWS_OF_ONE_EXPERT + 1) * b.rows // local_experts)}
    return [
        Moment("MLP, last projection of each expert", stream | parts_of_down, in_down),
        Moment("MLP, last projection", stream | down, after_down),
        Moment("activation", stream | activation, after_down, b.width_weight),
        Moment("MLP, first projections", up | more, after_up, b.width_weight),
    ]


def _shared_expert_moments(sizes: RankSizes, b: _Bytes, columns: int) -> list[Moment]:
    """Return the moments of the shared expert, whose backward comes before that of the routed ones."""
    if sizes.moe is None or not sizes.moe.shared_width:
        return []
    width = sizes.tokens * sizes.moe.shared_width * sizes.element_bytes
    weight = sizes.moe.shared_width * sizes.hidden * sizes.element_bytes
    down = {"gradients of the stream": 2 * b.stream, "gathered": b.gathered, "dA": width, "dW": weight}
    up = {
        "gradients of the stream": 2 * b.stream + b.reduced,
        "gathered": b.gathered,
        "gradients of the columns": columns * width,
        "dX": b.full,
        "dW": columns * weight,
    }
    freed = frozenset({"shared activation", "shared output", "gate of the shared output"})
    return [
        Moment("shared expert, last projection", down),
        Moment("shared expert, first projections", up, freed, weight),
    ]


def _merged_moments(sizes: RankSizes, kernels: Kernels) -> list[Moment]:
    """Return the moments of GPT-NeoX's layer with merged branches."""
    b = _Bytes(sizes)
    row_weights = b.output_weight + b.width_weight
    after_rows = frozenset({"mlp activation"})
    # For the gradients of the norms' weights XLA multiplies both branches' gradients with the
    # normalised rows, in fp32, before it sums over the tokens: f32[2048,6144] in GPT-NeoX-20B's graph.
    gradients: Tensors = {"dX": b.full, "gradient of normalised": b.stream}
    if kernels.compiles_steps:
        gradients = {"dX": 2 * b.full, "dX * normalised": 2 * b.full // sizes.element_bytes * FP32_BYTES}
    return [
        Moment(
            "output projections",
            {
                "gradients of the stream": b.stream,
                "gathered": b.gathered,
                "dO": b.query,
                "dA": b.width,
                "dW": row_weights,
            },
        ),
        Moment(
            "activation",
            {"gradients of the stream": b.stream, "dO": b.query, "dA": b.width, "gradient of expanded": b.width},
            after_rows,
            row_weights,
        ),
        Moment(
            "attention",
            {
                "gradients of the stream": b.stream,
                "dO": b.query,
                "gradient of expanded": b.width,
                "dQ, dK, dV": b.qkv,
                "scratch of the kernel": _attention_scratch(sizes, kernels),
            },
            after_rows | {"expanded"},
            row_weights,
        ),
        Moment(
            "input projections",
            {
                "gradients of the stream": b.stream + b.reduced,
                "gradient of expanded": b.width,
                "dQ, dK, dV": b.qkv,
                # normalised, and both branches' inputs or their gradients
                "normalised": b.stream + b.gathered,
                "inputs of the branches": 2 * b.full,
                "dW": b.qkv_weight + b.width_weight,
            }
            | gradients,
            after_rows | ATTENTION_SAVED | {"expanded"},
            row_weights,
        ),
    ]
