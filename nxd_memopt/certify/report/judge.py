"""Turns measurements into a certificate: checks, extrapolation to the model's depth, messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nxd_memopt._optional import require_transformers
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.backends.neuron.compiler_flags import recompute_error
from nxd_memopt.certify.measure.measurement import Measurement
from nxd_memopt.certify.measure.survival import Survival
from nxd_memopt.certify.memory_terms import MemoryTerms, extrapolate, memory_terms, planned_terms
from nxd_memopt.certify.report.verdict import (
    Certificate,
    Check,
    check_collectives,
    check_fit,
    check_large_tensors,
    check_ranks,
    check_survival,
)
from nxd_memopt.certify.request import Answer, Request
from nxd_memopt.planner.hardware import Device, host_device
from nxd_memopt.planner.memory.activations import activations
from nxd_memopt.planner.memory.compiled_graphs import DMA_SPILL_SHARE
from nxd_memopt.planner.search.plan import Plan
from nxd_memopt.planner.search.problem import Problem, kernels_of
from nxd_memopt.planner.sizes.rank_sizes import rank_sizes
from nxd_memopt.planner.sizes.states import StateLayout
from nxd_memopt.planner.techniques.attention_tiles import describe_tiles
from nxd_memopt.planner.timing.collectives import StepShape, expected_collectives, per_layer
from nxd_memopt.planner.timing.step_shape import step_shape

_INT64_BYTES = 8
ACTIVATION_ERROR = 0.01
"""Largest difference between measured and planned activations of a layer; of most models and techniques it is 0."""
SMALL_BYTES = 1 << 16
"""Sums of routers and other small tensors that no formula counts."""
MIB = 2**20
_SIMULATION_NOTES = (
    "XLA:CPU compiled with its pass cse_barrier_expander off: this simulates a compiler that "
    "honours optimization barriers. What neuronx-cc does is not shown; with recompute it needs NEURON_CC_FLAGS=-O1.",
    "Temporary memory is XLA:CPU's plan for the full step; a NeuronCore's compiler fuses and schedules differently. "
    f"DMA ring spills are {DMA_SPILL_SHARE:.1%} of it, as in the one account of neuronx-cc that is published.",
)


@dataclass(frozen=True)
class Planned:
    """The run as the planner sees it.

    Args:
        problem: model, device and batch.
        plan: the run's setting.
    """

    problem: Problem
    plan: Plan


def judge(
    request: Request,
    answer: Answer,
    *,
    device: Device,
    states: StateLayout,
    planned: Planned | None = None,
    max_temp_ratio: float | None,
    stands_for: str,
    compiler_flags: str | None,
) -> Certificate:
    """Compare the measurements with the formulas and the device, and return the certificate.

    Args:
        request: step that was measured.
        answer: measurements.
        device: device whose memory must fit the step.
        states: how the run stores parameters, gradients and the states of AdamW, which are added by arithmetic
            where the memory is measured.
        planned: the plan of the run; None if the planner does not cover it.
        max_temp_ratio: see ``Survival.failure``.
        stands_for: dtype that the user asked for, if another dtype was compiled instead.
        compiler_flags: ``NEURON_CC_FLAGS``; ``None`` if not set.
    """
    depth = request.config["num_hidden_layers"]
    memory = request.memory
    survivals = answer.survivals
    # Formulas are needed at each measured depth, to compare, and at the full one, to report.
    # PyTorch's eager checkpoint stops a recomputation early, so it omits collectives that XLA
    # has.
    shapes = {layers: _shape(request, layers) for layers in (*survivals, depth)}
    stops_early = request.backend != "xla"
    # The deepest measured model has the most complete list of large tensors. The bytes are those of
    # the full depth, where nothing is measured: a model of that depth may take too long to compile.
    deepest = survivals[max(survivals)].recompute
    at_depth = _at_depth(request, {n: pair.recompute for n, pair in survivals.items()})
    # A compiler's temporaries are in its graph only. Elsewhere the plan knows the device's kernels and the moments of
    # a step, where the sum of all terms is an upper bound.
    if planned is not None and (request.backend != "xla" or request.planned):
        fit = planned_terms(planned.plan, device.memory_gib)
    else:
        planned = None
        fit = _fit(request, answer, device, states, at_depth)
    # The full model recomputes as many layers as the run says, where a measured one may recompute one for all.
    all_layers = memory
    if planned is not None and memory.recompute_method == "block":
        all_layers = replace(memory, recompute_num_layers=planned.plan.setting.memory.recompute_num_layers)
    at_full_depth = _shape(replace(request, memory=all_layers), depth)
    checks = [
        check_survival(memory, survivals, max_temp_ratio),
        check_ranks(answer.fingerprints),
        check_collectives(shapes, survivals, memory, stops_early=stops_early),
        check_large_tensors(deepest, shapes[depth], _vocabulary_sizes(request)),
        check_fit(fit),
    ]
    if planned is not None and request.backend == "cpu":
        checks.insert(-1, _check_activations(request, survivals, planned.problem))
    if request.isolate_documents:
        checks.insert(-1, _check_isolation(request))
    # Only neuronx-cc can remove recomputation by its flags, and only if there is some to remove.
    if request.backend == "xla" and memory.recompute_granularity is not None:
        checks.insert(1, _check_flags(compiler_flags))
    return Certificate(
        checks=tuple(checks),
        survivals=survivals,
        collectives=expected_collectives(at_full_depth, all_layers, stops_early=stops_early),
        per_layer=per_layer(at_full_depth, at_full_depth.blocks[-1]),
        memory=fit,
        baseline_bytes=_at_depth(request, {n: pair.baseline for n, pair in survivals.items()}),
        notes=_notes(request, stands_for, planned),
    )


def _shape(request: Request, layers: int) -> StepShape:
    """Return the sizes of the step of a model with ``layers`` decoder layers."""
    require_transformers("nxd-memopt certify")
    from nxd_memopt.modules.moe.gpt_neox_config import config_of

    config: Any = config_of({**request.config, "num_hidden_layers": layers})
    spec = model_spec(config)
    sizes = rank_sizes(
        spec,
        request.parallel,
        sequence_length=request.sequence_length,
        micro_batch_size=request.micro_batch_size,
        # Backend xla measures fp16 for bf16: the step that was measured is the one of the formulas.
        dtype=request.dtype,
        moe=request.moe,
    )
    return step_shape(spec, sizes, request.memory)


def _vocabulary_sizes(request: Request) -> set[int]:
    """Return V, and ceil(V / T) for a rank's padded shard."""
    vocab_size = request.config["vocab_size"]
    size = request.parallel.tensor_model_parallel_size
    return {vocab_size, -(-vocab_size // size)}


def _check_flags(compiler_flags: str | None) -> Check:
    """Return the check that neuronx-cc's flags keep recomputation; a note if they are not set."""
    if compiler_flags is None:
        detail = "NEURON_CC_FLAGS is not set here; on the device it must say -O1"
        return Check("compiler flags", None, detail)
    error = recompute_error(compiler_flags)
    detail = error or f"NEURON_CC_FLAGS {compiler_flags!r} keeps recomputation"
    return Check("compiler flags", error is None, detail)


def _check_isolation(request: Request) -> Check:
    """Return a note with the cost of isolated documents."""
    # The graphs of "auto": a loop of tiles, since the flash kernels of NeuronCores take no bounds.
    if request.memory.attention_backend == "math":
        detail = "math attention: S x S scores and a mask"
    else:
        detail = (
            f"tiled attention: {describe_tiles(request.sequence_length)}; without isolation NeuronCores run their "
            "flash kernels, which take no document bounds"
        )
    return Check("isolated documents", None, detail)


def _check_activations(request: Request, survivals: Mapping[int, Survival], problem: Problem) -> Check:
    """Return the check that layers keep for backward what the planner's formulas say, with the CPU's operations."""
    few, many = min(survivals), max(survivals)
    measured = survivals[many].recompute.peak_bytes - survivals[few].recompute.peak_bytes
    kernels = kernels_of(replace(problem, device=host_device(1.0, 1), attention=None, fp8=None), request.memory)
    kept = {
        layers: activations(_shape(request, layers).sizes, request.memory, kernels).device_bytes
        for layers in (few, many)
    }
    planned = kept[many] - kept[few]
    detail = (
        f"from {few} to {many} layers the peak grows by {measured / MIB:.2f} MiB, and by {planned / MIB:.2f} MiB in "
        "the planner's formulas for the CPU's operations"
    )
    is_equal = abs(measured - planned) <= max(SMALL_BYTES, ACTIVATION_ERROR * planned)
    return Check("activations", is_equal, detail)


def _at_depth(request: Request, variants: Mapping[int, Measurement]) -> int:
    """Return the bytes of activations and temporaries at the full depth of the model."""
    depth = request.config["num_hidden_layers"]
    measured = {layers: measurement.peak_bytes for layers, measurement in variants.items()}
    # A layer's input is what full recomputation of single layers keeps; see extrapolate for why the
    # line must not be less steep.
    return extrapolate(measured, depth, least_per_layer=_shape(request, depth).sizes.residual_bytes)


def _fit(request: Request, answer: Answer, device: Device, states: StateLayout, temporary_bytes: int) -> MemoryTerms:
    """Return the memory of one rank at full depth."""
    # Ids and labels are one tensor of int64 [B, S]: the step passes its ids as its labels. Isolated
    # documents add their numbers and the positions.
    inputs = 3 if request.isolate_documents else 1
    return memory_terms(
        num_parameters=answer.num_parameters,
        num_expert_parameters=answer.num_expert_parameters,
        states=states,
        temporary_bytes=temporary_bytes,
        input_bytes=inputs * request.sequence_length * request.micro_batch_size * _INT64_BYTES,
        capacity_gib=device.memory_gib,
        reserve_gib=device.reserve_gib,
        in_graphs=request.backend == "xla",
    )


def _notes(request: Request, stands_for: str, planned: Planned | None) -> tuple[str, ...]:
    """Return what the figures assume and what they do not show."""
    few, many = min(request.layer_counts), max(request.layer_counts)
    depth = request.config["num_hidden_layers"]
    notes = [
        f"Activations and temporaries at {depth} layers: from those measured at {many}, by the "
        f"growth per layer from {few} to {many}, but no less than a layer's input."
    ]
    if planned is not None:
        notes = [
            f"Memory is planned for {planned.problem.devices} x {planned.problem.device.name}, with its kernels; "
            f"measured on the CPU: recompute, collectives, and what layers keep, with {few} and {many} of {depth} "
            "layers."
        ]
    if request.planned:
        notes.append(f"Planned and not measured: {'; '.join(request.planned)}.")
    if request.backend == "xla":
        notes += _SIMULATION_NOTES
    if stands_for != request.dtype:
        notes.append(
            f"{request.dtype} stands in for {stands_for}, of the same size: XLA:CPU would widen {stands_for} to fp32."
        )
    return tuple(notes)
