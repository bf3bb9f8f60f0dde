"""The allocator's setting of the training program on GPUs, without a GPU."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.backends.base import ALLOCATOR_VARIABLES
from nxd_memopt.backends.cuda.backend import CudaBackend


@pytest.fixture(params=["torch 2.11", "torch 2.9"])
def applied(request, monkeypatch) -> list[str]:
    """The settings that were applied, by either of PyTorch's functions."""
    found: list[str] = []
    name = "_accelerator_setAllocatorSettings"
    if request.param == "torch 2.11":
        monkeypatch.setattr(torch._C, name, found.append, raising=False)
    else:
        monkeypatch.delattr(torch._C, name, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", found.append)
    for variable in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return found


def test_segments_are_expandable(applied):
    CudaBackend.expand_segments(object.__new__(CudaBackend))
    assert applied == ["expandable_segments:True"]


@pytest.mark.parametrize("variable", ALLOCATOR_VARIABLES)
def test_the_users_settings_stand(applied, monkeypatch, variable):
    monkeypatch.setenv(variable, "max_split_size_mb:512")
    CudaBackend.expand_segments(object.__new__(CudaBackend))
    assert applied == []
