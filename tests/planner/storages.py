"""Counts the storages that a forward pass leaves for backward."""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist

from nxd_memopt.certify.measure.eager import _Recorder

ROWS, LENGTH = 3, 24  # of tests.reference_models.batch


def counted_bytes(net: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[int, dict]:
    """Bytes of the storages that a forward allocates and that still exist after it, with their list."""
    recorder = _Recorder()
    with recorder:
        loss = net(**inputs).loss
        # gloo's threads hold the tensors of a collective until every rank has left it
        if dist.is_initialized():
            dist.barrier()
            events = -1
            while events != len(recorder._events):
                events = len(recorder._events)
                time.sleep(0.3)
        gc.collect()
    alive: dict[int, int] = {}
    for serial, change in recorder._events:
        alive[serial] = alive.get(serial, 0) + change
    del loss
    listed = [f"{t}" for i, t in enumerate(recorder.tensors, 1) if alive[i]]
    return sum(alive.values()), listed
