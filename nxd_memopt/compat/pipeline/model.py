"""neuronx-distributed's pipeline model: a foreign model, traced and cut into stages, or a list of layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.compat.pipeline import hooks, manual_stages, materialize, scheduler, shared_weights
from nxd_memopt.compat.pipeline.options import ModelOptions
from nxd_memopt.compat.pipeline.partition import (
    analyze_pipeline_module,
    analyze_shared_weights_across_stages,
    create_partitions,
    partition_traced_model,
    stage_to_pipeline_parallel_rank,
)
from nxd_memopt.compat.pipeline.running import RunningModel
from nxd_memopt.compat.pipeline.timeline import mark_timeline
from nxd_memopt.compat.pipeline.trace import trace_model
from nxd_memopt.parallel_layers.coordination import raise_together, turns
from nxd_memopt.parallel_layers.utils import move_model_to_device

__all__ = ["INPUTS_ARG_NAME", "LABLES_ARG_NAME", "NxDPPModel", "mark_timeline", "parallel_state", "trace_model"]

# Programs and tests reach it, and replace it, through this module: the alias's has the adapters too.
parallel_state: Any = importlib.import_module("neuronx_distributed.parallel_layers.parallel_state")
INPUTS_ARG_NAME = manual_stages.INPUTS
LABLES_ARG_NAME = manual_stages.LABELS


class NxDPPModel(RunningModel):
    """A model whose stages are on the ranks of a pipeline. Every rank of the world builds it from the same module.

    With ``pipeline_cuts`` or ``auto_partition`` it is traced and cut here; otherwise call ``trace``,
    ``cut_pipeline_stage`` and ``partition``.

    Args:
        module: the whole model, which may be on the meta device; a list of layers with ``manual_pp_partition``.
        args, kwargs: see ``options.ModelOptions``.

    Raises:
        RuntimeError: process groups do not exist, or options contradict each other.
    """

    def __init__(self, module: Any, *args: Any, **kwargs: Any) -> None:
        options = ModelOptions(*args, **kwargs)
        if not parallel_state.model_parallel_is_initialized():
            raise RuntimeError("process groups do not exist: call initialize_model_parallel before NxDPPModel")
        refusal = backend.interleaving_refusal()
        if options.virtual_pipeline_size > 1 and refusal is not None:
            raise ValueError(f"virtual_pipeline_size {options.virtual_pipeline_size} {refusal}: use 1")
        super().__init__(module, options)
        self.transformer_layer_cls = options.transformer_layer_cls
        self.traced_model: Any = None
        self.partitions: list[nn.Module] = []
        self.pipeline_cuts: list[str] = []
        self.model_moved_to_device = False
        self.shared_weights_name_to_pg: dict[str, Any] = {}
        if options.manual_pp_partition:
            manual_stages.partition(self, options.manual_pp_stage_partition_fn)
            return
        cuts = self._chosen_cuts()
        if cuts:
            if options.input_names is None:
                raise ValueError("a model is traced for its named inputs: pass input_names with the cuts")
            self.trace(input_names=options.input_names, **options.of_trace())
            for cut in cuts:
                self.cut_pipeline_stage(cut)
            self.partition()

    @property
    def _parallel_state(self) -> Any:
        return parallel_state

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Attributes that the wrapper lacks (``config``, methods) are the model's; a list of layers has none.
            whole = self.__dict__.get("_modules", {}).get("original_torch_module")
            if whole is None:
                raise
            return getattr(whole, name)

    # Tracing and partition

    def _chosen_cuts(self) -> Sequence[str]:
        if not self.options.auto_partition:
            return self.options.pipeline_cuts or ()
        if self.pipeline_parallel_size == 1:
            return ()
        layers = self.get_model_layers(self.original_torch_module, self.options.transformer_layer_cls)
        return create_partitions(self.pipeline_parallel_size * self.options.virtual_pipeline_size, layers)

    def get_model_layers(
        self, module: nn.Module, target_module_type: Any, current_path: Sequence[str] | None = None
    ) -> list[str]:
        """Return the names of the outermost modules of a class."""
        names: list[str] = []
        for name, child in module.named_children():
            path = [*(current_path or ()), name]
            if isinstance(child, target_module_type):
                names.append(".".join(path))
            else:
                names += self.get_model_layers(child, target_module_type, path)
        return names

    def trace(
        self,
        args: Any = None,
        kwargs: Any = None,
        input_names: Sequence[str] | None = None,
        leaf_modules: Sequence[str] | None = None,
        autowrap_functions: Sequence[Callable[..., Any]] | None = None,
        autowrap_modules: Sequence[Any] | None = None,
        autowrap_obj_methods: Mapping[Any, Sequence[str]] | None = None,
        tracer_cls: Any = None,
    ) -> None:
        """Trace the model; see ``trace.trace_model``. Layers are not entered."""
        if self.traced_model is not None:
            raise RuntimeError("the model is traced already: build another NxDPPModel")
        if self.options.transformer_layer_cls is None:
            raise RuntimeError("a list of layers is not traced: pass a model with transformer_layer_cls")
        self.input_names = input_names
        self.traced_model = trace_model(
            self.original_torch_module,
            args=args,
            kwargs=kwargs,
            input_names=input_names,
            leaf_modules=[*(leaf_modules or ()), self.options.transformer_layer_cls.__name__],
            autowrap_functions=autowrap_functions,
            autowrap_modules=autowrap_modules,
            autowrap_obj_methods=autowrap_obj_methods,
            tracer_cls=tracer_cls,
        )

    def cut_pipeline_stage(self, cut_point: str) -> None:
        """End a stage after the module ``cut_point``."""
        if self.traced_model is None or self.partitioned:
            raise RuntimeError(f"cut {cut_point}: stages are cut after trace() and before partition()")
        if cut_point in self.pipeline_cuts:
            raise ValueError(f"a stage ends after {cut_point} already: name another module")
        nodes = [n for n in self.traced_model.graph.nodes if n.op == "call_module" and n.target == cut_point]
        if not nodes:
            raise RuntimeError(f"the traced graph has no module {cut_point}: name one that the trace does not enter")
        nodes[-1].meta["partition"] = True
        self.pipeline_cuts.append(cut_point)

    def partition(self) -> None:
        """Cut the traced model into stages and keep those of this rank. Every rank of the world calls."""
        if self.partitioned:
            raise RuntimeError("the model is partitioned already: build another NxDPPModel")
        if self.traced_model is None:
            raise RuntimeError("the model is not traced: call trace() before partition()")
        stages = len(self.pipeline_cuts) + 1
        ranks, chunks = self.pipeline_parallel_size, self.options.virtual_pipeline_size
        if stages != ranks * chunks:
            raise ValueError(
                f"{stages - 1} cuts make {stages} stages, and pipeline_parallel_size {ranks} x virtual_pipeline_size "
                f"{chunks} need {ranks * chunks}: change the cuts"
            )
        names: dict[str, str] = {}
        self.paritioned_model = partition_traced_model(self.traced_model, names)
        self.partitions = [part for _, part in self.paritioned_model.named_children()]
        (
            self.stage_id_to_IO_input_names,
            self.stage_id_to_model_input_names,
            self.stage_id_to_input_count,
            self.stage_id_to_output_count,
        ) = analyze_pipeline_module(self.paritioned_model)
        self.local_stage_modules = [
            part
            for stage, part in enumerate(self.partitions)
            if stage_to_pipeline_parallel_rank(stage, self.pipeline_parallel_size) == self.pipeline_parallel_rank
        ]
        self._build_parameter_buffer_name_mapping(names)
        self.partitioned = True
        self.register_shared_weights()
        self.create_schedule()
        self._disable_grad_for_nonlocal()
        if not self.options.use_model_wrapper:
            self.maybe_materialize_local_module()
        hooks.hooks.execute_all_hooks(self)

    def _build_parameter_buffer_name_mapping(self, qualname_map: Mapping[str, str]) -> None:
        """Relate the names in this rank's stages to those in the model; optimum-neuron overrides it."""
        names: dict[str, str] = {}
        for local, original in qualname_map.items():
            submodule, _, rest = local.partition(".")
            stage = int(submodule.removeprefix("submod_"))
            if stage_to_pipeline_parallel_rank(stage, self.pipeline_parallel_size) == self.pipeline_parallel_rank:
                names[rest] = original
        self.map_names(names)

    def register_shared_weights(self) -> None:
        """Create a group for each parameter that several ranks have. Every rank of the world calls."""
        for owners in analyze_shared_weights_across_stages(self.traced_model, self.partitions):
            group = self._create_pg_with_ranks([rank for _, rank in owners])
            for name, rank in owners:
                if rank == self.pipeline_parallel_rank:
                    self.shared_weights_name_to_pg[name] = group

    def _create_pg_with_ranks(self, ranks: list[int]) -> Any:
        return parallel_state.create_pg_with_ranks(ranks)

    def _shared_weights(self) -> list[shared_weights.SharedWeight]:
        """Return this rank's parameters that other stages have too."""
        parameters: dict[str, nn.Parameter] = {}
        for module in reversed(self.local_stage_modules):
            parameters.update(module.named_parameters(remove_duplicate=False))
        return [(parameters[name], group) for name, group in self.shared_weights_name_to_pg.items()]

    def create_schedule(self) -> None:
        """Set ``train_scheduler`` and ``eval_scheduler``, which describe the order of tasks."""
        micro_batches, chunks = self.options.num_microbatches, self.options.virtual_pipeline_size
        where = (self.pipeline_parallel_size, self.pipeline_parallel_rank)
        self.eval_scheduler = scheduler.InferenceSchedule(micro_batches, *where)
        if chunks == 1:
            self.train_scheduler: scheduler.PipeSchedule = scheduler.Train1F1BSchedule(micro_batches, *where)
        else:
            self.train_scheduler = scheduler.TrainInterleavedSchedule(micro_batches, chunks, *where)

    def _disable_grad_for_nonlocal(self) -> None:
        """Let optimizers and norms see this rank's parameters only."""
        local = {id(param) for param in self.local_parameters()}
        for param in self.parameters():
            if id(param) not in local:
                param.requires_grad_(False)
                param.grad = None

    # Weights

    def maybe_materialize_local_module(self) -> None:
        """Initialize this rank's stages with ``param_init_fn``, if there is one. Every rank of a pipeline calls."""
        if self.options.param_init_fn is not None:
            self._initialize(self._first_stage_generator())

    def _first_stage_generator(self) -> Tensor:
        rank, size = self.pipeline_parallel_rank, self.pipeline_parallel_size
        return materialize.share_generator_state(rank, size, self._method)

    def _initialize(self, state: Tensor) -> None:
        assert self.options.param_init_fn is not None, "checked by the callers"
        with materialize.generator_state(state):
            materialize.initialize_stages(
                self.original_torch_module, self.local_stage_modules, self.options.param_init_fn
            )

    def materialize_in_turns(self, ranks_at_once: int) -> None:
        """Initialize the stages and move them to the device, a number of ranks of each host at a time.

        Every rank of the world calls.
        """
        state = None if self.options.param_init_fn is None else self._first_stage_generator()
        for is_my_turn in turns(ranks_at_once):
            with raise_together("moving the stages to the device"):
                if is_my_turn:
                    if state is not None:
                        self._initialize(state)
                    self._move()
        self.move_model_to_device()

    def move_model_to_device(self) -> None:
        """Move the stages to the device and make shared weights equal, once. Every rank of the world calls."""
        if self.model_moved_to_device:
            return
        self._move()
        shared_weights.copy_from_first_stage(self._shared_weights())
        self.model_moved_to_device = True

    def _move(self) -> None:
        """Move the stages to the device; the whole model's names lead to the same parameters."""
        # Together: chunks may have a parameter in common.
        move_model_to_device(nn.ModuleList(self.local_stage_modules), backend.device)
        if self.options.manual_pp_partition:
            return
        whole = self.original_torch_module
        for name, param in self.local_named_parameters(remove_duplicate=False):
            path, _, last = name.rpartition(".")
            whole.get_submodule(path)._parameters[last] = param

    # What a pipeline model cannot do

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ``RuntimeError``."""
        raise RuntimeError("a pipeline model has no forward: call run_train() or run_eval()")

    def train(self, mode: bool = True) -> Any:
        """Raise ``RuntimeError``."""
        raise RuntimeError("a pipeline model sets its own mode: call run_train() or run_eval()")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raise ``RuntimeError``."""
        raise RuntimeError("a rank of a pipeline has a part of the state: call local_state_dict()")
