"""Switches torch_xla's functionalization for a test: on as this library sets it, off as AWS's torch-neuronx has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from nxd_memopt.backends import backend

VARIABLE = "XLA_DISABLE_FUNCTIONALIZATION"
# The other tests of the folder run with it on.
MODES = pytest.mark.parametrize(
    "enabled", [pytest.param(True, id="on", marks=pytest.mark.slow), pytest.param(False, id="off")]
)


@contextmanager
def functionalization(*, enabled: bool) -> Iterator[None]:
    """Make tensors of the block with or without functionalization; torch_xla reads the variable for each tensor."""
    before = os.environ[VARIABLE]
    backend.mark_step()
    os.environ[VARIABLE] = "0" if enabled else "1"
    try:
        assert splits_are_right() is enabled, f"{VARIABLE}={os.environ[VARIABLE]} has no effect: nothing is tested"
        yield
        backend.mark_step()
    finally:
        os.environ[VARIABLE] = before


def splits_are_right() -> bool:
    """Whether a split by sizes along the last dimension is right, which it is with functionalization alone."""
    x = torch.arange(12.0).view(2, 6)
    parts = x.to(backend.device).split([1, 5], dim=-1)
    return all(torch.equal(part.cpu(), other) for part, other in zip(parts, x.split([1, 5], dim=-1), strict=True))
