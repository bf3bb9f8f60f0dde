"""Planned host memory, and weights that wait there, against what the offload allocates and frees, as integers."""

from __future__ import annotations

import pytest

from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.memory import apply_memory
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.memory.offload import OFFLOAD_OWNER
from nxd_memopt.memory.weight_offload import WEIGHT_OWNER
from nxd_memopt.planner.memory.activations import activations, host_pool_bytes
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.memory.peak import step_memory
from nxd_memopt.planner.sizes.states import StateLayout
from nxd_memopt.planner.techniques.offloaded_weights import OffloadedWeights
from tests.deferred_transfers import DeferredTransfers
from tests.host_copies import HostOnly
from tests.planner.storages import share_of, sizes_of
from tests.reference import assert_says, error_message
from tests.reference_models import batch, gpt_neox_config, llama_config, parallel_model

LAYERS, ROWS, LENGTH = 6, 3, 24
FULL = {"recompute_granularity": "full"}
STREAMED = {**FULL, "cpu_offloading_activations": True}
CHUNKS = {"recompute_method": "uniform", "recompute_num_layers": 2}


def resident_bytes(model):
    """Bytes of the weights whose storages have memory."""
    storages = {param.untyped_storage()._cdata: param.untyped_storage().nbytes() for param in model.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize(
    ("number", "techniques"),
    [(1, {}), (4, {}), (LAYERS, {}), (3, FULL), (3, {**FULL, **CHUNKS}), (4, {**FULL, "recompute_method": "nested"})],
)
@pytest.mark.parametrize("config_of", [llama_config, gpt_neox_config])
def test_weights_in_the_loss_and_in_the_backward_of_each_layer(config_of, number, techniques, monkeypatch):
    monkeypatch.setattr("nxd_memopt.memory.apply.backend.host_transfers", lambda: DeferredTransfers())
    # Every weight has a multiple of 512 bytes, as those of real models.
    config = config_of(num_hidden_layers=LAYERS, hidden_size=256, intermediate_size=512, num_attention_heads=4)
    model = parallel_model(config)
    memory = MemoryConfig(cpu_offloading_weights=True, cpu_offloading_num_layers=number, **techniques)
    pool = HostPool()
    apply_memory(model, memory, pool=pool)
    share = share_of(config, ParallelConfig(1), LENGTH, ROWS, "float32")
    layout = StateLayout(4)
    plan = OffloadedWeights.of(share.layer_shapes, memory, layout, LAYERS)
    everything = sum(param.nbytes for param in model.parameters())
    found = {}

    def record(index):
        def in_backward(grad):
            found[index] = everything - resident_bytes(model)

        def after_forward(module, inputs, output):
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(in_backward)

        return after_forward

    for index, layer in enumerate(model.decoder_layers()):
        attention = layer.self_attn if hasattr(layer, "self_attn") else layer.attention
        attention.register_forward_hook(record(index))
    loss = model(**batch(rows=ROWS, length=LENGTH)).loss
    assert everything - resident_bytes(model) == plan.absent_bytes(LAYERS)
    loss.backward()
    assert found == {index: plan.absent_bytes(LAYERS, index) for index in range(LAYERS)}
    assert pool.ledger() == {WEIGHT_OWNER: plan.host_bytes(LAYERS)}
    used = step_memory(share, memory, Kernels(False, "sdpa"), layout)
    assert used.host["weights"] == plan.host_bytes(LAYERS) and used.host["activations"] == 0


def test_weights_on_the_host_lower_the_peak_of_backward_and_not_that_of_the_update():
    config = llama_config(num_hidden_layers=LAYERS, hidden_size=256, intermediate_size=512, num_attention_heads=4)
    share = share_of(config, ParallelConfig(1), 4096, 8, "bfloat16")
    offloading = MemoryConfig(cpu_offloading_weights=True, cpu_offloading_num_layers=5)
    layout = StateLayout(2, in_backward=True)
    plain = step_memory(share, MemoryConfig(), Kernels(True, "flash4"), layout)
    offloaded = step_memory(share, offloading, Kernels(True, "flash4"), layout)
    plan = OffloadedWeights.of(share.layer_shapes, offloading, layout, LAYERS)
    # All five layers are away in the loss; in backward, where the peak is then, up to three are back.
    assert plain.moment == "loss" and plan.absent_bytes(LAYERS, 4) < plan.absent_bytes(LAYERS)
    saved = plain.device_bytes - offloaded.device_bytes
    assert plan.absent_bytes(LAYERS, 4) <= saved <= plan.absent_bytes(LAYERS)
    assert plain.device["weights"] - offloaded.device["weights"] >= plan.absent_bytes(LAYERS, 4)
    # With few tokens the update is highest, for which all weights are on the device.
    share = share_of(config, ParallelConfig(1), 8, 1, "bfloat16")
    layout = StateLayout(2, sharding="zero1", data_parallel_size=2)
    plain = step_memory(share, MemoryConfig(), Kernels(True, "flash4"), layout)
    offloaded = step_memory(share, offloading, Kernels(True, "flash4"), layout)
    # Weights return after backward, when the gradient of the embedding's output is free.
    assert plain.moment == offloaded.moment == "update"
    assert plain.device | {"temporary tensors": 0} == offloaded.device


def test_refusals_of_weights_on_the_host():
    memory = MemoryConfig(cpu_offloading_weights=True, cpu_offloading_num_layers=LAYERS + 1)
    message = error_message(lambda: OffloadedWeights.of([(4, 4)], memory, StateLayout(4), LAYERS))
    assert_says(message, "7", "6 layers")
    memory = MemoryConfig(cpu_offloading_weights=True, cpu_offloading_num_layers=1)
    layout = StateLayout(2, sharding="zero3", data_parallel_size=2)
    assert_says(error_message(lambda: OffloadedWeights.of([(4, 4)], memory, layout, LAYERS)), "zero3", "leave one out")


@pytest.mark.parametrize(
    "techniques",
    [
        {"cpu_offloading_num_layers": 3},
        {**FULL, "cpu_offloading_num_layers": 2},
        STREAMED,
        {**STREAMED, "cpu_offloading_num_layers": 4},
        {**STREAMED, **CHUNKS},
        {**STREAMED, "recompute_method": "nested", "recompute_num_layers": 4},
        {**STREAMED, "recompute_method": "block", "recompute_num_layers": 5},
        {**STREAMED, "recompute_keep_core_attn": True},
        {**STREAMED, "recompute_keep_core_attn": 2},
    ],
)
def test_blocks_of_host_memory(techniques, monkeypatch):
    monkeypatch.setattr("nxd_memopt.memory.apply.backend.host_transfers", lambda: HostOnly())
    smallest, block = 1 << 13, 1 << 14
    monkeypatch.setattr("nxd_memopt.memory.offload._MIN_BYTES", smallest)
    config = llama_config(num_hidden_layers=LAYERS)
    memory = MemoryConfig(attention_backend="sdpa", **techniques)
    model = parallel_model(config)
    pool = HostPool(block_bytes=block)
    apply_memory(model, memory, pool=pool)
    for _ in range(2):
        model(**batch(rows=ROWS, length=LENGTH)).loss.backward()
    sizes = sizes_of(config, ParallelConfig(1), LENGTH, ROWS, "float32")
    kept = activations(sizes, memory, Kernels(False, "sdpa"), smallest_bytes=smallest)
    assert host_pool_bytes(kept, memory, block_bytes=block) == pool.allocated_bytes > 0
    assert set(pool.ledger()) <= {OFFLOAD_OWNER}
