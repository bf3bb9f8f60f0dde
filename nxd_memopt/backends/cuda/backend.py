"""The CUDA backend: NCCL or peer-memory collectives, CUDA graphs, memory statistics."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, Self
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce, get_process_group_ranks

from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.backends.base import ALLOCATOR_VARIABLES, EXPANDABLE_SEGMENTS, Capture, Result
from nxd_memopt.backends.c10d import C10dBackend
from nxd_memopt.backends.collectives import ChunkedAllGather, ChunkedReduction
from nxd_memopt.backends.cuda import attention as cuda_attention
from nxd_memopt.backends.cuda import kernel_cache
from nxd_memopt.backends.cuda.peer_memory import PeerAllGather, PeerMemory, PeerReduction
from nxd_memopt.backends.cuda.transfers import CudaTransfers
from nxd_memopt.backends.host_transfers import HostTransfers
from nxd_memopt.files import complete_file

PEER_MEMORY_SWITCH = "NXD_MEMOPT_PEER_MEMORY"
# Smallest shard for peer memory: a smaller one moves in less time than the host takes to launch its
# chunks. The value is between two measurements of eager steps on four H200 (at 7e6e26a, whose
# signals cost the host more): shards of 16 MiB (LLaMA-3-8B) 437 ms, with NCCL 276 ms; shards of
# 24 MiB (GPT-NeoX-20B) 546 ms, with NCCL 548 ms.
_PEER_MEMORY_BYTES = 20 << 20
_PEER_MEMORY_BYTES_AHEAD = 1 << 20  # if launch latency is hidden, as in a graph


class CudaBackend(C10dBackend):
    """NVIDIA GPUs, one per process, selected by torchrun's LOCAL_RANK."""

    name = "cuda"
    distributed_backend = "nccl"
    equal_heads_implementations = ("efficient",)

    def __init__(self) -> None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK {local_rank} needs {local_rank + 1} GPUs, "
                f"{torch.cuda.device_count()} visible: lower --nproc_per_node or set NXD_MEMOPT_BACKEND=cpu"
            )
        self.device = torch.device("cuda", local_rank)
        major, minor = torch.cuda.get_device_capability(self.device)
        self.compute_capability = major + minor / 10
        self.attention_implementations = cuda_attention.implementations(major)
        self._peer_memories: dict[ProcessGroup, PeerMemory | None] = {}
        # True while this backend captures a graph or warms up for one. Graphs that other code
        # captures leave it False.
        self._is_recording = False
        # Peak up to the last change of the bytes that the allocator does not count. Graphs are
        # referenced weakly: their pools are counted while a capture is alive.
        self._peak_bytes = 0
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    @classmethod
    def of_device(cls, compute_capability: float) -> Self:
        found = super().of_device(compute_capability)
        found.compute_capability = compute_capability
        return found

    @classmethod
    def unavailable_reason(cls) -> str | None:
        if not torch.backends.cuda.is_built():
            return f"torch {torch.__version__} is built without CUDA"
        if not torch.cuda.is_available():
            return "no CUDA device is visible"
        return None

    def expand_segments(self) -> None:
        if any(name in os.environ for name in ALLOCATOR_VARIABLES):
            return
        # Public only as an environment variable, which PyTorch reads when it is imported. Older versions,
        # such as 2.9, have the function of torch.cuda only.
        apply = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
        apply(EXPANDABLE_SEGMENTS)

    def keep_kernels(self) -> str:
        return kernel_cache.keep_kernels()

    def init_process_group(self, **kwargs: Any) -> None:
        torch.cuda.set_device(self.device)
        # Without device_id, because with it NCCL connects every group at once, including groups that are
        # never used, each of which takes memory (planner.hardware.NCCL_GIB).
        super().init_process_group(**kwargs)

    def start_all_gather(
        self,
        tensor: Tensor,
        group: ProcessGroup | None,
        *,
        materialize: bool = True,
        hides_launch_latency: bool = False,
    ) -> ChunkedAllGather:
        memory = self._peer_memory(group, tensor.nbytes, hides_launch_latency)
        if memory is None:
            return super().start_all_gather(tensor, group)
        return PeerAllGather(memory, tensor, materialize=materialize)

    def start_reduction(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        group: ProcessGroup | None,
        *,
        scattered: bool,
        hides_launch_latency: bool = False,
    ) -> ChunkedReduction:
        memory = None
        # The size of one rank's chunk of the sum decides. All-reduces always use NCCL.
        if scattered:
            own_bytes = math.prod(shape) * dtype.itemsize // self.group_size(group)
            memory = self._peer_memory(group, own_bytes, hides_launch_latency)
        if memory is None:
            return super().start_reduction(shape, dtype, group, scattered=scattered)
        return PeerReduction(memory, shape[0])

    def _peer_memory(
        self,
        group: ProcessGroup | None,
        own_bytes: int,
        hides_launch_latency: bool,
    ) -> PeerMemory | None:
        """Return the peer memory for shards of ``own_bytes``, or None if NCCL is to be used."""
        # Peer memory copies on its own streams with Python bookkeeping, which dynamo cannot trace.
        if group is None or group.size() == 1 or torch.compiler.is_compiling():
            return None
        # Replays need a barrier of the ranks before they use slots again. ``capture`` puts one into
        # the graphs of this backend; graphs that other code captures have none.
        if _is_capturing() and not self._is_recording:
            return None
        threshold = _PEER_MEMORY_BYTES
        if hides_launch_latency or self._is_recording:
            threshold = _PEER_MEMORY_BYTES_AHEAD
        if own_bytes < threshold:
            return None
        # A refusal is cached too. All ranks decide alike: sizes and settings are equal on all of
        # them.
        if group not in self._peer_memories:
            memory = None
            if self.peer_memory_refusal(get_process_group_ranks(group)) is None:
                memory = PeerMemory(group, self.device)
                # Graphs that other code captures use NCCL, which cannot connect while it is captured.
                all_reduce(torch.zeros(1, device=self.device), group=group)
            self._peer_memories[group] = memory
        return self._peer_memories[group]

    def gradient_sharding_refusal(self) -> None:
        return None

    def tf32_refusal(self) -> str | None:
        if self.compute_capability < 8:
            return f"needs a GPU of compute capability 8.0 or higher, this one has {self.compute_capability:.1f}"
        return None

    def fp8_refusal(self) -> str | None:
        if self.compute_capability < 9:
            return f"needs a GPU of compute capability 9.0 or higher, this one has {self.compute_capability:.1f}"
        return None

    def set_tf32(self, allowed: bool) -> None:
        # Not torch.backends.cuda.matmul.fp32_precision, the newer name: torch 2.9 to 2.13's compiler
        # reads the older one, and raises if the two are mixed (pytorch/pytorch#166387).
        # In some of these versions its warning of 500 characters asks for just the newer name.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Please use the new API settings")
            torch.set_float32_matmul_precision("high" if allowed else "highest")

    def capture_refusal(self) -> None:
        return None

    @property
    def is_recording(self) -> bool:
        return self._is_recording

    @contextmanager
    def warmup(self) -> Iterator[None]:
        # The barriers make each warm-up call start with the slots with which a capture starts, so
        # that the capture finds them allocated.
        with self._recording():
            for memory in self._memories():
                memory.barrier()
            yield

    @contextmanager
    def _recording(self) -> Iterator[None]:
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def capture(
        self,
        function: Callable[[], Result],
        *,
        pool_of: Capture[Any] | None = None,
    ) -> _Graph[Result]:
        # Drain peer memory first, so that nothing in the graph waits for work outside it.
        memories = self._memories()
        graph = torch.cuda.CUDAGraph()
        for memory in memories:
            memory.drain()
        assert pool_of is None or isinstance(pool_of, _Graph)
        self._record_peak(self._uncounted_bytes())
        # graphs that never run at the same time may share one pool
        if pool_of is None:
            pool = torch.cuda.graph_pool_handle()
        else:
            pool = pool_of.graph.pool()
        # The order of the contexts matters: barriers are inside the capture and become part of the
        # graph; the restoring of slots is outside, where the failed capture has already ended.
        with ExitStack() as stack:
            for memory in memories:
                stack.enter_context(memory.restored_on_failure())
            stack.enter_context(self._recording())
            stack.enter_context(self._captured_into(graph, pool))
            for memory in memories:
                stack.enter_context(memory.captured())
            result = function()
        # During the capture the allocator counted the tensors in a shared pool: do not add the
        # pool again.
        uncounted_bytes = self._uncounted_bytes()
        if pool_of is not None:
            uncounted_bytes -= _unused_bytes(pool_of.graph)
        self._record_peak(uncounted_bytes)
        self._graphs.add(graph)
        return _Graph(graph, memories, result)

    @contextmanager
    def _captured_into(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        """Capture into ``graph``; after a failure clean up and raise the first error.

        ``torch.cuda.graph`` leaves the stream of a failed capture current, its pool in use, and the
        random generator unusable. It raises the error of ending the capture instead of its cause.
        """
        stream_before = torch.cuda.current_stream(self.device)
        cause: BaseException | None = None
        try:  # thread_local: NCCL's own thread may go on calling CUDA
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                try:
                    yield
                except BaseException as error:
                    cause = error
                    raise
        except BaseException as error:
            torch.cuda.set_stream(stream_before)
            # torch has already released the pool if the capture ended
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index, pool)
            # Only a clone of the state is outside the capture that did not end.
            generator = torch.cuda.default_generators[self.device.index]
            generator.graphsafe_set_state(generator.clone_state())
            raise cause or error from None

    def _memories(self) -> list[PeerMemory]:
        return [memory for memory in self._peer_memories.values() if memory is not None]

    def release_groups(self) -> None:
        self.synchronize()
        self._peer_memories.clear()

    def describe_overlap(self) -> str:
        count = torch.cuda.device_count()
        refusal = self.peer_memory_refusal(range(count), count)
        if count > 1 and refusal is None:
            large = f"{_PEER_MEMORY_BYTES >> 20} MiB"
            small = f"{_PEER_MEMORY_BYTES_AHEAD >> 20} MiB"
            sizes = f"{large} (in CUDA graphs and the fused loss {small})"
            return f"chunks from {sizes} on go through the {count} GPUs' memory by copy engines"
        return f"{super().describe_overlap()} ({refusal or 'one GPU is visible'})"

    def peer_memory_refusal(
        self,
        ranks: Sequence[int],
        local_size: int | None = None,
    ) -> str | None:
        """Return why ``ranks`` cannot use peer memory, or None if they can.

        All ranks of the group must reach the same answer.

        Args:
            ranks: global ranks of one group.
            local_size: ranks on each host, each of which has the GPU of its local rank; default:
                torchrun's LOCAL_WORLD_SIZE.
        """
        if os.environ.get(PEER_MEMORY_SWITCH) == "0":
            return f"{PEER_MEMORY_SWITCH}=0 switches it off"
        local_size = local_size or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if len({rank // local_size for rank in ranks}) > 1:
            return f"the ranks {list(ranks)} are on several hosts, {local_size} on each"
        devices = [rank % local_size for rank in ranks]
        if max(devices) >= torch.cuda.device_count():
            return f"{local_size} ranks share a host and {torch.cuda.device_count()} GPUs are visible to this one"
        # Check both directions of each pair, also pairs without this rank: all ranks of the group
        # must give the same answer.
        for one, other in itertools.permutations(devices, 2):
            if not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} cannot map the memory of GPU {other}"
        return None

    def attention_refusal(self, implementation: str, call: AttentionCall) -> str | None:
        return cuda_attention.refusal(implementation, call)

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # During capture the generator's state cannot be read. Captured functions draw no random
        # numbers.
        if self._is_recording and _is_capturing():
            kwargs["preserve_rng_state"] = False
        return super().checkpoint(function, *args, **kwargs)

    def host_transfers(self) -> HostTransfers:
        return CudaTransfers(self.device)

    def host_transfers_refusal(self) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def get_rng_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device)

    def set_rng_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory_allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) + self._uncounted_bytes()

    def unused_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def free_memory_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device)

    def hardware_name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def allocations_refusal(self) -> None:
        return None

    @contextmanager
    def memory_history(self, file: Path) -> Iterator[None]:
        """Write the allocator's snapshot, which https://pytorch.org/memory_viz shows, after the block."""
        torch.cuda.memory._record_memory_history(stacks="python")
        try:
            yield
            with complete_file(file) as snapshot:
                torch.cuda.memory._dump_snapshot(str(snapshot))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def max_memory_allocated(self) -> int:
        peak_now = torch.cuda.max_memory_allocated(self.device) + self._uncounted_bytes()
        return max(self._peak_bytes, peak_now)

    def _uncounted_bytes(self) -> int:
        """Return the bytes in use that the caching allocator does not report.

        These are symmetric memory, which the allocator does not manage, and CUDA-graph pools, which
        it counts as free between replays.
        """
        # graphs that share a pool count once
        pools = {graph.pool(): graph for graph in self._graphs}
        return self.peer_memory_bytes() + sum(_unused_bytes(graph) for graph in pools.values())

    def peer_memory_bytes(self) -> int:
        """Return the bytes of the slots of peer memory, which PyTorch's allocator does not manage."""
        return sum(memory.allocated_bytes() for memory in self._memories())

    def _record_peak(self, uncounted_bytes: int) -> None:
        """Record the allocator's peak plus ``uncounted_bytes``, and restart the allocator's peak.

        Call before ``uncounted_bytes`` changes.
        """
        peak_now = torch.cuda.max_memory_allocated(self.device) + uncounted_bytes
        self._peak_bytes = max(self._peak_bytes, peak_now)
        torch.cuda.reset_peak_memory_stats(self.device)

    def reset_peak_memory_stats(self) -> None:
        self._peak_bytes = 0
        torch.cuda.reset_peak_memory_stats(self.device)


def _unused_bytes(graph: torch.cuda.CUDAGraph) -> int:
    """Return the bytes of the graph's pool that have no live tensor now, but that replays use."""
    segments = torch.cuda.memory_snapshot(graph.pool())
    return sum(segment["total_size"] - segment["allocated_size"] for segment in segments)


def _is_capturing() -> bool:
    return not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


class _Graph(Generic[Result]):
    """``Capture`` of a CUDA graph. A replay first finishes pending peer-memory operations."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        memories: Sequence[PeerMemory],
        result: Result,
    ) -> None:
        self.graph = graph
        self.result = result
        self._memories = memories

    def replay(self) -> None:
        for memory in self._memories:
            memory.drain()
        self.graph.replay()
