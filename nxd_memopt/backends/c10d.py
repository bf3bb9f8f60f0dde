"""Groups, collectives and checkpointing of devices with native torch.distributed collectives."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from nxd_memopt.backends.base import Backend, ContextPair
from nxd_memopt.backends.collectives import Completed, Pending

# torch 2.13 renames both functions; torch 2.9 to 2.12 have only the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class _Work:
    """Started torch.distributed collective. It keeps its input alive until it has been read."""

    def __init__(self, work: dist.Work | None, source: Tensor, result: Tensor) -> None:
        self._work = work
        # The collective reads its input asynchronously: a freed input could be overwritten.
        self._source = source
        self._result = result

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._result


class _TracedWork:
    """Collective in a graph that torch.compile traces.

    It is a functional collective, because dynamo does not trace the handles of in-place
    collectives.
    """

    def __init__(self, started: Tensor) -> None:
        self._started = started

    def wait(self) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(self._started)


class C10dBackend(Backend):
    """Device with eager torch.distributed collectives and asynchronous handles."""

    def describe_overlap(self) -> str:
        return f"{self.distributed_backend}'s collectives start before the matmuls that do not need them"

    def init_process_group(self, **kwargs: Any) -> None:
        if dist.is_initialized() or "RANK" not in os.environ:
            return
        try:
            dist.init_process_group(self.distributed_backend, **kwargs)
        except dist.DistNetworkError as error:
            # TCPStore names the error by its symbol with libuv, and by its text alone without
            message = str(error)
            if "EADDRINUSE" not in message and "address already in use" not in message.lower():
                raise
            port = os.environ.get("MASTER_PORT")
            raise ValueError(
                f"MASTER_PORT {port} is in use by another program: pass another --master_port to torchrun"
            ) from error

    def new_group(self, rank_groups: Sequence[Sequence[int]]) -> ProcessGroup | None:
        # new_group is a collective of the world: each rank creates every group, in the same
        # order.
        mine = None
        for ranks in rank_groups:
            assert list(ranks) == sorted(ranks), (
                f"torch.distributed numbers a group's ranks in ascending order: {ranks}"
            )
            group: Any = dist.new_group(list(ranks))  # an int where this rank is not a member
            if dist.get_rank() in ranks:
                mine = group
        return mine

    def group_size(self, group: ProcessGroup | None) -> int:
        return 1 if group is None else group.size()

    def group_rank(self, group: ProcessGroup | None) -> int:
        return 0 if group is None else group.rank()

    def shard(self, tensor: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
        size = self.group_size(group)
        length = tensor.size(dim) // size
        if size == 1:
            return tensor
        return tensor.narrow(dim, self.group_rank(group) * length, length)

    def all_reduce(self, tensor: Tensor, group: ProcessGroup | None, op: str = "sum") -> Tensor:
        if group is None or self.group_size(group) == 1:
            return tensor
        if torch.compiler.is_compiling():
            source = tensor.contiguous()
            traced = torch.ops._c10d_functional.all_reduce(source, op, group.group_name)
            return _TracedWork(traced).wait()
        # dist.all_reduce is in place: reduce a copy, as the input must stay unchanged
        result = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, op=_REDUCE_OPS[op], group=group)
        return result

    def all_gather(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        return self.all_gather_async(tensor, group).wait()

    def reduce_scatter(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        return self.reduce_scatter_async(tensor, group).wait()

    def all_to_all(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        if self.group_size(group) == 1:
            return tensor
        result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.all_to_all_single(result, tensor.contiguous(), group=group)
        return result

    def all_reduce_async(self, tensor: Tensor, group: ProcessGroup | None) -> Pending:
        if group is None or self.group_size(group) == 1:
            return Completed(tensor)
        if torch.compiler.is_compiling():
            source = tensor.contiguous()
            traced = torch.ops._c10d_functional.all_reduce(source, "sum", group.group_name)
            return _TracedWork(traced)
        # dist.all_reduce is in place: the copy keeps the contract that the input stays unchanged
        result = tensor.clone(memory_format=torch.contiguous_format)
        return _Work(dist.all_reduce(result, group=group, async_op=True), tensor, result)

    def all_gather_async(self, tensor: Tensor, group: ProcessGroup | None) -> Pending:
        size = self.group_size(group)
        if group is None or size == 1:
            return Completed(tensor)
        source = tensor.contiguous()
        if torch.compiler.is_compiling():
            name = group.group_name
            traced = torch.ops._c10d_functional.all_gather_into_tensor(source, size, name)
            return _TracedWork(traced)
        result = source.new_empty((source.size(0) * size, *source.shape[1:]))
        return _Work(_all_gather(result, source, group=group, async_op=True), source, result)

    def reduce_scatter_async(self, tensor: Tensor, group: ProcessGroup | None) -> Pending:
        size = self.group_size(group)
        if group is None or size == 1:
            return Completed(tensor)
        source = tensor.contiguous()
        if torch.compiler.is_compiling():
            name = group.group_name
            traced = torch.ops._c10d_functional.reduce_scatter_tensor(source, "sum", size, name)
            return _TracedWork(traced)
        result = source.new_empty((source.size(0) // size, *source.shape[1:]))
        return _Work(_reduce_scatter(result, source, group=group, async_op=True), source, result)

    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        context_fn: Callable[[], ContextPair] | None = None,
        determinism_check: str = "default",
        early_stop: bool = True,
        **kwargs: Any,
    ) -> Any:
        # Pass only options that differ from their defaults: dynamo does not trace the others.
        if context_fn is not None:
            kwargs["context_fn"] = context_fn
        if determinism_check != "default":
            kwargs["determinism_check"] = determinism_check
        if not early_stop:
            kwargs["early_stop"] = early_stop
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def compile_refusal(self) -> str | None:
        import torch._dynamo  # takes a second: import only when something is compiled

        # torch.compile would silently return the function itself
        if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            return "needs torch.compile, which TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE turns off: unset it"
        return None

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile with Inductor, torch's default compiler."""
        # fullgraph: code that does not fit into one graph raises an error; it never runs eagerly.
        # dynamic=False: each new shape is a new graph with static shapes.
        return torch.compile(function, fullgraph=True, dynamic=False)
