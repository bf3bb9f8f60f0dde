"""fp32 functions of one GPU instruction each, for kernels that are limited by arithmetic."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def exp2(x):
    """Return 2^x in one instruction; results below 2^-126 are 0.

    ``tl.exp2`` takes four instructions to handle these results.
    """
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """Return 1 / x in one instruction, exact to one unit in the last place; 0 for x above 2^126.

    The division ``1 / x`` takes more instructions to handle large x.
    """
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
