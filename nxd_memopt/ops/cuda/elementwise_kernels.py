"""Triton kernels of ``ops.cuda.elementwise``; imported only where Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from nxd_memopt.ops.cuda.approximate_kernels import exp2, reciprocal


@triton.jit
def rms_norm_forward(
    x,
    added,
    weight,
    total,
    y,
    rstd,
    hidden,
    eps,
    ADDS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Normalise one row per program.

    With ``ADDS`` normalise ``x + added``, which is rounded and written too.
    """
    row = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    # 64-bit row offsets, since rows * H may exceed 2^31; columns beyond H load 0
    values = tl.load(x + row + column, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        added_values = tl.load(added + row + column, mask=mask, other=0.0).to(tl.float32)
        summed = (values + added_values).to(x.dtype.element_ty)
        tl.store(total + row + column, summed, mask=mask)
        values = summed.to(tl.float32)  # statistics of the rounded sum, which backward reads
    # the row is in registers: one read of x, one write of y
    scale = tl.rsqrt(tl.sum(values * values, 0) / hidden + eps)
    tl.store(rstd + tl.program_id(0), scale)
    normalised = (values * scale).to(x.dtype.element_ty)  # rounded before the weight, as in LLaMA
    weights = tl.load(weight + column, mask=mask, other=0.0)
    tl.store(y + row + column, normalised * weights, mask=mask)


@triton.jit
def rms_norm_backward(
    x,
    weight,
    rstd,
    dy,
    dtotal,
    dx,
    dweight,
    rows,
    hidden,
    rows_each,
    ADDS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
    TRAINS: tl.constexpr,  # noqa: N803
):
    """Compute dx and a part of the weight's gradient for a range of rows per program.

    The part is in fp32. With ``ADDS``, ``dtotal`` is added to dx. ``STAGES`` is the number of rows
    whose loads are in flight at once. Without ``TRAINS`` the weight is frozen, and ``dweight`` is not
    written.
    """
    first = tl.program_id(0).to(tl.int64) * rows_each
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    weights = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    # the weight's gradient accumulates in registers over the rows of this program
    sums = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(first, tl.minimum(first + rows_each, rows), num_stages=STAGES):
        offset = row * hidden + column
        scale = tl.load(rstd + row)
        normalised = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) * scale
        grad = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        # With n = x * rstd and y = n * w: dw = sum over rows of dy * n, with n rounded as in
        # forward; dn = dy * w; dx = rstd * (dn - n * mean(dn * n)).
        if TRAINS:
            sums += grad * normalised.to(x.dtype.element_ty).to(tl.float32)
        grad *= weights
        projection = tl.sum(grad * normalised, 0) / hidden
        result = scale * (grad - normalised * projection)
        if ADDS:
            result += tl.load(dtotal + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=mask)
    if TRAINS:
        tl.store(dweight + tl.program_id(0).to(tl.int64) * hidden + column, sums, mask=mask)


@triton.jit
def add_residual(residual, output, bias, y, hidden, BLOCK: tl.constexpr):  # noqa: N803
    """Compute ``residual + (output + bias)``, rounded once."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    offset = tl.program_id(0).to(tl.int64) * hidden + column
    # output + bias first, as in the plain form, but in fp32 throughout
    values = tl.load(output + offset, mask=mask, other=0.0).to(tl.float32)
    values += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    values += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + offset, values.to(y.dtype.element_ty), mask=mask)


@triton.jit
def affine_forward(x, gain_1, gain_2, shift_1, shift_2, y_1, y_2, hidden, BLOCK: tl.constexpr):  # noqa: N803
    """Compute ``x * gain + shift`` for two branches; x is read once."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    offset = tl.program_id(0).to(tl.int64) * hidden + column
    values = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(gain_1 + column, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(shift_1 + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_1 + offset, (values * gain + shift).to(y_1.dtype.element_ty), mask=mask)
    gain = tl.load(gain_2 + column, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(shift_2 + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_2 + offset, (values * gain + shift).to(y_2.dtype.element_ty), mask=mask)


@triton.jit
def affine_backward(
    x,
    dy_1,
    dy_2,
    gain_1,
    gain_2,
    dx,
    parts,
    rows,
    hidden,
    rows_each,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Compute dx and parts of the gains' and shifts' gradients in fp32.

    A program handles a range of rows and a block of columns.
    """
    first = tl.program_id(0).to(tl.int64) * rows_each
    last = tl.minimum(first + rows_each, rows)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < hidden
    scale_1 = tl.load(gain_1 + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    scale_2 = tl.load(gain_2 + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    # dgain = sum over rows of dy * x, dshift = sum over rows of dy, per branch; the sum over the
    # tile's rows comes after the loop.
    dgain_1 = tl.zeros([ROWS, COLUMNS], tl.float32)
    dgain_2 = tl.zeros([ROWS, COLUMNS], tl.float32)
    dshift_1 = tl.zeros([ROWS, COLUMNS], tl.float32)
    dshift_2 = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows_each, ROWS):
        row = first + start + tl.arange(0, ROWS)
        mask = (row < last)[:, None] & is_column[None, :]
        offset = row[:, None] * hidden + column[None, :]
        values = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        grad_1 = tl.load(dy_1 + offset, mask=mask, other=0.0).to(tl.float32)
        grad_2 = tl.load(dy_2 + offset, mask=mask, other=0.0).to(tl.float32)
        # x feeds both branches: the sum of their gradients is rounded once
        result = grad_1 * scale_1 + grad_2 * scale_2
        tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=mask)
        dgain_1 += grad_1 * values
        dgain_2 += grad_2 * values
        dshift_1 += grad_1
        dshift_2 += grad_2
    # one row of parts per range: [4 * H] = gain 1, shift 1, gain 2, shift 2
    target = parts + tl.program_id(0).to(tl.int64) * 4 * hidden + column
    tl.store(target, tl.sum(dgain_1, 0), mask=is_column)
    tl.store(target + hidden, tl.sum(dshift_1, 0), mask=is_column)
    tl.store(target + 2 * hidden, tl.sum(dgain_2, 0), mask=is_column)
    tl.store(target + 3 * hidden, tl.sum(dshift_2, 0), mask=is_column)


@triton.jit
def column_sums(
    x,
    sums,
    rows,
    columns,
    row_stride,
    rows_each,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Sum a range of rows for a block of columns per program.

    The sums are in fp32 until they are stored.
    """
    first = tl.program_id(0).to(tl.int64) * rows_each
    last = tl.minimum(first + rows_each, rows)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, rows_each, ROWS, num_stages=3):  # prefetches rows
        row = first + start + tl.arange(0, ROWS)
        mask = (row < last)[:, None] & is_column[None, :]
        # per-element accumulators: the sum over ROWS comes after the loop
        pointers = x + row[:, None] * row_stride + column[None, :]
        total += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    target = sums + tl.program_id(0).to(tl.int64) * columns + column
    tl.store(target, tl.sum(total, 0).to(sums.dtype.element_ty), mask=is_column)


@triton.jit
def _silu(x):
    """Return x s and its derivative s (1 + x (1 - s)), with s = sigmoid(x)."""
    gate = tl.sigmoid(x)
    return x * gate, gate * (1.0 + x * (1.0 - gate))


@triton.jit
def _gelu(x):
    """Return x P(x) and its derivative, where P is the normal distribution function.

    P(x) is ``exp(-x^2 / 2)``, which the derivative needs too, times a polynomial in
    ``1 / (1 + p |x|)``, after Abramowitz and Stegun 7.1.26. These coefficients minimise the largest
    error for their degree, 1e-8. Compiled for Hopper, an element takes 21 instructions forward and
    26 backward. With division and ``tl.exp``, which handle the ends of fp32's range, and erfc's
    nine coefficients it took 37 and 48.
    """
    t = reciprocal(1.0 + 0.38890873 * tl.abs(x))
    series = 0.37985809 + t * (-0.25901972 + t * 0.053662392)
    series = t * (0.15079169 + t * (0.19542128 + t * (-0.020713727 + t * series)))
    # exp(-x^2 / 2) as a power of 2: 0.72134752 = log2(e) / 2
    bell = exp2(x * x * -0.7213475204444817)
    # 1 - P(|x|) is P(x) for negative x: no difference of nearly equal numbers in the tail
    tail = series * bell
    probability = tl.where(x < 0, tail, 1.0 - tail)
    # d/dx (x P(x)) = P(x) + x p(x), with the density p(x) = bell / sqrt(2 pi)
    return x * probability, probability + x * 0.3989422804014327 * bell


@triton.jit
def _tanh_gelu(x):
    """Return x s and its derivative, with s = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    # (1 + tanh(u)) / 2 = sigmoid(2 u)
    gate = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    # d(2 u)/dx; 1.5957691 = 2 sqrt(2 / pi), 0.134145 = 3 * 0.044715
    slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return x * gate, gate + x * gate * (1.0 - gate) * slope


@triton.jit
def _activated(x, KIND: tl.constexpr):  # noqa: N803
    """Return value and derivative of the activation ``KIND``."""
    if KIND == "silu":
        value, slope = _silu(x)
    elif KIND == "gelu":
        value, slope = _gelu(x)
    else:
        value, slope = _tanh_gelu(x)
    return value, slope


@triton.jit
def activation_forward(x, y, count, KIND: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Compute ``act(x)`` for one block per program."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < count
    # the derivative is not used, so the compiler removes it
    value, _ = _activated(tl.load(x + offset, mask=mask, other=0.0).to(tl.float32), KIND)
    tl.store(y + offset, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def activation_backward(x, dy, dx, count, KIND: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Compute ``dy * act'(x)`` for one block per program."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < count
    _, slope = _activated(tl.load(x + offset, mask=mask, other=0.0).to(tl.float32), KIND)
    grad = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + offset, (grad * slope).to(dx.dtype.element_ty), mask=mask)


@triton.jit
def gated_forward(
    gate,
    up,
    y,
    gate_row,
    up_row,
    y_row,
    width,
    KIND: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Compute ``act(gate) * up`` for a block of one row per program; ``*_row`` are row strides."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    # gate and up may be halves of one [rows, 2 F] tensor: each has its own row stride
    x = tl.load(gate + row * gate_row + column, mask=mask, other=0.0).to(tl.float32)
    value, _ = _activated(x, KIND)
    factor = tl.load(up + row * up_row + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * y_row + column, (value * factor).to(y.dtype.element_ty), mask=mask)


@triton.jit
def gated_backward(
    gate,
    up,
    dy,
    dgate,
    dup,
    y,
    gate_row,
    up_row,
    dy_row,
    dgate_row,
    dup_row,
    y_row,
    width,
    KIND: tl.constexpr,  # noqa: N803
    WITH_VALUE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Compute the gradients of ``act(gate) * up``, and the value too with ``WITH_VALUE``.

    A program reads its elements before it writes them, so a result may be the same memory as an
    input, at the same positions. Grid: rows x blocks of columns.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(gate + row * gate_row + column, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activated(x, KIND)
    factor = tl.load(up + row * up_row + column, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(dy + row * dy_row + column, mask=mask, other=0.0).to(tl.float32)
    # dup = dy * act(gate), dgate = dy * up * act'(gate)
    grad_up = grad * value
    grad_gate = grad * factor * slope
    tl.store(dup + row * dup_row + column, grad_up.to(dup.dtype.element_ty), mask=mask)
    tl.store(dgate + row * dgate_row + column, grad_gate.to(dgate.dtype.element_ty), mask=mask)
    if WITH_VALUE:
        tl.store(y + row * y_row + column, (value * factor).to(y.dtype.element_ty), mask=mask)
