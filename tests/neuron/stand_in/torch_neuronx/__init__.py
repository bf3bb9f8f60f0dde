"""A stand-in for TorchNeuron: the device ``neuron`` of stock torch, without kernels: FakeTensorMode gives shapes.

It records what it is asked in ``CALLS``. As in TorchNeuron's source (2.10 to 2.12), a process sees the cores that
NEURON_RT_VISIBLE_CORES names, or all ``STAND_IN_DEVICES``, until the process group exists. The group gives the process
one core, whose index is the local rank even where NEURON_RT_VISIBLE_CORES named the core before, and asserts that the
process did not see several cores of its own choice.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

__version__ = "2.13.3.0"
CALLS: list[tuple] = []
FALLBACK_AT_IMPORT = os.environ.get("TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS")


class _Device(_DummyBackendModule):
    """``torch.neuron``: a counter of bytes and one generator's seed per device."""

    seeds = dict.fromkeys(range(8), 0)
    allocated, peak, synchronized = 0, 0, False
    assigned: int | None = None  # by the process group

    def device_count(self) -> int:
        if self.assigned is not None:
            return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        visible = os.environ.get("NEURON_RT_VISIBLE_CORES")
        if visible:
            first, _, last = visible.partition("-")
            return int(last or first) - int(first) + 1
        return int(os.environ.get("STAND_IN_DEVICES", "1"))

    def current_device(self) -> int:
        CALLS.append(("current_device", dist.is_initialized()))
        return self.assigned or 0

    def assign(self, local_rank: int) -> None:
        assert not os.environ.get("NEURON_RT_VISIBLE_CORES") or self.device_count() == 1
        self.assigned = local_rank

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    def synchronize(self) -> None:
        self.synchronized = True

    def _after_synchronize(self, figure: int) -> int:
        assert self.synchronized, "figures are not settled before synchronize()"
        self.synchronized = False
        return figure

    def memory_allocated(self, device=None) -> int:
        assert device == (self.assigned or 0)
        return self._after_synchronize(self.allocated)

    def max_memory_allocated(self, device=None) -> int:
        return self._after_synchronize(self.peak)

    def reset_peak_memory_stats(self, device=None) -> None:
        self.peak = self._after_synchronize(self.allocated)

    def manual_seed(self, seed: int) -> None:
        self.seeds[0] = seed

    def get_rng_state(self, device=0):
        return torch.tensor([self.seeds[device]])

    def set_rng_state(self, state, device=0) -> None:
        self.seeds[device] = int(state)


_DEVICE = _Device()
_setup_privateuseone_for_python_backend(rename="neuron", backend_module=_DEVICE)


def _process_group(store, rank, size, timeout):
    CALLS.append(("process_group", rank, size))
    _DEVICE.assign(int(os.environ.get("LOCAL_RANK", rank)))
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.Backend.register_backend("neuron", _process_group, devices=["neuron", "cpu"])
