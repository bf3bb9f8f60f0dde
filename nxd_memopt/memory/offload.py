"""Owns keeping activations of the first layers in host memory between forward and backward.

The first layers' activations are the longest unused ones, and have the whole forward to leave and the whole backward to
come back, beside the device's work (TransformerEngine's and Megatron's ``cpu_offloading`` choose the same ones).
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import HostTransfers, Transfer

_LEAST_BYTES = 1 << 20  # smaller ones stay: they are many and hold nothing
_ORIGINAL_FORWARD = "_forward_without_offload"


class _Pool:
    """Host memory that is free again, by size: pinning memory takes longer than a step."""

    def __init__(self, transfers: HostTransfers) -> None:
        self._transfers = transfers
        self._free: dict[int, list[tuple[Tensor, Transfer | None]]] = defaultdict(list)
        self.allocated_bytes = 0

    def take(self, size_bytes: int) -> tuple[Tensor, Transfer | None]:
        """Memory, and what must be done before it is written to."""
        if self._free[size_bytes]:
            return self._free[size_bytes].pop()
        self.allocated_bytes += size_bytes
        return self._transfers.host_buffer(size_bytes), None

    def give(self, host: Tensor, last_use: Transfer | None) -> None:
        self._free[host.numel()].append((host, last_use))


class _Storage:
    """The memory of saved tensors, on the device, on its way, or on the host."""

    def __init__(self, pool: _Pool, transfers: HostTransfers, device: Tensor) -> None:
        self._pool, self._transfers = pool, transfers
        self.size_bytes = device.numel()
        self._host, after = pool.take(self.size_bytes)
        self.device: Tensor | None = device
        self._last = self.sent = transfers.to_host(device, self._host, after)

    def fetch(self) -> None:
        """Start to bring it back, unless it is there."""
        if self.device is None:
            self.device, self._last = self._transfers.to_device(self._host, self.sent)

    def on_device(self) -> Tensor:
        self.fetch()
        if self._last is not self.sent:
            self._last.wait()
        assert self.device is not None
        return self.device

    def __del__(self) -> None:
        self._pool.give(self._host, self._last)


@dataclass
class _View:
    """A saved tensor as a part of a storage."""

    storage: _Storage
    dtype: torch.dtype
    place: tuple[int, torch.Size, tuple[int, ...]]

    def tensor(self) -> Tensor:
        device = self.storage.on_device()
        return torch.empty(0, dtype=self.dtype, device=device.device).set_(device.untyped_storage(), *self.place)


class ActivationOffload:
    """Runs layers, and keeps what they save for backward in host memory.

    Args:
        transfers: of the device.
    """

    def __init__(self, transfers: HostTransfers) -> None:
        self._transfers = transfers
        self._pool = _Pool(transfers)
        self._leaving: deque[_Storage] = deque()
        self._saved_before: list[weakref.ref[_Storage]] = []
        self._layer_bytes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOffload:
        copy = memo[id(self)] = type(self)(self._transfers)
        return copy

    @property
    def host_bytes(self) -> int:
        """Host memory in use and kept for the next step."""
        return self._pool.allocated_bytes

    def run(self, layer: nn.Module, forward: Callable[..., Any], hidden: Any, *context: Any) -> Any:
        """``forward(hidden, *context)`` of ``layer``; what it saves, but for parameters and ``context``, goes away."""
        if not torch.is_grad_enabled():
            return forward(hidden, *context)
        stays = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *_tensors_in(context))}
        saved: dict[int, _Storage] = {}
        pack = functools.partial(self._pack, stays, saved)
        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            output = forward(hidden, *context)
        self._layer_bytes = sum(storage.size_bytes for storage in saved.values())
        self._end_layer(output, [weakref.ref(storage) for storage in saved.values()])
        return output

    def run_behind(self, forward: Callable[..., Any], hidden: Any, *context: Any) -> Any:
        """``forward(hidden, *context)`` of a layer whose activations stay, while others leave and come back."""
        output = forward(hidden, *context)
        if torch.is_grad_enabled():
            self._end_layer(output, [])
        return output

    def _end_layer(self, output: Any, saved: list[weakref.ref[_Storage]]) -> None:
        """The layer's backward will begin with fetching what the layer before it saved."""
        if self._saved_before and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(functools.partial(_fetch, self._saved_before))
        self._saved_before = saved
        self._let_go()

    def _pack(self, stays: set[int], saved: dict[int, _Storage], tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in stays or storage.nbytes() < _LEAST_BYTES:
            return tensor.detach()  # itself could be an output of the node that saves it, and keep that alive
        if address not in saved:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            saved[address] = _Storage(self._pool, self._transfers, whole)
            self._leaving.append(saved[address])
        return _View(saved[address], tensor.dtype, (int(tensor.storage_offset()), tensor.size(), tensor.stride()))

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        self._leaving.clear()  # backward has begun: what is still here stays
        return packed.tensor() if isinstance(packed, _View) else packed

    def _let_go(self) -> None:
        """Free the device's memory of what has left, and wait for more where the next layer might find none."""
        if self._leaving:
            self._transfers.keep_pace()
        while self._leaving:
            if not self._leaving[0].sent.is_done():
                if self._transfers.free_bytes() > 2 * self._layer_bytes:
                    break
                self._leaving[0].sent.wait()
            self._leaving.popleft().device = None


def _fetch(saved: Iterable[weakref.ref[_Storage]], grad: Tensor) -> None:
    del grad
    for reference in saved:
        storage = reference()
        if storage is not None:
            storage.fetch()


def _tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors_in(value)


def apply_offload(layers: Sequence[nn.Module], num_layers: int, transfers: HostTransfers) -> ActivationOffload:
    """Let the first ``num_layers`` of ``layers`` keep their activations on the host.

    Raises:
        ValueError: there are fewer layers.
    """
    if num_layers > len(layers):
        raise ValueError(f"cpu_offloading_num_layers {num_layers} exceeds the model's {len(layers)} layers: lower it")
    offload = ActivationOffload(transfers)
    for layer in layers[:num_layers]:
        _set_forward(layer, functools.partial(offload.run, layer, layer.forward))
    for layer in layers[num_layers:]:
        _set_forward(layer, functools.partial(offload.run_behind, layer.forward))
    return offload


def remove_offload(layers: Iterable[nn.Module]) -> None:
    """Undo ``apply_offload``."""
    for layer in layers:
        if _ORIGINAL_FORWARD in layer.__dict__:
            layer.__dict__["forward"] = layer.__dict__.pop(_ORIGINAL_FORWARD)
            if layer.__dict__["forward"] is None:
                del layer.__dict__["forward"]


def _set_forward(layer: nn.Module, forward: Callable[..., Any]) -> None:
    layer.__dict__[_ORIGINAL_FORWARD] = layer.__dict__.get("forward")
    layer.__dict__["forward"] = forward
