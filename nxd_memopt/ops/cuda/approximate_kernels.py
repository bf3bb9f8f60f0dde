"""fp32 functions of one GPU instruction each, for kernels that are limited by arithmetic."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def exp2(x):
    """``tl.exp2`` takes four, for results below 2^-126, which are 0 here."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """``1 / x`` takes more, for x above 2^126, whose reciprocals are 0 here; exact to one unit in the last place."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
