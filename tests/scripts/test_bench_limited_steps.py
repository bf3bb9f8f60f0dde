"""The benchmark of what the allocator needs: limits that fall until a step fails, and none after that."""

from __future__ import annotations

import pytest
import torch

from scripts.bench import limited_steps
from scripts.bench.limited_steps import least_reserved

ALLOCATED = 100_000
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


def least(**options) -> int:
    return least_reserved(
        lambda: None, **{"allocated": ALLOCATED, "planned": PLANNED, "step_s": 1.0, "fails_alone": True} | options
    )


def test_limits_fall_until_a_step_fails(limits):
    assert least(allocated=99_000) == 101_475
    assert limits == [PLANNED, 101_475, 99_990]


def test_a_limit_above_the_plan_is_not_tried(limits):
    assert least() == PLANNED
    assert limits == [PLANNED, 101_000]


def test_with_other_ranks_no_limit_is_below_the_planned_one(limits):
    assert least(allocated=99_000, fails_alone=False) == PLANNED
    assert limits == [PLANNED]


def test_long_steps_run_once(limits):
    assert least(allocated=99_000, step_s=10.0) == PLANNED
    assert limits == [PLANNED]


def test_a_step_for_which_the_plan_does_not_suffice_fails(limits):
    with pytest.raises(torch.OutOfMemoryError, match="91000 bytes"):
        least(allocated=90_000, planned=91_000)
    assert limits == [91_000]
