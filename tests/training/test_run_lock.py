"""Tests the lock of an output directory: refusals, stale locks, and starts at the same moment."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nxd_memopt.training import processes, run_lock
from nxd_memopt.training.processes import Process, this_process
from nxd_memopt.training.run_lock import NAME, RunLock, locked_output_directory
from tests.dist.pool import distributed


def write_lock(directory: Path, **changes: Any) -> bytes:
    """Write the lock of a process like this one but for ``changes``; return its bytes."""
    process = dataclasses.replace(this_process(), **changes)
    text = json.dumps({"process": dataclasses.asdict(process), "since": "2026-01-02T03:04:05+00:00"})
    directory.mkdir(exist_ok=True)
    (directory / NAME).write_text(text, encoding="utf-8")
    return text.encode()


def ended_pid() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_lock_names_this_process_and_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "run"
    with locked_output_directory(directory):
        owner = json.loads((directory / NAME).read_text(encoding="utf-8"))
        assert Process(**owner["process"]) == this_process()
        assert owner["process"]["pid"] == os.getpid()
        assert [path.name for path in directory.iterdir()] == [NAME]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(2), KeyboardInterrupt()])
def test_the_lock_is_removed_after_an_error(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), locked_output_directory(tmp_path):
        (tmp_path / "file").write_text("x", encoding="utf-8")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_in_use_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    with locked_output_directory(tmp_path):
        before = (tmp_path / NAME).read_bytes()
        remedy = "choose another trainer.output_dir, or stop that process"
        with (
            pytest.raises(ValueError, match=rf"{tmp_path} is in use by process {os.getpid()} on host .*{remedy}"),
            locked_output_directory(tmp_path),
        ):
            pass
        assert (tmp_path / NAME).read_bytes() == before
        assert len(list(tmp_path.iterdir())) == 1


def require_taken_over(directory: Path, capsys: pytest.CaptureFixture[str], pid: int) -> None:
    with locked_output_directory(directory):
        assert json.loads((directory / NAME).read_text(encoding="utf-8"))["process"]["pid"] == os.getpid()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"taking over {directory / NAME}: process {pid} "), lines
    assert not (directory / NAME).exists()


def test_the_lock_of_an_ended_process_is_taken_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid = ended_pid()
    write_lock(tmp_path, pid=pid)
    require_taken_over(tmp_path, capsys, pid)


@pytest.mark.parametrize(
    "changes",
    [{"started": "1"}, {"boot": "an earlier boot"}, {"pid_namespace": "pid:[1]"}],
    ids=lambda c: next(iter(c)),
)
def test_another_process_with_the_same_id_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    """The id was used again; the host was restarted; the process was one of another container."""
    machine = tmp_path / "machine-id"
    machine.write_text("ab12\n", encoding="utf-8")
    monkeypatch.setattr(processes, "MACHINE_ID", machine)
    write_lock(tmp_path / "run", **changes)
    require_taken_over(tmp_path / "run", capsys, os.getpid())


def test_a_process_of_another_container_keeps_its_lock_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "WAIT_S", 0.1)
    before = write_lock(tmp_path, pid_namespace="pid:[1]", pid=1)
    with (tmp_path / NAME).open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with pytest.raises(ValueError, match="in use by process 1 "):
            RunLock(tmp_path)
    assert (tmp_path / NAME).read_bytes() == before


def test_other_ranks_of_an_ended_process_keep_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "WAIT_S", 0.1)
    write_lock(tmp_path, pid=ended_pid())
    with (tmp_path / NAME).open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with pytest.raises(ValueError, match="or another rank of that run"):
            RunLock(tmp_path)
    RunLock(tmp_path).release()


@pytest.mark.parametrize(
    "changes",
    [{"boot": "b", "host": "other", "pid": 1}, {"boot": "b", "machine": "m"}, {"boot": "b", "machine": ""}],
    ids=["name", "machine", "unknown machine"],
)
def test_another_host_cannot_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(processes, "MACHINE_ID", tmp_path / "absent")
    before = write_lock(tmp_path / "run", **changes)
    with pytest.raises(ValueError, match=f"cannot be checked from host .*if that run has ended, delete {tmp_path}/run"):
        RunLock(tmp_path / "run")
    assert (tmp_path / "run" / NAME).read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1]", b'{"process": {"pid": 1}, "since": ""}', b"{}"])
def test_a_foreign_file_is_named_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path / NAME} is not a readable lock.*delete it"):
        RunLock(tmp_path)
    assert (tmp_path / NAME).read_bytes() == content


def test_a_file_system_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ValueError, match=r"without hard links \(.*choose one on another file system"):
        RunLock(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_without_file_locks_a_stale_lock_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two starts could both take it over."""

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    write_lock(tmp_path, pid=ended_pid())
    with pytest.raises(ValueError, match=r"does not support file locks \(flock\).*delete"):
        RunLock(tmp_path)
    (tmp_path / NAME).unlink()
    lock = RunLock(tmp_path)
    with pytest.raises(ValueError, match="in use"):
        RunLock(tmp_path)
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_zombie_has_ended_and_names_may_have_parentheses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PROC", tmp_path)
    for pid, state in ((7, "S"), (8, "Z")):
        (tmp_path / str(pid)).mkdir()
        fields = " ".join(str(number) for number in range(4, 53))
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) {state} {fields}", encoding="utf-8")
    assert processes.start_ticks(7) == "22"  # field 22, counted from 1
    assert processes.start_ticks(8) is None
    assert processes.start_ticks(9) is None


def test_remainders_of_killed_starts_are_removed(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.1.ab").write_text("", encoding="utf-8")
    RunLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_removed_lock_file_is_not_replaced_by_another_runs(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    (tmp_path / NAME).unlink()  # by hand
    second = RunLock(tmp_path)
    first.release()
    assert (tmp_path / NAME).is_file()
    second.release()


def starts(count: int, start: Callable[[], None]) -> list[BaseException | None]:
    """Call ``start`` in threads at the same moment; return the error of each."""
    errors: list[BaseException | None] = []
    barrier = threading.Barrier(count)

    def body() -> None:
        barrier.wait()
        try:
            start()
            errors.append(None)
        except ValueError as error:
            errors.append(error)

    threads = [threading.Thread(target=body) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("stale", [False, True])
def test_of_starts_at_the_same_moment_exactly_one_goes_on(tmp_path: Path, stale: bool) -> None:
    pid = ended_pid()
    for number in range(15):
        directory = tmp_path / str(number)
        if stale:
            write_lock(directory, pid=pid)
        locks: list[RunLock] = []
        errors = starts(4, lambda d=directory, held=locks: held.append(RunLock(d)))
        refused = [str(error) for error in errors if error is not None]
        assert len(locks) == 1 and len(refused) == 3, errors
        assert all(f"in use by process {os.getpid()} " in text for text in refused), refused
        assert [path.name for path in directory.iterdir()] == [NAME]
        locks[0].release()


@distributed(2)
def test_all_ranks_learn_that_the_directory_is_in_use(tmp_path: Path) -> None:
    with locked_output_directory(tmp_path):
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match="in use"):
                RunLock(tmp_path)
        dist.barrier()
        with pytest.raises(ValueError, match="is in use by process"), locked_output_directory(tmp_path):
            pass
    dist.barrier()  # rank 0 removes the lock after the other ranks have left
    assert list(tmp_path.iterdir()) == []
