"""Builds the optimizer that ``neuronx_distributed_config`` asks for, with every reduction its gradients need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.optimizer.one_pass_adamw import for_this_device
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.trainer.background import poll_saves


class NxDOptimizer(torch.optim.Optimizer):
    """Reduces gradients over sequence- and data-parallel ranks, clips them, and lets ``optimizer`` update.

    Args:
        optimizer: holds parameters, groups and states.
        nxd_config: from ``neuronx_distributed_config``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, nxd_config: Mapping[str, Any]) -> None:
        # no super().__init__(): everything that it would create belongs to the wrapped optimizer
        self.optimizer = optimizer
        self.nxd_config = nxd_config
        self._grad_norm: Tensor | None = None
        parallel_state.gradient_ledger.track(self.params)

    def __repr__(self) -> str:
        return f"NxDOptimizer({self.optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: while being copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the whole model's gradient before clipping, fp32, 0-dim; ``None`` before the first step."""
        return self._grad_norm

    @property
    def params(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Reduce, clip, update; return what ``closure`` returns.

        Raises:
            ValueError, OSError: on every rank, when ``save_checkpoint(async_save=True)`` failed on one.
        """
        poll_saves()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        options = self.nxd_config["optimizer_config"]
        grads.allreduce_sequence_parallel_gradients(self.params)
        if not options["zero_one_enabled"]:
            grads.bucket_allreduce_gradients(self.params)
        if isinstance(self.optimizer, NeuronZero1Optimizer):
            self.optimizer.step()
            self._grad_norm = self.optimizer.grad_norm
        else:
            clip = options["max_grad_norm"] if options["grad_clipping"] else torch.inf
            self._grad_norm = grads.clip_grad_norm(self.params, clip)
            self.optimizer.step()
        return loss


def initialize_parallel_optimizer(
    nxd_config: Mapping[str, Any],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    parameters: Any,
    **defaults: Any,
) -> NxDOptimizer:
    """Build ``optimizer_class`` with the sharding and the precision that ``nxd_config`` asks for.

    Args:
        nxd_config: from ``neuronx_distributed_config``.
        parameters: parameters or parameter groups.
        defaults: for ``optimizer_class``.
    """
    options, precision = nxd_config["optimizer_config"], nxd_config["mixed_precision_config"]
    if not options["zero_one_enabled"] and not precision["use_master_weights"] and not precision["use_fp32_grad_acc"]:
        return NxDOptimizer(for_this_device(optimizer_class)(parameters, **defaults), nxd_config)
    optimizer = NeuronZero1Optimizer(
        parameters,
        optimizer_class,
        grad_clipping=options["grad_clipping"],
        max_norm=options["max_grad_norm"],
        sharding_groups=None if options["zero_one_enabled"] else _groups_of_one(),
        use_grad_acc_hook=precision["use_fp32_grad_acc"],
        higher_cc_precision=precision["use_fp32_grad_acc"],
        save_master_weights=precision["use_master_weights_in_ckpt"],
        **defaults,
    )
    return NxDOptimizer(optimizer, nxd_config)


def _groups_of_one() -> list[list[int]]:
    return [[rank] for rank in range(parallel_state.get_world_size())]
