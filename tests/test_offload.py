"""Activations on the host: gradients to the bit, nothing kept on the device, and host memory used again."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory, offload
from nxd_memopt.memory.offload import apply_offload, remove_offload
from tests.reference import assert_says, error_message
from tests.reference_models import batch, gpt_neox_config, llama_config, parallel_model


class _Done:
    def wait(self) -> None:
        return

    def is_done(self) -> bool:
        return True


class HostOnly:
    """Transfers of a device whose memory is the host's, with a record of them."""

    def __init__(self, free_bytes: int = 2**40) -> None:
        self.events: list[str] = []
        self._free_bytes = free_bytes

    def host_buffer(self, size_bytes):
        return torch.empty(size_bytes, dtype=torch.uint8)

    def to_host(self, source, host, after):
        self.events.append("out")
        host.copy_(source)
        return _Done()

    def to_device(self, host, after):
        self.events.append("back")
        return host.clone(), _Done()

    def keep_pace(self) -> None:
        return

    def free_bytes(self) -> int:
        return self._free_bytes


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch):
    monkeypatch.setattr(offload, "_LEAST_BYTES", 1)


def gradients(model):
    model.zero_grad()
    loss = model(**batch()).loss
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters())]


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize(
    "memory", [{}, {"recompute_granularity": "selective", "recompute_modules": ("norm", "mlp_act")}]
)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_gradients_are_bit_equal(config, memory, num_layers):
    model = parallel_model(config(num_hidden_layers=3), **memory)
    expected = gradients(model)
    transfers = HostOnly()
    kept = apply_offload(model.decoder_layers(), num_layers, transfers)
    for step in range(3):
        for a, b in zip(gradients(model), expected, strict=True):
            assert torch.equal(a, b)
        if step == 0:
            host_bytes, count = kept.host_bytes, transfers.events.count("out")
            assert host_bytes > 0 and transfers.events.count("back") == count
    assert kept.host_bytes == host_bytes and transfers.events.count("out") == 3 * count
    remove_offload(model.decoder_layers())
    gradients(model)
    assert transfers.events.count("out") == 3 * count


def test_full_recompute_behind_the_offloaded_layers():
    model = parallel_model(llama_config(num_hidden_layers=4))
    expected = gradients(model)
    memory = MemoryConfig(recompute_granularity="full", cpu_offloading_num_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nxd_memopt.memory.apply.backend.host_transfers", HostOnly)
        apply_memory(model, memory)
    layers = model.decoder_layers()
    assert ["_forward_without_recompute" in layer.__dict__ for layer in layers] == [False, False, True, True]
    for a, b in zip(gradients(model), expected, strict=True):
        assert torch.equal(a, b)
    apply_memory(model, MemoryConfig())
    assert not any("forward" in layer.__dict__ for layer in layers)


def test_layers_come_back_one_ahead_of_backward():
    model = parallel_model(llama_config(num_hidden_layers=3))
    transfers = HostOnly()
    apply_offload(model.decoder_layers(), 2, transfers)
    loss = model(**batch()).loss
    each = len(transfers.events) // 2
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
    apply_offload(layers, 1, transfers)
    x = torch.randn(4, 6, requires_grad=True)
    y = layers[0](x)
    gc.collect()
    assert transfers.events == ["out"] and alive[0]() is None
    layers[1](y).sum().backward()
    assert transfers.events == ["out", "back"]


def test_waits_where_the_device_is_full():
    waited = []

    class Slow(_Done):
        def wait(self) -> None:
            waited.append(1)

        def is_done(self) -> bool:
            return False

    class Full(HostOnly):
        def to_host(self, source, host, after):
            super().to_host(source, host, after)
            return Slow()

    for free_bytes, waits in ((0, True), (2**40, False)):
        model = parallel_model(llama_config())
        expected = gradients(model)
        apply_offload(model.decoder_layers(), 1, Full(free_bytes))
        waited.clear()
        loss = model(**batch()).loss
        assert bool(waited) == waits
        loss.backward()
        assert torch.equal(next(iter(model.parameters())).grad, expected[1] * 2)


def test_two_graphs_at_once_and_copies_of_the_model():
    model = parallel_model(llama_config())
    expected = gradients(model)
    apply_offload(model.decoder_layers(), 1, HostOnly())
    twin = copy.deepcopy(model)
    model.zero_grad()
    losses = [model(**batch()).loss for _ in range(2)]
    for loss in losses:
        loss.backward()
    for param, grad in zip(model.parameters(), expected[1:], strict=True):
        torch.testing.assert_close(param.grad, 2 * grad)
    for a, b in zip(gradients(twin), expected, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        model(**batch())


def test_refusals():
    model = parallel_model(llama_config())
    assert_says(error_message(lambda: MemoryConfig(cpu_offloading_num_layers=-1)), "at least 0", "-1")
    assert_says(error_message(lambda: apply_offload(model.decoder_layers(), 3, HostOnly())), "3 exceeds", "2 layers")
    assert_says(
        error_message(lambda: apply_memory(model, MemoryConfig(cpu_offloading_num_layers=1))),
        "needs an NVIDIA GPU",
        "cpu",
    )
    everything = MemoryConfig(recompute_granularity="full", cpu_offloading_num_layers=2)
    assert_says(error_message(lambda: apply_memory(model, everything)), "left no layer", "leave one out")
