"""Triton kernels of ``ops.cuda.adamw``; imported only where Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]


@triton.jit
def _update_chunk(
    param,
    grad,
    mean,
    square,
    factor,
    output,
    size,
    first,
    correction,
    root_of_correction,
    lr,
    mean_rate,
    beta2,
    square_rate,
    eps,
    weight_decay,
    CHUNK: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Update ``CHUNK`` elements from ``first``. The rates are ``1 - beta``, computed in float64.

    ``factor`` multiplies the gradient, and ``output`` receives a copy of the parameter; either may
    be None. If ``param`` is int16, it has the remainders of fp32 parameters whose rounded values
    are in ``output``, which is bf16 then (``ops.param_remainders``).
    """
    step_size = lr / correction
    IS_REMAINDER: tl.constexpr = param.dtype.element_ty == tl.int16  # noqa: N806
    for block in range(CHUNK // BLOCK):
        offset = first + block * BLOCK + tl.arange(0, BLOCK)
        mask = offset < size
        g = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)
        if factor is not None:
            # Rounded by itself, as by a multiplication before this kernel: the compiler would fuse
            # another product with the subtraction below.
            g = libdevice.mul_rn(g, tl.load(factor))
        m = tl.load(mean + offset, mask=mask, other=0.0).to(tl.float32)
        # m + (g - m) * (1 - beta1), in the two forms that torch.lerp uses
        m = tl.where(mean_rate < 0.5, m + (g - m) * mean_rate, g - (g - m) * (1.0 - mean_rate))
        v_old = tl.load(square + offset, mask=mask, other=0.0).to(tl.float32)
        v = beta2 * v_old + square_rate * g * g
        # decoupled weight decay, then the step of the bias-corrected moments
        if IS_REMAINDER:
            high = tl.load(output + offset, mask=mask, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
            p = (high + tl.load(param + offset, mask=mask, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
        else:
            p = tl.load(param + offset, mask=mask, other=0.0).to(tl.float32)
        p *= 1.0 - lr * weight_decay
        p -= step_size * m / (tl.sqrt(v) / root_of_correction + eps)
        if IS_REMAINDER:
            rounded = p.to(tl.bfloat16)
            difference = p.to(tl.int32, bitcast=True) - rounded.to(tl.float32).to(tl.int32, bitcast=True)
            difference = tl.minimum(tl.maximum(difference, -32768), 32767)
            tl.store(param + offset, difference.to(tl.int16), mask=mask)
            tl.store(output + offset, rounded, mask=mask)
        else:
            tl.store(param + offset, p.to(param.dtype.element_ty), mask=mask)
            if output is not None:
                tl.store(output + offset, p.to(output.dtype.element_ty), mask=mask)
        tl.store(mean + offset, m.to(mean.dtype.element_ty), mask=mask)
        tl.store(square + offset, v.to(square.dtype.element_ty), mask=mask)


@triton.jit
def _address(addresses, index, like, ALIGNED: tl.constexpr):  # noqa: N803
    """Return entry ``index`` of a table row as a pointer of the type of ``like``."""
    address = tl.load(addresses + index).to(like.dtype)
    return tl.multiple_of(address, 16) if ALIGNED else address


@triton.jit
def _tensor_of(table, count, chunk):
    """Return the last row whose first chunk is not after ``chunk``, by binary search."""
    # invariant: first chunk of row low <= chunk < first chunk of row high
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(table + middle * 6 + 5) > chunk
        low = tl.where(is_after, low, middle)
        high = tl.where(is_after, middle, high)
    return low


@triton.jit(do_not_specialize=["count"])
def adamw(
    table,
    corrections,
    count,
    param_like,
    grad_like,
    mean_like,
    lr,
    mean_rate,
    beta2,
    square_rate,
    eps,
    weight_decay,
    ALIGNED: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Update one chunk of one of ``count`` tensors per program.

    A row of ``table`` has four addresses, the tensor's size and the number of its first chunk.
    ``*_like`` only carry the types of the addresses.
    """
    chunk = tl.program_id(0)
    tensor = _tensor_of(table, count, chunk)
    row = table + tensor * 6
    size = tl.load(row + 4)
    size = tl.multiple_of(size, 16) if ALIGNED else size
    _update_chunk(
        _address(row, 0, param_like, ALIGNED),
        _address(row, 1, grad_like, ALIGNED),
        _address(row, 2, mean_like, ALIGNED),
        _address(row, 3, mean_like, ALIGNED),
        None,  # factor
        None,  # output
        size,
        (chunk - tl.load(row + 5)) * CHUNK,
        tl.load(corrections + tensor * 2),
        tl.load(corrections + tensor * 2 + 1),
        lr,
        mean_rate,
        beta2,
        square_rate,
        eps,
        weight_decay,
        CHUNK,
        BLOCK,
    )


@triton.jit
def adamw_of_one(
    param,
    grad,
    mean,
    square,
    factor,
    output,
    size,
    correction,
    root_of_correction,
    lr,
    mean_rate,
    beta2,
    square_rate,
    eps,
    weight_decay,
    CHUNK: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Update one chunk of a single tensor per program, without a table on the device."""
    # 64-bit offsets: a tensor may have more than 2^31 elements
    first = tl.program_id(0).to(tl.int64) * CHUNK
    _update_chunk(
        param,
        grad,
        mean,
        square,
        factor,
        output,
        size,
        first,
        correction,
        root_of_correction,
        lr,
        mean_rate,
        beta2,
        square_rate,
        eps,
        weight_decay,
        CHUNK,
        BLOCK,
    )
