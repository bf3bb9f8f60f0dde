"""Tests optimizer states on the host: equal to resident states bit by bit at every fraction, and never stale."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.memory.recompute import layer_units
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.optimizer.loss_scaler import LossScaler
from nxd_memopt.optimizer.offloaded_zero1 import OffloadedZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state
from tests.deferred_transfers import DeferredTransfers
from tests.reference import assert_says, error_message
from tests.reference_models import batch, full_parameters, hugging_face, llama_config, parallel_model

SHAPES = ((7, 13), (5,), (11, 3), (1,), (64, 2), (17,))
OPTIONS = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8}
CHUNK = 32


@pytest.fixture(autouse=True)
def one_rank() -> None:
    parallel_state.initialize_model_parallel()


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def groups(params: list[nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() == 1], "weight_decay": 0.0},
    ]


def offloaded(params: list[nn.Parameter], fraction: float, **options: object) -> OffloadedZero1Optimizer:
    defaults = {"transfers": DeferredTransfers(), "chunk_elements": CHUNK, "staging_bytes": 3 * 12 * CHUNK}
    defaults["resident_elements"] = 1
    return OffloadedZero1Optimizer(
        groups(params), optimizer_offload_fraction=fraction, **(defaults | OPTIONS | options)
    )


def train(optimizer: NeuronZero1Optimizer, params: list[nn.Parameter], steps: range, *, skip: int = -1) -> list[Tensor]:
    """Run steps with gradients that depend on the step alone; return the norms."""
    norms = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for i, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if i == skip else gradient
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return norms


def resident(params: list[nn.Parameter]) -> NeuronZero1Optimizer:
    """The reference: torch's AdamW on fp32 masters."""
    return NeuronZero1Optimizer(
        groups(params), torch.optim.AdamW, optimizer_dtype=torch.float32, foreach=False, **OPTIONS
    )


def values(optimizer: NeuronZero1Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    stored = optimizer.stored_parameters()
    masters = [each.stored.detach() for each in stored]
    states = [optimizer.base_optimizer.state[each.stored] for each in stored]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step")]
    return [tensor.detach().clone() for tensor in (*params, *masters, *moments)]


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_every_fraction_equals_resident_states(dtype: torch.dtype, fraction: float) -> None:
    expected, actual = parameters(dtype), parameters(dtype)
    reference, optimizer = resident(expected), offloaded(actual, fraction)
    norms = train(reference, expected, range(6), skip=2)
    assert_equal(train(optimizer, actual, range(6), skip=2), norms)  # the norms are above 1: clipping is active
    assert_equal(values(optimizer, actual), values(reference, expected))


@pytest.mark.parametrize("slots", [2, 9, 50])
def test_every_number_of_slots(slots: int) -> None:
    expected, actual = parameters(torch.bfloat16), parameters(torch.bfloat16)
    reference, optimizer = resident(expected), offloaded(actual, 1.0, staging_bytes=slots * 12 * CHUNK)
    train(reference, expected, range(4))
    train(optimizer, actual, range(4))
    assert_equal(values(optimizer, actual), values(reference, expected))


CHUNKS_OF_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("memory", [{}, {"recompute_granularity": "full"}, CHUNKS_OF_LAYERS])
def test_updates_in_the_next_forward_change_nothing(memory: dict[str, object], fraction: float) -> None:
    """The first layer of a recompute chunk runs all of its layers, and waits for all of them."""
    results = []
    for in_forward in (False, True):
        torch.manual_seed(3)
        model = parallel_model(llama_config(), **memory).to(torch.bfloat16)
        transfers = DeferredTransfers()
        options = {"transfers": transfers, "chunk_elements": 256, "staging_bytes": 3 * 12 * 256}
        options["optimizer_offload_fraction"] = fraction
        optimizer = OffloadedZero1Optimizer(model.parameters(), resident_elements=100, **options, **OPTIONS)
        if in_forward:
            optimizer.pace_backward(model.decoder_layers())
            optimizer.update_in_forward(model.decoder_layers())
        losses, waiting = [], []
        for _ in range(4):
            loss = model(**batch()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            waiting.append(len(optimizer.base_optimizer._pending))
        assert all(waiting) == in_forward  # chunks are left for the next forward, or none
        assert transfers.paces == 4 * in_forward * len(layer_units(model.decoder_layers()))
        results.append([*losses, *values(optimizer, list(model.parameters()))])
        if in_forward:
            assert not optimizer.base_optimizer._pending  # reading the states completes the step
    assert_equal(*results)


def model_on_host(
    *, in_forward: bool, fraction: float = 1.0, chunk: int = 256
) -> tuple[nn.Module, OffloadedZero1Optimizer]:
    torch.manual_seed(3)
    model = parallel_model(llama_config())
    sizes = {"chunk_elements": chunk, "staging_bytes": 3 * 12 * chunk, "resident_elements": 100}
    optimizer = OffloadedZero1Optimizer(
        model.parameters(), optimizer_offload_fraction=fraction, transfers=DeferredTransfers(), **sizes, **OPTIONS
    )
    if in_forward:
        optimizer.update_in_forward(model.decoder_layers(), after_layers=[model.lm_head])
    return model, optimizer


# Whether a parameter is in the second group, which has another learning rate and no weight decay.
SECOND_GROUPS: dict[str, Callable[[str], bool]] = {
    "embedding last": lambda name: "embed_tokens" in name,
    "layers first": lambda name: ".layers." not in name,
    "queries last": lambda name: "q_proj" in name,
    "first layer last": lambda name: ".layers.0." in name,
    "one group": lambda name: False,
}


def groups_of(model: nn.Module, name: str) -> list[dict[str, object]]:
    chosen = SECOND_GROUPS[name]
    named = list(model.named_parameters())
    first = [param for each, param in named if not chosen(each)]
    second = [param for each, param in named if chosen(each)]
    return [{"params": first}, {"params": second, "lr": 0.02, "weight_decay": 0.0}]


@pytest.mark.parametrize(("tied", "fraction"), [(False, 0.0), (False, 1.0), (True, 0.5)])
@pytest.mark.parametrize("name", SECOND_GROUPS)
def test_updates_in_forward_run_in_the_order_of_use(name: str, tied: bool, fraction: float) -> None:
    """In training and evaluation, against transformers with torch's AdamW in float64 and against updates in ``step``.

    With chunks of 250 elements, a part of a weight may lie in a chunk that is updated before the others.
    """
    config = llama_config(tie_word_embeddings=tied)
    reference = hugging_face(config)
    full = full_parameters(reference)
    reference = reference.double()
    options: dict[str, Any] = OPTIONS | {"eps": 1e-3}  # so that rounding of small gradients stays small
    expected = torch.optim.AdamW(groups_of(reference, name), **options)
    wanted: list[Tensor] = []
    for _ in range(3):
        reference(**batch()).loss.backward()
        expected.step()
        expected.zero_grad()
        wanted.append(reference(**batch()).loss.detach())
    results = []
    for in_forward in (False, True):
        model = parallel_model(config, full)
        sizes = {"chunk_elements": 250, "staging_bytes": 3 * 12 * 250, "resident_elements": 100}
        optimizer = OffloadedZero1Optimizer(
            groups_of(model, name),
            optimizer_offload_fraction=fraction,
            transfers=DeferredTransfers(),
            grad_clipping=False,
            **sizes,
            **options,
        )
        if in_forward:
            optimizer.update_in_forward(model.decoder_layers(), after_layers=[] if tied else [model.lm_head])
        losses = []
        for _ in range(3):
            model(**batch()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert bool(optimizer.base_optimizer._pending) == in_forward
            with torch.inference_mode():
                losses.append(model(**batch()).loss.clone())
        results.append([*losses, *values(optimizer, list(model.parameters()))])
        torch.testing.assert_close(losses, [loss.float() for loss in wanted], rtol=1e-5, atol=0)  # fp32 arithmetic
    assert_equal(*results)


def steps_between_forwards(in_forward: bool, *, set_to_none: bool, fraction: float, again: bool) -> list[Tensor]:
    """Losses and weights of three steps; with ``again``, a step of other gradients without a forward follows each."""
    model, optimizer = model_on_host(in_forward=in_forward, fraction=fraction)
    losses = []
    for step in range(3):
        loss = model(**batch()).loss
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        if again:
            train(optimizer, list(model.parameters()), range(step, step + 1))
    return [*losses, *values(optimizer, list(model.parameters()))]


@pytest.mark.parametrize(
    ("set_to_none", "fraction", "again"),
    # At 0.05 two matrices are on the host, at 0 none is.
    [(False, 1.0, False), (True, 1.0, True), (True, 0.05, False), (True, 0.0, False)],
)
def test_updates_in_the_next_forward_have_the_gradients_of_their_step(
    set_to_none: bool, fraction: float, again: bool
) -> None:
    options = {"set_to_none": set_to_none, "fraction": fraction, "again": again}
    assert_equal(steps_between_forwards(True, **options), steps_between_forwards(False, **options))


def test_a_gradient_that_is_written_to_before_its_update_is_an_error() -> None:
    model, optimizer = model_on_host(in_forward=True)
    model(**batch()).loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=False)
    # Every later use fails as the first one: no part of the step is skipped.
    message = r"written to .* left to the next forward: call finish_update\(\) before"
    num_pending = len(optimizer.base_optimizer._pending)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            model(**batch())
        assert len(optimizer.base_optimizer._pending) == num_pending


def state_of_the_optimizer(model: nn.Module, optimizer: OffloadedZero1Optimizer) -> list[Tensor]:
    """A schedule has set the next step's rate, which is not the one of the updates that are left."""
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.state_dict()
    return values(optimizer, list(model.parameters()))


def state_of_the_model(model: nn.Module, optimizer: OffloadedZero1Optimizer) -> list[Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def loaded_weights(model: nn.Module, optimizer: OffloadedZero1Optimizer) -> list[Tensor]:
    generator = torch.Generator().manual_seed(8)
    model.load_state_dict(
        {name: torch.randn(tensor.shape, generator=generator) for name, tensor in model.state_dict().items()}
    )
    loss = model(**batch()).loss
    train(optimizer, list(model.parameters()), range(1))
    return [loss.detach(), *values(optimizer, list(model.parameters()))]


def new_masters(model: nn.Module, optimizer: OffloadedZero1Optimizer) -> list[Tensor]:
    optimizer.init_zero()
    return values(optimizer, list(model.parameters()))


@pytest.mark.parametrize("read", [state_of_the_optimizer, state_of_the_model, loaded_weights, new_masters])
def test_updates_that_are_left_are_complete_when_states_or_weights_are_read(read: Any) -> None:
    results = []
    for in_forward in (False, True):
        # 32 elements divide every parameter: no update is left halfway
        model, optimizer = model_on_host(in_forward=in_forward, chunk=32)
        model(**batch()).loss.backward()
        optimizer.step()
        assert bool(optimizer.base_optimizer._pending) == in_forward
        results.append(read(model, optimizer))
    assert_equal(*results)


@pytest.mark.parametrize("in_forward", [False, True])
def test_new_shards_after_freezing_have_no_more_memory_and_the_same_updates(in_forward: bool) -> None:
    """The states before are freed first, and updates in forward stay on."""
    model, optimizer = model_on_host(in_forward=in_forward)
    host_bytes = optimizer._pool.ledger()["optimizer states"]
    frozen = model.decoder_layers()[0].mlp.down_proj.weight.requires_grad_(False)
    message = error_message(lambda: train(optimizer, list(model.parameters()), range(1)))
    assert_says(message, "call init_zero()")
    model.zero_grad()
    optimizer.init_zero()
    assert optimizer._pool.ledger()["optimizer states"] == host_bytes - 12 * frozen.numel()
    reference, plain = model_on_host(in_forward=False)
    reference.decoder_layers()[0].mlp.down_proj.weight.requires_grad_(False)
    plain.init_zero()
    for step in range(3):
        for each, other in ((model, optimizer), (reference, plain)):
            each(**batch()).loss.backward()
            other.step()
            other.zero_grad()
        assert bool(optimizer.base_optimizer._pending) == in_forward, step
    found = [values(other, list(each.parameters())) for each, other in ((model, optimizer), (reference, plain))]
    assert_equal(*found)


@pytest.mark.parametrize("end", [0, 3])
def test_a_parameter_that_is_written_to_before_its_update_is_an_error(end: int) -> None:
    """The update would overwrite the write, also one in the middle of a parameter's updates."""
    model, optimizer = model_on_host(in_forward=True, chunk=200)
    model(**batch()).loss.backward()
    optimizer.step()
    optimizer.base_optimizer._finish_until(optimizer.base_optimizer._end_of_step + end)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"a parameter of .* was written to .* overwrite it: call finish_update\(\)"):
        model(**batch())


def test_what_would_run_layers_before_their_updates_is_refused() -> None:
    """A second optimizer would replace the first one, and a recompute chunk would run its later layers first."""
    model, first = model_on_host(in_forward=True)
    second = OffloadedZero1Optimizer(model.parameters(), transfers=DeferredTransfers(), **OPTIONS)
    message = error_message(lambda: second.update_in_forward(model.decoder_layers()))
    assert_says(message, "layer unit 0 of 2", "another optimizer", "one optimizer only")
    first.update_in_forward(model.decoder_layers())  # the same one again
    message = error_message(lambda: apply_memory(model, MemoryConfig(**CHUNKS_OF_LAYERS)))
    assert_says(message, "update_in_forward", "apply_memory before update_in_forward")
    model(**batch()).loss.backward()
    first.step()
    assert first.base_optimizer._pending


@pytest.mark.parametrize(
    ("dtype", "fraction", "options", "words"),
    [
        (torch.bfloat16, 1.5, {}, "between 0 and 1, got 1.5"),
        (torch.bfloat16, 1.0, {"amsgrad": True}, "amsgrad True is not supported"),
        (torch.bfloat16, 1.0, {"maximize": True}, "maximize True is not supported"),
        (torch.float64, 1.0, {}, "float64"),
        (torch.float16, 1.0, {"loss_scaler": LossScaler()}, "bf16-mixed"),
        (torch.float16, 1.0, {"store_param_remainders": True}, "store_param_remainders"),
    ],
)
def test_refusals(dtype: torch.dtype, fraction: float, options: dict[str, Any], words: str) -> None:
    assert_says(error_message(lambda: offloaded(parameters(dtype), fraction, **options)), words)


def test_a_device_or_host_without_the_memory_is_an_error_before_anything_is_allocated() -> None:
    params = parameters(torch.bfloat16)
    sizes = [param.numel() for param in params]
    # the first matrix, 91 elements, goes to the host, in 3 chunks of 32 elements, of which 3 are on the device
    required = 12 * (sum(sizes) - sizes[0]) + 3 * 12 * CHUNK
    small = DeferredTransfers(available_bytes=required - 1)
    message = error_message(lambda: offloaded(params, 0.1, transfers=small))
    assert_says(message, "device memory", required, required - 1, "optimizer_offload_fraction")
    offloaded(params, 0.1, transfers=DeferredTransfers(available_bytes=required))
    message = error_message(lambda: OffloadedZero1Optimizer(groups(params), lr=0.1))
    assert_says(message, "optimizer_offload_fraction", "the backend is cpu")
    pool = HostPool(block_bytes=1000)

    class Unlockable(DeferredTransfers):
        def host_buffer(self, size_bytes: int) -> Tensor:
            raise RuntimeError(f"{size_bytes} bytes cannot be locked")

    message = error_message(lambda: offloaded(params, 1.0, transfers=Unlockable(), pool=pool))
    assert_says(message, "page-locked", 12 * sum(sizes), f"{4 * sum(sizes)} bytes cannot be locked", "ulimit -l")
    assert pool.ledger() == {}


@pytest.mark.parametrize("kind", ["resident", "offloaded", "remainders"])
def test_loading_the_own_state_changes_nothing(kind: str) -> None:
    """What state_dict returns are the optimizer's own tensors."""
    params = parameters(torch.bfloat16)
    options = {"store_param_remainders": True} if kind == "remainders" else {}
    optimizer = resident(params) if kind == "resident" else offloaded(params, 0.5, **options)
    train(optimizer, params, range(3))
    before = values(optimizer, params)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_equal(values(optimizer, params), before)


@pytest.mark.parametrize("second", [None, "zero1"])
def test_gradients_are_those_of_another_optimizer_when_one_is_gone(second: str | None) -> None:
    (param,) = parameters(torch.bfloat16)[:1]
    options: dict[str, Any] = {"grad_clipping": False, "lr": 1.0}
    first = NeuronZero1Optimizer([param], torch.optim.SGD, use_grad_acc_hook=True, **options)
    del first
    gc.collect()
    other: Any = torch.optim.SGD([param], lr=1.0)
    if second is not None:
        other = NeuronZero1Optimizer([param], torch.optim.SGD, use_grad_acc_hook=True, **options)
    before = param.detach().clone()
    param.sum().backward()
    other.step()
    assert torch.equal(param.detach(), before - 1)
