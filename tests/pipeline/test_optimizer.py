"""Tests that an optimizer with separate masters has the norm of the complete model on every stage."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.config import ParallelConfig
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.optimizer import LossScaler
from nxd_memopt.parallel_layers import parallel_state, random
from nxd_memopt.pipeline.causal_lm import PipelinedCausalLM
from nxd_memopt.training.config.data_parallel import DataParallelConfig
from nxd_memopt.training.config.optimizer import OptimizerConfig
from nxd_memopt.training.optimizer import MasterWeightOptimizer
from nxd_memopt.training.parameter_groups import trained_parameters
from tests.dist.pool import distributed
from tests.pipeline.test_causal_lm import VOCABULARY, batches, train_whole
from tests.reference_models import llama_config


@distributed(world_size=2)
def test_norm_of_a_tied_model_with_masters() -> None:
    """The masters of bf16 weights are other tensors; the copy of the tied weight's counts once."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = llama_config(num_hidden_layers=2, tie_word_embeddings=True)
    norms: list[float] = []
    for stages in (1, 2):
        random.model_parallel_manual_seed(3)
        parallel = ParallelConfig(pipeline_model_parallel_size=stages)
        model = LlamaForCausalLM(config, parallel=parallel, dtype=torch.bfloat16)
        optimizer = MasterWeightOptimizer(trained_parameters(model), OptimizerConfig())
        if stages == 1:
            train_whole(model, batches(2))
            # Not by the optimizer, which would add up the norms of the complete models of both ranks.
            squares = [parameter.main_grad.double().square().sum() for _, parameter in trained_parameters(model)]
            norms.append(torch.stack(squares).sum().sqrt().item())
        else:
            PipelinedCausalLM(model).train(batches(2))
            norms.append(optimizer.reduce_gradients().item())
    # bf16: the gradients of the tied weight are rounded before they are added by one rank, and after by two.
    assert abs(norms[1] / norms[0] - 1) < 2**-9


@distributed(world_size=2)
def test_an_overflow_of_one_stage_is_one_of_all() -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    is_first = parallel_state.get_pipeline_model_parallel_rank() == 0
    scaler = LossScaler(initial_scale=1024.0)
    gradient = torch.full((2,), torch.inf if is_first else 1.0, device=backend.device)
    scaler.unscale([gradient])
    assert scaler.update()
    assert scaler.skipped_steps == 1


@pytest.mark.slow
@distributed(world_size=6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_a_tied_weight_stay_equal(dtype: torch.dtype) -> None:
    """Three data-parallel ranks share the states; a sum of three depends on the order of its addends."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    random.model_parallel_manual_seed(3)
    config = llama_config(num_hidden_layers=2, tie_word_embeddings=True)
    model = LlamaForCausalLM(config, parallel=ParallelConfig(pipeline_model_parallel_size=2), dtype=dtype)
    sharding = DataParallelConfig(sharding="zero1")
    optimizer = MasterWeightOptimizer(trained_parameters(model), OptimizerConfig(), sharding)
    pipeline = PipelinedCausalLM(model)
    ((tied, master),) = [(each.param, each.shard) for each in optimizer.inner._sharded if hasattr(each.param, "shared")]
    rank = parallel_state.get_data_parallel_rank()
    group = parallel_state.get_tied_stages_group()
    for _ in range(20):
        # Each data-parallel rank has micro-batches of its own.
        pipeline.train([batch | {"input_ids": (batch["input_ids"] + rank) % VOCABULARY} for batch in batches(2)])
        optimizer.reduce_gradients()
        optimizer.step(0.01)
        optimizer.zero_grad()
        for copy in (tied.detach().float(), master.detach()):
            first, last = backend.all_gather(copy.unsqueeze(0), group)
            assert torch.equal(first, last)
