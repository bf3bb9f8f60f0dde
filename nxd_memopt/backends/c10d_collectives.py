"""Collectives of devices with a torch.distributed backend of their own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends.collectives import Collectives, Completed, Pending

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


class C10dCollectives(Collectives):
    """Collectives of torch.distributed; functional collectives in graphs that dynamo traces."""

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
        return self._start_all_reduce(tensor, group, op, async_op=False).wait()

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
        return self._start_all_reduce(tensor, group, "sum", async_op=True)

    def _start_all_reduce(self, tensor: Tensor, group: ProcessGroup | None, op: str, *, async_op: bool) -> Pending:
        if group is None or self.group_size(group) == 1:
            return Completed(tensor)
        if torch.compiler.is_compiling():
            source = tensor.contiguous()
            return _TracedWork(torch.ops._c10d_functional.all_reduce(source, op, group.group_name))
        # dist.all_reduce is in place: reduce a copy, as the input must stay unchanged
        result = tensor.clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(result, op=_REDUCE_OPS[op], group=group, async_op=async_op)
        return _Work(work, result, result)

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
