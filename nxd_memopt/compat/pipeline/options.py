"""The options of neuronx-distributed's pipeline model, in the order of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_memopt.compat.model_utils import ParamInit
from nxd_memopt.compat.pipeline.micro_batches import WeightFunction


@dataclass(frozen=True)
class ModelOptions:
    """Options of ``NxDPPModel``.

    Args:
        transformer_layer_cls: class of the layers after which stages end.
        num_microbatches: M; dimension 0 of every input is divided by it.
        virtual_pipeline_size: V, stages of each rank. Stage s is on rank s % P.
        output_loss_value_spec: True, or a tuple, list or dict of booleans, which marks the loss in the output. None or
            False: there is no loss; ``run_eval`` returns the output.
        return_mb_loss: return the M losses on the last rank.
        broadcast_and_average_loss: return the mean over data- and context-parallel ranks on all ranks.
        use_zero1_optimizer, use_optimizer_wrapper: either is True: the optimizer averages gradients over
            data-parallel ranks; otherwise ``run_train`` does.
        use_model_wrapper: ``initialize_parallel_model`` initializes and moves the stage.
        pipeline_cuts: modules after which stages end.
        input_names: arguments of forward that are traced. All others stay at their defaults.
        leaf_module_cls: names of classes that are not entered.
        autowrap_functions, autowrap_modules, autowrap_obj_methods, tracer_cls: see ``trace.trace_model``.
        param_init_fn: initializes a module's own parameters; see ``model_utils.ParamInit``.
        trace_file_path: file for a timeline of forwards.
        return_loss_on_cpu: return losses on the host.
        deallocate_pipeline_outputs: no effect: outputs are freed when they are sent.
        auto_partition: cut into equal numbers of layers.
        fuse_microbatches: losses stay on the device.
        manual_pp_partition: the model is a list of layers.
        manual_pp_stage_partition_fn, manual_pp_loss_fn: of these; see ``manual_stages``.
        _mark_step_before_pp_runtime, _mark_step_after_pp_runtime: end the step before and after a batch.
        _use_gloo_for_metadata_comm: descriptions of tensors travel over groups of the host, not over the store.
        micro_batch_weight_fn: how many labels the loss of a micro-batch is the mean of; needed if the numbers differ.

    The other private options have no effect: the backend and the schedule decide.

    Raises:
        ValueError: ``transformer_layer_cls`` is missing.
        RuntimeError: options contradict each other.
    """

    transformer_layer_cls: Any = None
    num_microbatches: int = 1
    virtual_pipeline_size: int = 1
    output_loss_value_spec: Any = None
    return_mb_loss: bool = False
    broadcast_and_average_loss: bool = False
    use_zero1_optimizer: bool = False
    use_model_wrapper: bool = False
    use_optimizer_wrapper: bool = False
    pipeline_cuts: Sequence[str] | None = None
    input_names: Sequence[str] | None = None
    leaf_module_cls: Sequence[str] | None = None
    autowrap_functions: Sequence[Callable[..., Any]] | None = None
    autowrap_modules: Sequence[Any] | None = None
    autowrap_obj_methods: Mapping[Any, Sequence[str]] | None = None
    tracer_cls: Any = None
    param_init_fn: ParamInit | None = None
    trace_file_path: str | None = None
    return_loss_on_cpu: bool = True
    deallocate_pipeline_outputs: bool = False
    auto_partition: bool = False
    fuse_microbatches: bool = False
    manual_pp_partition: bool = False
    manual_pp_stage_partition_fn: Callable[..., Any] | None = None
    manual_pp_loss_fn: Callable[..., Any] | None = None
    _delay_tracing: bool = False
    _turn_off_odd_even_scheduler: bool = False
    _all_reduce_send_recv: bool = False
    _fused_send_recv: bool = False
    _fused_fwd_bwd: bool = False
    _mark_step_before_pp_runtime: bool = True
    _mark_step_after_pp_runtime: bool = True
    _deallocate_send_tensors: bool = True
    _use_gloo_for_metadata_comm: bool = False
    micro_batch_weight_fn: WeightFunction | None = None

    def __post_init__(self) -> None:
        if self.transformer_layer_cls is None and not self.manual_pp_partition:
            raise ValueError("NxDPPModel needs transformer_layer_cls, the class of the layers after which stages end")
        if self.broadcast_and_average_loss and self.return_mb_loss:
            raise RuntimeError(
                "return_mb_loss returns losses that are not averaged: turn broadcast_and_average_loss off"
            )
        if self.auto_partition and self.pipeline_cuts:
            raise RuntimeError("auto_partition chooses the cuts: leave pipeline_cuts out, or turn auto_partition off")

    @property
    def has_loss(self) -> bool:
        """Whether the last stage has a loss."""
        return bool(self.output_loss_value_spec) or self.manual_pp_loss_fn is not None

    @property
    def losses_on_host(self) -> bool:
        """Whether losses are returned on the host."""
        return self.return_loss_on_cpu and not self.fuse_microbatches

    def of_trace(self) -> dict[str, Any]:
        """Return the arguments of ``NxDPPModel.trace``."""
        return {
            "leaf_modules": self.leaf_module_cls,
            "autowrap_functions": self.autowrap_functions,
            "autowrap_modules": self.autowrap_modules,
            "autowrap_obj_methods": self.autowrap_obj_methods,
            "tracer_cls": self.tracer_cls,
        }
