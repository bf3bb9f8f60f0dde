"""Activations on the host: gradients to the bit, nothing kept on the device, and host memory used again."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch

from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.memory import apply_memory, apply_recompute, is_compiled, is_recomputed, offload
from nxd_memopt.memory.host_arena import HostArena
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.memory.offload import ActivationOffload, apply_offload, remove_offload
from nxd_memopt.planner.memory.activations import offloaded_checkpoint_bytes
from tests.host_copies import HostOnly, SlowCopy
from tests.reference import assert_says, error_message
from tests.reference_models import BATCH, LENGTH, batch, gpt_neox_config, llama_config, parallel_model

BLOCK = 4096  # smaller than most storages: they span blocks and share them


def offload_first(layers, num_layers, transfers, **options):
    pool = HostPool(block_bytes=BLOCK)
    apply_offload(layers, num_layers, ActivationOffload(transfers, pool, num_layers=num_layers, **options))
    return pool


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch):
    monkeypatch.setattr(offload, "_MIN_BYTES", 1)
    monkeypatch.setattr("nxd_memopt.memory.apply.new_pool", lambda transfers: HostPool(block_bytes=BLOCK))


def gradients(model):
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(**batch()).loss
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters())]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize(
    "memory", [{}, {"recompute_granularity": "selective", "recompute_modules": ("norm", "mlp_act")}]
)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_gradients_are_bit_equal(config, memory, num_layers):
    model = parallel_model(config(num_hidden_layers=3), **memory)
    expected = gradients(model)
    transfers = HostOnly()
    offload_first(model.decoder_layers(), num_layers, transfers)
    for _ in range(2):
        assert_equal(gradients(model), expected)
    count = transfers.events.count("out")
    assert count > 2 * num_layers and transfers.events.count("back") == count
    remove_offload(model.decoder_layers())
    gradients(model)
    assert transfers.events.count("out") == count


def test_full_recompute_behind_the_offloaded_layers():
    model = parallel_model(llama_config(num_hidden_layers=4))
    expected = gradients(model)
    memory = MemoryConfig(recompute_granularity="full", cpu_offloading_num_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nxd_memopt.memory.apply.backend.host_transfers", HostOnly)
        apply_memory(model, memory)
    layers = model.decoder_layers()
    assert [is_recomputed(layer) for layer in layers] == [False, False, True, True]
    assert_equal(gradients(model), expected)
    apply_recompute(model, MemoryConfig())  # takes recompute off and leaves the other
    assert not any(is_recomputed(layer) for layer in layers) and "forward" in layers[0].__dict__
    assert_equal(gradients(model), expected)
    apply_memory(model, MemoryConfig())
    assert not any("forward" in layer.__dict__ for layer in layers)


def test_layers_come_back_one_ahead_of_backward():
    model = parallel_model(llama_config(num_hidden_layers=3))
    transfers = HostOnly()
    offload_first(model.decoder_layers(), 2, transfers)
    loss = model(**batch()).loss
    each = transfers.events.count("out") // 2
    seen: list[int] = []
    for layer in model.decoder_layers():
        layer.mlp.down_proj.weight.register_post_accumulate_grad_hook(
            lambda _: seen.append(transfers.events.count("back"))
        )
    loss.backward()
    assert seen == [each, 2 * each, 2 * each]  # in the backward of layers 2, 1 and 0


def test_what_is_saved_is_freed_on_the_device_and_one_storage_goes_once():
    transfers, alive = HostOnly(), []

    class Layer(torch.nn.Module):
        def forward(self, x):
            both = x * 2
            left, right = both.chunk(2, dim=-1)  # views of one memory
            alive.append(weakref.ref(both.untyped_storage()))
            return torch.cat([left * right, right * left], -1)

    layers = [Layer(), Layer()]
    offload_first(layers, 1, transfers)
    x = torch.randn(4, 6, requires_grad=True)
    y = layers[0](x)
    gc.collect()
    assert transfers.events == ["out", "pace"] and alive[0]() is None
    layers[1](y).sum().backward()
    assert transfers.events == ["out", "pace", "back"]


def test_waits_where_the_device_is_full():
    for free_bytes in (0, 2**40):
        model = parallel_model(llama_config())
        expected = gradients(model)
        transfers = HostOnly(free_bytes, SlowCopy)
        offload_first(model.decoder_layers(), 1, transfers)
        assert_equal(gradients(model), expected)
        assert ("back" in transfers.events) == (free_bytes == 0)  # otherwise nothing had left when backward began


def test_a_dropped_graph_keeps_nothing():
    transfers = HostOnly(2**40, SlowCopy)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    offload_first([layer], 1, transfers)
    x = torch.randn(4, 8)
    alive = weakref.ref(x.untyped_storage())
    y = layer(x)
    assert transfers.events == ["out", "out", "pace"]
    del x
    gc.collect()
    assert alive() is not None
    del y
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("least_bytes", [1, 2**30])
def test_a_write_to_what_was_saved_is_an_error(monkeypatch, least_bytes):
    monkeypatch.setattr(offload, "_MIN_BYTES", least_bytes)

    class Writes(torch.nn.Module):
        def forward(self, x):
            y = x * 2
            z = y * y
            y.add_(1)
            return z

    layer = Writes()
    offload_first([layer], 1, HostOnly())
    x = torch.randn(4, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"shape \[4, 6\].*was written to .version 1, 0 when"):
        layer(x).sum().backward()


@pytest.mark.parametrize(("free_bytes", "is_freed"), [(2**40, False), (0, True)])
def test_a_write_after_the_layer_is_seen_unless_the_host_has_the_values(free_bytes, is_freed):
    """What is still on the device in backward is the memory that was written to."""
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())  # tanh saves its output
    x = torch.randn(4, 8)
    layer(x).mul(2).sum().backward()
    expected = layer[0].weight.grad.clone()
    layer.zero_grad()
    offload_first([layer], 1, HostOnly(free_bytes, SlowCopy))
    loss = layer(x).mul_(2).sum()
    if is_freed:
        loss.backward()
        assert torch.equal(layer[0].weight.grad, expected)
        return
    with pytest.raises(RuntimeError, match=r"shape \[4, 8\].*was written to .version 1, 0 when"):
        loss.backward()


def test_two_graphs_at_once_and_copies_of_the_model():
    model = parallel_model(llama_config())
    expected = gradients(model)
    offload_first(model.decoder_layers(), 1, HostOnly())
    twin = copy.deepcopy(model)
    model.zero_grad()
    losses = [model(**batch()).loss for _ in range(2)]
    for loss in losses:
        loss.backward()
    for param, grad in zip(model.parameters(), expected[1:], strict=True):
        torch.testing.assert_close(param.grad, 2 * grad)
    assert_equal(gradients(twin), expected)
    with torch.no_grad():
        model(**batch())


def test_refusals(monkeypatch):
    model = parallel_model(llama_config())
    first = MemoryConfig(cpu_offloading_num_layers=1)
    assert_says(error_message(lambda: apply_memory(model, first)), "an NVIDIA GPU", "cpu")
    monkeypatch.setattr("nxd_memopt.memory.apply.backend.host_transfers", HostOnly)
    everything = MemoryConfig(recompute_granularity="full", cpu_offloading_num_layers=2)
    assert_says(error_message(lambda: apply_memory(model, everything)), "left no layer", "leave one out")


def test_conjugates_stay():
    class Conjugates(torch.nn.Module):
        def forward(self, x):
            y = torch.complex(x, 2 * x).conj()
            return (y * y).real

    x = torch.randn(4, 6)
    gradients = []
    for offloaded in (False, True):
        layer = Conjugates()
        if offloaded:
            offload_first([layer], 1, HostOnly())
        x = x.detach().requires_grad_()
        layer(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.slow
def test_what_a_compiled_layer_keeps_leaves_too(monkeypatch):
    """By Inductor, whose backward may write into what forward kept: to the bit as without offload, twice."""
    torch._dynamo.reset()
    transfers = HostOnly()
    monkeypatch.setattr("nxd_memopt.memory.apply.backend.host_transfers", lambda: transfers)
    model = parallel_model(gpt_neox_config(num_hidden_layers=3))
    apply_memory(model, MemoryConfig(), compile="layer")
    expected = gradients(model)
    apply_memory(model, MemoryConfig(cpu_offloading_num_layers=2), compile="layer")
    assert all(map(is_compiled, model.decoder_layers()))
    for _ in range(2):
        assert_equal(gradients(model), expected)
    count = transfers.events.count("out")
    assert count > 2 * 2 and transfers.events.count("back") == count


VARIANTS = {
    "full": {},
    "kept attention": {"recompute_keep_core_attn": True},
    "uniform": {"recompute_method": "uniform", "recompute_num_layers": 2},
    "nested": {"recompute_method": "nested", "recompute_num_layers": 3},
    "first two, kept attention": {"cpu_offloading_num_layers": 2, "recompute_keep_core_attn": True},
    "first three, two kept": {"cpu_offloading_num_layers": 3, "recompute_keep_core_attn": 2},
}
NUM_CHECKPOINTS = {
    "uniform": 2,
    "nested": 2,
    "first two, kept attention": 2,
    "first three, two kept": 3,
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_checkpoints_leave_alone_and_come_back(config, variant, monkeypatch):
    transfers, keeps = HostOnly(0, SlowCopy), "kept" in variant
    monkeypatch.setattr("nxd_memopt.memory.apply.backend.host_transfers", lambda: transfers)
    # LLaMA's attention draws no dropout under a fused kernel
    hidden = {"hidden_dropout": 0.1} if config is gpt_neox_config else {"attention_dropout": 0.1}
    options = {"attention_backend": "sdpa"} if keeps else {}
    model = parallel_model(config(num_hidden_layers=4, **({} if keeps else hidden)), **options).train()
    expected = gradients(model)
    memory = MemoryConfig(recompute_granularity="full", cpu_offloading_activations=True, **VARIANTS[variant], **options)
    pool = HostPool(block_bytes=BLOCK)
    apply_memory(model, memory, pool=pool)
    for _ in range(2):
        transfers.events.clear()
        assert_equal(gradients(model), expected)
    count = NUM_CHECKPOINTS.get(variant, 4)
    if variant == "first three, two kept":
        count += 2  # the results of the third layer
    elif keeps:
        count *= 3  # and the kernel's results, the context and the log-sum-exps
    assert transfers.events.count("out") == count
    assert set(pool.ledger()) <= {offload.OFFLOAD_OWNER}


def test_attention_is_kept_in_layers_that_do_not_offload(monkeypatch):
    """Without ``cpu_offloading_activations`` the first layers offload and the others recompute."""
    monkeypatch.setattr("nxd_memopt.memory.apply.backend.host_transfers", HostOnly)
    options = {"attention_backend": "sdpa"}
    model = parallel_model(llama_config(num_hidden_layers=4), **options)
    expected = gradients(model)
    kept = MemoryConfig(recompute_granularity="full", recompute_keep_core_attn=True, **options)
    apply_memory(model, replace(kept, cpu_offloading_num_layers=2))
    assert_equal(gradients(model), expected)


def test_host_memory_is_that_of_the_formula(monkeypatch):
    """Blocks hold several storages: no rounding but the last block's, and none is allocated after the first step."""
    monkeypatch.setattr("nxd_memopt.memory.apply.backend.host_transfers", HostOnly)
    config = llama_config(num_hidden_layers=5)
    model = parallel_model(config)
    sizes = {"sequence_length": LENGTH, "micro_batch_size": BATCH, "dtype": "float32"}
    for options in ({}, {"recompute_method": "nested", "recompute_num_layers": 2}):
        pool = HostPool(block_bytes=BLOCK)
        memory = MemoryConfig(recompute_granularity="full", cpu_offloading_activations=True, **options)
        apply_memory(model, memory, pool=pool)
        expected = offloaded_checkpoint_bytes(model_spec(config), ParallelConfig(1), memory, **sizes, smallest_bytes=1)
        for _ in range(3):
            gradients(model)
            assert expected <= pool.allocated_bytes < expected + BLOCK


def test_missing_host_memory_is_an_error_in_the_first_layer(monkeypatch):
    transfers = HostOnly()
    monkeypatch.setattr("nxd_memopt.memory.apply.backend.host_transfers", lambda: transfers)
    model = parallel_model(llama_config(num_hidden_layers=4))
    memory = MemoryConfig(recompute_granularity="full", cpu_offloading_activations=True)
    apply_memory(model, memory, pool=HostPool(4 * BLOCK, block_bytes=BLOCK))
    message = error_message(lambda: gradients(model))
    # 4 layers of 12 * 3 * 32 * 4 bytes: 5 blocks, of which the first layer took 2
    assert_says(message, "activation offload requires 12288 more bytes", "8192 of the pool's 16384 are left")
    assert transfers.events.count("out") == 1


def test_a_block_in_use_by_a_copy_is_not_used_again():
    """A span retired with a pending copy; its neighbour in the block; a pool that may not grow."""
    pool = HostPool(2 * BLOCK, block_bytes=BLOCK)
    arena = HostArena(pool, "offload")
    order: list[str] = []
    spans = [arena.take(BLOCK // 2), arena.take(BLOCK // 2), arena.take(BLOCK)]
    assert spans[0].pieces[0].data_ptr() + BLOCK // 2 == spans[1].pieces[0].data_ptr()
    copies = [SlowCopy(lambda i=i: order.append(f"copy {i}")) for i in range(3)]
    alive = torch.zeros(1)
    target = weakref.ref(alive)
    arena.retire(spans[0], [copies[0]], alive)
    arena.retire(spans[1], [copies[1]])
    del alive
    assert target() is not None and pool.ledger() == {"offload": 2 * BLOCK}
    again = arena.take(BLOCK)  # waits for the copies instead of failing
    assert order == ["copy 0", "copy 1"] and target() is None
    assert again.pieces[0].data_ptr() == spans[0].pieces[0].data_ptr()


def test_a_recomputed_layers_checkpoint_waits_for_one_layer(monkeypatch):
    """However free the device is: a layer's other tensors are many times its checkpoint."""
    monkeypatch.setattr("nxd_memopt.memory.apply.backend.host_transfers", lambda: HostOnly(2**40, SlowCopy))
    inputs: list[weakref.ref] = []
    model = parallel_model(llama_config(num_hidden_layers=5))
    alive = []
    for layer in model.decoder_layers():
        original = layer.forward

        def forward(hidden, *context, original=original):
            inputs.append(weakref.ref(hidden.untyped_storage()))
            alive.append(sum(reference() is not None for reference in inputs))
            return original(hidden, *context)

        layer.forward = forward
    apply_memory(model, MemoryConfig(recompute_granularity="full", cpu_offloading_activations=True))
    model(**batch())
    assert alive == [1, 2, 2, 2, 2]  # the input of this layer, and the copy in flight


def test_several_kept_results_of_one_region_come_back_in_order(monkeypatch):
    """A chunk of two layers has two calls of attention, and a retained graph runs it twice."""
    monkeypatch.setattr("nxd_memopt.memory.apply.backend.host_transfers", HostOnly)
    options = {"attention_backend": "sdpa", "fused_linear_cross_entropy": False}
    model = parallel_model(llama_config(), **options)
    expected = gradients(model)
    uniform = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2, **options}
    apply_memory(model, MemoryConfig(recompute_keep_core_attn=True, cpu_offloading_activations=True, **uniform))
    model.zero_grad()
    loss = model(**batch()).loss
    loss.backward(retain_graph=True)
    first = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    loss.backward()
    for param, a, b in zip(model.parameters(), first, expected[1:], strict=True):
        assert torch.equal(a, b) and torch.equal(param.grad, b)


def test_a_prefetch_of_a_dropped_graph_lives_until_it_is_written():
    transfers = HostOnly(0, SlowCopy)
    pool = HostPool(block_bytes=BLOCK)
    layers = [torch.nn.Tanh(), torch.nn.Tanh()]
    apply_offload(layers, 2, ActivationOffload(transfers, pool, num_layers=2))
    targets: list[weakref.ref] = []
    to_device = transfers.to_device

    def watched(*args):
        target, copy = to_device(*args)
        returned = target[:]  # the copy holds the target itself
        targets.append(weakref.ref(returned))
        return returned, copy

    transfers.to_device = watched
    x = torch.randn(4, 8, requires_grad=True)
    y = layers[0](x)
    z = layers[1](y)
    y.register_hook(lambda grad: 1 / 0)  # backward of the second layer has fetched for the first one
    with pytest.raises(ZeroDivisionError):
        z.sum().backward()
    del y, z
    gc.collect()
    assert len(targets) == 2 and targets[0]() is not None
