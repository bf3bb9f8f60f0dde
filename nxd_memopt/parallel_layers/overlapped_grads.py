"""Reduces gradients during backward, bucket by bucket, each as soon as it is complete."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.ops.parts import split_sizes
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.data_shards import require_replicated
from nxd_memopt.parallel_layers.grads import ParameterSource, bucket_indices, gradient_of, parameters_of
from nxd_memopt.parallel_layers.summed_gradients import is_sequence_parallel, mark_summed, needs_sum, observe
from nxd_memopt.parallel_layers.utils import is_expert_parallel
from nxd_memopt.planner.techniques.buckets import BUCKET_BYTES, OVERLAPPED_BUCKETS


class OverlappedGradientReduction:
    """Reduction of gradients during backward: sum over sequence shards, average over data ranks.

    The results equal those of the functions in ``grads``. Parameters are assigned to buckets from
    the last to the first, the usual order of backward. A bucket is reduced when all of its
    gradients are complete, in the order of buckets, so that all ranks agree (arXiv:2006.15704).
    All ranks need gradients of the same parameters (``grads.bucket_allreduce_gradients``).

    Args:
        source: a module, an optimizer or parameters; parameters that need no gradient are skipped.
        bucket_bytes: maximum bytes of a bucket's parameters; a larger parameter is alone.

    Raises:
        ValueError: a parameter is sharded over data-parallel ranks, whose gradients backward
            reduces already.

    Example::

        reduction = OverlappedGradientReduction(model)
        for batch in batches[:-1]:
                model(batch, labels=batch).loss.backward()       # accumulate only
        with reduction.last_backward():
            model(batches[-1], labels=batches[-1]).loss.backward()
        grads.clip_grad_norm(model, 1.0)                     # gradients are reduced
    """

    def __init__(self, source: ParameterSource, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        params = [param for param in reversed(parameters_of(source)) if param.requires_grad]
        require_replicated(params, "OverlappedGradientReduction", "leave it out, zero3 reduces in backward")
        # Sequence-parallel parameters need two reductions, so they have their own buckets.
        # Buckets are sorted by the parameter that backward reaches last.
        observe(params)
        shards: list[Tensor] = []
        experts: list[Tensor] = []
        remaining: list[Tensor] = []
        for param in params:
            if is_sequence_parallel(param):
                shards.append(param)
            elif parallel_state.get_data_parallel_size() == 1:
                continue  # the gradient is complete: it needs no bucket
            elif is_expert_parallel(param):
                experts.append(param)  # reduced over a group of their own
            else:
                remaining.append(param)
        buckets: list[_Bucket] = []
        for kind in (shards, remaining, experts):
            for indices in bucket_indices(kind, bucket_bytes):
                buckets.append(_Bucket([kind[i] for i in indices]))
        position = {id(param): i for i, param in enumerate(params)}
        self._buckets = sorted(buckets, key=lambda bucket: max(position[id(param)] for param in bucket.params))
        self._in_progress: deque[_Bucket] = deque()
        self._is_reducing = False
        self._hooks = []
        # The hooks hold weak references: a reference cycle through autograd hooks is never garbage-collected.
        for index, bucket in enumerate(self._buckets):
            hook = functools.partial(_on_gradient, weakref.ref(self), index)
            for param in bucket.params:
                self._hooks.append(param.register_post_accumulate_grad_hook(hook))

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Reduce the gradients during the backward inside; they are complete when the block ends.

        Parameters that this backward does not reach are reduced at the end of the block, if an
        earlier backward gave them a gradient.

        Raises:
            RuntimeError: nested use.
        """
        if self._is_reducing:
            raise RuntimeError("last_backward() inside last_backward(): one backward completes the gradients")
        for bucket in self._buckets:
            bucket.reset()
        self._in_progress.clear()
        self._is_reducing = True
        try:
            yield
        finally:
            self._is_reducing = False
        # Skipped if the block raised: its gradients are incomplete. What was started then is
        # dropped by the next ``last_backward``.
        self._start(self._buckets)
        for bucket in self._buckets:
            bucket.finish()
        # After all buckets: gradients that are views of one tensor share a version counter.
        for bucket in self._buckets:
            bucket.mark()

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, bucket: _Bucket, param: Tensor) -> None:
        """Mark ``param`` as arrived and start the buckets that were complete before.

        The bucket of ``param`` itself starts later, because other hooks of ``param`` may not have
        run yet, such as the one that adds to ``main_grad``.
        """
        if not self._is_reducing:
            return
        # Only the leading complete buckets: every rank must start collectives in the same order.
        self._start(itertools.takewhile(lambda each: not each.missing, self._buckets))
        if id(param) not in bucket.missing:
            raise RuntimeError(
                f"a second gradient of a parameter of shape {list(param.shape)} in one "
                "last_backward(): the first may have been reduced already; call backward() once inside"
            )
        bucket.missing.remove(id(param))

    def _start(self, buckets: Iterable[_Bucket]) -> None:
        # Buckets in progress first start their second reduction, if any: it waits for the first
        # one, which has run since the last gradient arrived. The limit bounds memory: each bucket
        # in progress needs two flat copies of its gradients.
        for bucket in self._in_progress:
            bucket.start_next()
        for bucket in buckets:
            if bucket.is_started:
                continue
            # Ranks start a bucket when the gradients before it have arrived, several at a time or one by one. The
            # second reductions of the buckets before it come first in both cases: ranks that started collectives
            # of one group in different orders would exchange the gradients of different parameters.
            for other in self._in_progress:
                other.start_next()
            # Each needs two flat copies of its gradients, input and result.
            if len(self._in_progress) == OVERLAPPED_BUCKETS:
                self._in_progress.popleft().finish()
            bucket.start()
            self._in_progress.append(bucket)


def _on_gradient(owner: weakref.ref[OverlappedGradientReduction], index: int, param: Tensor) -> None:
    """Hook on the gradient of ``param``, a parameter of bucket ``index``."""
    reduction = owner()
    if reduction is not None:
        reduction._on_gradient(reduction._buckets[index], param)


class _FlatReduction:
    """Gradients that are reduced as one flat tensor, over one process group after another."""

    def __init__(self, grads: Sequence[Tensor], groups: Sequence[ProcessGroup | None]) -> None:
        self._grads = grads
        first, *self._groups = groups
        flat = torch.cat([grad.detach().reshape(-1) for grad in grads])
        # The average over data ranks; the sum over sequence shards is linear, so the order is
        # free.
        flat /= parallel_state.get_data_parallel_size()
        self._pending = backend.all_reduce_async(flat, first)

    def start_next(self) -> None:
        """Start the second reduction, if any; wait for the first one, which ran meanwhile."""
        if self._groups:
            self._pending = backend.all_reduce_async(self._pending.wait(), self._groups.pop(0))

    def finish(self) -> None:
        """Wait for the last reduction and copy the results into the gradients."""
        self.start_next()
        reduced = split_sizes(self._pending.wait(), [grad.numel() for grad in self._grads])
        for grad, result in zip(self._grads, reduced, strict=True):
            grad.detach().copy_(result.view_as(grad))


class _Bucket:
    """Parameters of one kind (dtype, device, sequence-parallel or not), reduced together."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.reset()

    def reset(self) -> None:
        """Expect all gradients again; call before each reduced backward."""
        self.missing = {id(param) for param in self.params}
        self.is_started = False
        self._reductions: list[_FlatReduction] = []

    def start(self) -> None:
        """Start reducing the existing gradients; sums over sequence shards are only averaged."""
        self.is_started = True
        over_tensor = parallel_state.get_tensor_model_parallel_group()
        over_data = parallel_state.get_data_parallel_group()
        if is_expert_parallel(self.params[0]):
            over_data = parallel_state.get_expert_data_parallel_group()
        parts: list[Tensor] = []
        sums: list[Tensor] = []
        for param in self.params:
            grad = gradient_of(param)
            if grad is None:
                continue
            # An earlier sum over sequence shards stays valid if no gradient was added since.
            if self._is_summed_over_tensor_ranks and needs_sum(param):
                parts.append(grad)
            else:
                sums.append(grad)
        if parts:
            self._reductions.append(_FlatReduction(parts, [over_tensor, over_data]))
        if sums and parallel_state.get_data_parallel_size() > 1:
            self._reductions.append(_FlatReduction(sums, [over_data]))

    def start_next(self) -> None:
        """Start the second reduction of the gradients that need one."""
        for reduction in self._reductions:
            reduction.start_next()

    def finish(self) -> None:
        """Wait for all reductions and copy the results into the gradients."""
        for reduction in self._reductions:
            reduction.finish()
        self._reductions.clear()

    def mark(self) -> None:
        """Record the sums over sequence shards, so that the functions of ``grads`` skip them."""
        if self._is_summed_over_tensor_ranks:
            mark_summed(self.params)

    @property
    def _is_summed_over_tensor_ranks(self) -> bool:
        # All parameters of a bucket are tagged, or none is.
        is_tagged = is_sequence_parallel(self.params[0])
        return is_tagged and parallel_state.get_tensor_model_parallel_size() > 1
