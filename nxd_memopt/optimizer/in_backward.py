"""Runs the optimizer inside backward: each gradient is used and freed as soon as it is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.parallel_layers import grads
from nxd_memopt.parallel_layers.parallel_state import gradient_ledger


class OptimizerInBackward:
    """Step ``optimizer`` for each parameter when backward has made its gradient; the model's gradients never coexist.

    It saves the bytes of all gradients but the largest (2 a parameter in bf16), for one backward a step: gradients
    cannot be accumulated, nor clipped by their common norm. Those of sequence shards are first summed over the
    tensor-parallel ranks, and all are averaged over the data-parallel ranks, parameter by parameter.

    ``torchtune.training.memory.OptimizerInBackwardWrapper`` does the same with an optimizer for each parameter; here it
    is one, whose groups, state and learning-rate schedule are as without this. Keep this object: when it is gone,
    backward makes gradients as before.

    Args:
        optimizer: updates each parameter by its own gradient alone, as SGD, Adam and their like do.

    Raises:
        ValueError: a parameter does not require a gradient, or has one already.

    Example::

        optimizer = OptimizerInBackward(AdamW(model.parameters(), lr=1e-5))
        model(ids, labels=ids).loss.backward()  # the parameters are updated
        optimizer.step()                        # ends the step
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._params = [list(group["params"]) for group in optimizer.param_groups]
        self._updated: set[Tensor] = set()
        gradient_ledger.track(param for params in self._params for param in params)
        self._hooks = []
        for i, params in enumerate(self._params):
            for param in params:
                _require_fresh(param)
                self._hooks.append(param.register_post_accumulate_grad_hook(_hook(weakref.ref(self), i)))

    def _update(self, group: int, param: Tensor) -> None:
        if param in self._updated:
            raise RuntimeError(
                f"a second gradient of a parameter of shape {list(param.shape)} before step(): one backward a step, "
                "gradients cannot be accumulated"
            )
        self._updated.add(param)
        grads.allreduce_sequence_parallel_gradients([param])
        grads.bucket_allreduce_gradients([param])
        with self._only(group, param):
            self.optimizer.step()
        param.grad = None

    @contextmanager
    def _only(self, group: int, param: Tensor) -> Iterator[None]:
        """The optimizer sees one parameter."""
        for i, each in enumerate(self.optimizer.param_groups):
            each["params"] = [param] if i == group else []
        try:
            yield
        finally:
            for each, params in zip(self.optimizer.param_groups, self._params, strict=True):
                each["params"] = params

    def step(self) -> None:
        """End the step, in whose backward the parameters were updated.

        Raises:
            RuntimeError: none was.
        """
        if not self._updated:
            raise RuntimeError("no parameter had a gradient since the last step(): call backward() first")
        self._updated.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is left to clear; for training loops that call it."""
        del set_to_none

    def remove(self) -> None:
        """Let backward make gradients as before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's, so that a schedule can set their learning rates."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def _hook(owner: weakref.ref[OptimizerInBackward], group: int) -> Callable[[Tensor], None]:
    """Parameters do not keep their optimizer alive: a cycle through autograd's hooks would never be collected."""

    def update(param: Tensor) -> None:
        optimizer = owner()
        if optimizer is not None:
            optimizer._update(group, param)

    return update


def _require_fresh(param: Tensor) -> None:
    if not param.requires_grad or param.grad is not None:
        raise ValueError(
            f"a parameter of shape {list(param.shape)} has requires_grad={param.requires_grad} and "
            f"{'no' if param.grad is None else 'a'} gradient: leave frozen ones out, and call zero_grad() first"
        )
