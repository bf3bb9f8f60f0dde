"""The agent of one host's ranks: environment, signals, time to stop, failures. The ranks are small programs here."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nxd_memopt.launch import agent
from nxd_memopt.launch.agent import Agent, main, stop_s

# Ranks start with blocked signals: one that arrived before is ignored only if its handler is there first.
IGNORING = (
    "import signal, time; signal.signal({0}, signal.SIG_IGN); "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals()); time.sleep(60)"
)


def ranks(text: str, processes: int = 2) -> int:
    """Run a program of one line on every rank."""
    return Agent(
        [sys.executable, "-S", "-c", "import os, sys; rank = int(os.environ['RANK']); " + text], processes, os.environ
    ).run()


@pytest.fixture
def send_later() -> Iterator[Callable[..., None]]:
    """Send a signal to this process after each delay; those that come after the agent's end do nothing."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda *_: None) for number in numbers}
    threads: list[threading.Thread] = []

    def start(number: int, *delays_s: float) -> None:
        def send() -> None:
            for delay_s in delays_s:
                time.sleep(delay_s)
                os.kill(os.getpid(), number)

        threads.append(threading.Thread(target=send))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()
    for number in numbers:
        signal.signal(number, previous[number])


def test_ranks_get_torchruns_variables(tmp_path: Path) -> None:
    text = f"import json; open(r'{tmp_path}/' + str(rank), 'w').write(json.dumps(dict(os.environ)))"
    assert ranks(text) == 0
    found = [json.loads((tmp_path / str(rank)).read_text(encoding="utf-8")) for rank in range(2)]
    assert [(each["RANK"], each["LOCAL_RANK"], each["WORLD_SIZE"], each["GROUP_RANK"]) for each in found] == [
        ("0", "0", "2", "0"),
        ("1", "1", "2", "0"),
    ]
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"]


def test_the_ranks_have_a_group_and_the_store_outlives_rank_0(capfd: pytest.CaptureFixture[str]) -> None:
    text = (
        "import torch, torch.distributed as dist, time; dist.init_process_group('gloo'); "
        "x = torch.ones(1); dist.all_reduce(x); store = dist.distributed_c10d._get_default_store(); "
        "print(x.item()) if rank else store.set('left', '1'); dist.barrier(); "
        "rank or os._exit(0); time.sleep(0.5); print(store.get('left').decode())"
    )
    command = [sys.executable, "-c", "import os; rank = int(os.environ['RANK']); " + text]
    assert Agent(command, 2, os.environ).run() == 0
    assert capfd.readouterr().out.split() == ["2.0", "1"]


def test_a_user_error_is_rank_0s_line_and_ends_the_others_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert ranks("rank or (print('error: no', file=sys.stderr), sys.exit(2)); import time; time.sleep(60)") == 2
    assert time.monotonic() - started < 5
    assert capfd.readouterr().err == "error: no\n"


def test_the_first_failure_decides_and_a_killed_rank_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "FAILED_S", 0.3)
    assert ranks("import time; rank == 1 and os.kill(os.getpid(), 9); time.sleep(60)") == 137
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: rank 1 was ended by SIGKILL") and "from the last checkpoint" in line


def test_a_signal_is_forwarded_once_even_before_the_handlers_exist(
    tmp_path: Path, send_later: Callable[..., None]
) -> None:
    text = (
        "import signal, time; time.sleep(1.0); got = []; signal.signal(15, lambda *_: got.append(1)); "
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [15]); time.sleep(0.8); "
        f"open(r'{tmp_path}/' + str(rank), 'w').write(str(len(got))); sys.exit(143)"
    )
    send_later(signal.SIGTERM, 0.4, 1.0)
    assert ranks(text) == 143
    assert [(tmp_path / str(rank)).read_text(encoding="utf-8") for rank in range(2)] == ["1", "1"]


def test_ranks_that_do_not_stop_are_killed_after_their_time(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, send_later: Callable[..., None]
) -> None:
    monkeypatch.setattr(agent, "stop_s", lambda file: 0.5)
    send_later(signal.SIGTERM, 0.7)
    started = time.monotonic()
    assert ranks(IGNORING.format(15)) == 137
    assert 1.0 < time.monotonic() - started < 10
    (line,) = capfd.readouterr().err.splitlines()
    assert "killed" in line and "the last complete checkpoint is valid" in line


def test_a_second_signal_kills_the_ranks_soon(monkeypatch: pytest.MonkeyPatch, send_later: Callable[..., None]) -> None:
    monkeypatch.setattr(agent, "SECOND_S", 0.3)
    send_later(signal.SIGINT, 0.5, 2.2)
    started = time.monotonic()
    assert ranks(IGNORING.format(2)) == 137
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(("text", "expected"), [(None, 600), ("", 600), ("3.5", 120), ("800.25", 800.25)])
def test_time_to_stop(tmp_path: Path, text: str | None, expected: float) -> None:
    file = tmp_path / "stop_s"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    assert stop_s(file) == expected


@pytest.mark.parametrize(
    ("arguments", "rank", "says"),
    [
        (["--nproc", "0"], None, "at least 1, got '0'"),
        (["--nproc", "2"], "1", "omit --nproc or torchrun"),
        # Once, before the ranks start.
        (["--nproc", "2", "--config", "absent.yaml"], None, "absent.yaml does not exist"),
    ],
)
def test_bad_numbers_of_ranks(
    arguments: list[str],
    rank: str | None,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("nxd_memopt.training.runtime.errors.is_rank_zero", lambda: True)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line
