"""Forward and backward of the micro-batches of a run whose model is divided into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.architectures.stages import layers_of_stages
from nxd_memopt.backends import backend
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.optimizer import LossScaler
from nxd_memopt.pipeline.causal_lm import PipelinedCausalLM
from nxd_memopt.planner.techniques.pipeline_schedule import bubble
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.routers import ExpertForwardBackward

EVALUATED_TOGETHER = 8
"""Micro-batches of a rank's stage that an evaluation runs between two looks at signals."""


class PipelinedForwardBackward:
    """Forward and backward of all micro-batches of a step, on each rank of a pipeline.

    Args:
        model: the stages of this rank.
        scaler: scales the gradients; None scales nothing.
        experts: collects what the routers of this rank's layers do; None without experts.
    """

    def __init__(
        self, model: ParallelCausalLM, scaler: LossScaler | None, experts: ExpertForwardBackward | None
    ) -> None:
        self.experts = experts
        self._micro_batches: Sequence[MicroBatch] = ()
        options: dict[str, Any] = {}
        if scaler is not None:
            options["scale"] = scaler.scale_gradients_of
        if experts is not None:
            options["on_output"] = lambda index, chunk, output: experts.add(
                output.router, self._micro_batches[index], chunk
            )
        self._pipeline = PipelinedCausalLM(model, **options)

    def run(
        self, micro_batches: Sequence[MicroBatch], last_backward: Callable[[], AbstractContextManager[None]]
    ) -> Tensor:
        """Accumulate the gradients of a step; return the loss on the last stage, 0 on others."""
        self._micro_batches = micro_batches
        inputs_of = MicroBatch.inputs if self.experts is None else self.experts.inputs
        return self._pipeline.train([inputs_of(each) for each in micro_batches], last_backward)

    def evaluate(self, batches: Sequence[MicroBatch], before_batch: Callable[[], None]) -> Tensor:
        """Return the sum of the losses of ``batches`` on the last stage, 0 on others, without gradients."""
        # On the host first, as without stages: a constant would be part of the first forward's graph on XLA.
        total = torch.zeros(()).to(backend.device)
        for start in range(0, len(batches), EVALUATED_TOGETHER):
            before_batch()
            loss = self._pipeline.evaluate([each.inputs() for each in batches[start : start + EVALUATED_TOGETHER]])
            total = total + loss
        return total


def describe_pipeline(model: ParallelCausalLM, micro_batches: int) -> list[str]:
    """Return a line about the stages of a pipeline; none about a complete model."""
    parallel = model.parallel
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_chunks
    if size == 1:
        return []
    counts = layers_of_stages(model.spec, parallel)
    of_rank = f"{size} ranks"
    if chunks > 1:
        of_rank += f" with {chunks} stages each"
    share = bubble(size, chunks, micro_batches)
    return [
        f"pipeline: {of_rank}, layers {', '.join(map(str, counts))}; with {micro_batches} micro-batches and equal "
        f"stages each rank waits {share:.1%} of a step"
    ]
