"""Sizes and numbers of buckets of gradients."""

from __future__ import annotations

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
