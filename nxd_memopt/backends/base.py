"""Defines the backend contract: everything that differs between devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.backends.collectives import (
    ChunkedAllGather,
    ChunkedReduction,
    Completed,
    Pending,
    UnchunkedAllGather,
    UnchunkedReduction,
)
from nxd_memopt.backends.host_transfers import HostTransfers

Result = TypeVar("Result", covariant=True)


class Capture(Protocol[Result]):
    """Recorded work of a device. Every replay works on the memory that the recording's tensors had."""

    @property
    def result(self) -> Result:
        """What the recorded function returned; each replay writes its tensors."""
        ...

    def replay(self) -> None: ...


ContextPair = tuple[AbstractContextManager[None], AbstractContextManager[None]]


class Backend(ABC):
    """One device family.

    Collectives work along dim 0, return new tensors and never write to their input. A group of ``None`` or of size 1
    returns its input. Reductions run in the input's dtype.
    """

    name: str
    distributed_backend: str
    device: torch.device
    attention_implementations: tuple[str, ...]
    """Names understood by ``ops.attention``, best first; the last is ``"math"``, which runs always."""
    equal_heads_implementations: tuple[str, ...] = ()
    """Those that want a KV head for each query head: K and V are repeated for them."""
    views_share_memory: bool = True
    """A view and its base are one memory, so that writing into a part of a tensor saves another tensor."""
    scalars_are_compiled: bool = False
    """A Python number in an operation may become a constant of a compiled kernel, so that every new value, such as each
    step's learning rate, is another compilation: numbers that change are passed as 0-dim tensors."""

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str | None:
        """Return why this machine cannot use the backend, or ``None`` if it can."""

    @classmethod
    def passed_over_reason(cls) -> str | None:
        """Return why the backend is not chosen unasked, or ``None`` if it may be."""
        return cls.unavailable_reason()

    def description(self) -> str:
        """What the backend runs on, for people; part of ``BACKEND_REASON``."""
        return f"{self.name} on {self.device}"

    def describe_overlap(self) -> str:
        """How tensor parallelism's communication runs beside matmuls, for people."""
        return "collectives run between matmuls"

    # Processes and groups

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None:
        """Join the world that torchrun's environment describes; without one, stay a single process."""

    @abstractmethod
    def new_group(self, rank_groups: Sequence[Sequence[int]]) -> ProcessGroup | None:
        """Create all of ``rank_groups`` (every rank passes the same partition of the world) and return this rank's."""

    def initialize_collectives(self) -> None:
        """Run a first collective over the world, where the device's runtime sets its links up that way."""
        return

    def release_groups(self) -> None:
        """Free what is kept for groups: they are about to be destroyed."""
        return

    def device_order(self, world_size: int, tensor_model_parallel_size: int) -> list[int]:
        """Global ranks in the order in which tensor-parallel groups take them; neighbours share the fastest links."""
        del tensor_model_parallel_size
        return list(range(world_size))

    def kv_rank_stride(self, tensor_model_parallel_size: int, replicas: int) -> int:
        """How far apart in a tensor-parallel group the ``replicas`` ranks are that hold one KV head: 1 for neighbours.

        Called where groups are made; layers and parameters record the value (``parallel_layers.rank_order``).
        """
        del tensor_model_parallel_size, replicas
        return 1

    @abstractmethod
    def group_size(self, group: ProcessGroup | None) -> int: ...

    @abstractmethod
    def group_rank(self, group: ProcessGroup | None) -> int:
        """This rank in ``group``, for descriptions and files; a forward or backward uses ``group_rank_in_graph``."""

    def group_rank_in_graph(self, group: ProcessGroup | None) -> int | Tensor:
        """This rank in ``group``: a 0-dim device tensor where all ranks must trace one graph, otherwise an int."""
        return self.group_rank(group)

    @abstractmethod
    def shard(self, tensor: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
        """This rank's chunk of ``tensor`` along ``dim``, which the group's size divides; may share its storage."""

    # Collectives

    @abstractmethod
    def all_reduce(self, tensor: Tensor, group: ProcessGroup | None, op: str = "sum") -> Tensor:
        """Reduce with ``"sum"``, ``"max"`` or ``"min"``."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        """``[n, ...] -> [n * size, ...]``, in rank order."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        """``[n, ...] -> [n / size, ...]``: this rank's chunk of the sum."""

    @abstractmethod
    def all_to_all(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        """Send equal chunk ``i`` of dim 0 to rank ``i``; receive in rank order. Same shape."""

    def reduce_scatter_mean_list(self, tensors: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
        """Return this rank's chunk of each tensor's mean over ``group``, ``[D * n_i] -> [n_i]``, by one collective.

        The tensors, of one dtype, become the matrix ``[D, sum of n_i]``, whose row i goes to rank i: one copy of all
        tensors.
        """
        size = self.group_size(group)
        rows = torch.cat([tensor.view(size, -1) for tensor in tensors], dim=1)
        chunk = self.reduce_scatter(rows.div_(size).view(-1), group)
        chunks = []
        start = 0
        for tensor in tensors:
            chunks.append(chunk.narrow(0, start, tensor.numel() // size))
            start += tensor.numel() // size
        return chunks

    def all_gather_list(self, tensors: Sequence[Tensor], group: ProcessGroup | None) -> Iterator[Tensor]:
        """Yield each tensor's chunks of all ranks, ``[n_i] -> [D * n_i]``, gathered by one collective; one dtype."""
        size = self.group_size(group)
        rows = self.all_gather(torch.cat(list(tensors)), group).view(size, -1)  # [D, sum of n_i]
        start = 0
        for tensor in tensors:
            yield rows.narrow(1, start, tensor.numel()).reshape(-1)
            start += tensor.numel()

    def all_reduce_async(self, tensor: Tensor, group: ProcessGroup | None) -> Pending:
        return Completed(self.all_reduce(tensor, group))

    def all_gather_async(self, tensor: Tensor, group: ProcessGroup | None) -> Pending:
        return Completed(self.all_gather(tensor, group))

    def reduce_scatter_async(self, tensor: Tensor, group: ProcessGroup | None) -> Pending:
        return Completed(self.reduce_scatter(tensor, group))

    def start_all_gather(
        self,
        tensor: Tensor,
        group: ProcessGroup | None,
        *,
        materialize: bool = True,
        hides_launch_latency: bool = False,
    ) -> ChunkedAllGather:
        """``all_gather_async`` whose rows may arrive in pieces.

        Args:
            tensor: this rank's chunk.
            group: of the ranks.
            materialize: all rows are wanted in one tensor, by ``wait()``, which is not called otherwise.
            hides_launch_latency: the device has long work; the host's time to start pieces does not count.
        """
        del materialize, hides_launch_latency
        return UnchunkedAllGather(self.all_gather_async(tensor, group))

    def start_reduction(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        group: ProcessGroup | None,
        *,
        scattered: bool,
        hides_launch_latency: bool = False,
    ) -> ChunkedReduction:
        """``reduce_scatter_async``, or ``all_reduce_async`` when not ``scattered``, of a tensor handed over in pieces.

        Args:
            shape: of the whole tensor, ``[n, ...]``.
            dtype: of its pieces.
            group: of the ranks.
            scattered: each rank wants its chunk only.
            hides_launch_latency: as for ``start_all_gather``.
        """
        del dtype, hides_launch_latency
        start = self.reduce_scatter_async if scattered else self.all_reduce_async
        return UnchunkedReduction(shape[0], lambda tensor: start(tensor, group))

    # Random state of the device's default generator

    @abstractmethod
    def manual_seed(self, seed: int) -> None: ...

    @abstractmethod
    def get_rng_state(self) -> Tensor: ...

    @abstractmethod
    def set_rng_state(self, state: Tensor) -> None: ...

    # Execution and memory

    def attention_refusal(self, implementation: str, call: AttentionCall) -> str | None:
        """Why ``implementation`` fails on this device, or materialises S x S there; ``None``: it serves ``call``."""
        del implementation, call
        return None

    @contextmanager
    def outside_step(self) -> Iterator[None]:
        """Keep collectives that are not part of a training step out of its graph, on devices that record graphs.

        Such a device chains the collectives of one graph. Without this fence a collective that runs between two steps
        is chained to those of the next step, whose graph then is another one and is compiled again.
        """
        self.mark_step()
        yield
        self.mark_step()

    def mark_step(self) -> None:
        """End the step: a device that records graphs lazily runs what it recorded."""
        return

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        return

    @abstractmethod
    def memory_allocated(self) -> int | None:
        """Bytes in use now; ``None`` where the device does not tell."""

    @abstractmethod
    def max_memory_allocated(self) -> int | None:
        """Peak bytes since the last reset; ``None`` where the device does not tell."""

    @abstractmethod
    def reset_peak_memory_stats(self) -> None: ...

    def optimization_barrier(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return ``tensors`` so that a compiler cannot merge work behind the barrier with work before it."""
        return list(tensors)

    def check_recompute(self) -> None:
        """Raise ``ValueError`` where the device's compiler is set up so that recomputation would save no memory."""
        return

    def capture_refusal(self) -> str | None:
        """Why ``capture`` records nothing on this device; ``None``: it does."""
        return f"needs an NVIDIA GPU, and the backend is {self.name}"

    def rehearsal(self) -> AbstractContextManager[None]:
        """Inside, what will be captured runs as it is, and sets up what the captured work will use."""
        return nullcontext()

    def capture(self, function: Callable[[], Result], *, beside: Capture[Any] | None = None) -> Capture[Result]:
        """Record the device's work of ``function``. A failure leaves no trace in the backend.

        Args:
            function: has run before, in a ``rehearsal`` and on tensors of the same shapes.
            beside: an earlier recording, which never runs at the same time: both use the same memory.
        """
        raise NotImplementedError(self.capture_refusal())

    def host_transfers(self) -> HostTransfers | None:
        """What copies between the device's memory and the host's beside the device's work; ``None``: nothing does."""
        return None

    @abstractmethod
    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        context_fn: Callable[[], ContextPair] | None = None,
        determinism_check: str = "default",
        early_stop: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run ``function``, keep only its inputs, and run it again in backward with the same random numbers.

        ``context_fn`` returns one context manager for the forward pass and one for the recomputation. The other options
        are those of ``torch.utils.checkpoint.checkpoint``.
        """

    def compile_refusal(self) -> str | None:
        """Why ``compile`` would not compile anything here; ``None``: it does."""
        return None

    @abstractmethod
    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as one graph of static shapes.

        Each combination of input shapes, and of gradients being recorded or not, is compiled at its first call. What
        one graph cannot hold is an error of torch's at that call; nothing runs eagerly in its place.
        """
