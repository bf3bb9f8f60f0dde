"""Tags of a model with parameters that have no dimensions, under ZeRO-1."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxd_memopt import trainer
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state
from tests.dist.pool import distributed

STATES = ("exp_avg", "exp_avg_sq")


@distributed(world_size=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_without_dimensions_are_saved_and_loaded(dtype, tmp_path):
    """A trained and a frozen scalar, at D=4, and from there at D=2 and back: every state is that of the run."""

    def build_scalars(tensor_size: int):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
        model = nn.Module()
        model.scale, model.frozen = (nn.Parameter(torch.tensor(value, dtype=dtype)) for value in (2.0, 3.0))
        model.weight = nn.Parameter(torch.ones(3, dtype=dtype))
        model.frozen.requires_grad_(False)
        return model, NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.25)

    def values(model, optimizer) -> torch.Tensor:
        """Of the first elements: all are on data-parallel rank 0."""
        state = optimizer.base_optimizer.state
        shards = [param for group in optimizer.base_optimizer.param_groups for param in group["params"]]
        found = [model.scale, *shards, *(state[shard][name] for shard in shards for name in (*STATES, "step"))]
        return torch.stack([value.detach().float().reshape(-1)[0] for value in found])

    model, optimizer = build_scalars(1)
    (model.scale * 3.0 + model.weight.sum()).backward()
    optimizer.step()
    want = values(model, optimizer)
    dist.broadcast(want, 0)
    for tag, size in (("first", 2), ("second", 4), ("third", 1)):
        trainer.save_checkpoint(tmp_path, tag, model, optimizer)
        model, optimizer = build_scalars(size)
        trainer.load_checkpoint(tmp_path, tag, model, optimizer)
        if parallel_state.get_data_parallel_rank() == 0:
            assert torch.equal(values(model, optimizer), want)
        for param in optimizer.base_optimizer.param_groups[0]["params"]:
            state = optimizer.base_optimizer.state[param]
            assert all(state[name].shape == param.shape for name in STATES)
