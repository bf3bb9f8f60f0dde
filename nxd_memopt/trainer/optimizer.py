"""Builds the optimizer that ``neuronx_distributed_config`` asks for, with every reduction its gradients need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.optimizer.groups import require_no_context_parallelism
from nxd_memopt.optimizer.one_pass_adamw import for_this_device
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.summed_gradients import observe
from nxd_memopt.trainer.background import poll_saves


class NxDOptimizer(torch.optim.Optimizer):
    """Reduces gradients over sequence- and data-parallel ranks, clips them, and steps the wrapped
    ``optimizer``.

    Args:
        optimizer: the optimizer with parameters, groups and states.
        nxd_config: configuration from ``neuronx_distributed_config``.

    Raises:
        ValueError: context parallelism is enabled: gradients are not reduced over its ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, nxd_config: Mapping[str, Any]) -> None:
        require_no_context_parallelism()
        # No super().__init__(): the wrapped optimizer has everything that it would create, and
        # parameter groups of its own would differ from the wrapped ones after the first change.
        self.optimizer = optimizer
        self.nxd_config = nxd_config
        self._grad_norm: Tensor | None = None
        observe(self.params)

    def __repr__(self) -> str:
        return f"NxDOptimizer({self.optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet, while the object is copied: avoid infinite recursion
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # torch.optim.Optimizer's have the groups and states alone, which are the wrapped optimizer's.
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def grad_norm(self) -> Tensor | None:
        """Gradient norm of the complete model before clipping, 0-dim fp32, or None before the
        first step.
        """
        return self._grad_norm

    @property
    def params(self) -> list[Tensor]:
        """All parameters of the optimizer, in the order of the groups."""
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
            ValueError, OSError: on every rank, if ``save_checkpoint(async_save=True)`` failed on
                one.
        """
        # Errors of a save are raised here on every rank at the same step, before any collective of
        # the step could wait for a rank that has stopped.
        poll_saves()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        options = self.nxd_config["optimizer_config"]
        # ZeRO-1 reduces over data-parallel ranks itself (reduce-scatter). Masters without ZeRO-1
        # have groups of one rank, so the gradients are all-reduced here.
        grads.allreduce_sequence_parallel_gradients(self.params)
        if not options["zero_one_enabled"]:
            grads.bucket_allreduce_gradients(self.params)
        # ``NeuronZero1Optimizer`` clips in its own step, on shards.
        if isinstance(self.optimizer, NeuronZero1Optimizer):
            self.optimizer.step()
            self._grad_norm = self.optimizer.grad_norm
        else:
            if options["grad_clipping"]:
                self._grad_norm = grads.clip_grad_norm(self.params, options["max_grad_norm"])
            else:
                self._grad_norm = grads.get_grad_norm(self.params)
            self.optimizer.step()
        return loss


def initialize_parallel_optimizer(
    nxd_config: Mapping[str, Any],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    parameters: Any,
    **defaults: Any,
) -> NxDOptimizer:
    """Build ``optimizer_class`` with the sharding and precision of ``nxd_config``.

    Args:
        nxd_config: configuration from ``neuronx_distributed_config``.
        optimizer_class: a torch optimizer class.
        parameters: parameters or parameter groups.
        defaults: passed to ``optimizer_class``.
    """
    # Masters and fp32 accumulation are features of ``NeuronZero1Optimizer``; with groups of one
    # rank it has them without sharding.
    options = nxd_config["optimizer_config"]
    precision = nxd_config["mixed_precision_config"]
    uses_fp32 = precision["use_master_weights"] or precision["use_fp32_grad_acc"]
    if not options["zero_one_enabled"] and not uses_fp32:
        return NxDOptimizer(for_this_device(optimizer_class)(parameters, **defaults), nxd_config)
    # None selects the data-parallel groups.
    sharding_groups: list[list[int]] | None = None
    if not options["zero_one_enabled"]:
        sharding_groups = [[rank] for rank in range(parallel_state.get_world_size())]
    optimizer = NeuronZero1Optimizer(
        parameters,
        optimizer_class,
        grad_clipping=options["grad_clipping"],
        max_norm=options["max_grad_norm"],
        sharding_groups=sharding_groups,
        use_grad_acc_hook=precision["use_fp32_grad_acc"],
        higher_cc_precision=precision["use_fp32_grad_acc"],
        save_master_weights=precision["use_master_weights_in_ckpt"],
        **defaults,
    )
    return NxDOptimizer(optimizer, nxd_config)
