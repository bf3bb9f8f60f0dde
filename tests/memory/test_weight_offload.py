"""Weights on the host: gradients and updates to the bit, device memory freed, no write lost and no stale read."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from nxd_memopt.checkpoint import BackgroundSaver, TrainingState, load_training_state, save_training_state
from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory, weights_to_device
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.memory.weight_offload import WEIGHT_OWNER, apply_weight_offload
from nxd_memopt.optimizer import AdamW, NeuronZero1Optimizer, OptimizerInBackward
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.trainer import neuronx_distributed_config
from nxd_memopt.trainer.optimizer import NxDOptimizer
from tests.deferred_transfers import DeferredTransfers
from tests.reference import assert_says, error_message
from tests.reference_models import batch, gpt_neox_config, llama_config, parallel_model

LAYERS = 4


class PoisonedTransfers(DeferredTransfers):
    """Device memory is NaN until the copy into it is waited for."""

    def copy_in(self, pairs, after):
        pairs = list(pairs)
        for target, _ in pairs:
            target.fill_(255)
        return super().copy_in(pairs, after)


@pytest.fixture(autouse=True)
def transfers(monkeypatch):
    transfers = PoisonedTransfers()
    monkeypatch.setattr("nxd_memopt.memory.apply.backend.host_transfers", lambda: transfers)
    monkeypatch.setattr("nxd_memopt.memory.apply.new_pool", lambda transfers: HostPool())
    return transfers


def build(config=llama_config, **memory):
    torch.manual_seed(1)
    return parallel_model(config(num_hidden_layers=LAYERS), **memory)


def offloaded(config=llama_config, num_layers=LAYERS, **memory):
    model = build(config)
    apply_memory(model, MemoryConfig(cpu_offloading_weights=True, cpu_offloading_num_layers=num_layers, **memory))
    return model


def backward(model):
    loss = model(**batch()).loss
    loss.backward()
    return loss.detach()


def gradients(model):
    model.zero_grad()
    loss = backward(model)
    return [loss, *(param.grad.clone() for param in model.parameters())]


def device_bytes(layer):
    return sum(param.untyped_storage().nbytes() for param in layer.parameters())


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


FULL = {"recompute_granularity": "full"}


@pytest.mark.parametrize(
    ("num_layers", "memory"),
    [
        (2, {}),
        (LAYERS, FULL),
        (2, FULL | {"recompute_method": "nested", "recompute_num_layers": 3}),
        (LAYERS, {"recompute_granularity": "selective", "recompute_modules": ("norm", "mlp_act")}),
        (LAYERS, {"mlp_tile_tokens": 16}),
    ],
)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_gradients_are_bit_equal_and_weights_leave_the_device(config, memory, num_layers):
    expected = gradients(build(config, **memory))
    model = offloaded(config, num_layers, **memory)
    for _ in range(2):
        assert_equal(gradients(model), expected)
        # A chunk of recomputed layers belongs to its first layer.
        assert not any(device_bytes(layer) for layer in model.decoder_layers()[:num_layers])


def test_few_layers_are_on_the_device_at_a_time():
    model = offloaded()
    most = 0
    layers = model.decoder_layers()

    def count(*_):
        nonlocal most
        most = max(most, sum(device_bytes(layer) > 0 for layer in layers))

    backward(model)
    for layer in layers:
        layer.mlp.register_forward_hook(count)
        layer.mlp.register_full_backward_hook(count)
    gradients(model)
    assert most == 3  # in use, fetched ahead, and on its way to the host
    with torch.no_grad():
        most = 0
        model(**batch())
        assert most == 2  # forward writes nothing back


def zero1(model):
    return NeuronZero1Optimizer(model.parameters(), AdamW, grad_clipping=True, max_norm=0.5, lr=0.1)


def wrapped(model):
    """torch's optimizer in neuronx-distributed's wrapper, which clips."""
    config = neuronx_distributed_config(optimizer_config={"zero_one_enabled": False, "max_grad_norm": 0.5})
    return NxDOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), config)


OPTIMIZERS = {
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "loop": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
    "library": lambda model: AdamW(model.parameters(), lr=0.1),
    "zero1": zero1,
    "wrapped": wrapped,
}


@pytest.mark.parametrize(
    ("name", "closure"),
    [("torch", "positional"), ("loop", None), ("library", "keyword"), ("zero1", "positional"), ("wrapped", None)],
)
def test_an_optimizer_updates_the_weights(name, closure):
    """A closure runs forward and backward inside of the step, after which the weights are on the host again."""
    parallel_state.initialize_model_parallel()
    expected, model = build(), offloaded()
    backward(model)  # the optimizer finds the weights on the host
    model.zero_grad()
    optimizers = [OPTIMIZERS[name](each) for each in (expected, model)]
    for _ in range(3):
        for each, optimizer in zip((expected, model), optimizers, strict=True):
            backward(each)  # accumulation
            again = functools.partial(backward, each)
            if closure is None:
                again()
            arguments = {None: [], "positional": [again], "keyword": []}[closure]
            optimizer.step(*arguments, **({"closure": again} if closure == "keyword" else {}))
            optimizer.zero_grad()
    with torch.no_grad():
        assert torch.equal(model(**batch()).loss, expected(**batch()).loss)
    assert_equal(model.state_dict().values(), expected.state_dict().values())


def test_a_checkpoint_has_the_weights(tmp_path):
    parallel_state.initialize_model_parallel()
    model, other = offloaded(), build()
    gradients(model)
    save_training_state(tmp_path, 1, state=TrainingState(model, None), config={})
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    load_training_state(tmp_path, state=TrainingState(other, None), config={})
    assert_equal(model.state_dict().values(), other.state_dict().values())
    with BackgroundSaver(tmp_path) as saver, pytest.raises(ValueError, match="turn cpu_offloading_weights off"):
        saver.save(2, TrainingState(model, None), {})


def test_an_optimizer_in_backward_updates_the_weights():
    expected, model = build(), offloaded()
    optimizers = [OptimizerInBackward(AdamW(each.parameters(), lr=0.1)) for each in (expected, model)]
    for _ in range(3):
        for each, optimizer in zip((expected, model), optimizers, strict=True):
            backward(each)
            optimizer.step()
    assert_equal(model.state_dict().values(), expected.state_dict().values())


def test_loaded_weights_are_used():
    """Also before the first step, after a step, and through Tensor.data, which no version counter sees."""
    model, other = offloaded(), build()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5)
    for _ in range(2):
        model.load_state_dict(other.state_dict())
        assert_equal(gradients(model), gradients(other))
        weights_to_device(model.parameters())
        for each in (model, other):
            for param in each.parameters():
                param.data.add_(0.01)
        assert_equal(gradients(model), gradients(other))
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_writes_after_a_failed_pass_are_not_lost(where, num_layers):
    """A failed pass leaves a copy of the next layer on the device."""
    for failing in range(num_layers):
        expected, model = build(), offloaded(num_layers=num_layers)
        backward(model)
        mlp = model.decoder_layers()[failing].mlp
        register = mlp.register_forward_hook if where == "forward" else mlp.register_full_backward_hook
        hook = register(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(model)
        hook.remove()
        for each in (expected, model):
            weights_to_device(each.parameters())
            for param in each.parameters():
                param.data.add_(0.01)
        assert_equal(gradients(model), gradients(expected))


def test_the_host_memory_is_counted_and_given_back(transfers):
    model, pool = build(), HostPool()
    layers = model.decoder_layers()
    offload = apply_weight_offload(layers, 2, transfers, pool)
    size = sum(device_bytes(layer) for layer in layers[:2])
    assert size <= offload.host_bytes == pool.ledger()[WEIGHT_OWNER] <= size + 2 * 9 * 512
    expected = gradients(build())
    assert_equal(gradients(model), expected)
    apply_memory(model, MemoryConfig())
    assert WEIGHT_OWNER not in pool.ledger() and device_bytes(layers[0])
    assert copy.deepcopy(model) is not model
    assert not any("forward" in layer.__dict__ for layer in layers)
    assert_equal(gradients(model), expected)
    small = HostPool(limit_bytes=offload.host_bytes - 1, block_bytes=512)
    message = error_message(lambda: apply_weight_offload(layers, 2, transfers, small))
    assert_says(message, WEIGHT_OWNER, str(offload.host_bytes), str(offload.host_bytes - 1))


def test_refusals(monkeypatch, transfers):
    model = offloaded()
    for _ in range(2):
        assert_says(error_message(lambda: copy.deepcopy(model)), "cpu_offloading_weights", "before apply_memory")
        backward(model)  # the weights are on the host
    plain = build()
    many = MemoryConfig(cpu_offloading_weights=True, cpu_offloading_num_layers=LAYERS + 1)
    assert_says(error_message(lambda: apply_memory(plain, many)), f"{LAYERS + 1} exceeds", f"{LAYERS} layers")
    layers = plain.decoder_layers()
    layers[1].mlp.down_proj.weight = layers[0].mlp.down_proj.weight
    shared = MemoryConfig(cpu_offloading_weights=True, cpu_offloading_num_layers=2)
    assert_says(error_message(lambda: apply_memory(plain, shared)), "two layers share", "untie")
    weights_to_device(model.parameters())
    model.to(torch.float64)
    with pytest.raises(RuntimeError, match="was replaced after cpu_offloading_weights"):
        backward(model)
    monkeypatch.setattr("nxd_memopt.memory.apply.backend.host_transfers", lambda: None)
    assert_says(error_message(lambda: apply_memory(build(), shared)), "cpu_offloading_weights", "an NVIDIA GPU", "cpu")


class Pair(torch.nn.Linear):
    """A layer that passes on two values."""

    def forward(self, state, *context):
        return torch.relu(super().forward(state[0])), None


def test_layers_that_pass_on_tuples_have_their_weights_in_backward():
    layers = torch.nn.ModuleList(Pair(64, 64) for _ in range(3))
    state = (torch.randn(4, 64, requires_grad=True), None)
    expected = torch.autograd.grad(run_layers(layers, state), list(layers.parameters()))
    apply_weight_offload(list(layers), 2, DeferredTransfers(), HostPool())
    run_layers(layers, state).backward()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(layers.parameters(), expected, strict=True))


def run_layers(layers, state):
    for layer in layers:
        state = layer(state)
    return state[0].sum()


def test_memory_of_a_dropped_model_outlives_its_copies():
    """A wait on the device's stream leaves a copy running, whose memory the allocator and the host would reuse."""
    ended = []

    class Running:
        def wait(self):
            pass

        def synchronize(self):
            ended.append(self)

        def is_done(self):
            return self in ended

    class StreamTransfers(DeferredTransfers):
        def __init__(self):
            super().__init__()
            self.begun = []

        def copy_in(self, pairs, after):
            for target, source in pairs:
                target.copy_(source)
            self.begun.append(Running())
            return self.begun[-1]

        copy_out = copy_in

    transfers = StreamTransfers()
    gc.collect()
    num_hooks = len(_global_optimizer_pre_hooks)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    apply_weight_offload(list(layers), 3, transfers, HostPool())
    with torch.no_grad():
        layers[1](layers[0](torch.ones(4)))
    assert transfers.begun and not ended
    last = transfers.begun[-1]
    del layers
    gc.collect()
    assert last in ended
    assert len(_global_optimizer_pre_hooks) == num_hooks
