"""The XLA backend: torch_xla on trn1's NeuronCores, or on a CPU that simulates them."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends.base import ContextPair, Message
from nxd_memopt.backends.collectives import Collectives
from nxd_memopt.backends.cpu import reset_resident_peak, resident_bytes
from nxd_memopt.backends.neuron.barrier_checkpoint import barrier_checkpoint
from nxd_memopt.backends.neuron.compiler_flags import recompute_error
from nxd_memopt.backends.neuron.stage_links import ordered_transfers, pairs_of_link
from nxd_memopt.backends.neuron.trainium import TrainiumBackend

_SEED_BITS = 64
_FUNCTIONALIZATION = "XLA_DISABLE_FUNCTIONALIZATION"


class XlaBackend(TrainiumBackend):
    """Lazy tensors: operations are recorded, then compiled and run once per step, at ``mark_step``.

    Collectives are part of the graph. They name the groups of all ranks and leave the layout open,
    and the rank is data in a device tensor, so that all ranks compile the same graph. On a CPU
    (``PJRT_DEVICE=CPU``) several ranks are simulated: the layers are the same, but gloo carries
    each collective through the host, which ends the graph there.
    """

    name = "xla"
    attention_implementations = ("nki", "tiled", "math")
    default_group_is_complete = False  # it has no _mesh, from which scripts for neuronx-distributed read the ranks
    narrows_float64 = True  # torch_xla makes F64 F32 on NeuronCores; the simulation alone computes in float64

    def __init__(self) -> None:
        _prefer_neuron_cores()
        # both calls set environment variables that torch_xla reads: call them before its import
        self.functionalization_note = _enable_functionalization()
        import torch_xla  # pyright: ignore[reportMissingImports]
        import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]
        import torch_xla.runtime as xr  # pyright: ignore[reportMissingImports]

        self._torch_xla = torch_xla
        self._xm = xm
        self.device = torch_xla.device()
        self.is_simulated = xr.device_type() == "CPU"
        self.rounds_matmuls = not self.is_simulated
        self.distributed_backend = "xla"
        if self.is_simulated:
            self.distributed_backend = "gloo"
        # group name -> the partition of the world with this group
        self._rank_groups: dict[str, list[list[int]]] = {}
        self._ranks_in_graph: dict[str, Tensor] = {}
        self._recompute_checked = False

    @classmethod
    def unavailable_reason(cls) -> str | None:
        if PathFinder.find_spec("torch_xla") is None:  # nxd_memopt.compat's stand-in does not count
            return "torch_xla is not installed"
        return None

    @classmethod
    def passed_over_reason(cls) -> str | None:
        missing = cls.unavailable_reason()
        if missing is not None:
            return missing
        # A simulation is slow: only an explicit request selects it.
        if os.environ.get("PJRT_DEVICE", "NEURON") != "NEURON":
            return (
                f"PJRT_DEVICE={os.environ['PJRT_DEVICE']} only simulates NeuronCores: ask with NXD_MEMOPT_BACKEND=xla"
            )
        if not _neuron_devices():
            return (
                "torch_xla is installed, but there is no /dev/neuron*: ask for a simulation with NXD_MEMOPT_BACKEND=xla"
            )
        return None

    def description(self) -> str:
        device = "torch_xla on NeuronCores"
        if self.is_simulated:
            device = "simulated on a CPU: torch_xla compiles for the CPU, gloo carries collectives through the host"
        return f"{device}; {self.functionalization_note}"

    # Processes and groups

    def init_process_group(self, **kwargs: Any) -> None:
        if not self.is_simulated and "RANK" in os.environ and not dist.is_initialized():
            import torch_xla.distributed.xla_backend  # pyright: ignore[reportMissingImports]  # noqa: F401 (registers the torch.distributed backend)

            kwargs.setdefault("init_method", "xla://")
        super().init_process_group(**kwargs)

    def new_group(self, rank_groups: Sequence[Sequence[int]]) -> ProcessGroup | None:
        """Create all of ``rank_groups`` and return this rank's; see ``Backend.new_group``.

        On devices the group's mesh names all groups, so that every rank traces the same graph.
        """
        groups = [list(ranks) for ranks in rank_groups]
        if dist.get_backend() == "xla":
            mine = next(ranks for ranks in groups if dist.get_rank() in ranks)
            group: Any = dist.new_group(mine, pg_options={"xla_pg_options": {"mesh": groups}})
        else:
            group = super().new_group(groups)
        if group is not None:
            self._rank_groups[group.group_name] = groups
        return group

    def initialize_collectives(self) -> None:
        """Sum one number over the world.

        Neuron's runtime sets up collectives with all workers at once, not with the workers of one
        group.
        """
        if not dist.is_initialized() or self._through_host:
            return
        # keep the result alive until the graph runs: torch_xla drops dead tensors
        with self.outside_step():
            _total = self.all_reduce(torch.zeros(1).to(self.device), dist.group.WORLD)

    def _groups(self, group: ProcessGroup | None) -> list[list[int]]:
        """Return the partition of the world with ``group``, all of which a collective names."""
        assert group is not None
        if group is dist.group.WORLD:
            return [list(range(dist.get_world_size()))]
        if group.group_name not in self._rank_groups:
            raise ValueError(
                f"process group {group.group_name} was made by torch.distributed, which does not "
                "say what the other ranks' groups are: make it with backend.new_group or "
                "parallel_state"
            )
        return self._rank_groups[group.group_name]

    def _ranks(self, group: ProcessGroup | None) -> list[int]:
        return next(ranks for ranks in self._groups(group) if dist.get_rank() in ranks)

    def group_size(self, group: ProcessGroup | None) -> int:
        if group is None:
            return 1
        return len(self._ranks(group))

    def group_rank(self, group: ProcessGroup | None) -> int:
        if group is None:
            return 0
        return self._ranks(group).index(dist.get_rank())

    def group_rank_in_graph(self, group: ProcessGroup | None) -> int | Tensor:
        if group is None:
            return 0
        return self._rank_tensor(group).squeeze(0)

    def _rank_tensor(self, group: ProcessGroup) -> Tensor:
        """Return this rank as ``[1]`` int64 on the device, which is input data of the graph."""
        # Cached: a tensor that is copied to the device once is the same input in the graph of every
        # step.
        name = group.group_name
        if name not in self._ranks_in_graph:
            rank = torch.tensor([self.group_rank(group)])
            self._ranks_in_graph[name] = rank.to(self.device)
        return self._ranks_in_graph[name]

    def shard(self, tensor: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
        if group is None or self.group_size(group) == 1:
            return tensor
        # index_select with the rank as data, not narrow with the rank as a number: the same graph
        # on all ranks
        dim = dim % tensor.dim()
        chunks = tensor.unflatten(dim, (self.group_size(group), -1))
        return chunks.index_select(dim, self._rank_tensor(group)).squeeze(dim)

    # Collectives

    @property
    def _through_host(self) -> bool:
        return dist.get_backend() == "gloo"

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Copy ``tensor`` to the host after running the pending graph.

        torch_xla may return wrong values when pending results are read one by one.
        """
        self.mark_step()
        return tensor.cpu()

    def all_reduce(self, tensor: Tensor, group: ProcessGroup | None, op: str = "sum") -> Tensor:
        if self.group_size(group) == 1:
            return tensor
        if self._through_host:
            return super().all_reduce(self._on_host(tensor), group, op).to(self.device)
        # pin_layout=False leaves the layout to the compiler, here and in the other collectives
        return self._xm.all_reduce(op, tensor, groups=self._groups(group), pin_layout=False)

    def all_gather(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        if self.group_size(group) == 1:
            return tensor
        if self._through_host:
            return super().all_gather_async(self._on_host(tensor), group).wait().to(self.device)
        return self._xm.all_gather(tensor, dim=0, groups=self._groups(group), pin_layout=False)

    def reduce_scatter(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        if self.group_size(group) == 1:
            return tensor
        if self._through_host:
            return super().reduce_scatter_async(self._on_host(tensor), group).wait().to(self.device)
        return self._scattered_sum(tensor, group)

    def _scattered_sum(self, rows: Any, group: ProcessGroup | None) -> Any:
        """Return this rank's chunk of the sum of ``rows``, a tensor or a list, along dimension 0, unscaled."""
        options: dict[str, Any] = {"groups": self._groups(group), "pin_layout": False}
        return self._xm.reduce_scatter("sum", rows, 1.0, 0, self.group_size(group), **options)

    def reduce_scatter_mean_list(
        self,
        tensors: Sequence[Tensor],
        group: ProcessGroup | None,
    ) -> list[Tensor]:
        """Return this rank's chunk of each tensor's mean over ``group``, ``[D * n_i] -> [n_i]``.

        torch_xla's list collectives take the tensors as they are, without the copy of
        ``Backend.reduce_scatter_mean_list``.
        """
        size = self.group_size(group)
        if size == 1 or self._through_host:
            return super().reduce_scatter_mean_list(tensors, group)
        # divide before the sum, as the default implementation does
        return self._scattered_sum([tensor / size for tensor in tensors], group)

    def all_gather_list(
        self,
        tensors: Sequence[Tensor],
        group: ProcessGroup | None,
    ) -> Iterator[Tensor]:
        if self.group_size(group) == 1 or self._through_host:
            yield from super().all_gather_list(tensors, group)
        else:
            groups = self._groups(group)
            yield from self._xm.all_gather(list(tensors), dim=0, groups=groups, pin_layout=False)

    def all_to_all(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        size = self.group_size(group)
        if size == 1:
            return tensor
        if self._through_host:
            return super().all_to_all(self._on_host(tensor), group).to(self.device)
        return self._xm.all_to_all(tensor, 0, 0, size, groups=self._groups(group), pin_layout=False)

    def interleaving_refusal(self) -> str | None:
        return "needs messages from the last rank to the first one, and the backend xla pairs neighbors only"

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], group: ProcessGroup | None
    ) -> list[Tensor]:
        """Exchange by all-gathers over pairs of ranks, outside the graphs of the computations around it.

        Neuron's runtime has no sends and receives: the receiver contributes zeros, and takes the other half.
        """
        if self._through_host:
            on_host = [(self._on_host(tensor), peer) for tensor, peer in sends]
            buffers = [(torch.empty_like(tensor, device="cpu"), peer) for tensor, peer in receives]
            return [tensor.to(self.device) for tensor in super().exchange(on_host, buffers, group)]
        results = [tensor for tensor, _ in receives]
        sent: list[Tensor] = []
        rank = self.group_rank(group)
        with self.outside_step():
            for index, is_sent, low in ordered_transfers(sends, receives, rank):
                tensor = (sends if is_sent else receives)[index][0]
                own = tensor if is_sent else torch.zeros_like(tensor)
                pairs = pairs_of_link(self._groups(group), low)
                halves = self._xm.all_gather(own.unsqueeze(0), dim=0, groups=pairs, pin_layout=False)
                # The sender keeps the result alive until the graph runs: torch_xla drops dead tensors.
                sender = rank if is_sent else 2 * low + 1 - rank
                kept = halves[sender - low]
                if is_sent:
                    sent.append(kept)
                else:
                    results[index] = kept
        return results

    # A graph has no asynchronous handles to wait for: use the complete results of Collectives, not
    # the handles of C10dCollectives.
    all_reduce_async = Collectives.all_reduce_async
    all_gather_async = Collectives.all_gather_async
    reduce_scatter_async = Collectives.reduce_scatter_async

    # Random state

    def manual_seed(self, seed: int) -> None:
        self._xm.set_rng_state(seed % 2**_SEED_BITS)  # torch maps negative seeds in the same way

    def get_rng_state(self) -> Tensor:
        """Return the seed as 8 bytes; torch_xla's full state is one unsigned 64-bit number."""
        # uint8 as the states of torch's other devices; int64 would not hold all unsigned seeds
        seed = self._xm.get_rng_state() % 2**_SEED_BITS
        return torch.tensor(list(seed.to_bytes(_SEED_BITS // 8, "little")), dtype=torch.uint8)

    def set_rng_state(self, state: Tensor) -> None:
        self._xm.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"))

    # Execution and memory

    def describe_overlap(self) -> str:
        return "the compiler orders collectives and matmuls of a step's graph"

    def mark_step(self) -> None:
        self._torch_xla.sync()

    def synchronize(self) -> None:
        self._torch_xla.sync()
        # sync() starts the graph; the host waits for it here
        self._xm.wait_device_ops()

    def memory_allocated(self) -> int | None:
        if self.is_simulated:
            return resident_bytes("VmRSS")
        return self._memory_statistic("bytes_used")

    def allocations_refusal(self) -> str:
        return "the compiler plans the memory of a step's graphs: nxd-memopt certify measures it"

    def step_counters(self) -> dict[str, float]:
        """Return the graphs that were compiled and run so far, and the seconds of both."""
        from torch_xla.debug import metrics  # pyright: ignore[reportMissingImports]

        found: dict[str, float] = {}
        for name, title in (("CompileTime", "compiled graphs"), ("ExecuteTime", "run graphs")):
            # (number of samples, sum in nanoseconds, latest samples); None before the first one
            data = metrics.metric_data(name)
            count, total_ns = (0, 0.0) if data is None else data[:2]
            found[title] = count
            found[f"seconds of {title}"] = total_ns / 1e9
        return found

    def max_memory_allocated(self) -> int | None:
        if self.is_simulated:
            return resident_bytes("VmHWM")
        return self._memory_statistic("peak_bytes_used")

    def _memory_statistic(self, field: str) -> int | None:
        try:
            return self._xm.get_memory_info(self.device)[field]
        # "UNIMPLEMENTED": the device's runtime has no memory statistics
        except RuntimeError:
            return None

    def reset_peak_memory_stats(self) -> None:
        """Restart the peak in simulations.

        NeuronCores keep their peak for the life of the process.
        """
        if self.is_simulated:
            reset_resident_peak()

    def optimization_barrier(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # torch_xla's barrier is in place: it would replace the caller's tensors. A clone records no
        # operation in the graph.
        barriered = [tensor.clone() for tensor in tensors]
        self._xm.optimization_barrier_(barriered)
        return barriered

    def check_recompute(self) -> None:
        if self._recompute_checked:
            return
        error = recompute_error(os.environ.get("NEURON_CC_FLAGS"))
        if error is not None:
            if os.environ.get("NXD_MEMOPT_RECOMPUTE_CHECK") != "warn":
                raise ValueError(f"{error}, or NXD_MEMOPT_RECOMPUTE_CHECK=warn to go on without being sure")
            warnings.warn(error, RuntimeWarning, stacklevel=2)
        # once per process, so that there is one warning
        self._recompute_checked = True

    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        context_fn: Callable[[], ContextPair] | None = None,
        determinism_check: str = "default",
        early_stop: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Recompute ``function`` in backward after a barrier; see ``Backend.checkpoint``.

        ``determinism_check`` and ``early_stop`` are ignored: the full function runs again, and only
        the shapes of its results are compared.
        """
        del determinism_check, early_stop
        self.check_recompute()
        return barrier_checkpoint(self, function, *args, context_fn=context_fn, **kwargs)

    def compile_refusal(self) -> str | None:
        return "is not for the backend xla, which records and compiles each step already"

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` itself: each step is already recorded and compiled as one graph."""
        return function


def _neuron_devices() -> list[Path]:
    return list(Path("/dev").glob("neuron*"))


def _enable_functionalization() -> str:
    """Enable torch_xla's functionalization unless the user has chosen, and return the setting.

    AWS's torch-neuronx leaves functionalization off when nothing is set. Without it, torch_xla 2.9
    returns wrong data for ``Tensor.split`` with a list of sizes along any dimension but the first
    (pytorch/xla#8640). This library avoids these splits and is correct in both modes; other model
    code may not be. torch_xla reads the variable each time it creates a tensor, so a program that
    sets it too late has tensors of both modes.
    """
    if _FUNCTIONALIZATION not in os.environ:
        os.environ[_FUNCTIONALIZATION] = "0"
        if "torch_xla" in sys.modules:
            warnings.warn(
                f"torch_xla was imported before nxd_memopt and {_FUNCTIONALIZATION} was not set: "
                "it is 0 from here on, but on AWS's torch-neuronx tensors made until now lack "
                "functionalization, and Tensor.split with a list of sizes returns wrong data for "
                f"them (pytorch/xla#8640); set {_FUNCTIONALIZATION}=0 in the environment, or "
                "import nxd_memopt first",
                RuntimeWarning,
                stacklevel=2,
            )
    return f"{_FUNCTIONALIZATION}={os.environ[_FUNCTIONALIZATION]}"


def _prefer_neuron_cores() -> None:
    """Set the device that PJRT opens, unless the user has set it."""
    device = "CPU"
    if _neuron_devices():
        device = "NEURON"
    os.environ.setdefault("PJRT_DEVICE", device)
