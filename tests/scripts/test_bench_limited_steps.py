"""The benchmark of what the allocator needs: limits that fall until a step fails, and none after that."""

from __future__ import annotations

import pytest
import torch

from scripts.bench import limited_steps
from scripts.bench.limited_steps import FRACTIONS, least_reserved

ALLOCATED = 100_000
PLANNED = 101_900


@pytest.fixture
def limits(monkeypatch):
    """Limits of the steps that run; a step needs 101,700 and reserves what it may, up to 104,000."""
    found: list[int] = []

    def limited(_, limit):
        found.append(limit)
        if limit < 101_700:
            raise torch.OutOfMemoryError(f"{limit} bytes")
        return min(limit, 104_000)

    monkeypatch.setattr(limited_steps, "limited_step", limited)
    monkeypatch.setattr(limited_steps, "CudaBackend", object)
    return found


def least(**options) -> int:
    return least_reserved(
        lambda: None, **{"allocated": ALLOCATED, "planned": PLANNED, "step_s": 1.0, "fails_alone": True} | options
    )


def test_limits_fall_until_a_step_fails(limits):
    assert least() == PLANNED
    assert limits == [106_000, 104_500, 103_500, 102_500, 102_000, PLANNED, 101_500]


def test_a_plan_of_too_little_is_measured_above_it(limits):
    assert least(planned=101_000) == 102_000
    assert limits[-1] == 101_500 and 101_000 not in limits


def test_with_other_ranks_no_limit_is_below_the_planned_one(limits):
    assert least(fails_alone=False) == PLANNED
    assert min(limits) == PLANNED


def test_long_steps_run_twice(limits):
    assert least(step_s=10.0) == PLANNED
    assert limits == [ALLOCATED + round(ALLOCATED * FRACTIONS[0]), PLANNED]


def test_a_step_for_which_no_limit_suffices_fails(limits):
    with pytest.raises(torch.OutOfMemoryError, match="95400 bytes"):
        least(allocated=90_000, planned=91_000)
    assert limits == [95_400]
