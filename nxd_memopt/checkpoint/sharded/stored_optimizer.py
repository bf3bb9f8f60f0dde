"""Finds the parameters, states and options that an optimizer stores, inside of wrapper optimizers and of ZeRO-1."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.ops.param_remainders import REMAINDER
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.optimizer.nxd_reading import OPTIONS_OF_THE_DEVICE
from nxd_memopt.optimizer.sharded_parameters import StoredParameter
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.data_shards import model_dtype, require_replicated

MASTER = "master"
"""Name of the master weights among the states."""


class StoredOptimizer:
    """One interface to a torch optimizer, to ``NeuronZero1Optimizer``, and to wrappers such as
    ``NxDOptimizer``.

    A wrapper is an optimizer with the wrapped optimizer as attribute ``optimizer``.

    Args:
        optimizer: the optimizer that the program uses.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = _unwrapped(optimizer)
        self._zero1: NeuronZero1Optimizer | None = None
        if isinstance(self._optimizer, NeuronZero1Optimizer):
            self._zero1 = self._optimizer

    @cached_property
    def parameters(self) -> list[StoredParameter]:
        """The tensors that the optimizer updates, by parameter.

        ZeRO-1 first cuts masters from parameters that were written to.
        """
        if self._zero1 is not None:
            return self._zero1.stored_parameters()
        # Without ZeRO-1 every data-parallel rank stores the full state of its tensor-parallel
        # shard.
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        require_replicated(
            params, f"a checkpoint of {type(self._optimizer).__name__}", "use data_parallel.Zero3Optimizer"
        )
        holders = tuple(range(parallel_state.get_data_parallel_size()))
        return [StoredParameter(param, param, 0, 1, holders) for param in params]

    @property
    def base(self) -> torch.optim.Optimizer:
        """The optimizer whose ``state`` has the states of ``parameters``."""
        if self._zero1 is None:
            return self._optimizer
        return self._zero1.base_optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups that the program and its learning-rate schedule use."""
        return self._optimizer.param_groups

    @property
    def steps(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose ``step`` writes to parameters, masters and states."""
        if self._zero1 is None:
            return [self._optimizer]
        return [self._optimizer, self.base]

    def require_all_states(self) -> None:
        """Refuse states that are not in ``base.state`` by parameter: a checkpoint would silently
        lack them.

        Raises:
            ValueError: a state belongs to no parameter, or an inner optimizer has the states.
        """
        base = self.base
        # Compare by identity: == of tensors is element-wise.
        known = {id(each.stored) for each in self.parameters}
        unknown = [key for key in base.state if id(key) not in known]
        if unknown:
            raise ValueError(
                f"{type(base).__name__} has {len(unknown)} of {len(base.state)} states that are of none of its "
                "parameters: pass the optimizer whose param_groups have what it updates"
            )
        # A wrapper that names its inner optimizer differently would look like an optimizer before
        # its first step.
        if known and not base.state and _has_states_elsewhere(base):
            raise ValueError(
                f"{type(base).__name__} has {len(known)} parameters and its attribute 'state' is empty, but an "
                "optimizer inside of it has states: pass that one, or name the attribute that holds it 'optimizer'"
            )

    def states_of(self, each: StoredParameter) -> Mapping[Any, Any]:
        """Return the states of one parameter by name."""
        return self.base.state.get(each.stored, {})

    def has_master(self, each: StoredParameter) -> bool:
        """Return whether the stored tensor has another dtype than the parameter and is to be
        saved.
        """
        if not self.saves_masters:
            return False
        # A shard in the parameter's dtype is another tensor, but has no bits that the parameter
        # lacks.
        return each.stored is not each.param and each.stored.dtype != model_dtype(each.param)

    @property
    def saves_masters(self) -> bool:
        """Whether masters, or their remainders, are to be saved."""
        return self._zero1 is None or self._zero1.save_master_weights

    def keeps_remainder(self, each: StoredParameter) -> bool:
        """Return whether a state has what the fp32 master has beyond the stored tensor."""
        return REMAINDER in self.states_of(each)

    def mark_masters_synced(self) -> None:
        """Treat the current parameters and masters as equal, after both were read from one
        checkpoint.
        """
        if self._zero1 is not None:
            self._zero1.mark_masters_synced()

    def finish_update(self) -> None:
        """Complete updates that would write to parameters, masters or states later."""
        if self._zero1 is not None:
            self._zero1.finish_update()

    def load_options(self, saved: list[Mapping[str, Any]]) -> None:
        """Restore the options of each group.

        Options of the device, such as ``capturable``, do not change.

        A learning rate keeps its type, tensor or number: a run on a GPU may use a tensor.
        """
        for group, options in zip(self.param_groups, saved, strict=True):
            for option, value in options.items():
                if option not in OPTIONS_OF_THE_DEVICE:
                    group[option] = _match_type(group.get(option), value)
        if self._zero1 is not None:
            self._zero1.copy_options()


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the innermost optimizer of nested wrappers."""
    # ``vars`` instead of ``getattr``: a wrapper's ``__getattr__`` may delegate to the optimizer
    # inside, which would then be asked for its own ``optimizer``.
    inner = vars(optimizer).get("optimizer")
    if isinstance(inner, torch.optim.Optimizer):
        return _unwrapped(inner)
    return optimizer


def _match_type(present: Any, value: Any) -> Any:
    """Return ``value`` as a tensor or a number, like ``present``."""
    if isinstance(present, Tensor):
        return torch.as_tensor(value, dtype=present.dtype, device=present.device)
    if isinstance(present, (int, float)) and isinstance(value, Tensor) and not value.dim():
        return value.item()
    return value


def _has_states_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an inner optimizer, or an overridden ``state_dict``, has states."""
    for value in vars(optimizer).values():
        if isinstance(value, torch.optim.Optimizer) and value.state:
            return True
    # torch's own ``state_dict`` reads ``state``, which is empty. Building it is skipped.
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return False
    return bool(optimizer.state_dict().get("state"))
