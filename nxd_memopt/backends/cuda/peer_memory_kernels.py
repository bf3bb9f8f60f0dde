"""Triton kernels of ``peer_memory``; imported only where Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import globaltimer  # pyright: ignore[reportMissingImports]


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
    """Sum ``parts``, ``[SIZE, count]``, over ranks in fp32; ``own`` replaces the part of ``RANK``.

    The part of ``RANK`` in ``parts`` is not read.
    """
    # 64-bit offsets: the program index times BLOCK may exceed 32 bits
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += tl.load(own + offsets, mask=mask, other=0.0).to(tl.float32)
        else:
            total += tl.load(parts + offsets, mask=mask, other=0.0).to(tl.float32)
        parts += count  # pointer increments: rank * count may exceed 32 bits
    tl.store(result + offsets, total.to(result.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["ranks"])
def wait_for_signals(pad, ranks, timeout_ms, SIZE: tl.constexpr):  # noqa: N803
    """Wait until each rank whose bit is set in ``ranks`` has written 1 into its word of ``pad``.

    Each word is reset to 0. After ``timeout_ms`` the kernel traps: all later work on the device
    fails.
    """
    limit = globaltimer() + timeout_ms.to(tl.int64) * 1_000_000
    # One thread block polls the words one after the other. The compare-and-swap resets a word in
    # the same step; acquire at system scope makes the rows of that rank visible.
    for rank in range(SIZE):
        if (ranks >> rank) & 1:
            seen = tl.atomic_cas(pad + rank, 1, 0, sem="acquire", scope="sys")
            while seen != 1:
                if globaltimer() > limit:
                    tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [seen], tl.int32, is_pure=False, pack=1)
                seen = tl.atomic_cas(pad + rank, 1, 0, sem="acquire", scope="sys")
