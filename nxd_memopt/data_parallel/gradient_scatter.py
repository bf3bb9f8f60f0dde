"""Reduce-scatters gradients into shards during backward, bucket by bucket, and frees them."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import CheckpointFunction

from nxd_memopt.backends import backend
from nxd_memopt.ops.parts import split_sizes
from nxd_memopt.parallel_layers.grads import bucket_indices
from nxd_memopt.parallel_layers.summed_gradients import was_summed
from nxd_memopt.parallel_layers.utils import is_expert_parallel, padded_size
from nxd_memopt.planner.techniques.buckets import SCATTERED_BUCKETS


class GradientScatter:
    """Adds this rank's part of the mean gradient to ``shard.grad`` and frees the full gradient.

    A bucket is started when the next gradient after its last one arrives, so that all hooks of its
    parameters have run, and always in the order of buckets, on which all ranks agree
    (arXiv:2006.15704): from the second backward pass on, that of the first rank's gradients in the
    first one. At the end of each backward pass the remaining buckets follow; a parameter that the
    pass did not reach counts as zero, because other ranks may have reached it.

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
        self._params = list(params)
        self._group = group
        self._expert_group = expert_group
        self._bucket_bytes = bucket_bytes
        # At most SCATTERED_BUCKETS at a time: each has a matrix of its bucket's size.
        self._in_progress: deque[_Pending] = deque()
        self._backward = -1  # graph task of the backward pass that the arrivals belong to
        self._arrived: list[int] | None = []  # numbers of parameters, until the order is known
        self.is_finished = False
        # From the last parameter to the first, the usual order of backward, and then the norms, of which the first
        # layer's comes last.
        numbers = reversed(range(len(self._params)))
        self._fill_buckets(sorted(numbers, key=lambda number: self._params[number][0].dim() < 2))
        self._hooks = []
        for number, (param, _) in enumerate(self._params):
            self._hooks.append(param.register_post_accumulate_grad_hook(_hook(weakref.ref(self), number)))

    def _fill_buckets(self, order: Sequence[int]) -> None:
        """Divide the parameters into buckets; ``order`` has their numbers in the order in which gradients arrive."""
        # One collective has one group: experts, which fewer ranks share, have buckets of their own. Their buckets
        # are sorted among the others by arrival, because they are started in one order.
        place = {number: index for index, number in enumerate(order)}
        found: list[tuple[list[int], ProcessGroup | None]] = []
        for is_expert, over in ((False, self._group), (True, self._expert_group)):
            numbers = [number for number in order if is_expert_parallel(self._params[number][0]) == is_expert]
            same_group = [self._params[number][0] for number in numbers]
            parts = bucket_indices(same_group, self._bucket_bytes)
            found += [([numbers[i] for i in part], over) for part in parts if part]
        # Sorted by the parameter that backward reaches last.
        found.sort(key=lambda each: max(place[number] for number in each[0]))
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        for numbers, over in found:
            bucket = _Bucket([self._params[number] for number in numbers], over)
            self._buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(numbers, bucket)

    def _use_order_of_arrival(self, arrived: list[int]) -> None:
        """Fill the buckets again in the order of the first rank's gradients.

        A bucket that waits for a late gradient holds up all buckets after it, and so their gradients: an optimizer
        may have its parameters in another order than the model, by groups of weight decay.
        """
        # Ranks may reach other parameters, or the same in another order, with mixtures of experts: the order of
        # the first rank holds for all of them, and parameters that it has not reached come last.
        unreached = set(range(len(self._params))) - set(arrived)
        order = torch.tensor([*arrived, *sorted(unreached)], device=backend.device)
        first = backend.all_gather_async(order, self._group).wait()[: len(self._params)]
        self._fill_buckets(first.tolist())

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def clear(self) -> None:
        """Drop the accumulated shards: the next backward pass starts a new step."""
        self.is_finished = False
        for _, shard in self._params:
            shard.grad = None

    def finish(self) -> None:
        """Give shards without a gradient zeros; ``clear`` must follow before the next backward."""
        self.is_finished = True
        for _, shard in self._params:
            if shard.grad is None:
                shard.grad = torch.zeros_like(shard)

    def _on_gradient(self, number: int, param: Tensor) -> None:
        # The engine numbers each backward(), also one that runs inside another one. Outside of any it is -1.
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
            if self._backward >= 0 and _is_in_reentrant_checkpoint():
                raise RuntimeError(
                    "torch.utils.checkpoint with use_reentrant=True runs a backward inside another one, of which zero2 "
                    "has begun to reduce the gradients: set use_reentrant=False, or use zero1"
                )
            self._begin(task)
        # The leading complete buckets only; that of ``param`` itself waits for its other hooks.
        self._start(itertools.takewhile(lambda each: not each.missing, self._buckets))
        self._bucket_of[number].missing.discard(id(param))
        if self._arrived is not None and number not in self._arrived:
            self._arrived.append(number)

    def _begin(self, task: int) -> None:
        """Expect all gradients again. What a backward pass that failed has left is dropped."""
        self._backward = task
        self._in_progress.clear()
        if self._arrived is not None:
            self._arrived.clear()
        for bucket in self._buckets:
            bucket.reset()
        # Runs when all gradients of this pass have been accumulated, before backward() returns.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end)

    def _end(self) -> None:
        # Buckets that wait for a gradient which did not come: the rows of such a parameter are zeros.
        self._start(self._buckets)
        while self._in_progress:
            self._in_progress.popleft().finish()
        self._backward = -1
        if self._arrived is not None:
            self._use_order_of_arrival(self._arrived)
            self._arrived = None

    @torch.no_grad()
    def _start(self, buckets: Iterable[_Bucket]) -> None:
        for bucket in buckets:
            if bucket.is_started:
                continue
            bucket.is_started = True
            # Before the next bucket is copied, so that no third one exists.
            if len(self._in_progress) == SCATTERED_BUCKETS:
                self._in_progress.popleft().finish()
            self._in_progress.append(_Pending(bucket, self._num_ranks, self._reduce_dtype))


def _is_in_reentrant_checkpoint() -> bool:
    """Return whether the present backward is that of a torch.utils.checkpoint with ``use_reentrant=True``."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not CheckpointFunction.backward.__code__:
        frame = frame.f_back
    return frame is not None


def _hook(owner: weakref.ref[GradientScatter], number: int) -> Callable[[Tensor], None]:
    """Return a hook with a weak reference: a cycle through autograd hooks is never collected."""

    def arrived(param: Tensor) -> None:
        scatter = owner()
        if scatter is not None:
            scatter._on_gradient(number, param)

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


def copy_to_rows(flat: Tensor, rows: Tensor) -> None:
    """Copy ``flat`` to the first elements of ``rows``, row by row; the other elements stay as they are."""
    # Without padding ``flat``, which would copy a gradient once more: full rows first, then the rest of one row.
    if not flat.numel():
        return
    width = rows.size(1)
    full = flat.numel() // width
    rows[:full].copy_(flat[: full * width].view(full, width))
    rest = flat.numel() - full * width
    if rest:
        rows[full, :rest].copy_(flat[full * width :])


class _Pending:
    """A reduce-scatter in progress: ``[D, sum of ceil(n / D)]``, of which rank i gets row i."""

    def __init__(self, bucket: _Bucket, divisor: int, reduce_dtype: torch.dtype | None) -> None:
        size = backend.group_size(bucket.group)
        params = bucket.params
        self._shards = [shard for _, shard in params]
        widths = [padded_size(param.numel(), size) // size for param, _ in params]
        # Each gradient is freed when it is copied: besides this matrix there is no other copy of the bucket.
        matrix = torch.zeros(size, sum(widths), dtype=reduce_dtype or params[0][0].dtype, device=params[0][0].device)
        for (param, _), columns in zip(params, split_sizes(matrix, widths, dim=1), strict=True):
            grad = param.grad
            if grad is None:
                continue
            if was_summed(grad):
                raise ValueError(
                    f"a hook has summed the gradient of a parameter of shape {list(param.shape)} over the "
                    "tensor-parallel ranks: leave it out, reduce_gradients() sums the shards"
                )
            copy_to_rows(grad.reshape(-1), columns)
            param.grad = None
        # Division before the sum keeps a sum of many ranks in the range of half precision.
        self._pending = backend.reduce_scatter_async(matrix.div_(divisor).view(-1), bucket.group)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, and add the result to the gradients of the shards."""
        chunks = split_sizes(self._pending.wait(), [shard.numel() for shard in self._shards])
        for shard, chunk in zip(self._shards, chunks, strict=True):
            chunk = chunk.view(shard.shape)  # that of the parameter if one rank has all of it
            if shard.grad is None:
                shard.grad = chunk.to(shard.dtype)  # shares the memory of the bucket's result, if the dtype is its own
            else:
                shard.grad += chunk
