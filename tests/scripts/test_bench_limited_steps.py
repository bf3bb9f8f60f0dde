"""The benchmark of what the allocator needs: limits that fall until a step fails, and none after that."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.hardware import device_named
from scripts.bench.planner import limited_steps
from scripts.bench.planner.cells import Cell, plan_of
from scripts.bench.planner.limited_steps import least_reserved
from scripts.bench.planner.memory import tried_limits, waits_for_memory

PLANNED = 101_900


@pytest.fixture
def limits(monkeypatch):
    """Limits of the steps that run; a step needs 101,400 and reserves what it may, up to 104,000."""
    found: list[int] = []

    def limited(_, limit):
        found.append(limit)
        if limit < 101_400:
            raise torch.OutOfMemoryError(f"{limit} bytes")
        return min(limit, 104_000)

    monkeypatch.setattr(limited_steps, "limited_step", limited)
    monkeypatch.setattr(limited_steps, "CudaBackend", object)
    return found


def smallest(tried, *, planned=PLANNED, fails_alone=True) -> int:
    return least_reserved(lambda: None, limits=tried, planned=planned, fails_alone=fails_alone)


def test_limits_fall_until_a_step_fails(limits):
    assert smallest([99_000, 99_990, 101_475]) == 101_475
    assert limits == [PLANNED, 101_475, 99_990]


def test_a_limit_above_the_plan_is_not_tried(limits):
    assert smallest([102_500, 101_000]) == PLANNED
    assert limits == [PLANNED, 101_000]


def test_with_other_ranks_no_limit_is_below_the_planned_one(limits):
    assert smallest([101_475], fails_alone=False) == PLANNED
    assert limits == [PLANNED]


def test_a_step_for_which_the_plan_does_not_suffice_fails(limits):
    with pytest.raises(torch.OutOfMemoryError, match="91000 bytes"):
        smallest([90_000], planned=91_000)
    assert limits == [91_000]


def test_short_steps_have_limits_of_what_they_allocate():
    plan = plan_of(Cell("smollm 2k", "smollm2-135m", 30, 2048), device_named("h200"))
    assert tried_limits(plan, 1000, is_elastic=False) == [1025, 1010]


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({}, False),
        ({"cpu_offloading_num_layers": 2}, True),
        ({"cpu_offloading_num_layers": 2, "recompute_granularity": "full", "cpu_offloading_activations": True}, False),
        ({"cpu_offloading_num_layers": 2, "cpu_offloading_weights": True}, False),
    ],
)
def test_only_offloaded_activations_of_whole_layers_take_what_is_left(options, waits):
    assert waits_for_memory(MemoryConfig(**options)) is waits
