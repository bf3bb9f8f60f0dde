"""The ZeRO-1 optimizer: any torch optimizer on this rank's shard of fp32 master weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.memory.weight_offload import weights_to_device
from nxd_memopt.optimizer.closures import loss_of
from nxd_memopt.optimizer.groups import (
    expert_sharding_groups,
    join_group,
    require_no_context_parallelism,
    require_tensor_parallel_groups,
)
from nxd_memopt.optimizer.loss_scaler import LossScaler
from nxd_memopt.optimizer.main_grad import accumulate_in, clear_main_grad
from nxd_memopt.optimizer.one_pass_adamw import for_this_device
from nxd_memopt.optimizer.rank_states import StatesInRankFiles
from nxd_memopt.optimizer.reduced_in_place import ReducedInPlace
from nxd_memopt.optimizer.sharded_parameters import (
    Sharded,
    StoredParameter,
    full_shapes,
    group_with,
    require_matching,
    require_same_trained,
    stored_shards,
)
from nxd_memopt.optimizer.sharding import all_gather_into, cut_blocks, cut_shard, reduce_scatter_mean
from nxd_memopt.parallel_layers import coordination, grads, parallel_state
from nxd_memopt.parallel_layers.data_shards import require_replicated
from nxd_memopt.parallel_layers.summed_gradients import observe
from nxd_memopt.parallel_layers.utils import is_expert_parallel, is_sharded
from nxd_memopt.pipeline.tied import sum_tied_gradients

# MiB. Large enough for full bandwidth, small compared with the gradients of a model.
_DEFAULT_BUCKET_MB = 128


class NeuronZero1Optimizer(StatesInRankFiles, torch.optim.Optimizer):
    """Shards optimizer states and fp32 masters over data-parallel ranks (ZeRO-1, arXiv:1910.02054).

    ``step()`` all-reduces the sequence-parallel gradients, reduce-scatters all gradients to their
    mean, clips by the norm of the complete model, updates this rank's elements with
    ``optimizer_class``, and all-gathers the parameters. With D ranks the states and masters of P
    parameters take 12 P / D bytes with Adam (4 bytes each for master, first and second moment).
    Results are exact for element-wise optimizers (Adam, SGD), but not for optimizers with
    per-matrix or per-tensor statistics (Muon, LAMB).

    A trained parameter without a gradient is treated as having a zero gradient, so ranks whose
    batches skip it (experts) run the same collectives. Outside writes to the parameters, such as
    the model's ``load_state_dict``, are copied to the masters; writes through ``param.data`` are
    not, because autograd does not count them.

    Args:
        params: parameters or parameter groups; parameters with ``requires_grad=False`` are ignored.
        optimizer_class: optimizer class with the interface of torch.optim. It receives groups of
            1-D shards, or of full shapes if the sharding group has one rank. On TorchNeuron
            ``nxd_memopt.optimizer.AdamW`` replaces ``torch.optim.AdamW``.
        optimizer_dtype: dtype of masters and states; default float32, or float64 if a parameter is
            float64. A dtype narrower than a parameter's rounds the parameter to it in each step.
        grad_clipping: clip by ``max_norm``. ``grad_norm`` is computed in both cases.
        max_norm: default 1.0.
        pin_layout: torch-xla option, accepted for compatibility and ignored.
        sharding_groups: a partition of the world's ranks; default the data-parallel groups. Groups
            of one rank give unsharded masters and no reduction over data-parallel ranks.
        grad_norm_groups: must be the tensor-parallel groups, over which the norm is always summed.
        lazy_init: shard at ``init_zero()`` instead of in the constructor.
        bucket_cap_mb_all_gather: MiB of one rank's all-gather input; 0 means 128 / group size.
        bucket_cap_mb_reduce_scatter: MiB of gradients in one reduce-scatter; 0 means 128.
        use_grad_acc_hook: accumulate gradients of narrower parameters in ``param.main_grad``, in
            ``optimizer_dtype``.
        save_master_weights: put masters of another dtype than their parameters into ``state_dict``.
            Without them a resumed run starts from the rounded parameters.
        higher_cc_precision: reduce gradients in ``optimizer_dtype``.
        loss_scaler: the scaler of the loss, for fp16 parameters: gradients are unscaled before
            they are clipped, and a step with overflow on any rank updates nothing on all ranks.
        sum_tied: sum the gradients of weights that stages of a pipeline share (``pipeline.tied``), after
            their reduction.
        defaults: passed to ``optimizer_class``.

    Raises:
        ValueError: a group does not match the process groups, or context parallelism is enabled:
            gradients would not be reduced over context-parallel ranks.
    """

    inited = False

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: Sequence[Sequence[int]] | None = None,
        grad_norm_groups: Sequence[Sequence[int]] | None = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: float = 0,
        bucket_cap_mb_reduce_scatter: float = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = True,
        higher_cc_precision: bool = False,
        loss_scaler: LossScaler | None = None,
        sum_tied: bool = False,
        **defaults: Any,
    ) -> None:
        del pin_layout
        require_no_context_parallelism()
        require_tensor_parallel_groups(grad_norm_groups)
        super().__init__(params, defaults)
        observe(grads.parameters_of(self))
        self.optimizer_class = optimizer_class
        # torch.float32 is the initial value: bf16 and fp16 parameters get fp32 masters, float64
        # parameters float64 masters.
        dtypes = [param.dtype for param in grads.parameters_of(self) if param.requires_grad]
        self.optimizer_dtype = optimizer_dtype or functools.reduce(torch.promote_types, dtypes, torch.float32)
        self._rounds_parameters = optimizer_dtype is not None
        # with an infinite limit the norm is computed, and the gradients are left unchanged
        self.max_norm = math.inf
        if grad_clipping:
            self.max_norm = 1.0 if max_norm is None else max_norm
        self.sharding_groups = [
            list(ranks) for ranks in sharding_groups or parallel_state.get_data_parallel_replica_groups()
        ]
        self.sharding_group = join_group(self.sharding_groups)
        # Expert-parallel ranks have different experts: experts are sharded over fewer ranks.
        self.expert_sharding_groups = expert_sharding_groups(self.sharding_groups)
        self.expert_sharding_group = join_group(self.expert_sharding_groups)
        # The all-gather option counts one rank's input, ``_gather_bytes`` the gathered output.
        size = backend.group_size(self.sharding_group)
        self._gather_bytes = int((bucket_cap_mb_all_gather * size or _DEFAULT_BUCKET_MB) * 2**20)
        self._reduce_bytes = int((bucket_cap_mb_reduce_scatter or _DEFAULT_BUCKET_MB) * 2**20)
        self.use_grad_acc_hook = use_grad_acc_hook
        self.higher_cc_precision = higher_cc_precision
        self.save_master_weights = save_master_weights
        self.loss_scaler = loss_scaler
        self._sums_tied = sum_tied
        self.grad_norm: Tensor | None = None
        """Gradient norm of the complete model before clipping, 0-dim fp32; None before a step."""
        self._hooks: list[Any] = []
        self._sharded: list[Sharded] = []
        self._reduced_in_place = ReducedInPlace()
        if not lazy_init:
            self.init_zero()

    # Shards

    def init_zero(self) -> None:
        """Shard the current parameters and start with new optimizer states."""
        # A second call shards again, for example after parameters were frozen. Hooks of the first
        # call would leave no gradient for the new ones to add.
        for hook in self._hooks:
            hook.remove()
        weights_to_device(param for group in self.param_groups for param in group["params"])
        self._sharded = []
        self._reduced_in_place = ReducedInPlace()
        self._hooks = []
        self.base_optimizer = for_this_device(self.optimizer_class)(
            [self._shard_group(group) for group in self.param_groups], **self.defaults
        )
        self.inited = True
        self._copy_options(self.base_optimizer.param_groups, self.param_groups)

    def _shard_group(self, group: dict[str, Any]) -> dict[str, Any]:
        sharded = [self._shard(param) for param in group["params"] if param.requires_grad]
        self._sharded += sharded
        if self.use_grad_acc_hook:
            self._hooks += accumulate_in(self.optimizer_dtype, [each.param for each in sharded], self)
        return {**group, "params": [each.shard for each in sharded]}

    @torch.no_grad()
    def _shard(self, param: nn.Parameter) -> Sharded:
        """Return the master shard of ``param``, 1-D of ceil(n / D) elements, zeros at the end."""
        require_replicated([param], "NeuronZero1Optimizer", "use data_parallel.Zero3Optimizer")
        # Without sharding and with masters of the same dtype a copy would only cost memory: the
        # optimizer updates the parameter itself.
        if self._shares_parameter(param):
            return Sharded(param, param, param._version)
        wide = torch.promote_types(param.dtype, self.optimizer_dtype)
        if wide != self.optimizer_dtype and not self._rounds_parameters:
            raise ValueError(
                f"a parameter of dtype {param.dtype} is added to masters of dtype {self.optimizer_dtype}, which would "
                f"round it: pass it when the optimizer is made, or pass optimizer_dtype={wide}"
            )
        group = self._group_of(param)
        shard: Any = nn.Parameter(self._new_master(param, cut_shard(param.detach(), group)))
        # For ``clip_grad_norm``, which counts replicated elements once.
        shard.tensor_model_parallel = is_sharded(param)
        shard.replicas = getattr(param, "replicas", 1)
        shard.expert_model_parallel = is_expert_parallel(param)
        shard.shared = getattr(param, "shared", False)
        shard.blocks = cut_blocks(param, group)
        return Sharded(param, shard, param._version)

    def _group_of(self, param: Tensor) -> ProcessGroup | None:
        """Return the group over which ``param`` is sharded."""
        return self.expert_sharding_group if is_expert_parallel(param) else self.sharding_group

    def _by_group(self, each_of: Iterable[Sharded]) -> Iterator[tuple[ProcessGroup | None, list[Sharded]]]:
        """Yield the parameters of each sharding group: all but the experts, then these."""
        everything = list(each_of)
        for group, is_expert in ((self.sharding_group, False), (self.expert_sharding_group, True)):
            yield group, [each for each in everything if is_expert_parallel(each.param) == is_expert]

    def _shares_parameter(self, param: nn.Parameter) -> bool:
        """Return whether the optimizer updates ``param`` itself."""
        return param.dtype == self.optimizer_dtype and backend.group_size(self._group_of(param)) == 1

    def _new_master(self, param: nn.Parameter, values: Tensor) -> Tensor:
        """Return a copy of ``values``, this rank's elements of ``param``, in the optimizer's dtype."""
        del param
        return values.to(self.optimizer_dtype, copy=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.inited:
            self.base_optimizer.add_param_group(self._shard_group(self.param_groups[-1]))
            self._copy_options(self.base_optimizer.param_groups, self.param_groups)

    @staticmethod
    def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        """Copy all options.

        Schedulers write to ``self.param_groups``, not to the base optimizer's.
        """
        for from_group, to_group in zip(source, target, strict=True):
            to_group.update({name: value for name, value in from_group.items() if name != "params"})

    # A step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Reduce gradients, clip, update, all-gather; return what ``closure`` returns."""
        loss = loss_of(closure)
        # Per step and parameter element: one reduce-scatter of the gradients, the all-reduces of
        # the (scalar) norm, an update of 1/D of the elements, and one all-gather of the parameters.
        self.reduce_gradients()
        self.update_parameters()
        return loss

    @torch.no_grad()
    def reduce_gradients(self) -> Tensor:
        """Run the first half of ``step()``: reduce and clip the gradients. Return ``grad_norm``."""
        self._require_shards()
        if self._reduced_in_place.are_current():
            assert self.grad_norm is not None
            return self.grad_norm
        # Sum over tensor-parallel ranks (sequence shards), then average over data-parallel ranks:
        # each reduced gradient has ceil(n / D) elements, [A_1 .. A_D] -> A_i.
        params = [each.param for each in self._sharded]
        grads.allreduce_sequence_parallel_gradients(params)
        full = {id(param): self._full_gradient(param) for param in params}
        reduced: dict[int, Tensor] = {}
        for group, sharded in self._by_group(self._sharded):
            keys = [id(each.param) for each in sharded]
            shards = reduce_scatter_mean([full.pop(key) for key in keys], group, bucket_bytes=self._reduce_bytes)
            reduced |= zip(keys, shards, strict=True)
        means = [self._mean(param, reduced[id(param)]) for param in params]
        if self._sums_tied:
            # The stages have other tensors in their buckets, so that a reduction may add up the ranks in another
            # order on each. A sum of two after it is equal on both: copies of a weight never differ.
            sum_tied_gradients(params, means)
        self.grad_norm = self._clip(means)
        if self._clips or self._sums_tied or self.loss_scaler is not None:
            self._reduced_in_place.record(self._sharded)
        return self.grad_norm

    def _mean(self, param: Tensor, reduced: Tensor) -> Tensor:
        """Return the mean over all data-parallel ranks, of a mean over the sharding group."""
        # The gradient of an expert has the tokens of all expert-parallel ranks: a sum over them.
        ranks = backend.group_size(self.sharding_group) // backend.group_size(self._group_of(param))
        return reduced if ranks == 1 else reduced / ranks

    def _clip(self, reduced: list[Tensor]) -> Tensor:
        """Clip this rank's elements of the gradients; return the norm before."""
        for each, grad in zip(self._sharded, reduced, strict=True):
            # The reduction runs in the gradients' dtype; only this rank's 1/D of the elements is
            # cast to fp32.
            each.shard.grad = grad.to(self.optimizer_dtype)
        shards = [each.shard for each in self._sharded]
        # Before clipping: the norm and ``max_norm`` are of the gradients without the loss scale.
        if self.loss_scaler is not None:
            self.loss_scaler.unscale([shard.grad for shard in shards if shard.grad is not None])
        if not self._clips:
            # A factor of infinity / norm would be NaN, for all parameters, if one gradient is infinite.
            return grads.get_grad_norm(shards, sharding_group=self.sharding_group)
        return grads.clip_grad_norm(shards, self.max_norm, sharding_group=self.sharding_group)

    @property
    def _clips(self) -> bool:
        return math.isfinite(self.max_norm)

    def _full_gradient(self, param: Tensor) -> Tensor:
        """Return the unreduced gradient, or zeros: collectives need equal shapes on all ranks."""
        grad = grads.gradient_of(param)
        if grad is None:
            # a collective needs one dtype too: with the hook the other ranks pass ``main_grad``
            dtype = self.optimizer_dtype if self.use_grad_acc_hook else None
            grad = torch.zeros_like(param, dtype=dtype)
        if self.higher_cc_precision:
            grad = grad.to(self.optimizer_dtype)
        return grad

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Run the second half of ``step()``: update masters and all-gather the parameters.

        With a loss scaler, a step with overflow only releases the gradients and lowers the scale.
        """
        if self.loss_scaler is None or not self.loss_scaler.update():
            self._copy_outside_writes()
            self.copy_options()
            self.base_optimizer.step()
            self._gather_parameters()
        # Release the reduced gradients, 1/D of the elements in fp32, before the next forward needs
        # the memory for activations.
        for each in self._sharded:
            if each.shard is not each.param:
                each.shard.grad = None
        self._reduced_in_place.clear()

    def finish_update(self) -> None:
        """Complete updates that the last step has left to the next forward; here there are none.

        Call it before parameters are read or written outside of a step.
        """

    def _before_masters_are_used(self) -> None:
        """Wait for updates of the masters that are still under way; here there are none."""

    @torch.no_grad()
    def _copy_outside_writes(self) -> None:
        """Copy outside writes to parameters into the masters."""
        weights_to_device(each.param for each in self._sharded)
        for index, each in enumerate(self._sharded):
            if each.was_written_to:
                self._before_masters_are_used()
                self._copy_to_master(index, cut_shard(each.param.detach(), self._group_of(each.param)))
                each.mark_equal()

    def _copy_to_master(self, index: int, written: Tensor) -> None:
        """Copy this rank's elements of a written parameter to the master of parameter number ``index``."""
        # A master element that rounds to the written value keeps its lower bits: a model that is
        # loaded after the optimizer does not round the masters.
        shard = self._sharded[index].shard
        written = written.to(shard.device)
        shard.copy_(torch.where(shard.to(written.dtype) == written, shard, written))

    def _gather_parameters(self) -> None:
        """All-gather the masters into the parameters, cast to the parameters' dtypes."""
        # Parameters that the optimizer updates in place (no sharding, no masters) need no copy.
        separate = [each for each in self._sharded if each.shard is not each.param]
        for group, sharded in self._by_group(separate):
            params = [each.param.detach() for each in sharded]
            shards = [each.shard.detach() for each in sharded]
            all_gather_into(params, shards, group, bucket_bytes=self._gather_bytes)
        for each in separate:
            each.mark_equal()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._reduced_in_place.clear()
        for group in self.param_groups:
            clear_main_grad(group["params"], set_to_none=set_to_none)

    def _require_shards(self) -> None:
        """Raise an error if the parameters are not sharded, or other ones require gradients now."""
        if not self.inited:
            raise RuntimeError("parameters are not sharded yet: call init_zero() before the first step")
        require_same_trained(self.param_groups, self._sharded)

    # Saving and loading

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return this rank's states and masters by parameter and options by group, as plain values.

        Entries: ``state`` and ``param_groups`` of ``optimizer_class``, ``sharded_master_weights``,
        ``shape_info`` (full shapes), ``sharding`` (``[rank, size]``).
        """
        self._require_shards()
        # Updates that are under way have the options of their step.
        self._before_masters_are_used()
        self._copy_outside_writes()
        self.copy_options()
        # A master in the parameter's dtype equals the parameter: it is not stored.
        masters: dict[int, Tensor] = {}
        if self.save_master_weights:
            for i, each in enumerate(self._sharded):
                if each.param.dtype != self.optimizer_dtype:
                    masters[i] = self._master(i)
        return {
            **self.base_optimizer.state_dict(),
            "sharded_master_weights": masters,
            "shape_info": full_shapes(self._sharded),
            "sharding": self._sharding(),
        }

    def _master(self, index: int) -> Tensor:
        """Return the master of parameter number ``index``."""
        return self._sharded[index].shard.detach()

    def _set_master(self, index: int, values: Tensor) -> None:
        """Write to the master of parameter number ``index``."""
        self._sharded[index].shard.copy_(values)

    def stored_parameters(self) -> list[StoredParameter]:
        """Return the stored tensor of each trained parameter, equal to the parameter now."""
        self._require_shards()
        self._before_masters_are_used()
        self._copy_outside_writes()
        return stored_shards(self._sharded, self.sharding_groups, self.expert_sharding_groups)

    def mark_masters_synced(self) -> None:
        """Treat parameters and masters as equal: both were read from one checkpoint."""
        for each in self._sharded:
            each.mark_equal()

    def copy_options(self) -> None:
        """Apply the current options of ``param_groups`` to the updates."""
        self._copy_options(self.param_groups, self.base_optimizer.param_groups)

    def _sharding(self) -> list[int]:
        """Return ``[rank, size]`` of this rank in its sharding group."""
        rank = parallel_state.get_global_rank()
        ranks = group_with(rank, self.sharding_groups)
        return [ranks.index(rank), len(ranks)]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ``state_dict()`` of the same rank.

        Load the model's parameters first. Every rank calls.

        Masters that the state lacks are cut from the current parameters. Masters in the state
        overwrite the parameters.

        Raises:
            ValueError: on every rank, if it is of another rank, number of ranks, or other shapes.
        """
        self._require_shards()
        with coordination.raise_together("loading the optimizer"):
            require_matching(state_dict, self._sharded, self._sharding())
        self._before_masters_are_used()
        weights_to_device(each.param for each in self._sharded)
        masters = state_dict["sharded_master_weights"]
        for i, each in enumerate(self._sharded):
            # A state without masters (``save_master_weights=False``) continues from the rounded
            # parameters. Those of the state may be this optimizer's own tensors.
            if i not in masters and each.shard is not each.param:
                self._set_master(i, cut_shard(each.param.detach(), self._group_of(each.param)))
        self.base_optimizer.load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        self._copy_options(self.base_optimizer.param_groups, self.param_groups)
        for i, master in masters.items():
            self._set_master(i, master)
        self._gather_parameters()
