"""Offloads activations of the first layers to host memory between forward and backward.

The activations of the first layers are unused for the longest time. They have the rest of forward
to be copied to the host and most of backward to be copied back, overlapped with compute.
TransformerEngine's and Megatron-LM's ``cpu_offloading`` choose the same layers.

A recomputed layer saves only its input, and optionally the results of attention: its checkpoint.
The copy of a checkpoint takes a fraction of the layer's compute time, so checkpoints of all layers
can be offloaded, and at most ``LAYERS_IN_FLIGHT`` of them are on the device in forward.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import HostTransfers, Transfer
from nxd_memopt.memory.host_arena import HostArena
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.memory.recompute import is_passed_over
from nxd_memopt.parallel_layers.data_shards import is_data_sharded
from nxd_memopt.parallel_layers.wrapping import unwrap_forward, wrap_forward
from nxd_memopt.planner.memory.activations import OFFLOADED_STORAGE_BYTES

OFFLOAD_OWNER = "activation offload"
"""Owner of the offloaded activations in the ledger of a ``HostPool``."""
LAYERS_IN_FLIGHT = 1
"""Layers whose checkpoints may still be on their way to the host when the next layer ends."""

_MIN_BYTES = OFFLOADED_STORAGE_BYTES


@dataclass(frozen=True)
class _OnDevice:
    """A saved tensor that stays on the device.

    ``alias`` is a detached alias with the same version counter. The tensor itself could be an
    output of the node that saves it and would keep the node alive in a reference cycle.
    """

    alias: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _OnDevice:
        return cls(tensor.detach(), tensor._version)

    def write_error(self) -> str | None:
        """Return the message about a write to the tensor after it was saved; None without one.

        Autograd's own check does not cover tensors that pass through saved-tensor hooks.
        """
        if self.alias._version == self.version:
            return None
        return (
            f"a tensor of shape {list(self.alias.shape)} that an offloaded layer saved for backward was written to "
            f"(version {self.alias._version}, {self.version} when it was saved): leave the in-place operation out, or "
            "the layer out of cpu_offloading_num_layers"
        )

    def tensor(self) -> Tensor:
        """Return the tensor; raise ``RuntimeError`` if it was written to after it was saved."""
        _raise_if(self.write_error())
        return self.alias


def _raise_if(error: str | None) -> None:
    if error is not None:
        raise RuntimeError(error)


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the tensors' storages; parameters that are not gathered have none."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if not is_data_sharded(tensor)}


class _Storage:
    """The storage of saved tensors, on the device, in transfer, or on the host."""

    def __init__(self, transfers: HostTransfers, arena: HostArena, layer: int, device: Tensor) -> None:
        self._transfers = transfers
        self._arena = arena
        self.layer = layer
        self.size_bytes = device.numel()
        self.device: Tensor | None = device
        self._span = arena.take(self.size_bytes)
        # The copy starts when the work that produces the tensor is done. ``device`` is set until
        # ``_free_sent`` frees it.
        self.sent = transfers.to_host(device, self._span.pieces)
        self._returned: Transfer | None = None
        self._is_awaited = False
        self._saved: list[_OnDevice] = []
        self._write_errors: list[str | None] = []

    def __del__(self) -> None:
        # The constructor may have failed before a copy started.
        if not hasattr(self, "sent"):
            return
        transfers = [self.sent]
        fetched = None
        if self._returned is not None:
            transfers.append(self._returned)
            # A stream that waited for the copy orders later users of the memory after it. Nothing
            # orders them after a prefetch that was never used.
            if not self._is_awaited:
                fetched = self.device
        self._arena.retire(self._span, transfers, fetched)

    def add(self, tensor: Tensor) -> int:
        """Return the number of a saved tensor that is a view of the storage."""
        self._saved.append(_OnDevice.of(tensor))
        return len(self._saved) - 1

    def require_unwritten(self) -> None:
        """Raise ``RuntimeError`` if a saved tensor was written to."""
        for each in self._saved:
            _raise_if(each.write_error())

    def free(self) -> None:
        """Free the device memory, whose copy has reached the host."""
        # With it go the version counters. The copy may have read a write from after the layer's end,
        # which is an error if backward needs that tensor.
        self._write_errors = [each.write_error() for each in self._saved]
        self._saved.clear()
        self.device = None

    def fetch(self) -> None:
        """Start the copy back to the device, unless the storage is on the device."""
        if self.device is None:
            self.device, self._returned = self._transfers.to_device(self._span.pieces, self.sent)

    def on_device(self, number: int) -> Tensor:
        """Return the device memory, 1-D uint8; the current stream waits for the copy.

        Args:
            number: the saved tensor that is used.

        Raises:
            RuntimeError: it was written to after it was saved.
        """
        _raise_if(self._saved[number].write_error() if self._saved else self._write_errors[number])
        self.fetch()
        if self._returned is not None:
            self._returned.wait()
            self._is_awaited = True
        assert self.device is not None
        return self.device


@dataclass(frozen=True)
class _View:
    """A saved tensor as a view of an offloaded storage.

    Attributes:
        number: its number among the saved tensors of the storage.
        geometry: storage offset, size and stride, in elements.
    """

    storage: _Storage
    number: int
    dtype: torch.dtype
    geometry: tuple[int, torch.Size, tuple[int, ...]]

    def tensor(self) -> Tensor:
        device_bytes = self.storage.on_device(self.number)
        view = torch.empty(0, dtype=self.dtype, device=device_bytes.device)
        return view.set_(device_bytes.untyped_storage(), *self.geometry)


class ActivationOffload:
    """Runs layers and keeps their saved tensors in host memory.

    Args:
        transfers: asynchronous copies between device and host.
        pool: host memory.
        num_layers: number of layers that offload; the memory for all of them is allocated when the
            first one has shown how much it saves.
        layers_in_flight: number of preceding layers whose copies may be incomplete when a layer
            ends; None waits only if the device is nearly full.
    """

    def __init__(
        self, transfers: HostTransfers, pool: HostPool, *, num_layers: int, layers_in_flight: int | None = None
    ) -> None:
        self._transfers = transfers
        self._pool = pool
        self._arena = HostArena(pool, OFFLOAD_OWNER)
        self._num_layers = num_layers
        self._layers_in_flight = layers_in_flight
        self._reserved_bytes = 0
        self._num_ended = 0  # calls of ``_end_layer``, which number the layers
        self._pack_current: Callable[[Tensor], _OnDevice | _View] | None = None
        # Weak references: only the autograd graph keeps storages alive, so a dropped graph frees
        # them.
        self._sending: deque[weakref.ref[_Storage]] = deque()
        self._saved_before: list[weakref.ref[_Storage]] = []
        # What a layer may need: what one has saved, or by how much one has lowered the free memory.
        # A layer without recompute after offloaded layers with recompute needs more than they do.
        self._layer_bytes = 0
        self._largest_growth = 0
        self._free_at_end: int | None = None  # free memory when the last layer ended, in this forward

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOffload:
        copy = memo[id(self)] = type(self)(
            self._transfers, self._pool, num_layers=self._num_layers, layers_in_flight=self._layers_in_flight
        )
        return copy

    def keep(self, tensor: Tensor) -> _OnDevice | _View:
        """Offload ``tensor``, which the running layer keeps for its recomputation.

        ``tensor()`` of the result returns it.
        """
        assert self._pack_current is not None, "keep is called inside run"
        return self._pack_current(tensor)

    def run(self, layer: nn.Module, forward: Callable[..., Any], hidden: Any, *context: Any) -> Any:
        """Return ``forward(hidden, *context)`` of ``layer``; offload what it saves for backward.

        Parameters, tensors in ``context``, and storages below 1 MiB stay on the device.
        """
        if not torch.is_grad_enabled():
            return forward(hidden, *context)
        # Parameters and the context are alive anyway: a host copy frees nothing.
        resident_addresses = _addresses([*layer.parameters(), *tensors_in(context)])
        # Experts at zero3 with expert parallelism are a unit of their own, which is gathered inside of this forward:
        # until then they have no address.
        gathered_later = [
            module for module in layer.modules() if any(map(is_data_sharded, module.parameters(recurse=False)))
        ]
        # By address: views of one storage share a single transfer.
        saved: dict[int, _Storage] = {}
        pack = functools.partial(self._pack, resident_addresses, gathered_later, saved)
        self._pack_current = pack
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
                output = forward(hidden, *context)
        finally:
            self._pack_current = None
        # Where the layer itself writes to what it has saved, its error is in forward.
        for storage in saved.values():
            storage.require_unwritten()
        # Bytes of the last layer estimate the bytes that the next layer will need.
        references = [weakref.ref(storage) for storage in saved.values()]
        self._layer_bytes = sum(storage.size_bytes for storage in saved.values())
        # Layers save about the same. Memory that is missing for the last layer is an error in the
        # first layer of the first step, and later steps pin nothing.
        if self._layer_bytes * self._num_layers > self._reserved_bytes:
            self._arena.reserve(self._layer_bytes * self._num_layers)
            self._reserved_bytes = self._layer_bytes * self._num_layers
        # Autograd keeps the pack hook, and the dictionary bound to it, as long as the graph.
        saved.clear()
        self._end_layer(output, references)
        return output

    def run_resident(self, forward: Callable[..., Any], hidden: Any, *context: Any) -> Any:
        """Return ``forward(hidden, *context)`` of a layer whose activations stay on the device.

        It also advances the transfers of the offloaded layers before it.
        """
        output = forward(hidden, *context)
        if torch.is_grad_enabled():
            self._end_layer(output, [])
        return output

    def _end_layer(self, output: Any, saved: list[weakref.ref[_Storage]]) -> None:
        """Register the prefetch for backward and free the storages that have reached the host.

        The gradient of this layer's output arrives when backward of this layer starts. At that
        point the storages of the previous layer are fetched, one layer ahead of their use.
        """
        # The hidden states are the first tensor of an output that has more (mixture of experts).
        hidden = next(tensors_in(output), None)
        if self._saved_before and hidden is not None and hidden.requires_grad:
            hidden.register_hook(functools.partial(_fetch, self._saved_before))
        self._saved_before = saved
        self._free_sent()

    def _pack(
        self,
        resident_addresses: set[int],
        gathered_later: Sequence[nn.Module],
        saved: dict[int, _Storage],
        tensor: Tensor,
    ) -> _OnDevice | _View:
        storage = tensor.untyped_storage()
        # Offload complete storages, once per storage: several saved tensors are often views of one
        # storage.
        address = storage.data_ptr()
        # A storage does not record the conj and neg bits of a lazy view.
        is_lazy = tensor.is_conj() or tensor.is_neg()
        if address in resident_addresses or is_lazy or storage.nbytes() < _MIN_BYTES:
            return _OnDevice.of(tensor)
        if any(address in _addresses(module.parameters(recurse=False)) for module in gathered_later):
            return _OnDevice.of(tensor)
        if address not in saved:
            storage_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            saved[address] = _Storage(self._transfers, self._arena, self._num_ended, storage_bytes)
            self._sending.append(weakref.ref(saved[address]))
        number = saved[address].add(tensor)
        geometry = (int(tensor.storage_offset()), tensor.size(), tensor.stride())
        return _View(saved[address], number, tensor.dtype, geometry)

    def _unpack(self, packed: _OnDevice | _View) -> Tensor:
        # Backward has begun: storages that are still on the device stay there.
        self._sending.clear()
        self._free_at_end = None
        return packed.tensor()

    def _free_sent(self) -> None:
        """Free the device memory of storages whose copy is complete.

        Wait for incomplete copies too: of layers before the last ``layers_in_flight``, and if free
        memory is at most twice what a layer may need.
        """
        self._num_ended += 1
        if not self._sending:
            self._free_at_end = None
            return
        self._transfers.keep_pace()
        if self._free_at_end is not None:
            growth = self._free_at_end - self._transfers.free_bytes()
            self._largest_growth = max(self._largest_growth, growth)
        needed = 2 * max(self._layer_bytes, self._largest_growth)
        while self._sending:
            # Copies complete in order: stop at the first incomplete one. A dead reference means
            # that autograd dropped the storage.
            storage = self._sending[0]()
            if storage is not None and not storage.sent.is_done():
                # Waiting stalls the compute stream; it pays only if the next layer could run out of
                # memory. In a recomputed layer, whose checkpoint is a small part of what it
                # allocates, the number of layers in flight is bounded instead.
                is_old = False
                if self._layers_in_flight is not None:
                    is_old = storage.layer < self._num_ended - self._layers_in_flight
                if not is_old and self._transfers.free_bytes() > needed:
                    break
                storage.sent.wait()
            if storage is not None:
                storage.free()
            self._sending.popleft()
        self._free_at_end = self._transfers.free_bytes()


def _fetch(saved: Iterable[weakref.ref[_Storage]], grad: Tensor) -> None:
    del grad
    for reference in saved:
        storage = reference()
        if storage is not None:
            storage.fetch()


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of a layer's output: itself, or those of nested tuples and lists, in order."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_in(value)


def new_pool(transfers: HostTransfers) -> HostPool:
    """Return a pool whose memory ``transfers`` can copy to and from asynchronously."""
    return HostPool(pinned=transfers.needs_pinned_memory)


def apply_offload(layers: Sequence[nn.Module], num_layers: int, offload: ActivationOffload) -> None:
    """Keep the activations of the first ``num_layers`` of ``layers`` on the host.

    Replaces an earlier choice.

    Args:
        layers: all decoder layers, in order.
        num_layers: number of first layers that offload.
        offload: one object for all layers: the transfers of one layer overlap with the compute of
            the next.
    """
    for i, layer in enumerate(layers):
        # The first layer of a recomputed chunk runs this one: it saves nothing. A call would only
        # separate the chunk from the one before it, whose checkpoint is to be fetched ahead.
        if is_passed_over(layer):
            continue
        # The wrapper is a partial of ``partial`` itself: called with a forward, it returns a bound
        # forward. Unlike a closure, ``copy.deepcopy`` copies it together with the layer.
        if i < num_layers:
            wrapper = functools.partial(functools.partial, offload.run, layer)
        else:
            wrapper = functools.partial(functools.partial, offload.run_resident)
        wrap_forward(layer, "offload", wrapper)


def remove_offload(layers: Iterable[nn.Module]) -> None:
    """Undo ``apply_offload``."""
    for layer in layers:
        unwrap_forward(layer, "offload")
