"""Supports ``torch.distributed.init_process_group("xla")`` where torch_xla is not installed."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist

from nxd_memopt.backends import backend


def install() -> None:
    """Make ``init_process_group("xla", ...)`` use the collectives of the chosen backend.

    Calls with another backend's name are unchanged.
    """
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        named = args[0] if args else kwargs.get("backend")
        if named != "xla":
            return original(*args, **kwargs)
        return _join(*args[1:], **{key: value for key, value in kwargs.items() if key != "backend"})

    dist.init_process_group = init_process_group


def _join(init_method: str | None = None, timeout: Any = None, **kwargs: Any) -> None:
    """Initialize torch.distributed from torchrun's environment, or with one rank."""
    if init_method not in (None, "pjrt://", "xla://", "env://"):
        raise ValueError(f'init_method {init_method!r}: with "xla" torchrun\'s environment describes the world')
    if timeout is not None:
        kwargs["timeout"] = timeout
    if "RANK" in os.environ:
        backend.init_process_group(**kwargs)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend.distributed_backend, store=store, rank=0, world_size=1, **kwargs)
