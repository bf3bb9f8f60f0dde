"""Plans the memory of a run before its weights are loaded: what fits, and ``memory: auto``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from nxd_memopt.architectures.experts import BALANCED_ROUTING, MoESizes
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory.host_limits import available_host_bytes
from nxd_memopt.modules.moe.causal_lm import require_moe_memory
from nxd_memopt.ops.attention import attention_implementation
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import share_texts
from nxd_memopt.planner.hardware import (
    CUDA_CONTEXT_GIB,
    GIB,
    PAGE_LOCKING_S_PER_GIB,
    Device,
    device_named,
    gpu_named,
    host_device,
)
from nxd_memopt.planner.search.choice import choose_memory
from nxd_memopt.planner.search.plan import Plan, evaluate, memory_by_stage
from nxd_memopt.planner.search.problem import PRECISIONS, Problem, Setting, attention_notes
from nxd_memopt.planner.sizes.states import StateLayout, initialization_bytes, local_shapes
from nxd_memopt.planner.techniques.recomputation import keeps_inputs_alone
from nxd_memopt.training.config.data_parallel import SHARDS_GRADIENTS
from nxd_memopt.training.config.moe import resolve_options
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.device_support import cuda_graph_option_conflict, shard_ranks, uses_cuda_graph
from nxd_memopt.training.runtime.distributed import is_rank_zero, ranks_per_host, world_size

CERTAIN = 1.1
"""A plan with margin that is above the available memory by this factor is an error, a smaller excess a warning: most
steps need less than the margin."""


@dataclass(frozen=True)
class MemoryPlan:
    """Planned memory of one rank.

    Args:
        planned_bytes: peak of a training step; None if the run has an option that is not planned.
        available_bytes: bytes of the device that tensors can use; None if they are not known.
        before_bytes: bytes that the process uses before the model, which a host counts too; at the
            time of the plan, until ``before_model`` counts them again.
        lines: what is shown.
    """

    planned_bytes: int | None
    available_bytes: int | None
    before_bytes: int
    lines: tuple[str, ...]

    def before_model(self) -> MemoryPlan:
        """Return the plan with the bytes that the process uses now: tokenizer and data are no part of the plan."""
        return replace(self, before_bytes=_counted_before())

    def measured_bytes(self, peak_bytes: int | None) -> int | None:
        """Return what a peak of the backend has of the run itself; None if it was not measured.

        A simulated device's peak is that of the host, which the plan is not of.
        """
        if peak_bytes is None or self.available_bytes is None:
            return None
        return peak_bytes - self.before_bytes


def plan_memory(config: TrainConfig, hf_config: PretrainedConfig) -> tuple[TrainConfig, MemoryPlan]:
    """Return the configuration, with the memory techniques of ``memory: auto``, and its planned memory.

    Every rank calls; rank 0 shows the plan.

    Raises:
        ValueError: on every rank, if the run will not fit, or ``memory: auto`` finds nothing.
    """
    before = _counted_before()
    _require_room_for_initialization(config, hf_config)
    is_auto = config.auto_memory
    try:
        problem, plan = planned(config, hf_config)
    except ValueError as error:
        if is_auto:
            raise
        result = MemoryPlan(None, None, before, (f"memory: not planned ({error})",))
    else:
        lines = _lines(problem, plan)
        if is_auto:
            lines.insert(0, _chosen(plan))
        # The lines are of the fullest rank of a pipeline; what a rank measures is compared with its own stages.
        own = memory_by_stage(problem, plan.setting)[parallel_state.get_pipeline_model_parallel_rank()]
        result = MemoryPlan(own.device_bytes, _known(problem, plan), before, tuple(lines))
        if result.available_bytes is not None:
            _require_fit(plan)
        # From here on `memory` is explicit.
        if is_auto:
            config = replace(config, memory=plan.setting.memory, auto_memory=False)
    if is_rank_zero():
        print("\n".join(result.lines), flush=True)
    return config, result


def planned(
    config: TrainConfig, hf_config: PretrainedConfig, device: Device | None = None, *, ranks: int | None = None
) -> tuple[Problem, Plan]:
    """Return what a run asks for, and its plan; with ``memory: auto`` the chosen one. Every rank calls.

    Args:
        config: configuration of the run.
        hf_config: the model's configuration.
        device: what each rank has; default this rank's device, with the memory that is free now and the attention
            that runs in this process.
        ranks: number of ranks of ``device``; default those of this run.

    Raises:
        ValueError: on every rank, if an option is not planned, ``memory: auto`` finds nothing, or the ranks of this
            run take different attention implementations.
    """
    if device is None:
        assert ranks is None, "ranks are those of a device"
        here = _device().with_given(host_memory_gib=_least(_host_gib()) or None)
        problem = _problem(config, hf_config, here, world_size())
        problem = replace(problem, attention=_attention(config, problem))
    else:
        problem = _problem(config, hf_config, device, ranks or world_size())
    setting = setting_of(config, hf_config, device, ranks=ranks)
    if config.auto_memory:
        return problem, choose_memory(problem, setting)
    return problem, evaluate(problem, setting)


def _counted_before() -> int:
    """Return the bytes that the backend's figures have before a tensor of the run exists."""
    # Elsewhere the figures are those of an allocator, which the run alone uses.
    if backend.device.type == "cuda":
        return 0
    return backend.memory_allocated() or 0


def _problem(config: TrainConfig, hf_config: PretrainedConfig, device: Device, ranks: int) -> Problem:
    """Return what is trained, on ``device`` for each rank."""
    spec = model_spec(hf_config)
    return Problem(
        model=spec,
        device=device,
        devices=ranks,
        sequence_length=config.data.seq_length,
        global_batch_size=config.data.global_batch_size,
        precision=str(config.trainer.precision),
        isolate_documents=config.data.isolate_documents,
        moe=resolve_options(config.moe, hf_config),
        lora=config.lora.config(),
        fp8=config.fp8_layers(spec.num_layers),
    )


def _attention(config: TrainConfig, problem: Problem) -> str | None:
    """Return the attention that ``auto`` takes in this process, None if another one is named. Every rank calls.

    Layers with a window are planned as tiles, whatever the other layers take.

    Raises:
        ValueError: on every rank, if the ranks take different implementations.
    """
    if config.memory.attention_backend != "auto":
        return None
    spec = problem.model
    name, _ = attention_implementation(
        (config.data.micro_batch_size, spec.num_heads, config.data.seq_length, spec.head_dim),
        spec.num_kv_heads,
        dtype=getattr(torch, PRECISIONS[problem.precision][0]),
        packed=config.data.isolate_documents,
        dropout_p=spec.attention_dropout,
    )
    names = set(share_texts(name))
    if len(names) > 1:
        raise ValueError(
            f"ranks take different attention implementations, {sorted(names)}: install the same packages on each host, "
            "or set memory.attention_backend"
        )
    return name


def _device() -> Device:
    """Return this rank's device with the least memory that any rank has free, so that all plan the same."""
    if backend.device.type == "cpu":
        return host_device(_least(_host_gib()) or GIB, ranks_per_host())
    name = backend.hardware_name()
    if backend.device.type == "cuda":
        # An unknown GPU has the rates of a known one, which order the settings, and its own memory.
        known = gpu_named(name) or device_named("h200")
        free_gib = (backend.free_memory_bytes() or 0) / GIB + CUDA_CONTEXT_GIB
        return replace(known, memory_gib=_least(free_gib))
    return device_named(name)


def _host_gib() -> float:
    """Return this rank's part of the host memory that can still be allocated; 0.0 if it is not known."""
    return (available_host_bytes() or 0) / GIB / ranks_per_host()


def _least(value: float) -> float:
    """Return the smallest value of all ranks. Every rank calls."""
    return min(float(text) for text in share_texts(repr(value)))


def _known(problem: Problem, plan: Plan) -> int | None:
    """Return the bytes that the plan can use; None where the device's memory is not the table's: it is simulated."""
    is_simulated = problem.device.kind == "neuron" and getattr(backend, "is_simulated", False)
    if is_simulated:
        return None
    return plan.usable_bytes


def _has_graph(config: TrainConfig, hf_config: PretrainedConfig, device: Device | None) -> bool:
    """Return whether forward and backward are a CUDA graph on ``device``, which may be another than the backend's."""
    if device is None:
        return uses_cuda_graph(config, hf_config)
    is_possible = device.kind == "cuda" and cuda_graph_option_conflict(config, hf_config) is None
    return bool(config.trainer.enable_cuda_graph) and is_possible


def setting_of(
    config: TrainConfig, hf_config: PretrainedConfig, device: Device | None = None, *, ranks: int | None = None
) -> Setting:
    """Return the options of the run that memory depends on; ``device`` and ``ranks`` as ``planned``."""
    stage = config.data_parallel.sharding
    memory = config.memory
    _require_planned_graphs(config)
    moe = resolve_options(config.moe, hf_config)
    if moe is not None:
        require_moe_memory(memory)
    options: dict[str, Any] = {}
    if stage in SHARDS_GRADIENTS:
        host_ranks = None
        if device is not None and ranks is not None:
            host_ranks = min(ranks, device.ranks_per_host)
        options["shard_ranks"] = shard_ranks(config, ranks=ranks, host_ranks=host_ranks)
    return Setting(
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        sharding=stage,
        micro_batch_size=config.data.micro_batch_size,
        memory=memory,
        cuda_graph=_has_graph(config, hf_config, device),
        optimizer_offload_fraction=config.optimizer.optimizer_offload_fraction,
        sequence_parallel_enabled=config.parallel.sequence_parallel_enabled,
        grad_reduce_in_fp32=config.data_parallel.grad_reduce_in_fp32 is not False,
        optimizer_update_in_forward=config.optimizer.optimizer_update_in_forward,
        optimizer_staging_gib=config.optimizer.optimizer_staging_gib,
        store_param_remainders=config.optimizer.store_param_remainders,
        optimizer_in_backward=config.optimizer.in_backward,
        expert_model_parallel_size=config.parallel.expert_model_parallel_size,
        reduce_dtype=config.parallel.reduce_dtype,
        reshard_after_forward=config.data_parallel.reshard_after_forward,
        overlap_grad_reduce=config.optimizer.overlap_grad_reduce,
        pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.parallel.num_chunks,
        pipeline_model_parallel_layout=config.parallel.pipeline_model_parallel_layout,
        **options,
    )


def _require_planned_graphs(config: TrainConfig) -> None:
    """Raise ``ValueError`` for compiled layers of which the compiler chooses what they keep for backward."""
    if config.trainer.compile and not keeps_inputs_alone(config.memory):
        raise ValueError(
            f"with trainer.compile {config.trainer.compile!r} the compiler chooses what a layer keeps for backward, "
            "which is planned with recompute_granularity 'full' of all layers only: use it, or set compile to null"
        )


def _chosen(plan: Plan) -> str:
    """Return a line with the options of the memory section that were chosen."""
    defaults = MemoryConfig()
    options = {field.name: getattr(plan.setting.memory, field.name) for field in fields(MemoryConfig)}
    changed = [f"{name}: {value}" for name, value in options.items() if value != getattr(defaults, name)]
    return f"memory: auto chose {', '.join(changed) or 'no technique'}"


def _lines(problem: Problem, plan: Plan) -> list[str]:
    """Return the plan in words."""
    lines: list[str] = []
    terms = sorted(plan.memory.device.items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {size / GIB:.2f}" for name, size in terms[:4] if size)
    available = _known(problem, plan)
    planned_gib = f"{plan.memory.device_bytes / GIB:.2f} GiB"
    if plan.memory.margin_bytes:
        planned_gib += f", {plan.memory.reserved_bytes / GIB:.2f} with margin,"
    if available is not None:
        planned_gib += f" of {available / GIB:.2f} available"
    lines.append(f"memory: planned {planned_gib} on each device ({largest}; peak in {plan.memory.moment})")
    experts = None
    if problem.moe is not None:
        experts = MoESizes(problem.moe, plan.setting.expert_model_parallel_size, 1)
    if experts is not None and experts.depends_on_routing:
        lines.append(f"memory: planned for {BALANCED_ROUTING}")
    if plan.memory.host_bytes:
        host_gib = plan.memory.host_bytes / GIB
        lines.append(
            f"host memory: planned {host_gib:.2f} GiB of {problem.usable_host_bytes / GIB:.2f} available for each "
            f"rank; page-locking it takes about {host_gib * PAGE_LOCKING_S_PER_GIB:.0f} s before the first step"
        )
    return [*lines, *(f"memory: {note}" for note in attention_notes(problem, plan.setting))]


def _require_room_for_initialization(config: TrainConfig, hf_config: PretrainedConfig) -> None:
    """Raise ``ValueError``, on every rank, if the ranks of a host cannot initialize or load their weights there."""
    # On a CPU the plan of the step has these weights. Not counted: expert-parallel ranks' experts.
    is_skipped = backend.device.type == "cpu" or config.parallel.expert_model_parallel_size > 1
    if is_skipped or not config.parallel.use_cpu_initialization:
        return
    size = config.parallel.tensor_model_parallel_size
    layout = StateLayout(getattr(torch, config.dtype).itemsize, sharding=config.data_parallel.sharding)
    shapes = local_shapes(model_spec(hf_config), size, config.parallel.expert_model_parallel_size)
    needed = initialization_bytes(shapes, layout)
    available = int(_least(_host_gib()) * GIB)
    if available and needed > available:
        raise ValueError(
            f"zero3 initializes or loads {needed} bytes of weights for each rank in host memory, and {available} are "
            f"available for each of {ranks_per_host()} ranks of a host: raise tensor_model_parallel_size (now {size}) "
            "or start fewer ranks on each host; where devices have room for these weights, "
            "parallel.use_cpu_initialization: false initializes them there"
        )


_REMEDIES = {
    "device": "set memory: auto, use more ranks, or let nxd-memopt plan show settings that fit",
    "host": "offload less, start fewer ranks on each host, or let nxd-memopt plan show settings that fit",
}
"""Place of a shortage -> what to change."""


def _require_fit(plan: Plan) -> None:
    """Raise ``ValueError`` if a memory is smaller than the plan by more than the plan may be wrong, else warn."""
    found = plan.shortages
    if not found:
        return
    needs = " and ".join(each.describe() for each in found)
    text = f"the planned memory of a step exceeds the available memory: {needs} ({plan.setting.describe()})"
    remedy = "; ".join(_REMEDIES[each.place] for each in found)
    if any(each.planned_bytes > CERTAIN * each.usable_bytes for each in found):
        raise ValueError(f"{text}; {remedy}")
    if is_rank_zero():
        print(f"warning: {text}; it may end out of memory: {remedy}", flush=True)
