"""The planned bytes of weights, gradients, masters and moments equal the tensors' bytes, as integers."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.models import model_class
from nxd_memopt.optimizer import AdamW, NeuronZero1Optimizer, OffloadedZero1Optimizer
from nxd_memopt.optimizer.streamed_adamw import PlacedStates
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.data_shards import local_rows
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.memory.peak import _in_update, step_memory
from nxd_memopt.planner.sizes.states import (
    StateLayout,
    gradient_bytes,
    local_shapes,
    master_bytes,
    moment_bytes,
    offloaded_state_bytes,
    parameters_on_host,
    shard_bytes,
    shard_elements,
    weight_bytes,
)
from tests.data_parallel.stages import STAGES, Run, build, initialize
from tests.deferred_transfers import DeferredTransfers
from tests.dist.pool import distributed
from tests.planner.storages import share_of
from tests.reference_models import mixtral_config

BATCH = torch.arange(24).view(2, 12)


def stored_bytes(run: Run, stage: str) -> dict[str, int]:
    """Bytes of the tensors between backward and update, and of the optimizer's states."""
    optimizer = run.optimizer
    sharded = optimizer._sharded
    states = optimizer.base_optimizer.state
    moments = [states[each.shard][name] for each in sharded for name in ("exp_avg", "exp_avg_sq")]
    shards = [each.shard for each in sharded if each.shard is not each.param]
    weights = [] if stage == "zero3" else [each.param for each in sharded]
    return {
        name: sum(tensor.nbytes for tensor in tensors)
        for name, tensors in {"weights": weights, "masters": shards, "moments": moments}.items()
    }


def gradients(run: Run, stage: str) -> int:
    tensors = []
    for each in run.optimizer._sharded:
        if stage == "zero3":
            tensors.append(local_rows(each.param.grad))
        elif stage == "zero2":
            tensors.append(each.shard.grad)
        else:
            tensors.append(getattr(each.param, "main_grad", None) if each.param.grad is None else each.param.grad)
    return sum(tensor.nbytes for tensor in tensors)


def check_states(run: Run, stage: str, shapes, layout: StateLayout) -> None:
    """Compare the tensors of a step with the plan."""
    run.backward([BATCH])
    found = {"gradients": gradients(run, stage)}
    run.optimizer.step()
    found |= stored_bytes(run, stage)
    functions = {"gradients": gradient_bytes, "weights": weight_bytes, "masters": master_bytes, "moments": moment_bytes}
    # Ranks other than the first may have fewer rows of a parameter with stage 3.
    if stage != "zero3" or parallel_state.get_data_parallel_rank() == 0:
        assert found == {name: function(shapes, layout) for name, function in functions.items()}, (stage, layout)


@distributed(world_size=2)
def test_every_stage_in_every_dtype():
    initialize(1)
    for name in ("llama", "neox"):
        for stage in STAGES:
            for dtype in (torch.float32, torch.bfloat16):
                # an odd number of rows, which stage 3 splits unevenly
                model = build(name, dtype=dtype, vocab_size=33)
                layout = StateLayout(dtype.itemsize, master_weights=True, sharding=stage, data_parallel_size=2)
                check_states(Run.of(model, stage), stage, local_shapes(model_spec(model.config), 1), layout)


@distributed(world_size=2)
def test_gradients_that_are_added_up_in_the_dtype_of_the_parameters():
    initialize(1)
    for stage in ("none", "zero1"):
        model = build("llama", dtype=torch.bfloat16, vocab_size=33)
        groups = None if stage == "zero1" else [[0], [1]]
        optimizer = NeuronZero1Optimizer(list(model.parameters()), AdamW, sharding_groups=groups, max_norm=1.0)
        model(BATCH, labels=BATCH).loss.backward()
        layout = StateLayout(2, master_weights=True, sharding=stage, data_parallel_size=2, grad_reduce_in_fp32=False)
        shapes = local_shapes(model_spec(model.config), 1)
        assert gradient_bytes(shapes, layout) == sum(parameter.grad.nbytes for parameter in model.parameters())
        optimizer.reduce_gradients()
        # All of them are cast before the first update: "reduced gradients" of the plan.
        assert shard_bytes(shapes, layout) == sum(each.shard.grad.nbytes for each in optimizer._sharded)
        wide = StateLayout(2, master_weights=True, sharding=stage, data_parallel_size=2)
        assert gradient_bytes(shapes, wide) == 2 * gradient_bytes(shapes, layout)


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("remainders", [False, True])
def test_streamed_states_of_a_model(fraction, remainders):
    """Masters, or their remainders, and moments on host and device; gradients stay in the parameters' dtype."""
    initialize(1)
    model = build("llama", dtype=torch.bfloat16, vocab_size=8192)
    pool = HostPool()
    optimizer = OffloadedZero1Optimizer(
        model.parameters(),
        optimizer_offload_fraction=fraction,
        transfers=DeferredTransfers(),
        pool=pool,
        store_param_remainders=remainders,
        lr=1e-3,
    )
    model(BATCH, labels=BATCH).loss.backward()
    optimizer.reduce_gradients()
    assert all(each.shard.main_grad is each.param.grad for each in optimizer._sharded)
    shapes = local_shapes(model_spec(model.config), 1)
    layout = StateLayout(
        2,
        master_weights=True,
        grad_reduce_in_fp32=False,
        optimizer_offload_fraction=fraction,
        param_remainders=remainders,
    )
    on_host = offloaded_state_bytes(shapes, layout)
    assert pool.ledger().get("optimizer states", 0) == on_host and (on_host > 0) == (fraction > 0)
    on_device = master_bytes(shapes, layout) + moment_bytes(shapes, layout) - on_host
    assert sum(buffer.nbytes for buffer in optimizer._states.device) == on_device
    share = share_of(model.spec, ParallelConfig(), BATCH.size(1), BATCH.size(0), "bfloat16")
    planned = step_memory(share, MemoryConfig(), Kernels(False, "sdpa"), layout)
    assert planned.host["optimizer states"] == on_host
    assert planned.device["master weights"] + planned.device["optimizer moments"] == on_device
    _, update = _in_update(share, layout, gradient_bytes(shapes, layout))
    assert ("reduced gradients" in update) == (fraction == 0)


@distributed(world_size=2)
def test_inputs_of_the_gather_of_streamed_shards():
    initialize(1)
    model = build("llama", dtype=torch.bfloat16, vocab_size=8193)
    optimizer = OffloadedZero1Optimizer(model.parameters(), transfers=DeferredTransfers(), lr=1e-3)
    layout = StateLayout(2, master_weights=True, sharding="zero1", data_parallel_size=2, optimizer_offload_fraction=1.0)
    share = share_of(model.spec, ParallelConfig(), 12, 2, "bfloat16")
    planned = step_memory(share, MemoryConfig(), Kernels(False, "sdpa"), layout).device["inputs of the all-gather"]
    assert planned == sum(output.nbytes for output in optimizer._outputs)


@distributed(world_size=2, slow=[4])
def test_experts_are_sharded_over_the_ranks_that_have_the_same_ones(world_size):
    for stage in STAGES:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        parallel = ParallelConfig(1, expert_model_parallel_size=2)
        config = mixtral_config(vocab_size=33)
        model = model_class("mixtral")(config, parallel=parallel, dtype=torch.bfloat16)
        shapes = local_shapes(model_spec(config), 1, 2)
        assert shapes == [tuple(parameter.shape) for parameter in model.parameters()]
        layout = StateLayout(2, master_weights=True, sharding=stage, data_parallel_size=world_size, expert_ranks=2)
        check_states(Run.of(model, stage), stage, shapes, layout)


@distributed(world_size=[], slow=[4])
def test_hybrid_sharding_divides_by_the_ranks_of_an_instance():
    """Four replicas in two instances: each rank stores a half."""
    initialize(1)
    model = build("llama", dtype=torch.bfloat16)
    layout = StateLayout(2, master_weights=True, sharding="zero2", data_parallel_size=2)
    check_states(
        Run.of(model, "zero2", ranks_per_replica=2), "zero2", local_shapes(model_spec(model.config), 1), layout
    )


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 1.0])
def test_states_on_the_host(fraction):
    shapes = [(1000, 300), (300,), (1024, 64), (50, 50)]
    layout = StateLayout(2, master_weights=True, optimizer_offload_fraction=fraction)
    matrices = [shape for shape in shapes if len(shape) == 2]
    sizes = [shard_elements(shape, layout) for shape in (*matrices, (300,))]
    placed = PlacedStates(sizes, fraction=fraction)
    placed.allocate(DeferredTransfers(), HostPool())
    assert offloaded_state_bytes(shapes, layout) == sum(buffer.nbytes for buffer in placed.host)
    # Whole matrices of at least 65,536 elements.
    assert placed.host_elements == {0.0: 0, 0.3: 300_000, 0.5: 300_000, 1.0: 365_536}[fraction]


def test_states_on_the_host_are_spread_over_the_parameters():
    """Up to each parameter the part on the host is the fraction, and less than a parameter more."""
    sizes = [1 << 20, 300, 1 << 17, 1 << 18, 300, 1 << 17, 1 << 18] * 20
    for fraction in (0.1, 0.5, 0.55, 0.9):
        chosen = parameters_on_host(sizes, fraction)
        for count in range(1, len(sizes) + 1):
            matrices = [index for index in range(count) if sizes[index] > 300]
            on_host = sum(sizes[index] for index in matrices if index in chosen)
            wanted = fraction * sum(sizes[index] for index in matrices)
            assert wanted <= on_host < wanted + (1 << 20)
