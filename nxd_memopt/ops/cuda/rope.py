"""Rotary position embedding as one Triton kernel per pass, optionally in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nxd_memopt.ops.autograd import first_derivative_only
from nxd_memopt.ops.cuda.support import power_of_2
from nxd_memopt.ops.packed_view import Layout, packed_view


def _kernel() -> Any:
    from nxd_memopt.ops.cuda.rope_kernels import rope

    return rope


class _Rope(torch.autograd.Function):
    """Rotation of one tensor; backward rotates the gradient with the transposed matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, torch.empty_like(x), transposed=False)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, torch.empty_like(grad), transposed=True), None, None


class _RopeQKV(torch.autograd.Function):
    """Rotation of query and key that are chunks of one tensor together with value.

    In place only the rotated dimensions are read and written. Otherwise all three are written to
    new memory.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, in_place: bool
    ) -> tuple[Tensor, ...]:
        ctx.layout, ctx.in_place = Layout.of(query, key, value), in_place
        ctx.save_for_backward(cos, sin)
        # in place: detach() gives new tensors on the same memory, see increment_version below
        given = (query, key, value)
        results = [x.detach() for x in given] if in_place else [torch.empty_like(x) for x in given]
        _rotate_all(given, results, cos, sin, in_place=in_place, transposed=False)
        return tuple(results)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # attention's backward may have created them in this layout
        in_place = ctx.in_place and ctx.layout.is_that_of(*grads)
        # gradients in the layout of the inputs, so that the projection's backward sees one tensor
        results = grads if in_place else ctx.layout.empty(grads[0])
        _rotate_all(grads, results, *ctx.saved_tensors, in_place=in_place, transposed=True)
        return *results, None, None, None


def _rotate_all(
    given: Sequence[Tensor], results: Sequence[Tensor], cos: Tensor, sin: Tensor, *, in_place: bool, transposed: bool
) -> None:
    """Rotate query and key into ``results``, and copy value unless ``in_place``.

    Query and key take one launch if their heads are adjacent in memory.
    """
    # [B, h, S, d] and [B, g, S, d] with adjacent heads are one [B, h + g, S, d]: one launch
    packed = packed_view(given[:2], 1)
    packed_result = packed_view(results[:2], 1)
    pairs = list(zip(given[:2], results[:2], strict=True))
    if packed is not None and packed_result is not None:
        pairs = [(packed, packed_result)]
    for x, y in pairs:
        _rotate(x, cos, sin, y, transposed=transposed, in_place=in_place)
    if in_place:
        torch.autograd.graph.increment_version(given[:2])  # autograd raises if they were saved
    else:
        _copied(given[2], cos, results[2])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, *, transposed: bool, in_place: bool = False) -> Tensor:
    """Rotate ``x`` into ``y`` and return ``y``.

    With ``in_place`` both are the same memory. Shapes are ``[B, h, S, d]``, in any order of memory
    with contiguous heads.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    assert y.stride(-1) == 1
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, heads, tokens, head_dim = x.shape
    rotary_dim = cos.size(-1)
    # in place the dimensions that are not rotated are already at their destination
    rest = 0 if in_place else head_dim - rotary_dim
    # one program per token, with all heads
    _kernel()[(tokens, batch)](
        x,
        y,
        cos,
        sin,
        *x.stride()[:3],
        *y.stride()[:3],
        # stride 0 broadcasts one table [1, S, rotary_dim] over the batch
        0 if cos.size(0) == 1 else cos.stride(0),
        heads,
        head_dim,
        rotary_dim // 2,
        TRANSPOSED=transposed,
        HEADS=power_of_2(heads),
        HALF=power_of_2(rotary_dim // 2),
        REST=power_of_2(rest) if rest else 0,
        num_warps=4,
    )
    return y


def _copied(x: Tensor, cos: Tensor, y: Tensor) -> Tensor:
    """Copy ``x`` into ``y`` with the RoPE kernel and no rotated dimension.

    The copy runs at memory bandwidth; ``Tensor.copy_`` reaches a third of it here.
    """
    nothing = cos[..., :0]
    return _rotate(x, nothing, nothing, y, transposed=False)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Implement ``ops.rope.apply_rope``; the result is rounded once."""
    return cast(Tensor, _Rope.apply(x, cos, sin))


def apply_rope_qkv(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, *, in_place: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement ``ops.rope.apply_rope_qkv``."""
    # chunks of one projection's output: only then can gradients be written as one tensor
    is_joined = all(x.stride(-1) == 1 for x in (query, key, value)) and Layout.of(query, key, value).span is not None
    if not is_joined:
        return apply_rope(query, cos, sin), apply_rope(key, cos, sin), value
    in_place = in_place and not _is_dispatch_watched()
    return cast("tuple[Tensor, Tensor, Tensor]", _RopeQKV.apply(query, key, value, cos, sin, in_place))


def _is_dispatch_watched() -> bool:
    """Return whether a dispatch mode is active.

    Selective checkpointing, for example, may keep the output of a matmul and return it again in the
    recomputation.
    """
    return torch._C._len_torch_dispatch_stack() > 0
