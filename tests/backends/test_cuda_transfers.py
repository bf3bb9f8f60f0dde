"""Free memory of a GPU as the offloading of activations reads it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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
