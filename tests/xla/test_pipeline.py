"""Tests of pipeline stages on simulated XLA ranks: the losses of a CPU, and graphs that do not depend on M."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.parallel_layers import parallel_state, random
from nxd_memopt.parallel_layers.utils import move_model_to_device
from nxd_memopt.pipeline.causal_lm import PipelinedCausalLM
from nxd_memopt.pipeline.tied import sum_tied_gradients
from tests.dist.pool import distributed
from tests.reference_models import llama_config

RECOMPUTE = MemoryConfig(recompute_granularity="full")


def batches(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(61, (2, 8), generator=generator).to(backend.device) for _ in range(count)]
    divisor = torch.tensor([16.0 * count]).to(backend.device)
    return [{"input_ids": each, "labels": each, "num_items_in_batch": divisor} for each in ids]


def compiled() -> int:
    return int(backend.step_counters()["compiled graphs"])


def step(pipeline: PipelinedCausalLM, model: Any, count: int) -> tuple[float, int]:
    """The loss of a step, and what it compiled; gradients are there from the first one on."""
    steps = batches(count)
    backend.mark_step()
    before = compiled()
    loss = pipeline.train(steps)
    backend.mark_step()
    loss = backend.all_reduce(loss, parallel_state.get_pipeline_model_parallel_group()).item()
    return loss, compiled() - before


@pytest.mark.xdist_group("pipeline")
@distributed(world_size=2)
def test_two_stages() -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = llama_config(num_hidden_layers=2)
    random.model_parallel_manual_seed(3)
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    model = LlamaForCausalLM(config, parallel=parallel, memory=RECOMPUTE, device="cpu").to(backend.device)
    random.model_parallel_manual_seed(3)
    whole = LlamaForCausalLM(config, parallel=ParallelConfig(), memory=RECOMPUTE, device="cpu").to(backend.device)
    expected = sum(float(whole(**batch).loss.item()) for batch in batches(3))

    pipeline = PipelinedCausalLM(model)
    loss, _ = step(pipeline, model, 3)
    assert loss == pytest.approx(expected, rel=1e-6)  # fp32
    # The gradients exist now: a step of any number of micro-batches runs the graphs of the one before.
    step(pipeline, model, 3)
    assert step(pipeline, model, 2)[1] == 0
    assert step(pipeline, model, 8)[1] == 0


@pytest.mark.xdist_group("pipeline")
@distributed(world_size=2)
def test_a_tied_weight_is_tied_on_the_device() -> None:
    """torch_xla moves a model into new parameters, which must keep what says that a stage has a copy."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = llama_config(num_hidden_layers=2, tie_word_embeddings=True)
    gradients: list[torch.Tensor] = []
    for size in (2, 1):
        random.model_parallel_manual_seed(3)
        parallel = ParallelConfig(pipeline_model_parallel_size=size)
        model = LlamaForCausalLM(config, parallel=parallel, device="cpu")
        move_model_to_device(model, backend.device)
        if size > 1:
            PipelinedCausalLM(model).train(batches(2))
            sum_tied_gradients(model.parameters())
        else:
            for each in batches(2):
                model(**each).loss.backward()
        gradients.append(model.embedding_weight().grad.cpu())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-6)
