"""The native Neuron backend: TorchNeuron's eager device on trn2 and trn3.

Also tells TorchNeuron from torch-xla's build, which has the same import name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.backends.collectives import Completed, Pending
from nxd_memopt.backends.neuron.topology import PHYSICAL_CORES_PER_CHIP, logical_nc_config
from nxd_memopt.backends.neuron.trainium import TrainiumBackend

_PACKAGE = "torch_neuronx"
_FIRST_NATIVE_VERSION = (2, 10)
_NO_SILENT_FALLBACK = "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS"
_VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"
_SDPA_SEQUENCE_MULTIPLE = 512
_SDPA_MAX_HEAD_DIM = 128
_SDPA_MAX_BATCH_HEADS = 512
_LATE_FALLBACK = (
    f"{_NO_SILENT_FALLBACK} was not set when torch imported {_PACKAGE}, so operations that fail "
    f"may still run on the CPU silently and slowly: export {_NO_SILENT_FALLBACK}=1 before Python "
    "starts (nxd-memopt launch does)"
)
_FALLBACK_SET_LATE = _PACKAGE in sys.modules and _NO_SILENT_FALLBACK not in os.environ
"""Whether the package was loaded before the variable was set.

``import torch`` loads the package (torch's device autoload), so the package may have read its
settings before this line.
"""


class NeuronBackend(TrainiumBackend):
    """Trainium2 and Trainium3 through TorchNeuron, one logical core per process.

    TorchNeuron's process group assigns the device. The device index is the process's rank on this
    host, whatever NEURON_RT_VISIBLE_CORES was before. The group must be created before the first
    tensor on the device.

    Operations that fail on the device would silently run on the CPU. Unless the environment says
    otherwise, the backend makes them raise.
    """

    name = "neuron"
    distributed_backend = "neuron"
    attention_implementations = ("sdpa", "tiled", "math")
    equal_heads_implementations = ("sdpa",)

    def __init__(self) -> None:
        self._device_module = _import_device_module()
        self._assigned_device: torch.device | None = None
        # one warning, not one per process
        if _FALLBACK_SET_LATE and os.environ.get("RANK", "0") == "0":
            warnings.warn(_LATE_FALLBACK, RuntimeWarning, stacklevel=2)

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the device of this process.

        The device has no index until the process group exists: ``neuron`` without an index means
        the current device whenever a tensor is created, so code that saved it stays correct.
        ``neuron:0`` would be another process's core.
        """
        # Save the index only when the process group has assigned it: until then the current device
        # is the first that this process sees, which may be another process's core.
        if self._assigned_device is None and dist.is_initialized():
            self._assigned_device = torch.device("neuron", self._device_module.current_device())
        if self._assigned_device is not None:
            return self._assigned_device
        if "RANK" in os.environ:
            return torch.device("neuron")
        return torch.device("neuron", self._device_module.current_device())

    @classmethod
    def unavailable_reason(cls) -> str | None:
        reason = _not_native_reason()
        if reason is not None:
            return reason
        try:
            device_count = _import_device_module().device_count()
        except Exception as error:  # the loader of a missing driver or library may raise anything
            return f"{_PACKAGE} cannot be imported: {type(error).__name__}: {error}"
        if not device_count:
            return f"{_found()} is native, but no Neuron device is visible"
        return None

    def description(self) -> str:
        return f"{_found()}, native; {self._fallback_state()}"

    def _fallback_state(self) -> str:
        if os.environ.get(_NO_SILENT_FALLBACK) != "1":
            return f"operations that fail silently run on the CPU, as {_NO_SILENT_FALLBACK} is not 1"
        if _FALLBACK_SET_LATE:
            return _LATE_FALLBACK
        return "only operations that it does not have run on the CPU"

    def describe_overlap(self) -> str:
        size = PHYSICAL_CORES_PER_CHIP // logical_nc_config(os.environ)
        return f"{super().describe_overlap()}; groups of up to {size} ranks stay within one chip"

    # Processes and groups

    def init_process_group(self, **kwargs: Any) -> None:
        """Join the world; see ``Backend.init_process_group``.

        Call before the first tensor on the device; the runtime refuses later calls.

        Raises:
            ValueError: this process would not get exactly one core.
        """
        if "RANK" in os.environ and not dist.is_initialized():
            _require_a_core(self._device_module.device_count())
        super().init_process_group(**kwargs)

    # Collectives. The device reduces integers in fp32, which is exact only up to 2^24. Integers are
    # all-gathered, which does not change their bits, and reduced on the host.

    def all_reduce(self, tensor: Tensor, group: ProcessGroup | None, op: str = "sum") -> Tensor:
        if not _is_integer(tensor) or self.group_size(group) == 1:
            return super().all_reduce(tensor, group, op)
        # [...] -> [size, ...] on the host, where the reduction over dim 0 is exact. The copy to the
        # host waits for the device.
        gathered = self.all_gather(tensor.unsqueeze(0), group).cpu()
        reduced = {"sum": gathered.sum, "max": gathered.amax, "min": gathered.amin}[op](0)
        return reduced.to(device=tensor.device, dtype=tensor.dtype)

    def all_reduce_async(self, tensor: Tensor, group: ProcessGroup | None) -> Pending:
        if _is_integer(tensor):
            return Completed(self.all_reduce(tensor, group))
        return super().all_reduce_async(tensor, group)

    def reduce_scatter_async(self, tensor: Tensor, group: ProcessGroup | None) -> Pending:
        if _is_integer(tensor):
            # all_reduce sums on the host; return this rank's chunk
            return Completed(self.shard(self.all_reduce(tensor, group), 0, group))
        return super().reduce_scatter_async(tensor, group)

    # Random state

    def manual_seed(self, seed: int) -> None:
        self._device_module.manual_seed(seed)

    def get_rng_state(self) -> Tensor:
        return self._device_module.get_rng_state(self._device_module.current_device())

    def set_rng_state(self, state: Tensor) -> None:
        self._device_module.set_rng_state(state, self._device_module.current_device())

    # Execution and memory

    def attention_refusal(self, implementation: str, call: AttentionCall) -> str | None:
        """Return why ``implementation`` cannot run ``call``, or None if it can.

        Outside the limits of its kernel the device's SDPA silently materialises S x S scores.
        """
        if implementation != "sdpa":
            return None
        return call.unsuited(
            "Neuron's SDPA kernel",
            sequence_multiple=_SDPA_SEQUENCE_MULTIPLE,
            max_head_dim=_SDPA_MAX_HEAD_DIM,
            max_batch_heads=_SDPA_MAX_BATCH_HEADS,
        )

    def synchronize(self) -> None:
        self._device_module.synchronize()

    def memory_allocated(self) -> int:
        """Return the bytes of tensors, without the internal memory of compiled graphs."""
        # operations that are still queued may allocate
        self.synchronize()
        return self._device_module.memory_allocated(self._device_module.current_device())

    def max_memory_allocated(self) -> int:
        self.synchronize()
        return self._device_module.max_memory_allocated(self._device_module.current_device())

    def reset_peak_memory_stats(self) -> None:
        self.synchronize()
        self._device_module.reset_peak_memory_stats(self._device_module.current_device())

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile with TorchNeuron, which supports static shapes only.

        Every other shape is another compilation.
        """
        return torch.compile(function, backend="neuron", fullgraph=True, dynamic=False)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _require_a_core(device_count: int) -> None:
    """Raise ``ValueError`` unless this process gets exactly one core.

    TorchNeuron's process group asserts this later, without a reason. With NEURON_RT_VISIBLE_CORES
    unset, a process sees all cores of the host, and the group takes the core of its local rank.

    Args:
        device_count: logical cores that this process sees before the group exists.

    Raises:
        ValueError: more than one core was given to the process, or its local rank is not among the
            host's cores.
    """
    visible = os.environ.get(_VISIBLE_CORES)
    if visible:
        if device_count != 1:
            raise ValueError(
                f"{_VISIBLE_CORES}={visible} gives this process {device_count} cores, but "
                "TorchNeuron takes one per process: unset it, so that each takes the core of its "
                "LOCAL_RANK, or set one core for each process"
            )
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= device_count:
        raise ValueError(
            f"LOCAL_RANK {local_rank} needs {local_rank + 1} Neuron devices, {device_count} "
            "visible: lower --nproc_per_node, or check NEURON_LOGICAL_NC_CONFIG (1 gives twice the "
            "cores of 2)"
        )


def _import_device_module() -> Any:
    """Return ``torch.neuron``, which importing the package registers.

    Before the import, restrict the fallback to the CPU.
    """
    os.environ.setdefault(_NO_SILENT_FALLBACK, "1")
    importlib.import_module(_PACKAGE)
    return getattr(torch, "neuron")  # noqa: B009 (type checkers know torch without it)


def _not_native_reason() -> str | None:
    """Return why the installed package is not TorchNeuron, or None if it is; imports nothing.

    torch-xla's build has the same import name and also a ``torch.neuron``. It has ``xla_impl``
    instead of ``neuron_dynamo_backend``, and its versions follow torch up to 2.9.
    """
    locations = _package_locations()
    if locations is None:
        return f"{_PACKAGE} is not installed"
    # PathFinder searches the package's directory without importing the package. A package of
    # version 2.10 is TorchNeuron even if its modules are renamed.
    if PathFinder.find_spec(f"{_PACKAGE}.neuron_dynamo_backend", locations) is not None:
        return None
    version = _version()
    if version is not None and Version(version).release >= _FIRST_NATIVE_VERSION:
        return None
    if PathFinder.find_spec(f"{_PACKAGE}.xla_impl", locations) is not None:
        return f"{_found()} is the PyTorch/XLA build, which backend xla serves: TorchNeuron is {_PACKAGE} 2.10 or newer"
    return f"{_found()} is not TorchNeuron: it is older than 2.10 and has no neuron_dynamo_backend"


def _package_locations() -> list[str] | None:
    # torch's device autoload may already have imported the package
    loaded = sys.modules.get(_PACKAGE)
    if loaded is not None:
        return list(getattr(loaded, "__path__", []))
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        return None
    return list(spec.submodule_search_locations or [])


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
