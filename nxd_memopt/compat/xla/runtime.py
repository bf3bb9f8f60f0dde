"""torch_xla.runtime's functions, answered by torch.distributed and torchrun's environment."""

from __future__ import annotations

import os

import torch.distributed as dist

from nxd_memopt.backends import backend


def world_size() -> int:
    """Return the number of ranks."""
    # Scripts ask before init_process_group too: torchrun's variables have the same values.
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def global_ordinal() -> int:
    """Return this process's rank in the world."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def local_ordinal() -> int:
    """Return this process's rank on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_process_count() -> int:
    """Return the number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def global_device_count() -> int:
    """Return the number of devices of all hosts: one per process."""
    return world_size()


def device_type() -> str:
    """Return the type of the device in capitals, such as ``CPU``."""
    # torch_xla answers with PJRT's names, which are in capitals: scripts compare with "NEURON".
    return backend.device.type.upper()
