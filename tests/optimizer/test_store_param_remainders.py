"""Remainders of masters: the bits of fp32 masters in 10 bytes of states per parameter, and never stale ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.optimizer.offloaded_zero1 import OffloadedZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state
from tests.deferred_transfers import DeferredTransfers
from tests.optimizer.test_offloaded_zero1 import (
    CHUNK,
    OPTIONS,
    SHAPES,
    assert_equal,
    offloaded,
    parameters,
    resident,
    train,
)
from tests.reference_models import batch, llama_config, parallel_model


@pytest.fixture(autouse=True)
def one_rank() -> None:
    parallel_state.initialize_model_parallel()


def with_remainders(params: list[nn.Parameter], fraction: float, **options: object) -> OffloadedZero1Optimizer:
    defaults = {"store_param_remainders": True, "staging_bytes": 3 * 10 * CHUNK}
    return offloaded(params, fraction, **(defaults | options))


def portable(optimizer: NeuronZero1Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    """Return parameters, masters and moments from ``state_dict``, which has the same entries for every optimizer."""
    state = optimizer.state_dict()
    moments = [values[name] for values in state["state"].values() for name in ("exp_avg", "exp_avg_sq", "step")]
    masters = list(state["sharded_master_weights"].values())
    return [tensor.detach().clone() for tensor in (*params, *masters, *moments)]


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_remainders_are_the_masters_of_resident_states(fraction: float) -> None:
    expected, actual = parameters(torch.bfloat16), parameters(torch.bfloat16)
    reference, optimizer = resident(expected), with_remainders(actual, fraction)
    norms = train(reference, expected, range(6), skip=2)
    assert_equal(train(optimizer, actual, range(6), skip=2), norms)
    assert_equal(portable(optimizer, actual), portable(reference, expected))
    masters = optimizer.state_dict()["sharded_master_weights"]
    assert any((master != master.bfloat16()).any() for master in masters.values())


@pytest.mark.parametrize(("build", "element_bytes"), [(offloaded, 12), (with_remainders, 10)])
def test_each_state_moves_once_in_each_direction(build: Any, element_bytes: int) -> None:
    params = parameters(torch.bfloat16)
    transfers = DeferredTransfers()
    pool = HostPool()
    optimizer = build(params, 1.0, transfers=transfers, pool=pool)
    elements = sum(param.numel() for param in params)
    assert pool.ledger() == {"optimizer states": element_bytes * elements}
    train(optimizer, params, range(5))
    optimizer.base_optimizer.synchronize()
    assert transfers.bytes_out == 5 * element_bytes * elements
    assert transfers.bytes_in == element_bytes * (5 * elements + 3 * CHUNK)  # three chunks are ahead


@pytest.mark.parametrize("of_saved", [offloaded, with_remainders])
@pytest.mark.parametrize(("of_loaded", "loaded"), [(offloaded, 0.0), (offloaded, 1.0), (with_remainders, 1.0)])
def test_a_saved_state_continues_at_another_fraction_and_format(of_saved: Any, of_loaded: Any, loaded: float) -> None:
    expected, actual = parameters(torch.bfloat16), parameters(torch.bfloat16)
    source = of_saved(expected, 0.5)
    train(source, expected, range(3))
    state = copy.deepcopy(source.state_dict())
    optimizer = of_loaded(actual, loaded)
    train(optimizer, actual, range(7, 9))  # other states and prefetched chunks, which loading must replace
    with torch.no_grad():
        for param, trained in zip(actual, expected, strict=True):
            param.copy_(trained)
    optimizer.load_state_dict(state)
    train(source, expected, range(3, 6))
    train(optimizer, actual, range(3, 6))
    assert_equal(portable(optimizer, actual), portable(source, expected))


def test_a_parameter_that_is_written_to_starts_without_a_remainder() -> None:
    params = parameters(torch.bfloat16)
    optimizer = with_remainders(params, 1.0)
    train(optimizer, params, range(2))
    with torch.no_grad():
        params[0].copy_(torch.full(SHAPES[0], 3.0))
    with pytest.warns(UserWarning, match="91 elements was written to"):
        masters = optimizer.state_dict()["sharded_master_weights"]
    assert_equal([masters[0]], [torch.full(SHAPES[0], 3.0)])
    assert (masters[1] != masters[1].bfloat16()).any()


@pytest.mark.parametrize(("of_saved", "of_loaded"), [(with_remainders, offloaded), (offloaded, with_remainders)])
def test_rank_files_have_masters(of_saved: Any, of_loaded: Any, tmp_path: Any) -> None:
    expected, actual = parameters(torch.bfloat16), parameters(torch.bfloat16)
    saved = of_saved(expected, 0.5)
    train(saved, expected, range(3))
    saved.save_sharded_state_dict(tmp_path)
    with torch.no_grad():
        for param, trained in zip(actual, expected, strict=True):
            param.copy_(trained)
    loaded = of_loaded(actual, 0.5)
    loaded.load_sharded_state_dict(tmp_path)
    assert_equal(portable(loaded, actual), portable(saved, expected))


@pytest.mark.parametrize("remainders", [False, True])
def test_updates_that_are_left_are_no_outside_writes(remainders: bool) -> None:
    """A chunk boundary inside of a parameter: its first half is updated in the forward, the rest by the next step."""
    found = []
    for in_forward in (False, True):
        torch.manual_seed(3)
        model = parallel_model(llama_config()).to(torch.bfloat16)
        options = {"transfers": DeferredTransfers(), "chunk_elements": 100, "staging_bytes": 3 * 12 * 100}
        optimizer = OffloadedZero1Optimizer(
            model.parameters(), resident_elements=50, store_param_remainders=remainders, **options, **OPTIONS
        )
        if in_forward:
            optimizer.update_in_forward(model.decoder_layers())
        for _ in range(2):
            model(**batch()).loss.backward()
            optimizer.step()
        optimizer.update_parameters()  # the gradients of the last step again
        found.append(portable(optimizer, list(model.parameters())))
    assert_equal(*found)


@pytest.mark.parametrize("remainders", [False, True])
def test_a_parameter_with_other_memory_is_an_error(remainders: bool) -> None:
    params = parameters(torch.bfloat16)
    optimizer = offloaded(params, 1.0, store_param_remainders=remainders)
    train(optimizer, params, range(1))
    params[2].data = params[2].data.clone()
    with pytest.raises(RuntimeError, match="33 elements has other memory"):
        train(optimizer, params, range(1, 2))


def test_a_state_without_masters_leaves_no_remainder_of_later_steps() -> None:
    params = parameters(torch.bfloat16)
    optimizer = with_remainders(params, 1.0, save_master_weights=False)
    train(optimizer, params, range(3))
    state, values = copy.deepcopy(optimizer.state_dict()), [param.detach().clone() for param in params]
    train(optimizer, params, range(3, 6))
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)
    optimizer.load_state_dict(state)
    optimizer.finish_update()
    restored = dict(zip(params, values, strict=True))
    for i, each in enumerate(optimizer._sharded):
        assert_equal([optimizer._master(i).flatten()], [restored[each.param].float().flatten()])
