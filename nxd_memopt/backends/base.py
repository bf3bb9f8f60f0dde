"""Defines the backend contract: everything that differs between devices; collectives are inherited."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.backends.collectives import Collectives
from nxd_memopt.backends.host_transfers import HostTransfers

Result = TypeVar("Result", covariant=True)
Message = tuple[Tensor, int]
"""A tensor, and the position in the group of the rank that it is sent to or received from."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""PyTorch's names of the environment variable with its allocator's settings, the newer one first."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"
"""Setting of ``Backend.expand_segments``."""


class Capture(Protocol[Result]):
    """Recorded device work, such as a CUDA graph.

    Each replay uses the memory of the recorded tensors.
    """

    @property
    def result(self) -> Result:
        """Return the result of the recorded function. Each replay overwrites its tensors."""
        ...

    def replay(self) -> None:
        """Run the recorded work again. The inputs are updated in place before the call."""
        ...


ContextPair = tuple[AbstractContextManager[None], AbstractContextManager[None]]


class Backend(Collectives):
    """Contract of one device family. ``Collectives`` has the part that communicates."""

    name: str
    distributed_backend: str
    device: torch.device
    attention_implementations: tuple[str, ...]
    """Names for ``ops.attention``, best first. The last one is ``"math"``, which can always run."""
    equal_heads_implementations: tuple[str, ...] = ()
    """Implementations without grouped-query support, for which K and V are repeated to h heads."""
    views_share_memory: bool = True
    """Whether a view and its base share memory, so that writing to a slice needs no new tensor."""
    shapes_are_static: bool = False
    """Whether the device compiles graphs of fixed shapes, so that no shape may depend on values."""
    most_of_top_k: int | None = None
    """The largest k of ``torch.topk`` that the device can compute; None without a limit."""
    default_group_is_complete: bool = True
    """Whether torch.distributed's default group has all that a group of all ranks has that ``new_group`` creates."""
    narrows_float64: bool = False
    """Whether float64 tensors have the precision of float32 on the device, without an error."""
    rounds_matmuls: bool = False
    """Whether the device's compiler may round the inputs of fp32 matmuls to bf16."""
    scalars_are_compiled: bool = False
    """Whether a Python number in an operation may become a constant of a compiled kernel.

    Each new value, such as the learning rate of the next step, is then another compilation. Pass
    numbers that change as tensors.
    """

    @classmethod
    def of_device(cls, compute_capability: float) -> Self:
        """Return the facts and the refusals of a device that this machine may lack; nothing runs on what is returned.

        Args:
            compute_capability: of an NVIDIA GPU; 0.0 for other devices.
        """
        del compute_capability
        # Without __init__, which opens the device.
        return cls.__new__(cls)

    def all_to_all_rows(
        self, tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup | None
    ) -> Tensor:
        """Send the next ``sent[i]`` rows of ``tensor`` to rank ``i``; receive ``received[i]`` from it.

        Args:
            tensor: ``[sum(sent), ...]``.
            sent: rows for each rank of the group, in rank order.
            received: rows from each rank, as that rank sends them.
            group: process group.

        Returns:
            ``[sum(received), ...]``, in rank order.

        Raises:
            ValueError: the device's graphs have fixed shapes.
        """
        del tensor, sent, received, group
        raise ValueError(
            f"the backend {self.name} exchanges equal numbers of rows only: set "
            "moe_pad_expert_input_to_capacity=True and moe_expert_capacity_factor, or moe_expert_block_size and "
            "moe_token_dispatcher_type allgather"
        )

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str | None:
        """Return why this machine cannot use the backend, or ``None`` if it can."""

    @classmethod
    def passed_over_reason(cls) -> str | None:
        """Return why automatic selection skips the backend, or ``None`` if it may be chosen."""
        return cls.unavailable_reason()

    def description(self) -> str:
        """Return what the backend runs on, in words; part of ``BACKEND_REASON``."""
        return f"{self.name} on {self.device}"

    def describe_overlap(self) -> str:
        """Return in words how tensor-parallel communication overlaps with matmuls."""
        return "collectives run between matmuls"

    # Processes and groups

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None:
        """Join the world that torchrun's environment variables describe.

        Without these variables the process stays a single process.
        """

    @abstractmethod
    def new_group(self, rank_groups: Sequence[Sequence[int]]) -> ProcessGroup | None:
        """Create all of ``rank_groups`` and return the group of this rank.

        Args:
            rank_groups: a partition of the world, the same on every rank.
        """

    def initialize_collectives(self) -> None:
        """Run a first collective over the world, if the runtime needs one to set up links."""
        return

    def release_groups(self) -> None:
        """Free what is cached for process groups, before the groups are destroyed."""
        return

    def device_order(self, world_size: int, tensor_model_parallel_size: int) -> list[int]:
        """Return the global ranks in the order in which tensor-parallel groups take them.

        Neighbours in this order share the fastest links.
        """
        del tensor_model_parallel_size
        return list(range(world_size))

    def kv_rank_stride(self, tensor_model_parallel_size: int, replicas: int) -> int:
        """Return the distance between ranks of a tensor-parallel group that share one KV head.

        Args:
            tensor_model_parallel_size: T, the size of the group.
            replicas: number of ranks that hold the same KV head.

        Returns:
            1 for adjacent ranks. Layers and parameters record the value when groups are created
            (``parallel_layers.rank_order``).
        """
        del tensor_model_parallel_size, replicas
        return 1

    # Messages between two ranks

    @abstractmethod
    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], group: ProcessGroup | None
    ) -> list[Tensor]:
        """Send and receive tensors, as one operation; return the received ones, in the order of ``receives``.

        Two ranks pair their messages by order: the first tensor that one sends to the other is the first one that the
        other receives from it.

        Args:
            sends: contiguous tensors.
            receives: tensors of the shapes and dtypes to receive, whose memory may be used.
            group: process group of the ranks.
        """

    # Collectives of many tensors, for sharded optimizers

    def reduce_scatter_mean_list(
        self,
        tensors: Sequence[Tensor],
        group: ProcessGroup | None,
    ) -> list[Tensor]:
        """Return this rank's chunk of each tensor's mean over ``group``, ``[D * n_i] -> [n_i]``.

        All tensors have one dtype. They are copied once, into a ``[D, sum of n_i]`` matrix that one
        reduce-scatter sums; row i goes to rank i.
        """
        size = self.group_size(group)
        # One collective instead of one per tensor. Row i of the matrix is chunk i of every tensor,
        # so that the scatter along dim 0 sends each rank its chunks of all tensors. The division is
        # in place in the copy.
        rows = torch.cat([tensor.view(size, -1) for tensor in tensors], dim=1)
        # Division before the sum keeps a sum of many ranks in the range of half precision.
        chunk = self.reduce_scatter(rows.div_(size).view(-1), group)
        # The chunk holds this rank's chunks of all tensors, one after the other: return views.
        chunks = []
        start = 0
        for tensor in tensors:
            chunks.append(chunk.narrow(0, start, tensor.numel() // size))
            start += tensor.numel() // size
        return chunks

    def all_gather_list(
        self,
        tensors: Sequence[Tensor],
        group: ProcessGroup | None,
    ) -> Iterator[Tensor]:
        """Yield the full tensor of each shard, ``[n_i] -> [D * n_i]``, with one all-gather.

        All shards have one dtype.
        """
        size = self.group_size(group)
        rows = self.all_gather(torch.cat(list(tensors)), group).view(size, -1)  # [D, sum of n_i]
        start = 0
        for tensor in tensors:
            # Columns [start, start + n_i) are tensor i's chunks of all ranks. They are copied into
            # [D * n_i] one tensor at a time, when the caller asks for it.
            yield rows.narrow(1, start, tensor.numel()).reshape(-1)
            start += tensor.numel()

    # Random state of the device's default generator

    @abstractmethod
    def manual_seed(self, seed: int) -> None: ...

    @abstractmethod
    def get_rng_state(self) -> Tensor: ...

    @abstractmethod
    def set_rng_state(self, state: Tensor) -> None: ...

    # Execution and memory

    def attention_refusal(self, implementation: str, call: AttentionCall) -> str | None:
        """Return why ``implementation`` cannot run ``call`` on this device, or ``None`` if it can.

        A kernel that would materialise S x S scores on this device counts as one that cannot run.
        """
        del implementation, call
        return None

    @contextmanager
    def outside_step(self) -> Iterator[None]:
        """Keep collectives that are not part of a training step out of the step's graph.

        A device that records graphs chains the collectives of one graph. Without this fence a
        collective between two steps is chained to the collectives of the next step. The next step's
        graph then differs and is compiled again.
        """
        self.mark_step()
        yield
        self.mark_step()

    def mark_step(self) -> None:
        """End the step: a device that records graphs lazily compiles and runs its graph."""
        return

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        return

    @abstractmethod
    def memory_allocated(self) -> int | None:
        """Return the bytes in use, or ``None`` if the device does not report them."""

    @abstractmethod
    def max_memory_allocated(self) -> int | None:
        """Return the peak bytes since the last reset, or ``None`` if they are not reported."""

    @abstractmethod
    def reset_peak_memory_stats(self) -> None: ...

    def freed_bytes_kept(self) -> int | None:
        """Return what ``memory_allocated`` counts of memory that tensors have freed; None if it is unknown or none."""
        return None

    def unused_bytes(self) -> int:
        """Return the bytes that the allocator of the device holds and no tensor uses; 0 if it does not report them."""
        return 0

    def expand_segments(self) -> None:
        """Let the device's allocator extend its segments, so that tensors of many sizes leave few fragments.

        Nothing on devices whose allocator has no such setting, and where the user has set its options.
        """

    def keep_kernels(self) -> str | None:
        """Let compiled kernels be kept on disk for later processes; return where, in words. None if nothing is kept."""
        return None

    def free_memory_bytes(self) -> int | None:
        """Return the bytes of the device that this process can still allocate or has; None if unknown."""
        return None

    def hardware_name(self) -> str:
        """Return the name of the device's model, or ``""``."""
        return ""

    def allocations_refusal(self) -> str | None:
        """Return why torch's profiler does not see the device's allocations, or ``None`` if it does."""
        return f"the backend {self.name} does not report its allocations"

    def memory_history(self, file: Path) -> AbstractContextManager[None]:
        """Write the allocator's own history of the block to ``file``, if the device has one."""
        del file
        return nullcontext()

    def step_counters(self) -> dict[str, float]:
        """Return counters of this process that explain a step's time; empty without them."""
        return {}

    def optimization_barrier(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return ``tensors`` after a compiler barrier.

        A compiler cannot merge work on the returned tensors with work on the given ones.
        """
        return list(tensors)

    def check_recompute(self) -> None:
        """Raise ``ValueError`` if the device's compiler settings make recompute save no memory."""
        return

    def loss_scaling_refusal(self) -> str | None:
        """Return why fp16 training with a loss scale is not supported here, or ``None``."""
        return None

    def tf32_refusal(self) -> str | None:
        """Return why fp32 matmuls cannot use TF32 on this device, or ``None`` if they can."""
        return f"needs an NVIDIA GPU, and the backend is {self.name}"

    def fp8_refusal(self) -> str | None:
        """Return why matmuls cannot have float8 operands on this device, or ``None`` if they can."""
        return f"needs an NVIDIA GPU of compute capability 9.0 or higher, and the backend is {self.name}"

    def set_tf32(self, allowed: bool) -> None:
        """Allow or forbid TF32 in the fp32 matmuls of this process; without TF32 do nothing."""
        del allowed

    def capture_refusal(self) -> str | None:
        """Return why ``capture`` is not available on this device, or ``None`` if it is."""
        return f"needs an NVIDIA GPU, and the backend is {self.name}"

    def warmup(self) -> AbstractContextManager[None]:
        """Return a context for warm-up runs before ``capture``.

        Work inside it runs eagerly and sets up the resources that the captured work will use.
        """
        return nullcontext()

    def capture(
        self,
        function: Callable[[], Result],
        *,
        pool_of: Capture[Any] | None = None,
    ) -> Capture[Result]:
        """Record the device work of ``function``. A failure leaves the backend's state unchanged.

        Args:
            function: has run before, in ``warmup`` and on tensors of the same shapes.
            pool_of: an earlier recording that never runs at the same time; the two share one memory
                pool.
        """
        raise NotImplementedError(self.capture_refusal())

    @property
    def is_recording(self) -> bool:
        """Whether ``capture`` or ``warmup`` is running: the host reads no value, and no shape depends on values."""
        return False

    def host_transfers(self) -> HostTransfers | None:
        """Return the copies between device and host memory that overlap with the device's work.

        ``None`` means that the device has no such copies.
        """
        return None

    def host_transfers_refusal(self) -> str | None:
        """Return why nothing can be offloaded to host memory, or ``None`` if it can."""
        if self.host_transfers() is None:
            return (
                "needs a device whose copies to the host overlap with its work, an NVIDIA GPU; the backend is "
                f"{self.name}"
            )
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
        """Run ``function``, save only its inputs, and recompute it in backward.

        The recomputation draws the same random numbers. ``context_fn`` returns one context manager
        for the forward pass and one for the recomputation. The other options are the options of
        ``torch.utils.checkpoint.checkpoint``.
        """

    def interleaving_refusal(self) -> str | None:
        """Return why a rank cannot have several stages of a pipeline on this device, or ``None`` if it can."""
        return None

    def gradient_sharding_refusal(self) -> str | None:
        """Return why gradients cannot be sharded in backward (ZeRO stages 2 and 3), or ``None``.

        They need hooks that run while backward does, and memory that is freed between them.
        """
        return f"is not available on the backend {self.name}: use zero1"

    def compile_refusal(self) -> str | None:
        """Return why ``compile`` would compile nothing here, or ``None`` if it compiles."""
        return None

    @abstractmethod
    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile ``function`` into one graph with static shapes.

        Each combination of input shapes and grad mode is compiled at its first call. Code that does
        not fit into one graph raises torch's error at that call; nothing falls back to eager
        execution.
        """
