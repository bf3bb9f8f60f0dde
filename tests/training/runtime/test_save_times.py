"""When ``trainer.save_interval: auto`` saves: what a kill may cost, with fast and slow steps, saves and evaluations."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from nxd_memopt.training.runtime.save_times import SaveTimes


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def losses_of_a_kill(
    step_s: float, save_s: float, *, background: bool = False, known: Path | None = None, hours: float = 6
) -> tuple[list[float], float]:
    """Simulate a run; return the training time that a kill would cost at the end of each save, and the saves' share."""
    clock = Clock()
    times = SaveTimes(known, clock)
    started = clock.now
    state, complete = clock.now, clock.now  # when the newest complete checkpoint's state existed
    ends_s: float | None = None
    found: list[float] = []
    saving = 0.0
    draws = random.Random(0)
    while clock.now - started < hours * 3600:
        clock.now += step_s * draws.uniform(0.8, 1.2)
        if ends_s is not None and clock.now >= ends_s:
            times.finished_save()
            found.append(ends_s - complete)
            complete, ends_s = state, None
        times.passed_step()
        if ends_s is None and times.is_due():
            times.started_save()
            state = clock.now
            saving += save_s
            if background:
                ends_s = clock.now + save_s
            else:
                clock.now += save_s
                times.finished_save()
                found.append(clock.now - complete)
                complete = state
    return found, saving / (clock.now - started)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("step_s", "save_s"), [(0.01 * 100, 1), (0.7, 60), (45, 20), (400, 90), (60, 600), (5, 700)])
def test_a_kill_costs_less_than_30_minutes(step_s: float, save_s: float, background: bool) -> None:
    found, share = losses_of_a_kill(step_s, save_s, background=background)
    assert len(found) > 8
    assert max(found) < 30 * 60
    if save_s <= 60:
        assert share < 0.05


def test_the_time_of_the_last_save_is_kept_for_the_next_start(tmp_path: Path) -> None:
    clock = Clock()
    file = tmp_path / "last_save.json"
    times = SaveTimes(file, clock)
    assert times.stop_s() is None
    times.started_save()
    clock.now += 40
    times.finished_save()
    assert json.loads(file.read_text(encoding="utf-8")) == {"seconds": 40}
    assert SaveTimes(file, clock).stop_s() == 80
    for text in ("", "[]", "{}", '{"seconds": "x"}', '{"seconds": -1}', '{"seconds": NaN}'):
        file.write_text(text, encoding="utf-8")
        assert SaveTimes(file, clock).save_s is None


def test_one_long_pause_is_forgotten_after_two_saves() -> None:
    clock = Clock()
    times = SaveTimes(None, clock)
    for pause in (1, 1, 1, 9 * 3600, 1):
        clock.now += pause
        times.passed_step()
    assert times.gap_s == 9 * 3600
    for _ in range(2):
        times.started_save()
        clock.now += 10
        times.finished_save()
    clock.now += 1
    times.passed_step()
    assert times.gap_s == 1
    assert not times.is_due()
