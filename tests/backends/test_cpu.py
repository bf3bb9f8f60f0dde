"""The CPU backend's figures of memory: what malloc keeps of freed tensors."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.backends.cpu import CpuBackend


def test_freed_blocks_between_others_are_counted():
    backend = CpuBackend()
    before = backend.freed_bytes_kept()
    if before is None:
        pytest.skip("not glibc 2.33 or newer")
    size = 60_000  # below the 128 KiB from which malloc maps a block by itself
    tensors = [torch.ones(size // 4) for _ in range(2000)]
    in_use = backend.freed_bytes_kept()
    assert in_use is not None and in_use <= before + (1 << 20)
    # Every other one: malloc can give none of the gaps back.
    del tensors[::2]
    kept = backend.freed_bytes_kept()
    assert kept is not None and 1000 * size <= kept - in_use <= 1001 * (size + 2000)
