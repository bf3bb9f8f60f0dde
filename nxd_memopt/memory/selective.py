"""Keeps the results of fused attention kernels in regions that are otherwise recomputed.

The kernels' outputs (the attention output and the log-sum-exps) are saved in forward and returned when the region runs
again. PyTorch's own contexts also compare all other operators of both runs, and end the run where FSDP2 names other
steps for the profiler, as it does when a region gathers experts again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from nxd_memopt.backends.base import ContextPair
from nxd_memopt.ops.autograd import ReusableContext
from nxd_memopt.ops.cuda.attention import FLASH4_OPERATOR

_OPERATORS = {FLASH4_OPERATOR} | {
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
    )
}


compiled_contexts: Any = functools.partial(create_selective_checkpoint_contexts, [*_OPERATORS])
"""Return contexts for a region that torch.compile traces, which knows PyTorch's own alone."""


class Kept(Protocol):
    """A tensor that is kept, for example in host memory."""

    def tensor(self) -> Tensor:
        """Return the tensor, on the device."""
        ...


Keep = Callable[[Tensor], Kept]


class OnDevice:
    """``Kept`` on the device, for one backward: the device may free the tensor when backward has used it."""

    def __init__(self, tensor: Tensor) -> None:
        # Autograd adds its history to the tensor itself, which would keep the graph alive.
        self._values: Tensor | None = tensor.detach()
        self._version = tensor._version

    def tensor(self) -> Tensor:
        values, self._values = self._values, None
        if values is None:
            raise RuntimeError("kept results of attention serve one backward: drop retain_graph, or keep_core_attn")
        if values._version != self._version:
            raise RuntimeError("a kept result of attention was modified in place: modify a copy")
        return values


@dataclass(frozen=True)
class _Held:
    """A kept tensor in the structure of an operator's result."""

    kept: Kept

    def tensor(self) -> Tensor:
        return self.kept.tensor()


class _KeepResults(TorchDispatchMode):
    """Passes the results of fused attention kernels to ``keep``, in the order of the calls."""

    def __init__(self, results: list[Any], keep: Keep) -> None:
        super().__init__()
        self._results = results
        self._keep = keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _OPERATORS:
            self._results.append(tree_map_only(Tensor, self._held, result))
        return result

    def _held(self, tensor: Tensor) -> _Held:
        return _Held(self._keep(tensor))


class _ReturnResults(TorchDispatchMode):
    """Returns the kept results instead of running the kernels, in the order of the calls."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__()
        # A copy: a retained graph recomputes its region again.
        self._remaining = iter(tuple(results))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPERATORS:
            return tree_map_only(_Held, _Held.tensor, next(self._remaining))
        return func(*args, **(kwargs or {}))


def keeping_contexts(keep: Keep) -> ContextPair:
    """Return a context that passes results to ``keep`` (forward pass) and one that returns them (recomputation)."""
    results: list[Any] = []
    forward = functools.partial(_KeepResults, results, keep)
    recompute = functools.partial(_ReturnResults, results)
    return ReusableContext(forward), ReusableContext(recompute)


def both_contexts(first: Callable[[], ContextPair], second: Callable[[], ContextPair]) -> ContextPair:
    """Return the context pair of ``first`` with the context pair of ``second`` nested inside."""
    first_forward, first_recompute = first()
    second_forward, second_recompute = second()
    # A retained graph recomputes its regions again: each entry builds new nested contexts.
    forward = functools.partial(_nested, first_forward, second_forward)
    recompute = functools.partial(_nested, first_recompute, second_recompute)
    return ReusableContext(forward), ReusableContext(recompute)


@contextmanager
def _nested(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield
