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
    # torch registers the backend "xla" only when torch_xla is imported, so the name alone would
    # be an error here.
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        name = args[0] if args else kwargs.get("backend")
        if name != "xla":
            return original(*args, **kwargs)
        kwargs.pop("backend", None)
        return _initialize(*args[1:], **kwargs)

    dist.init_process_group = init_process_group


def _initialize(init_method: str | None = None, timeout: Any = None, **kwargs: Any) -> None:
    """Initialize torch.distributed from torchrun's environment, or with one rank."""
    if init_method not in (None, "pjrt://", "xla://", "env://"):
        raise ValueError(f'init_method {init_method!r}: with "xla" torchrun\'s environment describes the world')
    if timeout is not None:
        kwargs["timeout"] = timeout
    if "RANK" in os.environ:
        backend.init_process_group(**kwargs)
    else:
        # Without torchrun there is no rendezvous to connect to: a store in this process's memory
        # is enough for one rank.
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend.distributed_backend, store=store, rank=0, world_size=1, **kwargs)
