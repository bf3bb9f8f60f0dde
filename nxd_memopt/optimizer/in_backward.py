"""Runs the optimizer inside backward: each gradient is used and freed as soon as it is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.parallel_layers import grads
from nxd_memopt.parallel_layers.data_shards import require_replicated
from nxd_memopt.parallel_layers.summed_gradients import observe


class OptimizerInBackward:
    """Steps ``optimizer`` for each parameter as soon as its gradient is complete, and frees the
    gradient.

    It saves the bytes of all gradients but the largest (2 bytes per parameter in bf16). In exchange
    a step has exactly one backward: gradients can neither be accumulated nor clipped by their
    common norm. Gradients of sequence shards are first summed over the tensor-parallel ranks. All
    gradients are averaged over the data-parallel ranks, parameter by parameter.

    ``torchtune.training.memory.OptimizerInBackwardWrapper`` uses one optimizer per parameter. Here
    a single optimizer keeps its groups, states and learning-rate schedule. Keep a reference to this
    object: when it is garbage-collected, backward accumulates gradients as usual.

    Args:
        optimizer: must update each parameter from its own gradient alone, as SGD and Adam do.
        computes_norm: compute ``grad_norm``, with a few small kernels for each parameter.

    Raises:
        ValueError: a parameter does not require a gradient, already has one, or is sharded over
            data-parallel ranks.

    Example::

        optimizer = OptimizerInBackward(AdamW(model.parameters(), lr=1e-5))
        model(ids, labels=ids).loss.backward()  # the parameters are updated
        optimizer.step()                        # ends the step
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, computes_norm: bool = False) -> None:
        self.optimizer = optimizer
        self._computes_norm = computes_norm
        self._norms: list[Tensor] = []
        # Keep the full groups: ``_restricted_to`` replaces the groups during each step.
        self._params = [list(group["params"]) for group in optimizer.param_groups]
        self._updated: set[Tensor] = set()
        require_replicated(
            grads.parameters_of(optimizer), "OptimizerInBackward", "use data_parallel.Zero3Optimizer instead"
        )
        observe(param for params in self._params for param in params)
        self._hooks = []
        for i, params in enumerate(self._params):
            for param in params:
                _require_no_gradient(param)
                hook = _hook(weakref.ref(self), i)
                self._hooks.append(param.register_post_accumulate_grad_hook(hook))

    def _update(self, group: int, param: Tensor) -> None:
        """Reduce the gradient of ``param``, update ``param``, and free the gradient."""
        if param in self._updated:
            raise RuntimeError(
                f"a second gradient of a parameter of shape {list(param.shape)} before step(): "
                "one backward a step, gradients cannot be accumulated"
            )
        # These collectives need the same order of hooks on all ranks, which run the same autograd
        # graph. One collective per parameter and no bucket: a bucket would keep the gradients that
        # this class is there to free.
        self._updated.add(param)
        grads.allreduce_sequence_parallel_gradients([param])
        grads.bucket_allreduce_gradients([param])
        # Of the reduced gradient, which is freed below.
        if self._computes_norm:
            self._norms.append(grads.local_norms([param]))
        # The optimizer keeps its own states and options; it only sees a group with a single
        # parameter.
        with self._restricted_to(group, param):
            self.optimizer.step()
        param.grad = None

    @contextmanager
    def _restricted_to(self, group: int, param: Tensor) -> Iterator[None]:
        """Restrict the optimizer to one parameter inside the block."""
        # ``optimizer.step()`` updates all parameters that have gradients. Other gradients may exist
        # but are not reduced yet.
        for each in self.optimizer.param_groups:
            each["params"] = []
        self.optimizer.param_groups[group]["params"] = [param]
        try:
            yield
        finally:
            for each, params in zip(self.optimizer.param_groups, self._params, strict=True):
                each["params"] = params

    def grad_norm(self) -> Tensor:
        """Return the norm of the full model's gradient in this step, 0-dim, fp32. Every rank calls, before ``step``.

        Raises:
            RuntimeError: no parameter was updated, or ``computes_norm`` is False.
        """
        if not self._norms:
            raise RuntimeError("no gradient's norm was computed: pass computes_norm=True and call backward() first")
        return grads.total_norm(torch.stack(self._norms).sum(0))

    def step(self) -> None:
        """End the step. The parameters were already updated in backward.

        Raises:
            RuntimeError: no parameter was updated.
        """
        if not self._updated:
            raise RuntimeError("no parameter had a gradient since the last step(): call backward() first")
        self._updated.clear()
        self._norms.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: backward has freed the gradients. Training loops may call it."""
        del set_to_none

    def remove(self) -> None:
        """Remove the hooks. Backward accumulates gradients as usual afterwards."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups. A schedule sets the learning rates here."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def _hook(owner: weakref.ref[OptimizerInBackward], group: int) -> Callable[[Tensor], None]:
    """Return a hook that holds a weak reference to ``owner``.

    A strong reference would form a cycle through autograd hooks, which is never garbage-collected.
    """

    def update(param: Tensor) -> None:
        optimizer = owner()
        if optimizer is not None:
            optimizer._update(group, param)

    return update


def _require_no_gradient(param: Tensor) -> None:
    """Raise ``ValueError`` if ``param`` does not require a gradient or already has one.

    A gradient from before would be added to the first one that the hook sees.
    """
    if not param.requires_grad or param.grad is not None:
        raise ValueError(
            f"a parameter of shape {list(param.shape)} is frozen or has a gradient already: leave frozen ones out, and "
            "call zero_grad() first"
        )
