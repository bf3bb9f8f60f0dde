"""The time of copies of optimizer states, next to a simulation of the step and by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nxd_memopt.planner.hardware import device_named
from nxd_memopt.planner.sizes.states import StateLayout, offloaded_state_bytes
from nxd_memopt.planner.timing.state_copies import host_copy_rate, state_copies_s

RATE = 50e9
LAYER = ((1000, 1000), (1000, 3000))
EMBEDDING = (5000, 1000)


def model_of(layers: int, *, head: bool = True) -> SimpleNamespace:
    others = (EMBEDDING, (1000,), *([EMBEDDING] if head else []))
    shapes = [EMBEDDING, *(LAYER * layers), *others[1:]]
    return SimpleNamespace(shapes=shapes, layer_shapes=LAYER, sizes=SimpleNamespace(num_layers=layers))


def copies(layers: int, *, compute_s: float, forward_s: float, staging: int = 0, **options) -> float:
    layout = StateLayout(2, master_weights=True, **{"optimizer_offload_fraction": 1.0} | options)
    model = model_of(layers)
    host = offloaded_state_bytes(model.shapes, layout)
    used = SimpleNamespace(host={"optimizer states": host}, device={"staging of optimizer states": staging})
    return state_copies_s(model, layout, used, RATE, compute_s=compute_s, forward_s=forward_s)


def test_without_an_update_in_forward_all_but_the_staged_states_are_waited_for():
    total = 12 * (2 * 5e6 + 4 * 4e6)
    assert copies(4, compute_s=1.0, forward_s=0.3) == pytest.approx(total / RATE)
    assert copies(4, compute_s=1.0, forward_s=0.3, staging=100_000_000) == pytest.approx((total - 1e8) / RATE)
    assert copies(4, compute_s=1.0, forward_s=0.3, staging=10**9) == 0
    assert copies(4, compute_s=1.0, forward_s=0.3, param_remainders=True) == pytest.approx(total / 12 * 10 / RATE)


@pytest.mark.parametrize("forward_s", [0.0, 1e-4, 1e-3, 3e-3, 1.0])
@pytest.mark.parametrize("staging", [0, 10**8])
@pytest.mark.parametrize("layers", [1, 3, 8])
def test_a_layer_waits_for_its_states(layers, staging, forward_s):
    """A link that brings unit after unit, and layers that begin when their unit has arrived and the last has ended."""
    units = [4e6] * layers
    units[0] += 5e6
    units[-1] += 5e6
    link_s = -staging / RATE
    ended_s = 0.0
    for elements in units:
        link_s += 12 * elements / RATE
        ended_s = max(ended_s, link_s) + forward_s / layers
    found = copies(layers, compute_s=100.0, forward_s=forward_s, staging=staging, update_in_forward=True)
    assert found == pytest.approx(ended_s - forward_s, abs=1e-12)


def test_states_that_do_not_return_within_a_step_are_waited_for():
    total_s = 12 * (2 * 5e6 + 3 * 4e6) / RATE
    found = copies(3, compute_s=total_s / 2, forward_s=total_s, staging=10**9, update_in_forward=True)
    assert found == pytest.approx(total_s / 2)


def test_gpus_of_a_host_share_its_copies():
    device = device_named("h200")
    assert host_copy_rate(device, 1) == device.host_copy_bytes_per_s
    # 34 to 39 of 50 GB/s were measured with two.
    assert 34e9 < host_copy_rate(device, 2) < 39e9
    trn1 = device_named("trn1")
    assert host_copy_rate(trn1, 32) == trn1.host_copy_bytes_per_s
