"""Owns the native Neuron backend: TorchNeuron's eager device on trn2 and trn3, and how to tell it from torch-xla's."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.backends.c10d import C10dBackend
from nxd_memopt.backends.pieces import Completed, Pending
from nxd_memopt.backends.topology import neuron_order

_PACKAGE = "torch_neuronx"
_FIRST_NATIVE_VERSION = (2, 10)
_NO_SILENT_FALLBACK = "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS"
_SDPA_SEQUENCE_MULTIPLE = 512
_SDPA_MAX_HEAD_DIM = 128
_FALLBACK_SET_LATE = _PACKAGE in sys.modules and _NO_SILENT_FALLBACK not in os.environ
"""The package, which torch may load by itself, came before this module and may have read its settings."""


class NeuronBackend(C10dBackend):
    """Trainium2 and 3 through TorchNeuron, one logical core per process: the one that torchrun's LOCAL_RANK names.

    Operations that fail on the device would run on the CPU without a word; unless the environment says otherwise, the
    backend has them raise.
    """

    name = "neuron"
    distributed_backend = "neuron"
    attention_implementations = ("sdpa", "tiled", "math")
    views_share_memory = False  # not known to hold on the beta
    equal_heads_implementations = ("sdpa",)

    def __init__(self) -> None:
        self._device_module = _import_device_module()
        self.device = torch.device("neuron", _local_device(self._device_module.device_count()))

    @classmethod
    def unavailable_reason(cls) -> str | None:
        reason = _not_native_reason()
        if reason is not None:
            return reason
        try:
            device_count = _import_device_module().device_count()
        except Exception as error:  # a missing driver or runtime library shows as whatever its loader raises
            return f"{_PACKAGE} cannot be imported: {type(error).__name__}: {error}"
        return None if device_count else f"{_found()} is native, but no Neuron device is visible"

    def description(self) -> str:
        return f"{_found()}, native; {self._fallback_state()}"

    def _fallback_state(self) -> str:
        if os.environ.get(_NO_SILENT_FALLBACK) != "1":
            return f"operations that fail run on the CPU without a word, as {_NO_SILENT_FALLBACK} is not 1"
        if _FALLBACK_SET_LATE:
            return f"{_NO_SILENT_FALLBACK}=1 came after the import of {_PACKAGE}: export it, or it may have no effect"
        return "only operations that it does not have run on the CPU"

    # Processes and groups

    def init_process_group(self, **kwargs: Any) -> None:
        """As ``Backend.init_process_group``; comes before the first tensor on the device, or the runtime refuses."""
        super().init_process_group(**kwargs)
        if dist.is_initialized():
            self._device_module.set_device(self.device.index)

    def device_order(self, world_size: int, tensor_model_parallel_size: int) -> list[int]:
        return neuron_order(os.environ, world_size, tensor_model_parallel_size)

    # Collectives: the device reduces integers in fp32, which is exact to 2^24 only. Integers are gathered, which moves
    # them as they are, and reduced on the host.

    def all_reduce(self, tensor: Tensor, group: ProcessGroup | None, op: str = "sum") -> Tensor:
        if not _is_integer(tensor) or self.group_size(group) == 1:
            return super().all_reduce(tensor, group, op)
        gathered = self.all_gather(tensor.unsqueeze(0), group).cpu()
        reduced = {"sum": gathered.sum, "max": gathered.amax, "min": gathered.amin}[op](0)
        return reduced.to(device=tensor.device, dtype=tensor.dtype)

    def all_reduce_async(self, tensor: Tensor, group: ProcessGroup | None) -> Pending:
        if _is_integer(tensor):
            return Completed(self.all_reduce(tensor, group))
        return super().all_reduce_async(tensor, group)

    def reduce_scatter_async(self, tensor: Tensor, group: ProcessGroup | None) -> Pending:
        if _is_integer(tensor):
            return Completed(self.shard(self.all_reduce(tensor, group), 0, group))
        return super().reduce_scatter_async(tensor, group)

    # Random state

    def manual_seed(self, seed: int) -> None:
        self._device_module.manual_seed(seed)

    def get_rng_state(self) -> Tensor:
        return self._device_module.get_rng_state(self.device.index)

    def set_rng_state(self, state: Tensor) -> None:
        self._device_module.set_rng_state(state, self.device.index)

    # Execution and memory

    def attention_refusal(self, implementation: str, call: AttentionCall) -> str | None:
        """Outside its kernel's limits the device's SDPA materialises S x S without a word."""
        if implementation != "sdpa":
            return None
        return call.unsuited(
            "Neuron's SDPA kernel", sequence_multiple=_SDPA_SEQUENCE_MULTIPLE, max_head_dim=_SDPA_MAX_HEAD_DIM
        )

    def synchronize(self) -> None:
        self._device_module.synchronize()

    def memory_allocated(self) -> int:
        """Bytes of tensors; what compiled graphs use inside themselves is not among them."""
        self.synchronize()
        return self._device_module.memory_allocated(self.device.index)

    def max_memory_allocated(self) -> int:
        self.synchronize()
        return self._device_module.max_memory_allocated(self.device.index)

    def reset_peak_memory_stats(self) -> None:
        self.synchronize()
        self._device_module.reset_peak_memory_stats(self.device.index)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """TorchNeuron compiles static shapes alone: another shape is another compilation, never a dynamic one."""
        return torch.compile(function, backend="neuron", fullgraph=True, dynamic=False)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _local_device(device_count: int) -> int:
    """Index of this process's device: LOCAL_RANK, or 0 where the process sees its own device alone."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_count == 1:
        return 0
    if local_rank >= device_count:
        raise ValueError(
            f"LOCAL_RANK {local_rank} needs {local_rank + 1} Neuron devices, {device_count} visible: lower "
            "--nproc_per_node or check NEURON_RT_VISIBLE_CORES"
        )
    return local_rank


def _import_device_module() -> Any:
    """``torch.neuron``, which importing the package registers; before that the fallback to the CPU is restrained."""
    os.environ.setdefault(_NO_SILENT_FALLBACK, "1")
    importlib.import_module(_PACKAGE)
    return getattr(torch, "neuron")  # noqa: B009 (type checkers know torch without it)


def _not_native_reason() -> str | None:
    """Why the installed package is not TorchNeuron; imports nothing.

    torch-xla's build has the same import name and a ``torch.neuron`` too. It has ``xla_impl`` in place of
    ``neuron_dynamo_backend``, and its versions follow torch up to 2.9.
    """
    locations = _package_locations()
    if locations is None:
        return f"{_PACKAGE} is not installed"
    if PathFinder.find_spec(f"{_PACKAGE}.neuron_dynamo_backend", locations) is not None:
        return None
    version = _version()
    if version is not None and _release(version) >= _FIRST_NATIVE_VERSION:
        return None
    if PathFinder.find_spec(f"{_PACKAGE}.xla_impl", locations) is not None:
        return f"{_found()} is the PyTorch/XLA build, which backend xla serves: TorchNeuron is {_PACKAGE} 2.10 or newer"
    return f"{_found()} is not TorchNeuron: it is older than 2.10 and has no neuron_dynamo_backend"


def _package_locations() -> list[str] | None:
    loaded = sys.modules.get(_PACKAGE)
    if loaded is not None:
        return list(getattr(loaded, "__path__", []))
    spec = importlib.util.find_spec(_PACKAGE)
    return None if spec is None else list(spec.submodule_search_locations or [])


def _version() -> str | None:
    loaded = getattr(sys.modules.get(_PACKAGE), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _found() -> str:
    return f"{_PACKAGE} {_version() or 'of unknown version'}"


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
