"""Sizes and numbers of buckets of gradients."""

from __future__ import annotations

from collections.abc import Iterable

GRADIENT_BUCKET_BYTES = 128 << 20
"""Bytes of a bucket of ``parallel_layers.grads``.

Enough for full bandwidth, but small next to all gradients."""
BUCKET_BYTES = 25 << 20
"""Bytes of the parameters of a bucket of gradients that are reduced during backward; a larger parameter is alone.

As in DistributedDataParallel: the last bucket overlaps with nothing."""
SCATTERED_BUCKETS = 2
"""Buckets of ``data_parallel/gradient_scatter.py`` at a time: one is reduced while the next one is filled."""
OVERLAPPED_BUCKETS = 4
"""Buckets of ``parallel_layers/overlapped_grads.py`` that are reduced at the same time."""


def packed(sizes: Iterable[int], largest: int) -> list[int]:
    """Return the sizes of buckets that are filled in order.

    A gradient that does not fit starts the next bucket, so that a gradient larger than a bucket is alone in one.
    """
    buckets: list[int] = []
    for size in sizes:
        if buckets and buckets[-1] + size <= largest:
            buckets[-1] += size
        else:
            buckets.append(size)
    return buckets
