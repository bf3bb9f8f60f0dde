"""The CUDA backend without a GPU: free memory, page-locked memory, and the allocator's setting."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nxd_memopt.backends.base import ALLOCATOR_VARIABLES
from nxd_memopt.backends.cuda.backend import CudaBackend
from nxd_memopt.backends.cuda.registered_memory import registered_buffer
from nxd_memopt.backends.cuda.transfers import CudaTransfers

GIB = 2**30


@pytest.mark.parametrize(
    ("driver_free", "fraction", "free"),
    [
        (60, 1.0, 70),  # 60 of the driver's, 10 in cached blocks
        (60, 0.5, 30),  # the process may have 50, of which 20 are allocated
        (5, 0.5, 15),  # of another process
        (60, 0.25, 10),  # 30 are reserved already, of which 20 are allocated
    ],
)
def test_free_memory_is_what_the_process_may_allocate(driver_free, fraction, free, monkeypatch):
    for name, value in {
        "memory_reserved": 30 * GIB,
        "memory_allocated": 20 * GIB,
        "mem_get_info": (driver_free * GIB, 100 * GIB),
        "get_per_process_memory_fraction": fraction,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    transfers = object.__new__(CudaTransfers)
    transfers.device = torch.device("cuda", 0)
    assert transfers.free_bytes() == free * GIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_registered_memory_is_unregistered_before_it_is_unmapped(monkeypatch):
    """Afterwards its addresses may be another mapping's, whose copies the device would read from the old pages."""
    mapped = []

    def covers(address):
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, stop = (int(number, 16) for number in line.split()[0].split("-"))
            if start <= address < stop:
                return True
        return False

    driver = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: 0,
        cudaHostUnregister=lambda address: mapped.append(covers(address)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    buffer = registered_buffer(1 << 21)
    view = buffer[16:]
    del buffer
    view.fill_(3)
    assert view.sum() == 3 * view.numel() and not mapped
    del view
    assert mapped == [True]


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
