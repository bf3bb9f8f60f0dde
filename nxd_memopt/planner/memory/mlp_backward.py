"""The temporary tensors of an MLP's backward, moment by moment: with a gate or without, by tiles, and of experts.

The sizes follow the code in ``parallel_layers/functional/`` and ``ops/cuda/``.
"""

from __future__ import annotations

from nxd_memopt.architectures.experts import MoESizes, copied_columns, copies_rows
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.memory.expert_tensors import has_expert_kernels
from nxd_memopt.planner.memory.layer_moment import LayerBytes, Moment
from nxd_memopt.planner.memory.layer_tensors import Kernels, Tensors
from nxd_memopt.planner.sizes.rank_sizes import FP32_BYTES, RankSizes
from nxd_memopt.planner.techniques.tiling import ACTIVATION_TILE_BYTES, auto_tile_tokens, mlp_tile_bytes

_MOST_LOAD = 3
"""Upper bound on an expert's load relative to the mean (2 observed, in random routers of eight experts)."""
_RETURNED = frozenset({"dA", "gradients of the columns"})
"""What the backward of a last projection returns: it exists while hooks of the gradients run. dA: of the activation."""


def mlp_moments(
    sizes: RankSizes, memory: MemoryConfig, kernels: Kernels, b: LayerBytes, projections: int
) -> list[Moment]:
    """Return the moments of the MLP's backward.

    Args:
        sizes: sizes of the rank.
        memory: tiles of tokens.
        kernels: fused or plain operations.
        b: bytes of the layer's tensors.
        projections: number of first projections, 2 with a gate.
    """
    if memory.mlp_tile_tokens is not None:
        return _tile_moments(sizes, memory.mlp_tile_tokens, kernels, b)
    if sizes.moe is not None and kernels.fused and has_expert_kernels(sizes, sizes.moe):
        return [*_shared_expert_moments(sizes, b, projections), *_expert_kernel_moments(b, sizes.hidden, sizes.moe)]
    if sizes.moe is not None and kernels.fused and sizes.moe.options.moe_expert_block_size is None:
        return [
            *_shared_expert_moments(sizes, b, projections),
            *_expert_loop_moments(b, projections, sizes.moe.local_experts),
        ]
    # The gated kernel needs the activation's gradient for one tile of rows at a time, and writes the
    # gradients of gate and up over them. Plain operations have all of these at once.
    activation = min(b.width, max(sizes.width * sizes.element_bytes, ACTIVATION_TILE_BYTES))
    written: Tensors = {}
    # An adapter with dropout on the last projection needs the activation, which the kernel does not have.
    is_adapted = sizes.adapters is not None and sizes.adapters.has_dropout and sizes.adapters.on("down_proj")
    if kernels.fused and projections == 1 and sizes.moe is None and not is_adapted:
        return _activation_moments(b)
    if is_adapted or not (kernels.fused and projections == 2 and sizes.moe is None):
        activation = b.width
        written = {"gradients of the columns": projections * b.width}
    down = {
        "gradients of the stream": b.stream,
        "gathered": b.gathered,
        "dA": activation,
        "dW": b.width_weight + b.adapters,
    }
    if sizes.moe is not None:
        # The gradients of the weighted rows and of the experts' outputs.
        down |= {"gradients of the rows": 2 * b.rows}
        if sizes.moe.options.moe_expert_block_size is not None and sizes.moe.local_experts > 1:
            # The blocks of an expert add up in fp32, which is rounded once.
            down |= {"dW in fp32": b.width_weight // sizes.element_bytes * FP32_BYTES}
    up = {
        "gradients of the stream": b.stream + b.reduced,
        "gathered": b.gathered,
        "dX": b.expert_tokens + b.rows,
        "dW": projections * b.width_weight + b.adapters,
    }
    return [
        *_shared_expert_moments(sizes, b, projections),
        Moment("MLP, last projection", down | written, returned=_RETURNED),
        Moment("MLP, first projections", up | written, frozenset({"mlp activation"}), b.width_weight),
    ]


def _tile_moments(sizes: RankSizes, tile: int | str, kernels: Kernels, b: LayerBytes) -> list[Moment]:
    """Return the moments of an MLP by tiles of tokens, whose weight gradients are summed in fp32."""
    per_token = mlp_tile_bytes(
        hidden_size=sizes.hidden,
        columns_per_partition=sizes.mlp_inputs * sizes.width,
        width_per_partition=sizes.width,
        element_bytes=sizes.element_bytes,
        gathers=sizes.tensor_model_parallel_size > 1,
        overwrites=kernels.fused and sizes.is_gated,
    )
    # "auto" depends on the free memory of the first step; without it the largest tile is planned.
    if isinstance(tile, str):
        tile = auto_tile_tokens(None, per_token)
    # The tiles' weight gradients are summed in fp32 and rounded once.
    sums = (sizes.mlp_inputs + 1) * sizes.width * sizes.hidden * FP32_BYTES
    rounded = 0
    if sizes.element_bytes != FP32_BYTES:
        rounded = (sizes.mlp_inputs + 1) * b.width_weight
    stream = {"gradients of the stream": 2 * b.stream, "dW in fp32": sums}
    rows = min(tile, sizes.tokens)
    # Input and output gradient are gathered; only the input is copied out of its slot of peer memory.
    gathered = rows * sizes.hidden * sizes.element_bytes * int(sizes.shards > 1)
    return [
        Moment("tiles of the MLP", {**stream, "gathered": gathered, "tile": rows * per_token - gathered}),
        Moment("rounding of the MLP's gradients", {**stream, "dW": rounded}),
    ]


def _activation_moments(b: LayerBytes) -> list[Moment]:
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
        Moment("MLP, last projection", down, returned=_RETURNED),
        Moment("activation", activation, after_down, b.width_weight),
        Moment("MLP, first projections", up, after_down, b.width_weight),
    ]


def _expert_kernel_moments(b: LayerBytes, hidden: int, moe: MoESizes) -> list[Moment]:
    """Return the moments of ``ops/cuda/experts.py``, whose gradient of gate and up overwrites them."""
    # The copies of rows that wide matmuls read: of the output's gradient, and of a part of the tokens.
    copied_gradients = b.rows * int(copies_rows(moe.width))
    copied_tokens = b.rows // hidden * copied_columns(hidden) * int(copies_rows(2 * moe.width))
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
        Moment("MLP, last projection", down, returned=_RETURNED),
        Moment("MLP, gradient of the tokens", tokens, finished_gradients=b.width_weight),
        Moment("MLP, first projections", up, finished_gradients=b.width_weight),
    ]


def _expert_loop_moments(b: LayerBytes, projections: int, local_experts: int) -> list[Moment]:
    """Return the moments of experts that are computed one after the other, for sizes or GPUs without grouped
    matmul kernels (``has_expert_kernels``).

    Autograd joins the gradients of the rows from tensors of full size that are zero outside of one expert: two of
    full size and one expert's part exist at a time.
    """
    stream = {"gradients of the stream": b.stream}
    in_down = frozenset({"outputs of the rows", "weighted rows"})
    after_down = in_down | {"activation of the rows"}
    after_up = after_down | {"rows", "gate, up of the rows", "activated gate of the rows", "expanded rows"}
    parts_of_down = {
        "gradients of the outputs": b.rows,
        "dA": 2 * b.width,
        "dA of one expert": min(b.width, _MOST_LOAD * b.width // local_experts),
        "parts of dW": b.width_weight,
    }
    down = {"dA": 2 * b.width, "parts of dW": b.width_weight, "dW": b.width_weight}
    activation = {"dA": b.width, "gradients of the columns": projections * b.width}
    weights = projections * b.width_weight
    up = {"gradients of the stream": b.stream + b.reduced, "dX": b.rows, "parts of dW": weights, "dW": weights}
    # The last expert's part of dX: the bound on its load, and one mean load as margin.
    more = {"dX of one expert": min(b.rows, (_MOST_LOAD + 1) * b.rows // local_experts)}
    return [
        Moment("MLP, last projection of each expert", stream | parts_of_down, in_down),
        Moment("MLP, last projection", stream | down, after_down, returned=_RETURNED),
        Moment("activation", stream | activation, after_down, b.width_weight),
        Moment("MLP, first projections", up | more, after_up, b.width_weight),
    ]


def _shared_expert_moments(sizes: RankSizes, b: LayerBytes, projections: int) -> list[Moment]:
    """Return the moments of the shared expert, whose backward comes before the backward of the routed experts."""
    if sizes.moe is None or not sizes.moe.shared_width:
        return []
    width = sizes.tokens * sizes.moe.shared_width * sizes.element_bytes
    weight = sizes.moe.shared_width * sizes.hidden * sizes.element_bytes
    down = {"gradients of the stream": 2 * b.stream, "gathered": b.gathered, "dA": width, "dW": weight}
    up = {
        "gradients of the stream": 2 * b.stream + b.reduced,
        "gathered": b.gathered,
        "gradients of the columns": projections * width,
        "dX": b.full,
        "dW": projections * weight,
    }
    freed = frozenset({"shared activation", "shared output", "gate of the shared output"})
    return [
        Moment("shared expert, last projection", down, returned=frozenset({"dA"})),
        Moment("shared expert, first projections", up, freed, weight),
    ]
