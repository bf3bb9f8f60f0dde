"""What ZeRO stages 2 and 3 refuse, by name and with a remedy."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import TrainingState, save_training_state
from nxd_memopt.config import MemoryConfig
from nxd_memopt.data_parallel import Zero2Optimizer, Zero3Optimizer, shard_model
from nxd_memopt.memory import GraphedLoss, apply_memory
from nxd_memopt.optimizer import AdamW, NeuronZero1Optimizer
from nxd_memopt.optimizer.in_backward import OptimizerInBackward
from nxd_memopt.parallel_layers import checkpointing, grads
from nxd_memopt.parallel_layers.overlapped_grads import OverlappedGradientReduction
from tests.data_parallel.stages import Run, batch_of, build, initialize
from tests.deferred_transfers import DeferredTransfers
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message


@distributed(world_size=2)
def test_what_needs_full_parameters(tmp_path):
    initialize(1)
    model = build("llama")
    assert_says(error_message(lambda: Zero3Optimizer(model.parameters(), AdamW)), "not sharded", "shard_model")
    shard_model(model)
    parameters = list(model.parameters())
    run = Run(model, "zero3", Zero3Optimizer(parameters, AdamW))
    run.backward([batch_of(0)])
    assert_says(error_message(lambda: grads.bucket_allreduce_gradients(model)), "averaging", "zero3", "leave it out")
    assert_says(error_message(lambda: OverlappedGradientReduction(model)), "OverlappedGradientReduction", "zero3")
    assert_says(error_message(lambda: NeuronZero1Optimizer(parameters, AdamW)), "Zero3Optimizer")
    assert_says(error_message(lambda: OptimizerInBackward(AdamW(parameters))), "Zero3Optimizer")
    assert_says(error_message(lambda: apply_memory(model, MemoryConfig())), "before data_parallel.shard_model")
    assert_says(error_message(lambda: shard_model(model)), "shard_model", "sharded (zero3)", "once")
    plain = TrainingState(model, torch.optim.AdamW(parameters))
    message = error_message(lambda: save_training_state(tmp_path, 1, state=plain, config={}))
    assert_says(message, "AdamW", "Zero3Optimizer")
    assert_says(error_message(lambda: checkpointing.save({"model": model.state_dict()}, tmp_path)), "zero3")
    message = error_message(lambda: checkpointing.save({"model": model.state_dict()}, tmp_path, save_xser=True))
    assert_says(message, "zero3", "save_training_state")
    assert_says(error_message(lambda: run.optimizer.save_sharded_state_dict(tmp_path)), "save_training_state")
    mixed = [*parameters, nn.Parameter(torch.ones(2))]
    mixed[-1].grad = torch.ones(2)
    assert_says(error_message(lambda: grads.get_grad_norm(mixed)), "one kind")


@distributed(world_size=2)
def test_a_graph_is_refused(monkeypatch=None):
    """On a backend that captures graphs; the refusal is before anything is captured."""
    initialize(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(backend), "capture_refusal", lambda self: None)
        model = build("llama")
        shard_model(model)
        message = error_message(lambda: GraphedLoss(model.parameters(), lambda ids: model(ids, labels=ids).loss))
        assert_says(message, "CUDA graph", "zero3")
        run = Run.of(build("llama"), "zero2")
        hook = next(iter(next(run.model.parameters())._post_accumulate_grad_hooks.values()))
        # a replay runs the hooks outside of a backward pass
        message = error_message(lambda: hook(next(run.model.parameters())), RuntimeError)
        assert_says(message, "CUDA graph", "zero1")


@distributed(world_size=2)
def test_a_backend_without_gradient_sharding():
    initialize(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(type(backend), "gradient_sharding_refusal")
        model = build("llama")
        assert_says(error_message(lambda: shard_model(model)), "zero3", backend.name, "zero1")
        message = error_message(lambda: Zero2Optimizer(model.parameters(), AdamW))
        assert_says(message, "zero2", backend.name, "zero1")


@distributed(world_size=2)
def test_models_that_cannot_be_sharded():
    initialize(2)
    assert_says(error_message(lambda: shard_model(build("llama"))), "there is 1", "zero1")
    assert Zero2Optimizer(build("llama").parameters(), AdamW)._scatter is None  # nothing to reduce
    initialize(1)
    message = error_message(lambda: Zero2Optimizer(build("llama").parameters(), AdamW, use_grad_acc_hook=True))
    assert_says(message, "use_grad_acc_hook", "leave it out")
    for ranks in (1, 3):
        message = error_message(lambda ranks=ranks: shard_model(build("llama"), ranks_per_replica=ranks))
        assert_says(message, "ranks_per_replica", ranks, "data-parallel size 2")
    mixed = build("llama", dtype=torch.bfloat16)
    mixed.model.norm.float()
    assert_says(error_message(lambda: shard_model(mixed)), "torch.bfloat16", "torch.float32", "model.norm.weight")
    offloaded = build("llama")
    memory = MemoryConfig(cpu_offloading_weights=True, cpu_offloading_num_layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(backend), "host_transfers", lambda self: DeferredTransfers())
        apply_memory(offloaded, memory)
    assert_says(error_message(lambda: shard_model(offloaded)), "cpu_offloading_weights", "zero2")


@distributed(world_size=2)
def test_a_backward_inside_another_one():
    """It would drop what the outer one has begun to reduce."""
    initialize(1)
    layer, head = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = Zero2Optimizer([*layer.parameters(), *head.parameters()], AdamW, lr=0.1)
    x = torch.ones(2, 4, requires_grad=True)
    loss = head(checkpoint(layer, x, use_reentrant=True)).sum()
    assert_says(error_message(loss.backward, RuntimeError), "use_reentrant=False", "zero1")
    optimizer.zero_grad()
    head(checkpoint(layer, x, use_reentrant=False)).sum().backward()
    optimizer.step()
