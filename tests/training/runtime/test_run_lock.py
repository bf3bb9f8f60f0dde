"""Tests the lock of an output directory: refusals, runs that were killed, and starts at the same moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from nxd_memopt.training.runtime import run_lock
from nxd_memopt.training.runtime.run_lock import NAME, locked_output_directory
from tests.dist.pool import distributed

HOLDER = """
import sys, time
from nxd_memopt.training.runtime.run_lock import locked_output_directory
try:
    with locked_output_directory(sys.argv[1]):
        print("held", flush=True)
        sys.stdin.read()
except ValueError as error:
    print(error, flush=True)
"""


def start_holder(directory: Path) -> subprocess.Popen[str]:
    """Start a process that locks ``directory`` until its standard input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_lock_names_this_process_and_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "run"
    with locked_output_directory(directory):
        assert f"process {os.getpid()} on host " in (directory / NAME).read_text(encoding="utf-8")
        assert [path.name for path in directory.iterdir()] == [NAME]
    assert list(tmp_path.iterdir()) == []


def test_the_lock_is_removed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), locked_output_directory(tmp_path):
        (tmp_path / "file").write_text("x", encoding="utf-8")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_in_use_is_refused_and_a_killed_run_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_lock, "WAIT_S", 0.1)
    holder = start_holder(tmp_path)
    assert first_line(holder) == "held"
    before = (tmp_path / NAME).read_bytes()
    remedy = "choose another trainer.output_dir, or stop that process"
    with (
        pytest.raises(ValueError, match=rf"{tmp_path} is in use by process {holder.pid} on host .*{remedy}"),
        locked_output_directory(tmp_path),
    ):
        pass
    assert (tmp_path / NAME).read_bytes() == before
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked_output_directory(tmp_path):
        assert f"process {os.getpid()} on host " in (tmp_path / NAME).read_text(encoding="utf-8")
    assert f"taking over {tmp_path / NAME} of process {holder.pid} on host " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_of_starts_at_the_same_moment_exactly_one_goes_on(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("process 1 on host a, started before\n", encoding="utf-8")
    holders = [start_holder(tmp_path) for _ in range(2)]
    answers = []
    for holder in holders:
        line = first_line(holder)
        answers.append(first_line(holder) if line.startswith("taking over") else line)
    assert sorted(answer == "held" for answer in answers) == [False, True], answers
    assert all("is in use by process " in answer for answer in answers if answer != "held"), answers
    for holder in holders:
        holder.communicate()
    assert list(tmp_path.iterdir()) == []


@distributed(2)
def test_all_ranks_learn_that_the_directory_is_in_use(tmp_path: Path) -> None:
    with (
        locked_output_directory(tmp_path),
        pytest.raises(ValueError, match="is in use by process"),
        locked_output_directory(tmp_path),
    ):
        pass
    dist.barrier()  # rank 0 removes the lock after the other ranks have left
    assert list(tmp_path.iterdir()) == []
