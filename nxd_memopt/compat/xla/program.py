"""Starts and feeds an XLA program: spawn, device loader, checkpoint, metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends import backend


def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """Call ``fn(index, *args)`` in this process; torchrun starts the processes.

    Raises:
        ValueError: ``nprocs`` is greater than 1.
    """
    del join, daemon, start_method
    if nprocs not in (None, 1):
        raise ValueError(f"nprocs={nprocs} processes are torchrun's to start: torchrun --nproc_per_node {nprocs}")
    fn(int(os.environ.get("LOCAL_RANK", "0")), *args)


def launch(fn: Callable[..., object], args: tuple[Any, ...] = (), start_method: str = "spawn") -> None:
    """Call ``fn(index, *args)`` in this process; see ``spawn``."""
    spawn(fn, args, start_method=start_method)


class MpDeviceLoader:
    """Iterable over ``loader`` with every tensor of a batch moved to ``device``."""

    def __init__(self, loader: Iterable[Any], device: torch.device, **kwargs: Any) -> None:
        del kwargs  # options of prefetching
        self._loader = loader
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        # torch_xla ends a step's graph when the program asks for the next batch.
        for batch in self._loader:
            yield _to(batch, self._device)
            backend.mark_step()

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        # Called for names that this class lacks, such as ``dataset`` and ``batch_size``.
        return getattr(self._loader, name)


class PerDeviceLoader(MpDeviceLoader):
    """What ``ParallelLoader.per_device_loader`` returns."""


class ParallelLoader:
    """Batches of ``loader`` for the devices of this process, of which there is one; for options see ``MpDeviceLoader``.

    Raises:
        ValueError: several devices.
    """

    def __init__(self, loader: Iterable[Any], devices: Sequence[Any], **kwargs: Any) -> None:
        if len(devices) != 1:
            raise ValueError(f"a process has one device, got {list(devices)}: start a process for each")
        self._loader = loader
        self._options = kwargs

    def per_device_loader(self, device: Any) -> PerDeviceLoader:
        """Return an iterable over the batches, with tensors on ``device``."""
        return PerDeviceLoader(self._loader, device, **self._options)

    def per_device_samples(self) -> int:
        """Return the number of batches."""
        return len(self._loader)  # pyright: ignore[reportArgumentType]

    def close(self) -> None:
        """Do nothing: no thread prefetches."""


def _to(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with every tensor in nested containers on ``device``."""
    # The type of a container is preserved: transformers' BatchEncoding and other mappings offer
    # their values as attributes, which scripts read.
    if isinstance(batch, Tensor):
        return batch.to(device)
    if hasattr(batch, "items"):
        return type(batch)((key, _to(value, device)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return type(batch)(_to(value, device) for value in batch)
    return batch


def metrics_report() -> str:
    """Return a note that there are no XLA metrics."""
    return f"no XLA metrics: the backend {backend.name} runs eagerly"
