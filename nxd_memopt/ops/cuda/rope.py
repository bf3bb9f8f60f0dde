"""Rotary position embedding as one Triton kernel per pass, optionally in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nxd_memopt.ops.autograd import first_derivative_only
from nxd_memopt.ops.cuda.support import power_of_2
from nxd_memopt.ops.parts import Layout, packed_view


def _kernel() -> Any:
    from nxd_memopt.ops.cuda.rope_kernels import rope

    return rope


class _Rope(torch.autograd.Function):
    """Rotation of one tensor; backward rotates the gradient with the transposed matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, _empty(x), transposed=False)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, _empty(grad), transposed=True), None, None


def _empty(x: Tensor) -> Tensor:
    """Return uninitialized memory for the rotation of ``x``, in its order of memory if heads are contiguous in it."""
    memory_format = torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
    return torch.empty_like(x, memory_format=memory_format)


class _RopeQKV(torch.autograd.Function):
    """Rotation of query and key that are chunks of one tensor together with value.

    In place only the rotated dimensions are read and written. Otherwise all three are written to
    new memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        in_place: bool,
    ) -> tuple[Tensor, ...]:
        ctx.layout = Layout.of(query, key, value)
        ctx.in_place = in_place
        ctx.save_for_backward(cos, sin)
        inputs = (query, key, value)
        if in_place:
            # new tensors on the same memory, see increment_version below
            results = [x.detach() for x in inputs]
        else:
            results = [_empty(x) for x in inputs]
        _rotate_all(inputs, results, cos, sin, in_place=in_place, transposed=False)
        return tuple(results)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The projection's backward reads one tensor if the gradients have the layout of the inputs.
        # Attention's backward may have created them in it; otherwise they are copied into it.
        in_place = ctx.in_place and ctx.layout.matches(*grads)
        results = grads
        if not in_place:
            results = ctx.layout.empty(grads[0])
        _rotate_all(grads, results, *ctx.saved_tensors, in_place=in_place, transposed=True)
        return *results, None, None, None


def _rotate_all(
    inputs: Sequence[Tensor],
    results: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    in_place: bool,
    transposed: bool,
) -> None:
    """Rotate query and key into ``results``, and copy value unless ``in_place``.

    Query and key take one launch if their heads are adjacent in memory.
    """
    # [B, h, S, d] and [B, g, S, d] with adjacent heads are one [B, h + g, S, d]: one launch
    packed = packed_view(inputs[:2], 1)
    packed_result = packed_view(results[:2], 1)
    pairs = list(zip(inputs[:2], results[:2], strict=True))
    if packed is not None and packed_result is not None:
        pairs = [(packed, packed_result)]
    for x, y in pairs:
        _rotate(x, cos, sin, y, transposed=transposed, in_place=in_place)
    if in_place:
        # The kernel writes without autograd's knowledge. With a higher version, backward raises if
        # another operation has saved the tensors, instead of reading rotated values.
        torch.autograd.graph.increment_version(inputs[:2])
    else:
        _copy(inputs[2], cos, results[2])


def _rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    y: Tensor,
    *,
    transposed: bool,
    in_place: bool = False,
) -> Tensor:
    """Rotate ``x`` into ``y`` and return ``y``.

    With ``in_place`` both are the same memory. Shapes are ``[B, h, S, d]``, in any order of memory
    with contiguous heads.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    assert y.stride(-1) == 1
    cos = cos.contiguous()
    sin = sin.contiguous()
    batch, heads, tokens, head_dim = x.shape
    rotary_dim = cos.size(-1)
    # In place, the dimensions that are not rotated are already at their destination: REST = 0
    # removes their copy from the kernel.
    rest = 0
    if not in_place and head_dim > rotary_dim:
        rest = power_of_2(head_dim - rotary_dim)
    # stride 0 broadcasts one table [1, S, rotary_dim] over the batch
    table_batch_stride = cos.stride(0)
    if cos.size(0) == 1:
        table_batch_stride = 0
    # One program per token, with all heads: they share the token's row of the tables.
    _kernel()[(tokens, batch)](
        x,
        y,
        cos,
        sin,
        *x.stride()[:3],
        *y.stride()[:3],
        table_batch_stride,
        heads,
        head_dim,
        rotary_dim // 2,
        TRANSPOSED=transposed,
        HEADS=power_of_2(heads),
        HALF=power_of_2(rotary_dim // 2),
        REST=rest,
        num_warps=4,
    )
    return y


def _copy(x: Tensor, cos: Tensor, y: Tensor) -> Tensor:
    """Copy ``x`` into ``y`` with the RoPE kernel and no rotated dimension.

    The copy runs at memory bandwidth; ``Tensor.copy_`` reaches a third of it here.
    """
    empty_table = cos[..., :0]
    return _rotate(x, empty_table, empty_table, y, transposed=False)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Implement ``ops.rope.apply_rope``; the result is rounded once."""
    return cast(Tensor, _Rope.apply(x, cos, sin))


def apply_rope_qkv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    in_place: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement ``ops.rope.apply_rope_qkv``.

    ``in_place`` is ignored if the three are not parts of one tensor, or if a dispatch mode is active.
    """
    # chunks of one projection's output: only then can gradients be written as one tensor
    has_contiguous_heads = all(x.stride(-1) == 1 for x in (query, key, value))
    if not has_contiguous_heads or Layout.of(query, key, value).span is None:
        return apply_rope(query, cos, sin), apply_rope(key, cos, sin), value
    in_place = in_place and not _has_dispatch_mode()
    results = _RopeQKV.apply(query, key, value, cos, sin, in_place)
    return cast("tuple[Tensor, Tensor, Tensor]", results)


def _has_dispatch_mode() -> bool:
    """Return whether a dispatch mode is active.

    Selective checkpointing, for example, may keep the output of a matmul and return it again in the
    recomputation. Rotated in place, it would be rotated twice.
    """
    return torch._C._len_torch_dispatch_stack() > 0
