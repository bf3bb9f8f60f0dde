"""Profiles steps of a run that ``nxd-memopt profile`` has started; any other run is not touched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from nxd_memopt.profiling import ProfileRequest, StepProfiler
from nxd_memopt.training.config import TrainConfig
from nxd_memopt.training.distributed import profile_request
from nxd_memopt.training.parallelize import uses_cuda_graph
from nxd_memopt.training.state import Training


class ProfileFinishedError(Exception):
    """All steps that were to be profiled are; every rank raises it after the same step."""


class ProfiledSteps:
    """Contexts of the steps of a run.

    Args:
        training: state of the run.
        config: configuration of the run.

    Raises:
        ValueError: the run ends before the steps to be profiled.
    """

    def __init__(self, training: Training, config: TrainConfig) -> None:
        self._profiler: StepProfiler | None = None
        text = profile_request()
        if text is None:
            return
        request = ProfileRequest.from_json(text)
        left = config.trainer.max_steps - training.step
        if left < request.total_steps:
            raise ValueError(
                f"trainer.max_steps {config.trainer.max_steps} leaves {left} steps, and the profile needs "
                f"{request.total_steps} ({request.skip} to skip, {request.steps} timed, 1 for memory): raise "
                "max_steps, or lower --skip or --steps"
            )
        notes: list[str] = []
        if uses_cuda_graph(config, training.model.config):  # pyright: ignore[reportArgumentType]
            notes.append(
                "forward and backward are one CUDA graph: its kernels belong to no module, and its memory is in its "
                "pool; trainer.enable_cuda_graph false shows both"
            )
        if config.trainer.compile:
            notes.append("compiled layers: what is inside of a layer belongs to the layer")
        self._profiler = StepProfiler(request, training.model, training.optimizer, tuple(notes))

    def step(self) -> AbstractContextManager[None]:
        """Return the context of the next step."""
        return nullcontext() if self._profiler is None else self._profiler.step()

    def raise_if_finished(self) -> None:
        """Raise ``ProfileFinishedError`` after the last profiled step of a run that exists for its profile."""
        if self._profiler is not None and self._profiler.is_done and self._profiler.request.stop:
            raise ProfileFinishedError
