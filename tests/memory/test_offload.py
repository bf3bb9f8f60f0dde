"""Activations on the host: gradients to the bit, nothing kept on the device, and host memory used again."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory, apply_recompute, is_compiled, is_recomputed, offload
from nxd_memopt.memory.offload import apply_offload, remove_offload
from tests.reference import assert_says, error_message
from tests.reference_models import batch, gpt_neox_config, llama_config, parallel_model


class _Copy:
    """Bytes that arrive when somebody waits for them."""

    def __init__(self, source, target) -> None:
        self._source, self._target = source, target

    def wait(self) -> None:
        if self._source is not None:
            self._target.copy_(self._source)
            self._source = None

    def is_done(self) -> bool:
        self.wait()
        return True


class _SlowCopy(_Copy):
    def is_done(self) -> bool:
        return self._source is None


class HostOnly:
    """Transfers of a device whose memory is the host's, with a record of them."""

    def __init__(self, free_bytes: int = 2**40, copy=_Copy) -> None:
        self.events: list[str] = []
        self._free_bytes, self._copy = free_bytes, copy

    def to_host(self, source):
        self.events.append("out")
        host = torch.full_like(source, 255)
        return host, self._copy(source.clone(), host)

    def to_device(self, host, after):
        self.events.append("back")
        assert after.is_done()
        target = torch.full_like(host, 255)
        return target, self._copy(host, target)

    def keep_pace(self) -> None:
        self.events.append("pace")

    def free_bytes(self) -> int:
        return self._free_bytes


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch):
    monkeypatch.setattr(offload, "_MIN_BYTES", 1)


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
    apply_offload(model.decoder_layers(), num_layers, transfers)
    for _ in range(2):
        for a, b in zip(gradients(model), expected, strict=True):
            assert torch.equal(a, b)
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
    for a, b in zip(gradients(model), expected, strict=True):
        assert torch.equal(a, b)
    apply_recompute(model, MemoryConfig())  # takes recompute off and leaves the other
    assert not any(is_recomputed(layer) for layer in layers) and "forward" in layers[0].__dict__
    for a, b in zip(gradients(model), expected, strict=True):
        assert torch.equal(a, b)
    apply_memory(model, MemoryConfig())
    assert not any("forward" in layer.__dict__ for layer in layers)


def test_layers_come_back_one_ahead_of_backward():
    model = parallel_model(llama_config(num_hidden_layers=3))
    transfers = HostOnly()
    apply_offload(model.decoder_layers(), 2, transfers)
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
    apply_offload(layers, 1, transfers)
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
        transfers = HostOnly(free_bytes, _SlowCopy)
        apply_offload(model.decoder_layers(), 1, transfers)
        for a, b in zip(gradients(model), expected, strict=True):
            assert torch.equal(a, b)
        assert ("back" in transfers.events) == (free_bytes == 0)  # otherwise nothing had left when backward began


def test_a_dropped_graph_keeps_nothing():
    transfers = HostOnly(2**40, _SlowCopy)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    apply_offload([layer], 1, transfers)
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
    apply_offload([layer], 1, HostOnly())
    x = torch.randn(4, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"shape \[4, 6\].*was written to .version 1, 0 when"):
        layer(x).sum().backward()


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nxd_memopt.memory.apply.backend.host_transfers", HostOnly)
        too_many = MemoryConfig(recompute_granularity="full", cpu_offloading_num_layers=3)
        assert_says(error_message(lambda: apply_memory(model, too_many)), "3 exceeds", "2 layers")
    assert not any(is_recomputed(layer) for layer in model.decoder_layers())
    assert_says(
        error_message(lambda: apply_memory(model, MemoryConfig(cpu_offloading_num_layers=1))),
        "an NVIDIA GPU",
        "cpu",
    )
    everything = MemoryConfig(recompute_granularity="full", cpu_offloading_num_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nxd_memopt.memory.apply.backend.host_transfers", HostOnly)
        assert_says(error_message(lambda: apply_memory(model, everything)), "left no layer", "leave one out")
    assert_says(error_message(lambda: MemoryConfig(cpu_offloading=True)), "contradicts", "set the number of layers")


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
            apply_offload([layer], 1, HostOnly())
        x = x.detach().requires_grad_()
        layer(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_what_a_compiled_layer_keeps_leaves_too(config, monkeypatch):
    """By Inductor, whose backward may write into what forward kept: to the bit as without offload, twice."""
    torch._dynamo.reset()
    transfers = HostOnly()
    monkeypatch.setattr("nxd_memopt.memory.apply.backend.host_transfers", lambda: transfers)
    model = parallel_model(config(num_hidden_layers=3))
    apply_memory(model, MemoryConfig(), compile="layer")
    expected = gradients(model)
    apply_memory(model, MemoryConfig(cpu_offloading_num_layers=2), compile="layer")
    assert all(map(is_compiled, model.decoder_layers()))
    for _ in range(2):
        for a, b in zip(gradients(model), expected, strict=True):
            assert torch.equal(a, b)
    count = transfers.events.count("out")
    assert count > 2 * 2 and transfers.events.count("back") == count
