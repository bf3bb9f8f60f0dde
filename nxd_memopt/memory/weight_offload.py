"""Keeps the weights of the first decoder layers in host memory, and on the device while they are used.

Forward and backward of a layer need its weights only. The copy of the next layer's weights overlaps
with the compute of the current one, so the device holds the weights of a few layers instead of all.

A weight is copied at the level of its storage: ``Parameter`` objects, views that share a storage,
and tensors that autograd has saved stay valid, and an evicted storage has no memory at all. A
forgotten copy cannot read stale values: kernels fail on a null address.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nxd_memopt.backends import HostTransfers, Transfer
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.memory.offload import tensors_in
from nxd_memopt.memory.recompute import is_passed_over, layer_units
from nxd_memopt.parallel_layers.data_shards import require_replicated
from nxd_memopt.parallel_layers.wrapping import unwrap_forward, wrap_forward
from nxd_memopt.planner.techniques.offloaded_weights import ALIGNMENT

WEIGHT_OWNER = "weight offload"
"""Owner of the offloaded weights in the ledger of a ``HostPool``."""

_ATTRIBUTE = "_weight_offload"


class _Unit:
    """The weights that are copied together: those of one layer, or of a chunk of recomputed layers.

    Attributes:
        is_on_device: whether the storages have device memory with the weights, perhaps once
            ``arrived`` is done.
        device_is_newer: whether the device memory may be newer than the host's. It then goes to the host
            before it is freed.
        leaving: the copy to the host that must end before the device memory is freed.
    """

    def __init__(self, transfers: HostTransfers, layers: Sequence[nn.Module]) -> None:
        self._transfers = transfers
        self._params = [param for layer in layers for param in layer.parameters()]
        require_replicated(self._params, "cpu_offloading_weights", "turn it off, or use zero1 or zero2")
        distinct = {param.untyped_storage()._cdata: param.untyped_storage() for param in self._params}
        self.storages = list(distinct.values())
        self._host: list[Tensor] = []
        self.is_on_device = True
        self.device_is_newer = True
        self.leaving: Transfer | None = None
        self._arrived: Transfer | None = None
        # May run on after the stream was told to wait for them.
        self._last_copy_in: Transfer | None = None
        self._last_copy_out: Transfer | None = None

    def synchronize(self) -> None:
        """Make the host wait for the copies."""
        for transfer in (self._last_copy_in, self._last_copy_out):
            if transfer is not None:
                transfer.synchronize()

    def size_bytes(self) -> int:
        """Return the bytes of the weights, with the padding between storages."""
        return sum(_aligned(storage.nbytes()) for storage in self.storages)

    def set_host_memory(self, buffer: Tensor) -> None:
        """Use ``buffer``, 1-D uint8 of ``size_bytes()`` elements, uninitialized."""
        start = 0
        for storage in self.storages:
            self._host.append(buffer[start : start + storage.nbytes()])
            start += _aligned(storage.nbytes())

    def forget(self) -> None:
        """Remove the references to this offload from the parameters."""
        for param in self._params:
            delattr(param, _ATTRIBUTE)
            delattr(param, "__deepcopy__")

    def require_unreplaced(self) -> None:
        """Raise ``RuntimeError`` if a parameter has another storage than at the beginning."""
        known = {storage._cdata for storage in self.storages}
        for param in self._params:
            if param.untyped_storage()._cdata not in known:
                raise RuntimeError(
                    f"a weight of shape {list(param.shape)} was replaced after cpu_offloading_weights was "
                    "applied, for example by Module.to(): move or convert the model before apply_memory"
                )

    def fetch(self) -> None:
        """Start the copy to the device, unless the weights are there."""
        self.free()
        if self.is_on_device:
            return
        for storage, host in zip(self.storages, self._host, strict=True):
            storage.resize_(host.numel())
        # The allocator reuses memory in the order of the current stream: the previous user of the
        # block may still be queued there, so the copy starts after all work queued so far.
        pairs = list(zip(map(_bytes_of, self.storages), self._host, strict=True))
        self._arrived = self._last_copy_in = self._transfers.copy_in(pairs, self._transfers.mark())
        self.is_on_device = True
        self.device_is_newer = False

    def wait(self) -> None:
        """Make the device's subsequent work wait until the weights have arrived."""
        if self._arrived is not None:
            self._arrived.wait()
            self._arrived = None

    def evict(self) -> None:
        """Free the device memory, or start the copy to the host, after which ``free`` frees it."""
        if not self.is_on_device:
            return
        # Also a copy that nobody used has to end before its target is freed.
        self.wait()
        self.is_on_device = False
        if not self.device_is_newer:
            self._release()
            return
        pairs = list(zip(self._host, map(_bytes_of, self.storages), strict=True))
        self.leaving = self._last_copy_out = self._transfers.copy_out(pairs, self._transfers.mark())

    def free(self) -> None:
        """Complete an eviction: free the device memory once the host has the weights."""
        if self.leaving is not None:
            self.leaving.wait()
            self.leaving = None
            self._release()

    def _release(self) -> None:
        for storage in self.storages:
            storage.resize_(0)


class WeightOffload:
    """Runs decoder layers whose weights are in host memory between their uses.

    In forward the weights of the next layer are fetched while a layer runs, and freed after it. In
    backward they are fetched in the opposite order. Backward also copies them to the host before
    they are freed, because an optimizer may have updated them (``OptimizerInBackward``). The device
    holds the weights of up to three layers: the current one, the next one, and one on its way to
    the host.

    After backward all offloaded weights are on the host. ``weights_to_device`` brings them back for
    whatever reads or writes them outside forward and backward; the next forward returns them.
    ``step`` of every ``torch.optim.Optimizer`` calls it.

    Args:
        transfers: asynchronous copies between device and host.
        pool: ledger that counts the host memory.
        layers: the offloaded decoder layers, in order of forward.
        others: all other parameters of the model.

    Raises:
        ValueError: a weight is on another device, is shared with another layer or is sharded over
            data-parallel ranks, or the host has too little memory.
    """

    def __init__(
        self, transfers: HostTransfers, pool: HostPool, layers: Sequence[nn.Module], others: Iterable[nn.Parameter] = ()
    ) -> None:
        self._transfers = transfers
        self._units = [_Unit(transfers, chunk) for chunk in layer_units(layers)]
        self._require_own_storages(transfers, others)
        self._pool = pool
        self.host_bytes = sum(unit.size_bytes() for unit in self._units)
        pool.claim(self.host_bytes, WEIGHT_OWNER)
        try:
            buffer = transfers.host_buffer(self.host_bytes)
        except BaseException:
            pool.release(self.host_bytes, WEIGHT_OWNER)
            raise
        start = 0
        for unit in self._units:
            unit.set_host_memory(buffer[start : start + unit.size_bytes()])
            start += unit.size_bytes()
        self._leaving_before: list[_Unit] = []
        self._is_in_backward = False
        # Not a handle in an attribute: among garbage its weak reference is cleared before ``__del__`` runs.
        self._remove_step_hook = weakref.finalize(self, register_optimizer_step_pre_hook(_fetch_before_step).remove)

    def __del__(self) -> None:
        # Neither the allocator that gets the weights' memory nor the host's unmapping knows of copies that run.
        # The constructor may have failed, and so may a copy, which is then over.
        for unit in getattr(self, "_units", ()):
            with suppress(Exception):
                unit.synchronize()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightOffload:
        raise ValueError("a model with cpu_offloading_weights cannot be copied: copy it before apply_memory")

    def _require_own_storages(self, transfers: HostTransfers, others: Iterable[nn.Parameter]) -> None:
        seen = {param.untyped_storage()._cdata for param in others}
        for unit in self._units:
            for storage in unit.storages:
                if storage.device.type != transfers.device.type:
                    raise ValueError(
                        f"cpu_offloading_weights finds a weight on {storage.device}, not on {transfers.device}: "
                        "move the model to the device before apply_memory"
                    )
                if storage._cdata in seen:
                    raise ValueError(
                        f"cpu_offloading_weights finds a weight of {storage.nbytes()} bytes that two layers "
                        "share: leave it out, or untie the weights"
                    )
                seen.add(storage._cdata)

    def run(self, index: int, forward: Callable[..., Any], hidden: Any, *context: Any) -> Any:
        """Return ``forward(hidden, *context)`` of the unit number ``index``."""
        unit = self._units[index]
        unit.require_unreplaced()
        # A backward that failed has not run its callback.
        self._is_in_backward = False
        self._use(index, index + 1)
        output = forward(hidden, *context)
        unit.evict()
        # After the last unit no copy on the device is left: a write to one would be lost.
        if index == len(self._units) - 1:
            self._free_all()
        self._watch_backward(index, output)
        return output

    def run_following(self, forward: Callable[..., Any], hidden: Any, *context: Any) -> Any:
        """Return ``forward(hidden, *context)`` of the layer after the last unit.

        When its backward begins, the weights of the last unit are fetched.
        """
        output = forward(hidden, *context)
        self._watch_backward(len(self._units), output)
        return output

    def _watch_backward(self, index: int, output: Any) -> None:
        """Call ``_begin_backward`` when the gradient of ``output`` arrives."""
        first = next(tensors_in(output), None)
        if torch.is_grad_enabled() and first is not None and first.requires_grad:
            first.register_hook(functools.partial(self._begin_backward, index))

    def to_device(self) -> None:
        """Bring all weights to the device. The next forward and backward return them to the host."""
        for unit in self._units:
            unit.fetch()
            # The caller may write to them.
            unit.device_is_newer = True
        for unit in self._units:
            unit.wait()

    def close(self) -> None:
        """Bring all weights to the device and give the host memory back."""
        self.to_device()
        self._remove_step_hook()
        for unit in self._units:
            unit.forget()
        # The host memory may be freed from now on.
        self._transfers.mark().synchronize()
        self._pool.release(self.host_bytes, WEIGHT_OWNER)

    def _use(self, index: int, following: int) -> None:
        """Have the weights of unit ``index`` on the device, and fetch those of ``following``."""
        # Their copies began one unit ago, so that the device does not wait for them.
        for unit in self._leaving_before:
            unit.free()
        self._leaving_before = [unit for unit in self._units if unit.leaving is not None]
        if 0 <= index < len(self._units):
            self._units[index].fetch()
            self._units[index].wait()
        if 0 <= following < len(self._units):
            self._units[following].fetch()

    def _begin_backward(self, index: int, grad: Tensor) -> None:
        """Evict the weights of the units whose backward is complete; fetch those of ``index``."""
        del grad
        if not self._is_in_backward:
            self._is_in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)
        for other, unit in enumerate(self._units):
            if other not in (index, index - 1):
                unit.evict()
        self._use(index, index - 1)
        if index < len(self._units):
            self._units[index].device_is_newer = True

    def _end_backward(self) -> None:
        self._is_in_backward = False
        for unit in self._units:
            unit.evict()
        self._free_all()

    def _free_all(self) -> None:
        for unit in self._units:
            unit.free()
        self._leaving_before = []


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return the memory of ``storage``, 1-D uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def apply_weight_offload(
    layers: Sequence[nn.Module],
    num_layers: int,
    transfers: HostTransfers,
    pool: HostPool,
    *,
    others: Iterable[nn.Parameter] = (),
) -> WeightOffload:
    """Keep the weights of the first ``num_layers`` of ``layers`` on the host.

    Args:
        layers: all decoder layers, in order, with all other techniques applied. A chunk of
            recomputed layers belongs to its first layer and is offloaded as one.
        num_layers: number of first layers, at most all.
        transfers: asynchronous copies between device and host.
        pool: ledger that counts the host memory.
        others: parameters of the model outside ``layers``.

    Raises:
        ValueError: see ``WeightOffload``.
    """
    first = list(layers[:num_layers])
    # The rest of a chunk that begins among the first layers.
    while len(first) < len(layers) and is_passed_over(layers[len(first)]):
        first.append(layers[len(first)])
    later = [param for layer in layers[len(first) :] for param in layer.parameters()]
    offload = WeightOffload(transfers, pool, first, [*others, *later])
    for index, (layer, *_) in enumerate(layer_units(first)):
        wrap_forward(layer, "weights", functools.partial(functools.partial, offload.run, index))
    if len(first) < len(layers):
        wrap_forward(layers[len(first)], "weights", functools.partial(functools.partial, offload.run_following))
    for layer in first:
        for param in layer.parameters():
            setattr(param, _ATTRIBUTE, offload)
            # ``copy`` asks the parameter first, whose own method would read memory that is freed.
            param.__deepcopy__ = offload.__deepcopy__  # pyright: ignore[reportAttributeAccessIssue]
        layer.register_state_dict_pre_hook(_fetch_before)
        layer.register_load_state_dict_pre_hook(_fetch_before)
    return offload


def remove_weight_offload(layers: Iterable[nn.Module]) -> None:
    """Undo ``apply_weight_offload``; the weights are on the device afterwards."""
    for layer in layers:
        unwrap_forward(layer, "weights")
        for param in layer.parameters():
            offload = _offload_of(param)
            if offload is not None:
                offload.close()


def weights_to_device(parameters: Iterable[Tensor]) -> None:
    """Bring the offloaded weights of a model to the device, until its next forward.

    Optimizers of ``torch.optim`` and this library, checkpoints, ``state_dict`` and ``load_state_dict``
    call it. Call it before anything else but forward and backward reads or writes weights: their
    memory is freed. Without offloaded weights it does nothing.

    Args:
        parameters: parameters that will be read or written.

    Example::

        weights_to_device(model.parameters())
        norms = [param.norm() for param in model.parameters()]
    """
    is_in_backward = torch._C._current_graph_task_id() >= 0
    fetched: set[int] = set()
    for param in parameters:
        offload = _offload_of(param)
        if offload is None or id(offload) in fetched:
            continue
        # Inside backward, weights that are on the device are in use and return to the host. Outside,
        # a pass that failed may have left a prefetched copy there, which would be dropped with what
        # the caller writes to it.
        if is_in_backward and param.untyped_storage().nbytes():
            continue
        offload.to_device()
        fetched.add(id(offload))


def has_offloaded_weights(parameters: Iterable[Tensor]) -> bool:
    """Return whether a parameter is kept on the host."""
    return any(_offload_of(param) is not None for param in parameters)


def _offload_of(param: Tensor) -> WeightOffload | None:
    return getattr(param, _ATTRIBUTE, None)


def _fetch_before(layer: nn.Module, *_: Any) -> None:
    """Bring the weights to the device: a hook of ``state_dict`` and ``load_state_dict``."""
    weights_to_device(layer.parameters())


def _fetch_before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Bring the weights to the device: a hook of every optimizer's ``step``."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not has_offloaded_weights(params):
        return None
    weights_to_device(params)

    def then_fetch(closure: Callable[[], Any]) -> Any:
        result = closure()
        weights_to_device(params)
        return result

    # The forward and backward of a closure return the weights to the host before the update.
    args = tuple(functools.partial(then_fetch, each) if callable(each) else each for each in args)
    kwargs = {name: functools.partial(then_fetch, each) if callable(each) else each for name, each in kwargs.items()}
    return args, kwargs
