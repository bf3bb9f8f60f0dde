"""Reduce-scatters gradients into shards during backward, bucket by bucket, and frees them."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.ops.parts import split_sizes
from nxd_memopt.parallel_layers.gradient_ledger import SUMMED_AT, is_sequence_parallel, record_addition, state_of
from nxd_memopt.parallel_layers.grads import bucket_indices
from nxd_memopt.parallel_layers.utils import is_expert_parallel, padded_size

_MAX_IN_PROGRESS = 2  # buckets: one is reduced while the next one is filled


class GradientScatter:
    """Adds this rank's part of the mean gradient to ``shard.grad`` and frees the full gradient.

    A bucket is started when the next gradient after its last one arrives, so that all hooks of its
    parameters have run, and always in the order of buckets, on which all ranks agree
    (arXiv:2006.15704). At the end of each backward pass the remaining buckets follow; a parameter
    that the pass did not reach counts as zero, because other ranks may have reached it.

    Args:
        params: trained parameters, each with its shard, 1-D of ceil(n / D) elements.
        group: the sharding group, of D ranks.
        expert_group: the sharding group of experts under expert parallelism. Their gradients have the
            tokens of all expert-parallel ranks, so they are divided by D too.
        bucket_bytes: maximum bytes of a bucket's parameters; a larger parameter is alone.
        reduce_dtype: dtype of the reduction; None takes the dtype of each gradient.

    Attributes:
        is_finished: whether ``finish`` was called and ``clear`` was not: no backward may follow.
    """

    def __init__(
        self,
        params: Sequence[tuple[nn.Parameter, nn.Parameter]],
        group: ProcessGroup | None,
        *,
        expert_group: ProcessGroup | None = None,
        bucket_bytes: int,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self._num_ranks = backend.group_size(group)
        self._reduce_dtype = reduce_dtype
        # From the last parameter to the first, the usual order of backward. Buckets are sorted by
        # the parameter that backward reaches last.
        reverse = list(reversed(params))
        found: list[tuple[list[int], ProcessGroup | None]] = []
        for is_expert, over in ((False, group), (True, expert_group)):
            numbers = [i for i, (param, _) in enumerate(reverse) if is_expert_parallel(param) == is_expert]
            same_group = [reverse[i][0] for i in numbers]
            found += [([numbers[i] for i in part], over) for part in bucket_indices(same_group, bucket_bytes) if part]
        found.sort(key=lambda each: max(each[0]))
        self._buckets = [_Bucket([reverse[i] for i in indices], over) for indices, over in found]
        self._in_progress: deque[_Pending] = deque()
        self._backward = -1  # graph task of the backward pass that the arrivals belong to
        self.is_finished = False
        self._hooks = []
        for bucket in self._buckets:
            for param, _ in bucket.params:
                hook = _hook(weakref.ref(self), weakref.ref(bucket))
                self._hooks.append(param.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def clear(self) -> None:
        """Drop the accumulated shards: the next backward pass starts a new step."""
        self.is_finished = False
        for bucket in self._buckets:
            for _, shard in bucket.params:
                shard.grad = None
                # the sum that it records is gone, also if no update followed it
                if hasattr(shard, SUMMED_AT):
                    delattr(shard, SUMMED_AT)

    def finish(self) -> None:
        """Give shards without a gradient zeros; ``clear`` must follow before the next backward."""
        self.is_finished = True
        for bucket in self._buckets:
            for _, shard in bucket.params:
                if shard.grad is None:
                    shard.grad = torch.zeros_like(shard)

    def _on_gradient(self, bucket: _Bucket, param: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task < 0:
            raise RuntimeError(
                "zero2 frees gradients in backward, and a CUDA graph keeps theirs: run the loss and backward() "
                "without GraphedLoss, or use zero1"
            )
        if self.is_finished:
            raise RuntimeError(
                "backward after reduce_gradients(), which has clipped the gradients of this step: call "
                "update_parameters() or zero_grad() before"
            )
        if task != self._backward:
            self._begin(task)
        # The leading complete buckets only; that of ``param`` itself waits for its other hooks.
        self._start(itertools.takewhile(lambda each: not each.missing, self._buckets))
        bucket.missing.discard(id(param))

    def _begin(self, task: int) -> None:
        """Expect all gradients again. What a backward pass that failed has left is dropped."""
        self._backward = task
        self._in_progress.clear()
        for bucket in self._buckets:
            bucket.reset()
        # Runs when all gradients of this pass have been accumulated, before backward() returns.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end)

    def _end(self) -> None:
        self._start(self._buckets)
        while self._in_progress:
            self._in_progress.popleft().finish()
        self._backward = -1

    @torch.no_grad()
    def _start(self, buckets: Iterable[_Bucket]) -> None:
        for bucket in buckets:
            if bucket.is_started:
                continue
            bucket.is_started = True
            self._in_progress.append(_Pending(bucket, self._num_ranks, self._reduce_dtype))
            if len(self._in_progress) > _MAX_IN_PROGRESS:
                self._in_progress.popleft().finish()


def _hook(owner: weakref.ref[GradientScatter], bucket: weakref.ref[_Bucket]) -> Callable[[Tensor], None]:
    """Return a hook with weak references: a cycle through autograd hooks is never collected."""

    def arrived(param: Tensor) -> None:
        scatter = owner()
        own = bucket()
        if scatter is not None and own is not None:
            scatter._on_gradient(own, param)

    return arrived


class _Bucket:
    """Parameters of one dtype, device and group that are reduced together, each with its shard."""

    def __init__(self, params: list[tuple[nn.Parameter, nn.Parameter]], group: ProcessGroup | None) -> None:
        self.params = params
        self.group = group
        self.reset()

    def reset(self) -> None:
        """Expect all gradients again."""
        self.missing = {id(param) for param, _ in self.params}
        self.is_started = False


class _Pending:
    """A reduce-scatter in progress: ``[D, sum of ceil(n / D)]``, of which rank i gets row i."""

    def __init__(self, bucket: _Bucket, divisor: int, reduce_dtype: torch.dtype | None) -> None:
        size = backend.group_size(bucket.group)
        params = bucket.params
        self._shards = [shard for _, shard in params]
        # The state of a sequence-parallel gradient: this rank's part, or a sum that a hook took.
        self._states: list[str | None] = []
        rows = []
        for param, _ in params:
            grad = param.grad
            self._states.append(None)
            if grad is None:
                grad = torch.zeros_like(param)
            elif is_sequence_parallel(param):
                self._states[-1] = state_of(param, grad)
            flat = grad.reshape(-1).to(reduce_dtype or param.dtype)
            rows.append(F.pad(flat, (0, padded_size(flat.numel(), size) - flat.numel())).view(size, -1))
            param.grad = None
        # Division before the sum keeps a sum of many ranks in the range of half precision.
        matrix = torch.cat(rows, dim=1).div_(divisor)
        self._pending = backend.reduce_scatter_async(matrix.view(-1), bucket.group)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, and add the result to the gradients of the shards."""
        chunks = split_sizes(self._pending.wait(), [shard.numel() for shard in self._shards])
        for shard, chunk, state in zip(self._shards, chunks, self._states, strict=True):
            before = None
            chunk = chunk.view(shard.shape)  # that of the parameter if one rank has all of it
            if shard.grad is None:
                # Shards of a bucket share the memory of its result, but not those with a record,
                # which depends on a version counter of their own.
                shard.grad = chunk.to(shard.dtype, copy=state is not None)
            else:
                if state is not None:
                    before = state_of(shard, shard.grad)
                shard.grad += chunk
            if state is not None:
                record_addition(shard, shard.grad, before, state)
