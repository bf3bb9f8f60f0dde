"""Forward and backward of a step's micro-batches through a causal language model that is divided into stages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.modules.causal_lm import CausalLMOutput, ParallelCausalLM
from nxd_memopt.modules.stages import StageInput
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import share_texts
from nxd_memopt.pipeline.runner import PipelineRunner, StageOutput

Batch = Mapping[str, Any]
"""Arguments of the model's ``forward`` for a micro-batch, equal on all ranks of the pipeline; ``labels`` are needed."""


class PipelinedCausalLM:
    """Runs the stages of a model on all ranks of its pipeline.

    Call it after everything that decides which parameters are trained. Every rank of the world calls.

    Args:
        model: built with ``pipeline_model_parallel_size``.
        scale: returns a loss with scaled gradients; default the loss.
        on_output: called with number and chunk of each micro-batch whose forward has run in training, and its output.
    """

    def __init__(
        self,
        model: ParallelCausalLM,
        *,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
        on_output: Callable[[int, int, CausalLMOutput], None] | None = None,
    ) -> None:
        self._model = model
        self._scale = scale
        self._on_output = on_output
        self._batches: Sequence[Batch] = ()
        self._loss = torch.zeros(())
        self._receives_trained = _chunks_after_trained(model)
        group = parallel_state.get_pipeline_model_parallel_group()
        self._runner = PipelineRunner(self, len(model.stages.chunks), group)

    def train(
        self, batches: Sequence[Batch], last_backward: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Tensor:
        """Run forward and backward of all micro-batches of a step.

        Args:
            batches: the micro-batches. Give each ``num_items_in_batch``: the losses are added up.
            last_backward: returns a context for this rank's last backward.

        Returns:
            The sum of the losses, fp32, 0-dim, on the last stage, and 0 on all others. It has no losses of routers.
        """
        self._begin(batches)
        self._runner.train(len(batches), last_backward)
        return self._end()

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """Run the forwards of any number of micro-batches without gradients; return as ``train``."""
        self._begin(batches)
        self._runner.evaluate(len(batches))
        return self._end()

    def _begin(self, batches: Sequence[Batch]) -> None:
        self._batches = batches
        # Created on the host and copied: on XLA a constant would be part of the first forward's graph.
        self._loss = torch.zeros(()).to(backend.device)

    def _end(self) -> Tensor:
        self._batches = ()
        return self._loss

    def inputs(self, micro_batch: int, chunk: int) -> list[Tensor]:
        """Return memory for the hidden states that a chunk receives, ``[B, S, H]`` or ``[s, B, H]``."""
        model, ids = self._model, self._batches[micro_batch]["input_ids"]
        rows, length = ids.shape
        shape = (rows, length, model.spec.hidden_size)
        if model.parallel.sequence_parallel_enabled:
            shape = (length // model.parallel.tensor_model_parallel_size, rows, model.spec.hidden_size)
        hidden = torch.empty(shape, dtype=model.any_weight().dtype, device=ids.device)
        needs_grad = torch.is_grad_enabled() and self._receives_trained[chunk]
        return [hidden.requires_grad_(needs_grad)]

    def forward(self, micro_batch: int, chunk: int, inputs: Sequence[Tensor]) -> StageOutput:
        """Run a chunk of the model."""
        hidden = inputs[0] if inputs else None
        output: CausalLMOutput = self._model(**self._batches[micro_batch], stage=StageInput(chunk, hidden))
        if self._on_output is not None and torch.is_grad_enabled():
            self._on_output(micro_batch, chunk, output)
        # With experts the loss of the last stage has the losses of its own routers.
        own = output.loss if output.loss is not None else getattr(output, "router_loss", None)
        losses = () if own is None else (self._scale(own),)
        if output.hidden is not None:
            return StageOutput((output.hidden.contiguous(),), losses)
        assert output.loss is not None, "the last stage needs labels"
        reported = getattr(output, "cross_entropy", None)
        self._loss = self._loss + (output.loss if reported is None else reported).detach().float()
        return StageOutput(losses=losses)


def _chunks_after_trained(model: ParallelCausalLM) -> list[bool]:
    """Return for each chunk whether a parameter of a stage before it is trained. Every rank of the world calls."""
    stages, layers = model.stages, dict(zip(model.stages.layers, model.decoder_layers(), strict=True))
    is_trained: list[bool] = []
    for chunk, numbers in enumerate(stages.chunks):
        modules: list[nn.Module] = [layers[number] for number in numbers]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        if stages.is_first(chunk):
            parameters.append(model.embedding_weight())
        is_trained.append(any(parameter.requires_grad for parameter in parameters))
    # Stage c * P + r is chunk c of the pipeline's rank r.
    texts = share_texts(json.dumps(is_trained))
    pipelines = parallel_state.get_pipeline_model_parallel_replica_groups()
    ranks = next(ranks for ranks in pipelines if parallel_state.get_global_rank() in ranks)
    of_ranks = [json.loads(texts[rank]) for rank in ranks]
    of_stages = [of_rank[chunk] for chunk in range(len(stages.chunks)) for of_rank in of_ranks]
    return [any(of_stages[: chunk * len(ranks) + stages.rank]) for chunk in range(len(stages.chunks))]
