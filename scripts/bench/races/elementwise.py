"""Races element-wise operations, forward and backward, and the optimizer's step, on one GPU.

    python -m scripts.bench.races.elementwise --append

bf16. ``ours`` is what the models run, ``eager`` the equivalent plain PyTorch code, ``compile``
torch.compile of ``eager``, ``liger`` Liger-Kernel's kernel. ``ideal_ms`` is the time to read each
input and write each result once at ``--bandwidth``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.ops.activation import activation, gated_activation
from nxd_memopt.ops.norm import (
    add_rms_norm,
    affine_branches,
    affine_branches_gradient,
    normalise,
    normalise_gradient,
    rms_norm,
)
from nxd_memopt.ops.parts import Layout, split_sizes
from nxd_memopt.ops.residual import add_residual
from nxd_memopt.ops.rope import apply_rope, apply_rope_qkv, rope_frequencies, rope_tables
from nxd_memopt.optimizer import AdamW
from scripts.bench.harness.gpu_race import first_line, parse_on_gpu, race, race_parser
from scripts.bench.harness.record import publish

EPS = 1e-5
Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """Operation to race.

    Args:
        inputs: arguments of the functions.
        functions: name of a competitor -> function that builds it.
        passes: bytes that forward and backward must read and write, as a multiple of the first
            input's bytes.
    """

    inputs: Sequence[Tensor]
    functions: dict[str, Callable[[], Function]]
    passes: float


# ``eager``: the specification of each operation in plain PyTorch


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x_fp32 = x.float()
    rstd = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * (x_fp32 * rstd).to(x.dtype)


def plain_add_rms_norm(x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + added
    return plain_rms_norm(total, weight), total


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def plain_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    # As in transformers: component i of a head forms a pair with component i + d/2, and each pair
    # is rotated by the angle of its position.
    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)

    return rotate(query), rotate(key)


class OneLayerNorm(torch.autograd.Function):
    """Normalization of GPT-NeoX's merged branches: one normalization and two affine parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *affine: Tensor) -> tuple[Tensor, ...]:
        normalised, mean, rstd = normalise(x, EPS)
        ctx.save_for_backward(x, mean, rstd, *affine)
        return tuple(affine_branches(normalised, affine[::2], affine[1::2]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, mean, rstd, *affine = ctx.saved_tensors
        normalised, _, _ = normalise(x, EPS)
        # The models need the affine outputs again for the weight gradients of the projections that
        # follow, so their recomputation is part of the measured work.
        gains = affine[::2]
        affine_branches(normalised, gains, affine[1::2])
        grad_normalised, grad_affine = affine_branches_gradient(normalised, grads, gains)
        grad_x = normalise_gradient(grad_normalised, x, mean, rstd)
        return grad_x, *grad_affine.to(x.dtype).flatten(0, 1)


def plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def plain_two_layer_norms(x: Tensor, *affine: Tensor) -> tuple[Tensor, ...]:
    return plain_layer_norm(x, *affine[:2]), plain_layer_norm(x, *affine[2:])


def plain_geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def plain_residual(residual: Tensor, output: Tensor, bias: Tensor) -> Tensor:
    return residual + (output + bias)


# ``liger``: imported when a variant is built, so that its absence is the failure of that variant
# alone. Offset 0 and casting mode "llama" are the arithmetic of ``plain_rms_norm``; not in place,
# because the inputs are used again.


def liger_rms_norm() -> Function:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def liger_add_rms_norm() -> Function:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction  # pyright: ignore[reportMissingImports]

    options = (EPS, 0.0, "llama", False)
    return lambda x, added, weight: LigerFusedAddRMSNormFunction.apply(x, added, weight, *options)


def liger_swiglu() -> Function:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # pyright: ignore[reportMissingImports]

    return lambda gate, up: LigerSiLUMulFunction.apply(gate, up)


def liger_layer_norm() -> Function:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # pyright: ignore[reportMissingImports]

    return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)


def liger_geglu() -> Function:
    from liger_kernel.ops.geglu import LigerGELUMulFunction  # pyright: ignore[reportMissingImports]

    return lambda gate, up: LigerGELUMulFunction.apply(gate, up)


def liger_rope() -> Function:
    from liger_kernel.ops.rope import LigerRopeFunction  # pyright: ignore[reportMissingImports]

    return lambda query, key, cos, sin: LigerRopeFunction.apply(query, key, cos, sin)


def random(*shape: int) -> Tensor:
    """Return a random bf16 tensor on the device that requires a gradient."""
    return torch.randn(shape, device=backend.device, dtype=torch.bfloat16, requires_grad=True)


def cases(tokens: int, hidden: int, width: int) -> dict[str, Case]:
    """Return the operations by name, with their passes over the first input.

    RMSNorm for example reads x and writes y in forward, and reads x and dy and writes dx in
    backward: 5 passes over ``[tokens, hidden]``.
    """
    # Statistics, gains, biases and RoPE tables are small next to the activations: they do not count
    # as passes. Forward + backward of the others, with x, y, r for input, output and residual:
    # - residual + RMSNorm: reads x, r, writes sum, y; reads sum, dy, dsum, writes one gradient: 8.
    # - gated activations: read gate, up, write y; read gate, up, dy, write dgate, dup: 8.
    # - two affine parts: reads x, writes y1, y2; reads x, dy1, dy2, writes dx: 7.
    # - residual + bias: reads x, r, writes y; reads dy for the bias, dx and dr are dy itself: 4.
    # - GeLU: reads x, writes y; reads x, dy, writes dx: 5.
    weight = random(hidden)
    return {
        "RMSNorm": Case(
            (random(tokens, hidden), weight),
            _competitors(lambda x, w: rms_norm(x, w, EPS), plain_rms_norm, liger_rms_norm),
            5,
        ),
        "residual + RMSNorm": Case(
            (random(tokens, hidden), random(tokens, hidden), weight),
            _competitors(
                lambda x, added, w: add_rms_norm(x, added, w, EPS),
                plain_add_rms_norm,
                liger_add_rms_norm,
            ),
            8,
        ),
        "SwiGLU": Case(
            (random(tokens, width), random(tokens, width)),
            _competitors(lambda g, u: gated_activation(g, u, "silu"), plain_swiglu, liger_swiglu),
            8,
        ),
        "GeGLU": Case(
            (random(tokens, width), random(tokens, width)),
            _competitors(
                lambda g, u: gated_activation(g, u, "gelu_pytorch_tanh"),
                plain_geglu,
                liger_geglu,
            ),
            8,
        ),
        "LayerNorm": Case(
            (random(tokens, hidden), weight, random(hidden)),
            _competitors(plain_layer_norm, plain_layer_norm, liger_layer_norm),
            5,
        ),
        "two affine parts of one LayerNorm": Case(
            (random(tokens, hidden), *(random(hidden) for _ in range(4))),
            _competitors(OneLayerNorm.apply, plain_two_layer_norms),
            7,
        ),
        "residual + bias": Case(
            (random(tokens, hidden), random(tokens, hidden), random(hidden)),
            _competitors(add_residual, plain_residual),
            4,
        ),
        "GeLU": Case((random(tokens, width),), _competitors(activation("gelu"), F.gelu), 5),
        "RoPE": _rope_case(tokens, hidden),
    }


def _rope_case(tokens: int, hidden: int) -> Case:
    """Return the case of RoPE on separate query and key, with LLaMA-3's proportions."""
    head_dim = 128
    heads = hidden // head_dim
    groups = heads // 4
    tables = rope_tables(
        rope_frequencies(head_dim, {"rope_theta": 5e5}),
        torch.arange(tokens, device=backend.device).unsqueeze(0),
        torch.bfloat16,
    )
    query = random(1, tokens, heads, head_dim).transpose(1, 2).detach().requires_grad_()
    key = random(1, tokens, groups, head_dim).transpose(1, 2).detach().requires_grad_()

    def ours(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rope(query, cos, sin), apply_rope(key, cos, sin)

    # Forward and backward each read and write query and key; key is groups / heads of query.
    passes = 4 * (1 + groups / heads)
    return Case((query, key, *tables), _competitors(ours, plain_rope, liger_rope), passes)


def _competitors(
    ours: Function, plain: Function, liger: Callable[[], Function] | None = None
) -> dict[str, Callable[[], Function]]:
    """Return the competitors by name; each is built when it runs, and may not be installed."""
    functions: dict[str, Callable[[], Function]] = {
        "ours": lambda: ours,
        "eager": lambda: plain,
        "compile": lambda: torch.compile(plain),
    }
    if liger is not None:
        functions["liger"] = liger
    return functions


@dataclass(frozen=True)
class Projection:
    """Packed output of a QKV projection.

    Args:
        heads: number of query heads.
        groups: number of KV heads.
        head_dim: d.
        rotary_dim: dimensions of a head that RoPE rotates.
        interleaved: whether q, k and v of a head are adjacent (GPT-NeoX), or all q, all k, all v
            (LLaMA).
    """

    heads: int
    groups: int
    head_dim: int
    rotary_dim: int
    interleaved: bool

    def split(self, packed: Tensor, *, as_models_do: bool) -> Sequence[Tensor]:
        """Return views of query, key and value, ``[B, heads, S, d]``."""
        # The models use split_sizes, whose backward returns the gradients' buffer without a copy if
        # the gradients are adjacent in memory. Autograd's own split always concatenates them.
        if self.interleaved:
            heads = packed.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            if as_models_do:
                return split_sizes(heads, [heads.size(-1) // 3] * 3, -1)
            return heads.chunk(3, dim=-1)
        sizes = [count * self.head_dim for count in (self.heads, self.groups, self.groups)]
        if as_models_do:
            chunks = split_sizes(packed, sizes, -1)
        else:
            chunks = packed.split(sizes, dim=-1)
        return [chunk.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for chunk in chunks]

    def case(self, tokens: int) -> Case:
        """Return the case of RoPE on the projection's output, with the gradient as one tensor.

        ``ours`` rotates in place like the models, ``ours, copied`` does not. In backward the
        incoming gradients are adjacent in memory, as flash4 writes them, except in
        ``ours, gradients apart``.
        """
        positions = torch.arange(tokens, device=backend.device).unsqueeze(0)
        frequencies = rope_frequencies(self.rotary_dim, {"rope_theta": 5e5})
        tables = rope_tables(frequencies, positions, torch.bfloat16)

        def ours(packed: Tensor, *, in_place: bool) -> tuple[Tensor, ...]:
            query, key, value = self.split(packed, as_models_do=True)
            return apply_rope_qkv(query, key, value, *tables, in_place=in_place)

        # GPT-NeoX rotates the first rotary_dim dimensions of a head and passes the others through.
        def plain(packed: Tensor) -> tuple[Tensor, ...]:
            query, key, value = self.split(packed, as_models_do=False)
            d = self.rotary_dim
            rotated_query, rotated_key = plain_rope(query[..., :d], key[..., :d], *tables)
            return (
                torch.cat([rotated_query, query[..., d:]], dim=-1),
                torch.cat([rotated_key, key[..., d:]], dim=-1),
                value,
            )

        functions = _competitors(partial(ours, in_place=True), plain)
        functions["ours, gradients apart"] = functions["ours"]
        functions["ours, copied"] = lambda: partial(ours, in_place=False)
        # In place, only the rotated part of query and key is read and written, once in each
        # direction: 4 passes over this share of the projection's output.
        rotated = (self.heads + self.groups) * self.rotary_dim
        width = (self.heads + 2 * self.groups) * self.head_dim
        return Case((random(1, tokens, width),), functions, 4 * rotated / width)


def forward_and_backward(
    function: Function, inputs: Sequence[Tensor], *, separate_gradients: bool
) -> Callable[[], object]:
    """Return a call that runs ``function`` and its backward.

    Args:
        function: operation.
        inputs: arguments of ``function``.
        separate_gradients: allocate the gradients of several outputs separately instead of in one
            tensor.
    """
    requiring_grad = [x for x in inputs if x.requires_grad]
    outputs = _as_tuple(function(*inputs))
    # The gradients are allocated once, outside the timed call: in a model the operations that
    # follow write them, as one buffer with views where the consumer is one kernel.
    if len(outputs) > 1 and not separate_gradients:
        buffers: Sequence[Tensor] = Layout.of(*outputs).empty(inputs[0])
    else:
        buffers = [torch.empty_like(x) for x in outputs]
    upstream = [x.normal_() for x in buffers]

    def run() -> object:
        return torch.autograd.grad(_as_tuple(function(*inputs)), requiring_grad, upstream)

    return run


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a function that returns one tensor or several."""
    if isinstance(results, tuple | list):
        return tuple(results)
    return (results,)


def optimizer_calls(numel: int) -> dict[str, Callable[[], object]]:
    """Return the steps of AdamW implementations by name, on ``numel`` bf16 parameters."""

    # Each competitor has parameters, gradients and moments of its own; all three sets are on the
    # device at once. 4096 x 4096 is the shape of LLaMA-3-8B's query projection.
    def parameters() -> list[Tensor]:
        params = [random(4096, 4096) for _ in range(numel // 4096**2)]
        for param in params:
            param.grad = torch.randn_like(param)
        return params

    return {
        "ours": AdamW(parameters(), lr=1e-5).step,
        "torch fused": torch.optim.AdamW(parameters(), lr=1e-5, fused=True).step,
        "torch foreach": torch.optim.AdamW(parameters(), lr=1e-5, foreach=True).step,
    }


def run_cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of all operations and of the optimizer."""
    rows: list[dict[str, Any]] = []
    table = cases(args.tokens, args.hidden, args.width)
    # Heads, groups, head_dim and rotary_dim of LLaMA-3-8B and GPT-NeoX-20B.
    llama = Projection(32, 8, 128, 128, interleaved=False)
    neox = Projection(64, 64, 96, 24, interleaved=True)
    table["RoPE of a projection"] = llama.case(args.tokens)
    table["GPT-NeoX's RoPE of a projection"] = neox.case(args.tokens)
    for name, case in table.items():
        calls: dict[str, Callable[[], object]] = {}
        # TB/s are 1e9 bytes per millisecond.
        ideal_ms = case.passes * case.inputs[0].nbytes / args.bandwidth / 1e9
        for variant, build in case.functions.items():
            row = {
                "operation": name,
                "tokens": args.tokens,
                "variant": variant,
                "ideal_ms": round(ideal_ms, 4),
            }
            rows.append(row)
            try:
                calls[variant] = forward_and_backward(
                    build(),
                    case.inputs,
                    separate_gradients="gradients apart" in variant,
                )
            except (ImportError, RuntimeError) as error:
                row["failure"] = first_line(error)
        _enter(rows, name, race(calls, args.turns))
    optimizers = ("ours", "torch fused", "torch foreach")
    rows += [{"operation": "AdamW", "tokens": "", "variant": name} for name in optimizers]
    # AdamW reads the parameter, the gradient and two moments, and writes all but the gradient:
    # 7 passes of 2 bytes per parameter.
    for row in rows[-len(optimizers) :]:
        row["ideal_ms"] = round(7 * 2 * args.parameters / args.bandwidth / 1e9, 4)
    _enter(rows, "AdamW", race(optimizer_calls(args.parameters), args.turns))
    return rows


def _enter(rows: list[dict[str, Any]], operation: str, times: dict[str, float]) -> None:
    """Write ``times`` of an operation's variants into its rows."""
    for row in rows:
        if row["operation"] == operation and row["variant"] in times:
            row["ms"] = round(times[row["variant"]], 4)


def main() -> None:
    parser = race_parser(__doc__, "elementwise", turns=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--width", type=int, default=14336, help="of the MLP")
    parser.add_argument("--parameters", type=int, default=2**29, help="of the optimizer's step")
    parser.add_argument("--bandwidth", type=float, default=4.8, help="of the memory, TB/s")
    args = parse_on_gpu(parser)
    rows = run_cases(args)
    columns = ("operation", "tokens", "variant", "ms", "ideal_ms", "failure")
    title = "element-wise operations, forward + backward"
    publish(rows, columns, title, args)


if __name__ == "__main__":
    main()
