"""The optimizer of parameters that are sharded over data-parallel ranks (ZeRO stage 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from nxd_memopt.data_parallel.fully_sharded import UNIT
from nxd_memopt.optimizer.loss_scaler import LossScaler
from nxd_memopt.optimizer.sharded_parameters import Sharded, StoredParameter, require_matching
from nxd_memopt.optimizer.zero1 import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.data_shards import (
    common_shard_group,
    is_data_sharded,
    local_gradient,
    local_rows,
    replica_ranks,
    row_range,
)
from nxd_memopt.parallel_layers.utils import blocks_within, is_expert_parallel


class Zero3Optimizer(NeuronZero1Optimizer):
    """Updates the rows that ``shard_model`` left on this rank; ``NeuronZero1Optimizer``'s interface.

    Backward has reduced the gradients, so ``reduce_gradients`` only sums the sequence-parallel ones
    over tensor-parallel ranks and clips by the norm of the complete model. The update writes to the
    rows themselves, which the next forward gathers: ``step()`` has no collective but those of the
    norm. Optimizer states have the dtype of the rows (``shard_model``'s ``master_dtype``).

    Args:
        params: parameters or parameter groups of a sharded model; parameters with
            ``requires_grad=False`` are ignored.
        optimizer_class: optimizer class with the interface of torch.optim. It receives plain tensors
            with this rank's rows.
        grad_clipping: clip by ``max_norm``. ``grad_norm`` is computed in both cases.
        max_norm: default 1.0.
        loss_scaler: see ``NeuronZero1Optimizer``.
        defaults: passed to ``optimizer_class``.

    Raises:
        ValueError: a trained parameter is not sharded, or context parallelism is enabled.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        loss_scaler: LossScaler | None = None,
        **defaults: Any,
    ) -> None:
        # a group's parameters are read twice, and may be a generator
        groups = [{**each, "params": list(each["params"])} if isinstance(each, dict) else each for each in params]
        params = _parameters(groups)
        super().__init__(
            groups,
            optimizer_class,
            # Gradients and states have the dtype of the rows.
            optimizer_dtype=next((param.dtype for param in params if param.requires_grad), None),
            grad_clipping=grad_clipping,
            max_norm=max_norm,
            sharding_groups=_sharding_groups(params),
            loss_scaler=loss_scaler,
            **defaults,
        )

    @torch.no_grad()
    def _shard(self, param: nn.Parameter) -> Sharded:
        """Return the rows of ``param`` as a plain parameter in the same memory."""
        if not is_data_sharded(param):
            raise ValueError(
                f"a parameter of shape {list(param.shape)} is not sharded over data-parallel ranks: "
                "call data_parallel.shard_model before Zero3Optimizer is made"
            )
        # Shares the memory of the rows: the update of ``shard`` is the update of the model.
        shard: Any = nn.Parameter(local_rows(param).detach())
        source: Any = param
        # For the norm, which counts replicated elements once.
        shard.tensor_model_parallel = getattr(param, "tensor_model_parallel", False)
        shard.replicas = getattr(param, "replicas", 1)
        shard.expert_model_parallel = is_expert_parallel(param)
        shard.blocks = ()
        if getattr(param, "blocks", None):
            shard.blocks = blocks_within(source.blocks, *row_range(param))
        return Sharded(param, shard, param._version)

    @torch.no_grad()
    def reduce_gradients(self) -> Tensor:
        """Sum gradients over sequence shards and clip them; return the norm, 0-dim fp32."""
        self._require_shards()
        # A second call of a step changes nothing: the gradients are unscaled and clipped.
        is_new = any(each.param.grad is not None or each.shard.grad is None for each in self._sharded)
        if not is_new and self.grad_norm is not None:
            return self.grad_norm
        grads.allreduce_sequence_parallel_gradients([each.param for each in self._sharded])
        for each in self._sharded:
            _take_gradient(each)
        self.grad_norm = self._clip([cast(Tensor, each.shard.grad) for each in self._sharded])
        return self.grad_norm

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Update the rows. Parameters that a forward without backward left gathered are freed."""
        self._require_same_memory()
        super().update_parameters()
        # The next forward must gather the new rows, also in units that are still gathered.
        # Several parameters name one unit; freeing it again costs a look at its state.
        for each in self._sharded:
            unit = getattr(each.param, UNIT)()
            if unit is not None:
                unit.reshard()

    def _require_same_memory(self) -> None:
        """Follow rows that were moved, for example by ``load_state_dict(assign=True)``."""
        for each in self._sharded:
            rows = local_rows(each.param)
            if rows.data_ptr() != each.shard.data_ptr():
                each.shard.data = rows.detach()

    def _copy_outside_writes(self) -> None:
        """Writes to a sharded parameter are writes to the rows that are updated."""

    def _gather_parameters(self) -> None:
        """The next forward gathers the parameters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for each in self._sharded:
            each.shard.grad = None

    def stored_parameters(self) -> list[StoredParameter]:
        """Return the rows of each trained parameter."""
        self._require_shards()
        self._require_same_memory()
        index, size = self._sharding()
        ranks = parallel_state.get_data_parallel_size()
        return [
            StoredParameter(each.param, each.shard, index, size, replica_ranks(each.param, ranks))
            for each in self._sharded
        ]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ``state_dict()`` of the same rank; the model's rows are loaded with the model."""
        self._require_shards()
        require_matching(state_dict, self._sharded, self._sharding())
        self._require_same_memory()
        self.base_optimizer.load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        self._copy_options(self.base_optimizer.param_groups, self.param_groups)

    def nxd_state_dict(self) -> NoReturn:
        """Refuse: neuronx-distributed has no optimizer with this layout."""
        raise ValueError("neuronx-distributed's files per rank are those of zero1: save with save_training_state")

    def load_sharded_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the rows, which are the masters, are stored with the model."""
        raise ValueError("zero3 has no file per rank: use nxd_memopt.checkpoint.load_training_state")


def _take_gradient(each: Sharded) -> None:
    """Move the gradient from the parameter to its rows, so that it is summed and clipped once."""
    grad = local_gradient(each.param)
    if grad is None:
        # Zeros as in the other stages: weight decay and moments change without a gradient too.
        if each.shard.grad is None:
            each.shard.grad = torch.zeros_like(each.shard)
        return
    if each.shard.grad is not None:
        raise RuntimeError(
            f"backward gave a parameter of shape {list(each.param.shape)} a gradient after "
            "reduce_gradients(), which has clipped the first one: call update_parameters() or zero_grad() before"
        )
    each.shard.grad = grad
    each.param.grad = None


def _parameters(groups: list[Any]) -> list[Tensor]:
    params: list[Tensor] = []
    for group in groups:
        params += grads.parameters_of(group["params"] if isinstance(group, dict) else group)
    return params


def _sharding_groups(params: list[Tensor]) -> list[list[int]]:
    """Return the partition of the world into groups over which the parameters are sharded."""
    own = common_shard_group(param for param in params if is_data_sharded(param) and not is_expert_parallel(param))
    data_groups = parallel_state.get_data_parallel_replica_groups()
    if own is None:
        return [list(ranks) for ranks in data_groups]
    # Hybrid sharding: runs of ``size`` consecutive data-parallel ranks hold a replica each.
    size = own.size()
    groups: list[list[int]] = []
    for ranks in data_groups:
        for first in range(0, len(ranks), size):
            groups.append(ranks[first : first + size])
    return groups
