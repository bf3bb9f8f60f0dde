"""The ZeRO-1 optimizer with fp32 masters and moments in host memory, exact AdamW on the device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import HostTransfers, backend
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.memory.recompute import layer_units
from nxd_memopt.ops.param_remainders import REMAINDER, join, remainder_of
from nxd_memopt.optimizer.sharding import all_gather_into
from nxd_memopt.optimizer.streamed_adamw import PlacedStates, StreamedAdamW
from nxd_memopt.optimizer.zero1 import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import grads
from nxd_memopt.parallel_layers.utils import padded_size
from nxd_memopt.parallel_layers.wrapping import Wrapper, is_wrapped, wrap_forward, wrapper_of
from nxd_memopt.planner.sizes.states import CHUNK_ELEMENTS, RESIDENT_ELEMENTS, STAGING_BYTES, stream_bytes


class OffloadedZero1Optimizer(NeuronZero1Optimizer):
    """AdamW whose fp32 masters and moments are in host memory between steps, 12 or 10 bytes per parameter.

    Results equal ``NeuronZero1Optimizer``'s with this library's ``AdamW`` on a GPU bit by bit, for
    every fraction; with ``store_param_remainders`` but for the last bits of few masters. Gradients are
    reduced, measured and clipped on the device as there, but they stay in their own dtype until a chunk
    is updated, so a step needs no second copy of them in fp32.

    Args:
        params: parameters or parameter groups.
        optimizer_offload_fraction: part of the elements whose states are on the host, in [0, 1]
            (Megatron's name); rounded up to a whole parameter.
        staging_bytes: device memory for states on their way. More of it lets more of the next
            step's states arrive during forward and backward.
        transfers: copies between device and host; default the backend's.
        pool: ledger of the host memory that is used.
        chunk_elements: elements of each state that travel together.
        resident_elements: states of parameters with fewer elements stay on the device.
        store_param_remainders: of masters, keep only the 16 bits that the bf16 parameters lack
            (Megatron's name): 10 bytes per parameter instead of 12, with the same arithmetic; about
            one of 131,072 updated masters loses its last bit (``ops.param_remainders``). A parameter
            that is not sharded and is written to outside of a step loses its 16 bits in all elements.
        options: other options of ``NeuronZero1Optimizer``, and ``lr``, ``betas``, ``eps`` and
            ``weight_decay`` of AdamW.

    Raises:
        ValueError: the device has no copies that overlap with its work, a parameter is wider than
            fp32, or not bf16 with ``store_param_remainders``, a loss scaler is given, or the host's or
            the device's memory is too small.
    """

    def __init__(
        self,
        params: Any,
        *,
        optimizer_offload_fraction: float = 1.0,
        staging_bytes: int = STAGING_BYTES,
        transfers: HostTransfers | None = None,
        pool: HostPool | None = None,
        chunk_elements: int = CHUNK_ELEMENTS,
        resident_elements: int = RESIDENT_ELEMENTS,
        store_param_remainders: bool = False,
        **options: Any,
    ) -> None:
        transfers = transfers or backend.host_transfers()
        if transfers is None:
            raise ValueError(f"optimizer_offload_fraction {backend.host_transfers_refusal()}: leave it out")
        if options.get("loss_scaler") is not None:
            raise ValueError("optimizer_offload_fraction does not scale losses: train in bf16 (precision bf16-mixed)")
        self._transfers = transfers
        self._pool = pool or HostPool()
        self._fraction = optimizer_offload_fraction
        self._staging_bytes = staging_bytes
        self._chunk_elements = chunk_elements
        self._resident_elements = resident_elements
        self._has_remainders = store_param_remainders
        self._has_warned = False
        self._layer_wrappers: list[Wrapper] = []
        self._deferred: tuple[Sequence[nn.Module], Sequence[nn.Module]] = ((), ())
        super().__init__(params, StreamedAdamW, optimizer_dtype=torch.float32, **options)

    def init_zero(self) -> None:
        if self.inited:
            # Masters are cut from the parameters, which a step may have left to be updated.
            self.finish_update()
            self._free_states()
        trained = [param for group in self.param_groups for param in group["params"] if param.requires_grad]
        for param in trained:
            if torch.promote_types(param.dtype, torch.float32) != torch.float32:
                raise ValueError(
                    f"optimizer_offload_fraction keeps fp32 states, got a parameter of dtype {param.dtype}"
                )
            if self._has_remainders and param.dtype != torch.bfloat16:
                raise ValueError(
                    f"store_param_remainders keeps what fp32 masters have beyond bf16 parameters, got a parameter of "
                    f"dtype {param.dtype}: leave it out, or train in bf16"
                )
        sizes: list[int] = []
        for param in trained:
            ranks = backend.group_size(self._group_of(param))
            sizes.append(padded_size(param.numel(), ranks) // ranks)
        self._states = PlacedStates(
            sizes,
            fraction=self._fraction,
            resident_elements=self._resident_elements,
            param_remainders=self._has_remainders,
        )
        self._states.allocate(
            self._transfers,
            self._pool,
            streaming_bytes=stream_bytes(
                self._states.host_elements,
                chunk_elements=self._chunk_elements,
                staging_bytes=self._staging_bytes,
                element_bytes=self._states.element_bytes,
            ),
        )
        self._outputs: list[Tensor] = []
        self.optimizer_class = functools.partial(
            StreamedAdamW,
            states=self._states,
            outputs=self._outputs,
            transfers=self._transfers,
            staging_bytes=self._staging_bytes,
            chunk_elements=self._chunk_elements,
        )
        super().init_zero()
        self.base_optimizer.on_update = self._end_update
        layers, after_layers = self._deferred
        if layers:
            self.update_in_forward(layers, after_layers=after_layers)

    def _free_states(self) -> None:
        """Free the states before new ones are allocated: the host may not have room for both."""
        # Until then the optimizer is one that has no shards yet, also if the allocation fails.
        self.inited = False
        self._sharded = []
        self._outputs = []
        del self.base_optimizer
        self._states.free(self._pool)

    def update_in_forward(self, layers: Sequence[nn.Module], *, after_layers: Sequence[nn.Module] = ()) -> None:
        """Leave the updates of the layers to the next forward, which waits for one layer at a time.

        The states of the later layers then arrive while the earlier ones run. Until the forward,
        the parameters of a step whose ``step`` has returned are those from before it, and its
        gradients stay allocated. ``finish_update`` completes the step; saving, the next ``step``, and
        ``state_dict`` and ``load_state_dict`` of the model call it.

        All other parameters, such as the embedding's, are updated in ``step``. The order of the
        optimizer's parameters and groups does not matter: updates run in the order of the forward.

        Args:
            layers: the model's decoder layers in the order of forward, after ``apply_memory``: the
                first layer of a recompute chunk runs, and waits for, all layers of the chunk. Their
                parameters must be used in their forwards only.
            after_layers: modules whose parameters are used only after the last layer has begun,
                ``ParallelCausalLM.modules_after_layers()``: they are updated with it. A tied head is
                none of them: the embedding reads its weight before the layers.

        Raises:
            ValueError: the parameters are sharded over data-parallel ranks, or another optimizer
                updates the layers in their forward.
        """
        if backend.group_size(self.sharding_group) > 1:
            raise ValueError("update_in_forward needs unsharded parameters: an all-gather needs all of them at once")
        if any(is_wrapped(layer, "weights") for layer in layers):
            raise ValueError("update_in_forward needs all weights on the device: turn cpu_offloading_weights off")
        units = layer_units(layers)
        self._require_no_other_optimizer(units)
        numbers = {id(each.param): index for index, each in enumerate(self._sharded) if index not in self._states.small}
        modules: list[Sequence[nn.Module]] = [*units[:-1], [*units[-1], *after_layers]]
        params = [{id(param) for module in unit for param in module.parameters()} for unit in modules]
        self.base_optimizer.defer([{numbers[each] for each in unit & numbers.keys()} for unit in params])
        for number, unit in enumerate(units):
            wrapper = functools.partial(functools.partial, self._run_layer, number)
            wrap_forward(unit[0], "optimizer", wrapper)
            self._layer_wrappers.append(wrapper)
        # Weights that are copied or replaced between a step and the next forward.
        for module in (*layers, *after_layers):
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_state_dict)
        self._deferred = (layers, after_layers)

    def _require_no_other_optimizer(self, units: Sequence[Sequence[nn.Module]]) -> None:
        """Raise ``ValueError`` if the forward of a layer completes the updates of another optimizer."""
        for number, unit in enumerate(units):
            wrapper = wrapper_of(unit[0], "optimizer")
            if wrapper is not None and not any(wrapper is own for own in self._layer_wrappers):
                raise ValueError(
                    f"layer unit {number} of {len(units)} completes the updates of another optimizer in its forward, "
                    "which update_in_forward would replace: give one optimizer all parameters, or call "
                    "update_in_forward of one optimizer only"
                )

    def _before_state_dict(self, layer: nn.Module, *_: Any) -> None:
        del layer
        self.base_optimizer.finish()

    def pace_backward(self, layers: Sequence[nn.Module]) -> None:
        """Keep the host at most some layers ahead of the device in backward, so that states keep arriving.

        A host that has launched as many kernels as the device takes, about 1,000, waits inside
        CUDA, and the threads that queue copies wait with it: for 0.35 s in each backward of
        LLaMA-3-8B on an H200, in which the link was idle.

        Args:
            layers: the model's decoder layers in the order of forward, after ``apply_memory``.
        """
        for unit in layer_units(layers):
            wrap_forward(unit[0], "pace", functools.partial(functools.partial, self._run_paced))

    def finish_update(self) -> None:
        """Complete the step whose updates were left to the next forward, and wait for the host's states."""
        self.base_optimizer.synchronize()

    def _run_layer(self, unit: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``forward`` of the first layer of a unit, after the updates of the unit's weights."""
        self.base_optimizer.finish(unit)
        return forward(*args, **kwargs)

    def _run_paced(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``forward`` of a layer, whose backward will keep the device's pace."""
        output = forward(*args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(self._keep_pace)
        return output

    def _keep_pace(self, grad: Tensor) -> None:
        del grad
        self._transfers.keep_pace()

    @torch.no_grad()
    def reduce_gradients(self) -> Tensor:
        self._require_shards()
        # Updates that are left, because no forward has run since the last step, need the gradients
        # of that step, and their writes to the parameters must not look like outside writes.
        self.base_optimizer.finish()
        return super().reduce_gradients()

    @torch.no_grad()
    def update_parameters(self) -> None:
        self._copy_outside_writes()
        self._require_unreplaced()
        self.copy_options()
        self.base_optimizer.step()
        self._gather_parameters()

    def _require_unreplaced(self) -> None:
        """Raise ``RuntimeError`` if the memory of a parameter that updates write to is no longer its own."""
        for each, output in zip(self._sharded, self._outputs, strict=True):
            if not self._is_gathered(each.param) and each.param.data_ptr() != output.data_ptr():
                raise RuntimeError(
                    f"a parameter of {output.numel()} elements has other memory than when the optimizer was made "
                    "(param.data was assigned to, or the model was converted): updates would not reach it; copy "
                    "values into the parameter, or call init_zero()"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none and self.inited:
            # The updates that are left would read the zeros.
            self.base_optimizer.finish()
        super().zero_grad(set_to_none)

    def _end_update(self, index: int) -> None:
        """Release the gradient of a parameter after its update."""
        each = self._sharded[index]
        shard: Any = each.shard
        shard.main_grad = None
        if not self._is_gathered(each.param):
            each.mark_equal()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.inited:
            raise ValueError("the states of an offloaded optimizer are allocated at once: add groups before init_zero")
        super().add_param_group(param_group)

    def _new_master(self, param: nn.Parameter, values: Tensor) -> Tensor:
        # Without sharding the updated weights go straight to the parameter; else to the input of
        # the all-gather.
        output = param.detach()
        if self._is_gathered(param):
            output = values.clone()
        self._outputs.append(output)
        if self._has_remainders:
            # Rounded weights and remainders together are the masters.
            return output
        master = self._states.of_parameter(len(self._outputs) - 1)[0].view(values.shape)
        return master.copy_(values)

    def _master(self, index: int) -> Tensor:
        if not self._has_remainders:
            return super()._master(index)
        remainder = self._remainder(index)
        return join(self._outputs[index].to(remainder.device), remainder)

    def _set_master(self, index: int, values: Tensor) -> None:
        super()._set_master(index, values)
        if self._has_remainders:
            remainder = self._remainder(index)
            on_same = values.to(remainder.device, torch.float32)
            remainder.copy_(remainder_of(on_same, self._outputs[index].to(remainder.device)))

    def _remainder(self, index: int) -> Tensor:
        """Return what the master of parameter number ``index`` has beyond its rounded values."""
        return self._states.of_parameter(index)[0].view(self._outputs[index].shape)

    @torch.no_grad()
    def _copy_outside_writes(self) -> None:
        # Updates that are left write to parameters too: only what is written after them is from outside.
        self.base_optimizer.finish()
        super()._copy_outside_writes()

    def _copy_to_master(self, index: int, written: Tensor) -> None:
        if not self._has_remainders:
            super()._copy_to_master(index, written)
            return
        each = self._sharded[index]
        master = written.float()
        if self._is_gathered(each.param):
            # The all-gather's input has the rounded values from before the write.
            kept = self._master(index).to(master.device)
            master = torch.where(self._outputs[index] == written, kept, master)
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a parameter of {written.numel()} elements was written to outside of a step: with "
                "store_param_remainders its masters are the written values, rounded to bf16, in all elements. "
                "Load weights before the optimizer's state; further parameters are not reported",
                stacklevel=2,
            )
        self._set_master(index, master)

    def _shares_parameter(self, param: nn.Parameter) -> bool:
        del param
        return False

    def _clip(self, reduced: list[Tensor]) -> Tensor:
        for each, grad in zip(self._sharded, reduced, strict=True):
            # Not ``grad``, which must be on the device of the shard.
            shard: Any = each.shard
            shard.main_grad = grad
        norm = grads.get_grad_norm([each.shard for each in self._sharded], sharding_group=self.sharding_group)
        # As in clip_grad_norm, but applied in fp32 when a chunk is updated.
        factor = None
        if self._clips:
            factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.base_optimizer.grad_factor = factor
        return norm

    def _gather_parameters(self) -> None:
        outputs = {id(each.param): output for each, output in zip(self._sharded, self._outputs, strict=True)}
        gathered = [each for each in self._sharded if self._is_gathered(each.param)]
        for group, sharded in self._by_group(gathered):
            params = [each.param.detach() for each in sharded]
            shards = [outputs[id(each.param)] for each in sharded]
            all_gather_into(params, shards, group, bucket_bytes=self._gather_bytes)
        for each in gathered:
            each.mark_equal()

    def _is_gathered(self, param: Tensor) -> bool:
        """Return whether other ranks have a part of the states, and the parameter is gathered from all."""
        return backend.group_size(self._group_of(param)) > 1

    def _before_masters_are_used(self) -> None:
        self.base_optimizer.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as every ZeRO-1 optimizer has it: with fp32 masters, also of remainders.

        Masters of remainders are copies, 4 bytes per parameter; all other tensors are those of the
        optimizer: save or copy the state before the next step.
        """
        state = super().state_dict()
        per_param = state["state"]
        without = {
            index: {name: value for name, value in values.items() if name != REMAINDER}
            for index, values in per_param.items()
        }
        return {**state, "state": without}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for each, output in zip(self._sharded, self._outputs, strict=True):
            output.copy_(each.shard)
            each.mark_equal()
        self._gather_parameters()
