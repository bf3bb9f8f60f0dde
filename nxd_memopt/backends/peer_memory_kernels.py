"""Owns the Triton source of ``backends.peer_memory``; imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_over_ranks(
    own,
    parts,
    result,
    count,
    SIZE: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """``parts`` holds ``count`` elements of each rank, and nothing yet for ``RANK``, whose are ``own``; fp32 sums."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += tl.load(own + place, mask=mask, other=0.0).to(tl.float32)
        else:
            total += tl.load(parts + rank * count + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(result + place, total.to(result.dtype.element_ty), mask=mask)
