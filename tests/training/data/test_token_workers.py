"""Processes that tokenize: order, read-ahead, errors, and their end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.tokenize import workers as token_workers
from nxd_memopt.training.data.tokenize.encoding import DocumentEncoder
from nxd_memopt.training.data.tokenize.workers import TokenWorkers
from tests.training.data.numbering import NumberingEncoder
from tests.training.packed_tokens import vocabulary

COUNT = 2


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenWorkers]:
    monkeypatch.setattr(token_workers, "FOREGROUND_S", 0.0)
    with TokenWorkers(NumberingEncoder(), COUNT) as started:  # pyright: ignore[reportArgumentType]
        yield started


def test_tokens_come_in_the_order_of_the_documents(workers: TokenWorkers) -> None:
    """Although every other call takes longer; read ahead is not more than two calls for each process."""
    read: list[str] = []

    def calls() -> Iterator[Sequence[str]]:
        for number in range(12):
            read.append(str(number))
            yield [f"{number}", f"{number} again"]

    found: list[Any] = []
    for number, encoded in enumerate(workers.encode(calls())):
        assert len(read) <= number + 2 * COUNT
        found += [encoded]
    assert [[int(each.tokens[0]) for each in encoded] for encoded in found] == [[number] * 2 for number in range(12)]
    processes = {int(encoded[0].tokens[1]) for encoded in found}
    assert (
        processes == {process.pid for process in workers.processes}
        and len(processes) == COUNT
        and os.getpid() not in processes
    )


def test_errors_and_the_end_of_a_process(workers: TokenWorkers) -> None:
    with pytest.raises(ValueError, match="no number in 'x'"):
        list(workers.encode(iter([["1"], ["x"]])))
    # A process that has answered with an error goes on.
    assert [int(each[0].tokens[0]) for each in workers.encode(iter([["1"], ["2"], ["3"]]))] == [1, 2, 3]
    workers.processes[0].kill()
    with pytest.raises(ValueError, match=r"was killed: if the host's memory was full, .* --workers"):
        list(workers.encode([str(number)] for number in range(8)))


@pytest.mark.slow
def test_processes_open_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend that this machine lacks: also what unpickling the tokenizer imports must not select it."""
    monkeypatch.setattr(token_workers, "FOREGROUND_S", 0.0)
    monkeypatch.setenv("NXD_MEMOPT_BACKEND", "neuron")
    encoder = DocumentEncoder(vocabulary(), DataConfig(seq_length=16))
    with TokenWorkers(encoder, COUNT) as workers:
        ((first, *_),) = next(workers.encode(iter([["abc"]])))
    ((expected, *_),) = encoder.encode(["abc"])
    assert os.environ["NXD_MEMOPT_BACKEND"] == "neuron" and first.tolist() == expected.tolist()


def test_a_short_text_starts_no_process() -> None:
    times = iter([0.0, 1.0, 2.0, 4.9, 5.1, 5.2, 5.3])
    with TokenWorkers(NumberingEncoder(), COUNT, lambda: next(times)) as workers:  # pyright: ignore[reportArgumentType]
        found = list(workers.encode([str(number)] for number in range(3)))
        assert [int(each[0].tokens[1]) for each in found] == [os.getpid()] * 3 and not workers.processes


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_processes_end_with_the_one_that_started_them() -> None:
    """Even if that is killed; signals for all processes of a terminal end none of them."""
    program = (
        "import time\n"
        "from nxd_memopt.training.data.tokenize.workers import TokenWorkers\n"
        "from tests.training.data.numbering import NumberingEncoder\n"
        "if __name__ == '__main__':\n"
        "    workers = TokenWorkers(NumberingEncoder(), 2)\n"
        "    workers._alone_until_s = 0.0\n"
        "    next(workers.encode([str(number)] for number in range(8)))\n"
        "    print(*(process.pid for process in workers.processes), flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        ids = [int(number) for number in parent.stdout.readline().split()]
        assert len(ids) == 2
        for number in ids:
            os.kill(number, signal.SIGINT)
        time.sleep(1)
        assert all(_runs(number) for number in ids)
    finally:
        parent.kill()
        parent.communicate()
    deadline_s = time.monotonic() + 30
    while any(_runs(number) for number in ids):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _runs(number: int) -> bool:
    """Return whether a process exists, and is no process that has ended and was not waited for."""
    status = Path(f"/proc/{number}/stat")
    try:
        return status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
