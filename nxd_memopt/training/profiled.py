"""Profiles steps of a run that ``nxd-memopt profile`` has started; any other run is not touched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from nxd_memopt.parallel_layers.coordination import share_texts
from nxd_memopt.profiling import ProfileRequest, StepProfiler
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.device_support import uses_cuda_graph
from nxd_memopt.training.runtime.distributed import profile_request
from nxd_memopt.training.state import Training


class ProfileFinishedError(Exception):
    """All steps that were to be profiled are; every rank raises it after the same step."""


class ProfiledSteps:
    """Contexts of the steps of a run.

    A command may start several runs. One that is too short is not profiled, nor is one after a profiled one.

    Args:
        training: state of the run.
        config: configuration of the run.
        say: shows a line.

    Raises:
        ValueError: the run exists for its profile, and ends before the steps to be profiled.
    """

    def __init__(self, training: Training, config: TrainConfig, say: Callable[[str], None]) -> None:
        self._profiler: StepProfiler | None = None
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
