"""Signals to the training program: what stops when, on every rank after the same step, and resumption afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nxd_memopt.commands import prepare
from nxd_memopt.training import loop
from nxd_memopt.training.runtime import save_times
from nxd_memopt.training.runtime.signals import Interrupted, Interrupts
from nxd_memopt.training.runtime.step_decisions import MAX_POINTS, StepDecisions
from tests.dist.pool import run_on_ranks
from tests.training.runs import Outcome, exact, rows, run_here, write_config


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def stop_line(outcome: Outcome) -> str:
    lines = [line for line in outcome.stderr.splitlines() if line.startswith("stopped by")]
    assert len(lines) == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr
    return lines[0]


def interrupt_in(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, call: int = 1) -> None:
    """Send ``number`` to this process at the beginning of the ``call``-th call of a function of the loop."""
    original: Callable[..., Any] = getattr(loop, name)
    calls: list[int] = []

    def with_signal(*arguments: Any, **options: Any) -> Any:
        calls.append(0)
        if len(calls) == call:
            os.kill(os.getpid(), number)
            time.sleep(0.05)  # until the handlers have run
        return original(*arguments, **options)

    monkeypatch.setattr(loop, name, with_signal)


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of an uninterrupted run."""
    directory = tmp_path_factory.mktemp("whole")
    outcome = run_here(write_config(directory, trainer={"val_check_interval": 2, "save_interval": 3}))
    assert outcome.returncode == 0, outcome.stderr
    return directory / "run"


@pytest.mark.parametrize(
    ("number", "async_save"), [pytest.param(signal.SIGUSR1, False, marks=pytest.mark.slow), (signal.SIGTERM, True)]
)
def test_a_signal_saves_after_the_step_and_the_run_goes_on_exactly(
    whole: Path, tmp_path: Path, number: signal.Signals, async_save: bool
) -> None:
    config = write_config(tmp_path, trainer={"val_check_interval": 2, "save_interval": 3, "async_save": async_save})
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    with pytest.MonkeyPatch.context() as patch:
        interrupt_in(patch, "train_step", number, call=5)
        stopped = run_here(config)
    assert stopped.returncode == 128 + number
    directory = tmp_path / "run" / "checkpoints"
    line = f"stopped by {number.name} after step 5: saved {directory}; start the same command to continue"
    assert stop_line(stopped) == line
    assert steps(tmp_path / "run") == ["step_00000003", "step_00000005"]
    assert {each: signal.getsignal(each) for each in before} == before
    resumed = run_here(config)
    assert resumed.returncode == 0 and "resuming after step 5" in resumed.stdout
    assert exact(tmp_path / "run") == exact(whole)
    assert rows(tmp_path / "run", "evaluation.jsonl") == rows(whole, "evaluation.jsonl")


def test_a_signal_during_an_evaluation_saves_and_the_evaluation_is_made_up(whole: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, trainer={"val_check_interval": 2, "save_interval": 3})
    with pytest.MonkeyPatch.context() as patch:
        interrupt_in(patch, "held_out_loss", signal.SIGTERM, call=3)  # before training, after step 2, after step 4
        stopped = run_here(config)
    assert "after step 4: saved" in stop_line(stopped)
    assert steps(tmp_path / "run") == ["step_00000003", "step_00000004"]
    assert [row["step"] for row in rows(tmp_path / "run", "evaluation.jsonl")] == [0, 2]
    assert run_here(config).returncode == 0
    assert exact(tmp_path / "run") == exact(whole)
    assert rows(tmp_path / "run", "evaluation.jsonl") == rows(whole, "evaluation.jsonl")


def test_a_step_that_is_saved_anyway_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    original = loop.Saver.save
    monkeypatch.setattr(loop.Saver, "save", lambda saver: (saved.append(saver._training.step), original(saver)))
    interrupt_in(monkeypatch, "train_step", signal.SIGINT, call=4)
    assert run_here(write_config(tmp_path)).returncode == 130
    assert saved == [2, 4]


@pytest.mark.parametrize(
    ("interval", "expected"), [("auto", [1, 2, 3, 4]), pytest.param(3, [3, 4], marks=pytest.mark.slow)]
)
def test_auto_saves_by_time_and_the_agent_learns_how_long_a_stop_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int | str, expected: list[int]
) -> None:
    for name in ("FIRST_SAVE_S", "MINIMUM_S", "LOSS_S"):
        monkeypatch.setattr(save_times, name, -3600.0)  # every step is due
    monkeypatch.setenv("NXD_MEMOPT_STOP_TIME_FILE", str(tmp_path / "stop_s"))
    trainer = {"save_interval": interval, "max_steps": 4, "keep_checkpoints": 9, "export": False}
    assert run_here(write_config(tmp_path, trainer=trainer)).returncode == 0
    assert steps(tmp_path / "run") == [f"step_{step:08d}" for step in expected]
    assert 0 <= float((tmp_path / "stop_s").read_text(encoding="utf-8")) < 60


@pytest.mark.parametrize(
    ("phase", "says"),
    [
        ("prepare_data", "before training: nothing is lost"),
        ("export", "after training: the last step is saved; start the same command to evaluate and export"),
    ],
)
def test_other_phases_stop_at_once(tmp_path: Path, phase: str, says: str) -> None:
    config = write_config(tmp_path, trainer={"max_steps": 2})
    with pytest.MonkeyPatch.context() as patch:
        interrupt_in(patch, phase, signal.SIGTERM)
        stopped = run_here(config)
    assert stopped.returncode == 143
    assert stop_line(stopped).startswith(f"stopped by SIGTERM {says}")
    assert not (tmp_path / "run" / "export").exists()
    assert run_here(config).returncode == 0
    assert (tmp_path / "run" / "export" / "config.json").is_file()


# ---- first and second signal -----------------------------------------------------------------------------------------


def test_a_second_signal_ends_the_process_and_a_repeated_one_does_not(capfd: pytest.CaptureFixture[str]) -> None:
    clock, left = Clock(), []
    interrupts = Interrupts(clock, left.append)
    with pytest.raises(Interrupted, match="before training"), interrupts.deferred():
        interrupts.receive(signal.SIGINT)
        clock.now += 1.9  # the terminal's own, forwarded by the agent
        interrupts.receive(signal.SIGINT)
        assert left == []
        clock.now += 0.2
        interrupts.receive(signal.SIGTERM)
        assert left == [143]
    assert interrupts.first == signal.SIGINT
    assert "stopped at once by a second SIGTERM" in capfd.readouterr().err


def test_a_second_signal_ends_a_process_that_runs_no_python_code() -> None:
    """The main thread waits in C++, where no Python handler runs, as it does in a collective."""
    clock, store = Clock(), dist.HashStore()

    def leave(status: int) -> None:
        store.set("status", str(status))

    def send() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        clock.now += 3
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted), Interrupts(clock, leave).handled() as interrupts, interrupts.deferred():
        threading.Timer(0.1, send).start()
        store.wait(["status"], timedelta(seconds=20))  # raises after this time
        assert store.get("status") == b"143"


def test_one_signal_during_a_long_call_in_c_is_not_counted_twice() -> None:
    """The Python handler of the main thread runs when the call returns, long after the watching thread."""
    clock, store, left = Clock(), dist.HashStore(), []

    def send() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        clock.now += 14
        store.set("step", "done")

    interrupts = Interrupts(clock, left.append)
    with pytest.raises(Interrupted), interrupts.handled(), interrupts.deferred():
        threading.Timer(0.1, send).start()
        store.wait(["step"], timedelta(seconds=20))
        time.sleep(0.1)
    assert (interrupts.first, left) == (signal.SIGTERM, [])


def test_a_child_process_does_not_pass_its_signals_on() -> None:
    with Interrupts().handled() as interrupts:
        child = os.fork()
        if child == 0:
            try:
                time.sleep(10)
            finally:
                os._exit(1)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        time.sleep(0.1)
        assert interrupts.first is None


LATE_SIGNAL = """
import atexit, os, signal, sys, threading, time
from nxd_memopt.training.runtime.signals import final_status

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # it may receive every signal

@atexit.register
def send():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)

sys.exit(final_status(130))
"""


def test_a_signal_at_the_end_of_a_stopped_process_is_ignored() -> None:
    done = subprocess.run([sys.executable, "-c", LATE_SIGNAL], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


# ---- several ranks ---------------------------------------------------------------------------------------------------


def decisions(store: dist.Store, clock: Clock, ranks: int) -> list[StepDecisions]:
    made = [StepDecisions(clock, store=store, rank=rank, world_size=ranks) for rank in range(ranks)]
    for each in made[1:]:
        each._prefix = made[0]._prefix
    return made


def test_a_signal_to_one_rank_stops_all_at_the_same_point() -> None:
    clock = Clock()
    store = dist.HashStore()
    ranks = decisions(store, clock, 3)
    found: list[list[int | None]] = []
    for point in range(4):
        clock.now += 1
        signals = [None, None, signal.SIGUSR1 if point >= 1 else None]
        taken = [each.next(signals[rank], lambda: False) for rank, each in enumerate(ranks)]
        found.append([decision.signal if decision else None for decision in taken])
    # Rank 0 decides first here, so it sees the signal of rank 2 at the next point.
    assert found == [[None] * 3, [None] * 3, [signal.SIGUSR1] * 3, [signal.SIGUSR1] * 3]
    assert store.num_keys() == 1  # the signal; decisions are removed by their last reader


def test_rank_0_alone_decides_about_saves_and_fast_points_share_a_decision() -> None:
    clock = Clock()
    ranks = decisions(dist.HashStore(), clock, 2)
    asked = 0

    def due() -> bool:
        nonlocal asked
        asked += 1
        return True

    def never() -> bool:
        raise AssertionError("rank 1 decided by its own clock")

    for _ in range(1 + 2 * MAX_POINTS):
        clock.now += 0.001
        first, second = ranks[0].next(None, due), ranks[1].next(None, never)
        assert first == second
    assert asked == 3
    last = ranks[0].next(None, due, is_last=True)
    assert last is not None and last == ranks[1].next(None, never, is_last=True)


def _interrupted_rank(config: str, receiver: int) -> tuple[int, bool, str]:
    """Train on this rank of the pool; ``receiver`` alone receives a signal, in its third step."""
    from nxd_memopt.parallel_layers import parallel_state, random
    from nxd_memopt.training.config.parsing import parse_config

    parsed = parse_config(["--config", config])
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    random.model_parallel_manual_seed(parsed.trainer.seed)
    interrupts = Interrupts()
    original = loop.train_step

    def train_step(training: Any, *arguments: Any) -> Any:
        if training.step == 2 and dist.get_rank() == receiver:
            interrupts.receive(signal.SIGTERM)
        return original(training, *arguments)

    loop.train_step = train_step
    try:
        loop.run(parsed, interrupts)
    except Interrupted as stop:
        return stop.number, stop.is_agreed, stop.message
    finally:
        loop.train_step = original
    raise AssertionError("the run was not stopped")


@pytest.mark.parametrize("receiver", [0, 1])
def test_ranks_of_a_run_stop_together_whoever_is_told(tmp_path: Path, receiver: int) -> None:
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel_enabled": True}
    config = write_config(tmp_path, parallel=parallel, trainer={"max_steps": 500, "save_interval": "auto"})
    found = run_on_ranks(_interrupted_rank, 2, str(config), receiver)
    assert found[0] == found[1] and found[0][:2] == (signal.SIGTERM, True)
    (saved,) = steps(tmp_path / "run")
    number = int(saved.removeprefix("step_"))
    assert 3 <= number <= 3 + 2 * MAX_POINTS
    assert found[0][2].startswith(f"after step {number}: saved")
    assert rows(tmp_path / "run")[-1]["step"] == number


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_a_signal_before_the_handlers_ends_the_run_as_one_after_them(tmp_path: Path, command: str) -> None:
    """The agent starts ranks with the signals blocked, so one may wait for the handlers."""
    config = write_config(tmp_path)
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        # To this thread: other threads of the tests do not block it.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        if command == "train":
            outcome = run_here(config)
            assert outcome.returncode == 128 + signal.SIGTERM
            assert stop_line(outcome).startswith("stopped by SIGTERM before training: nothing is lost")
        else:
            assert prepare.main(["--config", str(config)]) == 128 + signal.SIGTERM
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    assert not (tmp_path / "run").exists()
