"""The gradients that a reduction has unscaled or clipped in place, which a second call must not change again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from nxd_memopt.optimizer.sharded_parameters import Sharded
from nxd_memopt.parallel_layers import grads


class _Reduced(NamedTuple):
    """A gradient that was reduced in place, and its version then."""

    param: nn.Parameter
    grad: weakref.ref[Tensor]
    version: int


class ReducedInPlace:
    """Remembers the gradients of a step that were changed themselves, not as copies."""

    def __init__(self) -> None:
        self._reduced: list[_Reduced] = []
        self._num_parameters = 0

    def record(self, sharded: Sequence[Sharded]) -> None:
        """Remember the gradients of ``sharded`` that the update takes as they are."""
        self.clear()
        self._num_parameters = len(sharded)
        # Without sharding the gradient of an update is the parameter's own, if it has its dtype.
        for each in sharded:
            grad = grads.gradient_of(each.param)
            if grad is not None and grad is each.shard.grad:
                self._reduced.append(_Reduced(each.param, weakref.ref(grad), grad._version))

    def clear(self) -> None:
        """Forget them: the update has used them, or they are gone."""
        self._reduced.clear()

    def are_current(self) -> bool:
        """Return whether the parameters still have these gradients.

        Raises:
            RuntimeError: the gradients were added to since.
        """
        num_current = 0
        num_written = 0
        for each in self._reduced:
            grad = grads.gradient_of(each.param)
            if grad is not None and grad is each.grad():
                num_current += 1
                num_written += grad._version != each.version
        if num_written:
            raise RuntimeError(
                f"{num_written} of {self._num_parameters} gradients were written to after reduce_gradients(), which "
                "has clipped them: call update_parameters() or the optimizer's zero_grad() before the next backward"
            )
        return bool(num_current) and num_current == len(self._reduced)
