"""Profiles steps of a run that ``nxd-memopt profile`` has started; any other run is not touched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from nxd_memopt.backends import backend
from nxd_memopt.memory.cuda_graph import WARM_UP_CALLS
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import share_texts
from nxd_memopt.planner.search.plan import memory_by_stage, planned_activations
from nxd_memopt.planner.techniques.pipeline_schedule import bubble
from nxd_memopt.profiling import ProfileRequest, StepProfiler
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.device_support import uses_cuda_graph
from nxd_memopt.training.memory_plan import planned
from nxd_memopt.training.parallelize import eager_forward_backward
from nxd_memopt.training.reporting.mfu import utilization_per_token
from nxd_memopt.training.reporting.run_record import changed_options, environment
from nxd_memopt.training.runtime.distributed import profile_request, world_size
from nxd_memopt.training.runtime.start_phases import StartPhases
from nxd_memopt.training.state import Training

UNTIMED_GRAPH_STEPS = WARM_UP_CALLS + 1
"""Steps after which a CUDA graph is captured, of one micro-batch or several."""
_CATEGORIES = {
    "weights": "weights",
    "master weights": "optimizer states",
    "optimizer moments": "optimizer states",
    "staging of optimizer states": "optimizer states",
    "gradients": "gradients",
    "activations": "activations",
    "cuBLAS workspaces": "other",
    "peer memory": "other",
    "small tensors": "other",
}
"""Term of the plan -> category of a profile (``profiling/memory_summary.py``); other terms are temporary."""


class ProfileFinishedError(Exception):
    """All steps that were to be profiled are; every rank raises it after the same step."""


class ProfiledSteps:
    """Contexts of the steps of a run.

    A command may start several runs. One that is too short is not profiled, nor is one after a profiled one.
    A CUDA graph's kernels belong to no module and its memory is in one pool, so the profiled steps run without it.
    Afterwards steps with the graph are timed as a whole.

    Args:
        training: state of the run; ``forward_backward`` is without the graph until the profile is complete.
        config: configuration of the run.
        phases: phases of its start.
        say: shows a line.

    Raises:
        ValueError: the run exists for its profile, and ends before the steps to be profiled.
    """

    def __init__(
        self, training: Training, config: TrainConfig, phases: StartPhases, say: Callable[[str], None]
    ) -> None:
        self._profiler: StepProfiler | None = None
        self._graph: Callable[..., Any] | None = None
        self._graph_steps = 0
        self._graph_s: list[float] = []
        text = profile_request()
        if text is None:
            return
        request = ProfileRequest.from_json(text)
        refusal = _refusal(request, training, config)
        if refusal is not None:
            if request.stop:
                raise ValueError(refusal)
            say(f"not profiled: {refusal}")
            return
        self._training = training
        notes: list[str] = []
        model: Any = training.model
        if uses_cuda_graph(config, model.config):
            notes += self._leave_graph(request, config)
        if config.trainer.compile:
            notes.append("compiled layers: what is inside of a layer belongs to the layer")
        facts = _facts(training, config, phases)
        self._profiler = StepProfiler(request, training.model, training.optimizer, tuple(notes), facts)

    def _leave_graph(self, request: ProfileRequest, config: TrainConfig) -> list[str]:
        """Let the next steps run without the graph; return a line for the report if it will not be timed."""
        training = self._training
        model: Any = training.model
        self._graph = cast("Callable[..., Any]", training.forward_backward)
        training.forward_backward = eager_forward_backward(model, training.optimizer.loss_scaler)
        left = config.trainer.max_steps - training.step - request.total_steps
        needed = UNTIMED_GRAPH_STEPS + request.steps
        if left >= needed:
            self._graph_steps = needed
            return []
        return [
            "the profiled steps run without the run's CUDA graph, which is not timed: this needs "
            f"{needed} steps more, and trainer.max_steps leaves {left}"
        ]

    def step(self) -> AbstractContextManager[None]:
        """Return the context of the next step."""
        if self._profiler is None:
            return nullcontext()
        if not self._profiler.is_done:
            return self._profiler.step()
        if self._graph is not None:
            self._training.forward_backward = self._graph
        return self._timed_graph() if self._graph_steps else nullcontext()

    @contextmanager
    def _timed_graph(self) -> Iterator[None]:
        """Time a step with the CUDA graph, once it is captured; the last one adds the times to the profile."""
        assert self._profiler is not None
        self._graph_steps -= 1
        is_timed = self._graph_steps < self._profiler.request.steps
        backend.synchronize()
        if is_timed and not self._graph_s:
            backend.reset_peak_memory_stats()
        start = perf_counter()
        yield
        backend.synchronize()
        if is_timed:
            self._graph_s.append(perf_counter() - start)
        if not self._graph_steps:
            self._profiler.add("graph", {"step_s": self._graph_s, "peak_bytes": backend.max_memory_allocated()})

    def raise_if_finished(self) -> None:
        """Raise ``ProfileFinishedError`` after the last profiled step of a run that exists for its profile."""
        if self._profiler is None or not self._profiler.request.stop:
            return
        if self._profiler.is_done and not self._graph_steps:
            raise ProfileFinishedError


def _facts(training: Training, config: TrainConfig, phases: StartPhases) -> dict[str, Any]:
    """Return what the report shows of the run. Every rank calls."""
    model: Any = training.model
    return {
        "options": changed_options(config),
        "versions": environment()["packages"],
        "start_s": phases.seconds,
        "planned": _planned(training, config),
        "tokens_per_step": config.data.global_batch_size * config.data.seq_length,
        "utilization_per_token": utilization_per_token(config, model.config),
        "pipeline": _pipeline(model, config),
    }


def _pipeline(model: ParallelCausalLM, config: TrainConfig) -> dict[str, Any] | None:
    """Return the stages of this rank, and the share of a step that equal stages would wait; None without stages."""
    stages = model.stages
    if stages.is_whole:
        return None
    micro_batches = config.accumulation_steps(world_size())
    return {
        "stages": [chunk * stages.num_ranks + stages.rank for chunk in range(len(stages.chunks))],
        "layers": [[layers.start, layers.stop - 1] for layers in stages.chunks],
        "ideal_wait": bubble(stages.num_ranks, len(stages.chunks), micro_batches),
    }


def _planned(training: Training, config: TrainConfig) -> dict[str, Any]:
    """Return the planned memory of the profiled steps by category, and their activations by layer, in bytes.

    Only ``refusal`` if an option of the run is not planned. Every rank calls.
    """
    model: Any = training.model
    config = replace(config, trainer=replace(config.trainer, enable_cuda_graph=False))
    try:
        problem, plan = planned(config, model.config)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        memory = memory_by_stage(problem, plan.setting)[stage]
        kept = planned_activations(problem, plan.setting, stage)
    except ValueError as error:
        return {"refusal": str(error)}
    at_peak: dict[str, int] = defaultdict(int)
    for term, size in memory.device.items():
        at_peak[_CATEGORIES.get(term, "temporary")] += size
    # The fused loss computes the gradient of the head in forward: a gradient in a profile, an activation in the plan.
    if memory.moment == "loss":
        # The last chunk's, of the micro-batch whose forward has just run: backward adds it to the sum.
        head = kept[-1][0].around.get("gradient of the head", 0)
        at_peak["activations"] -= head
        at_peak["gradients"] += head
    names = {module: name for name, module in model.named_modules()}
    layer_bytes = [size * count for each, count in kept for size in each.layer_bytes]
    layers = zip(model.decoder_layers(), layer_bytes, strict=True)
    return {
        "moment": memory.moment,
        "at_peak": dict(at_peak),
        "layers": {names[layer]: size for layer, size in layers},
        "around_layers": sum(count * sum(each.around.values()) for each, count in kept),
    }


def _refusal(request: ProfileRequest, training: Training, config: TrainConfig) -> str | None:
    """Return why this run is not profiled, equal on every rank, or None."""
    left = config.trainer.max_steps - training.step
    if left < request.total_steps:
        return (
            f"trainer.max_steps {config.trainer.max_steps} leaves {left} steps, and the profile needs "
            f"{request.total_steps} ({request.skip} to skip, {request.steps} timed, 1 for memory): raise max_steps, or "
            "lower --skip or --steps"
        )
    # Rank 0's answer, because another rank may have written its file already.
    exists = (Path(request.directory) / "rank0.json").is_file()
    if share_texts(str(exists))[0] == str(True):
        return f"{request.directory} has the profile of an earlier run"
    return None
