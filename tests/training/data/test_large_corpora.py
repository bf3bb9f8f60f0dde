"""The first step with a large corpus: what a run reads and how much memory it takes do not depend on the size."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.training.runs import command, environment, losses, write_config

MEGABYTE = 10**6


@dataclass(frozen=True)
class Start:
    """A run of two steps.

    Args:
        first_step_s: seconds from the start of the process to the end of its first step.
        read_bytes: bytes that the process has read.
        peak_bytes: largest resident memory of the process, or of the one that tokenizes.
    """

    first_step_s: float
    read_bytes: int
    peak_bytes: int


def write_corpus(path: Path, size: int) -> Path:
    """Write documents of 0.3 to 7 KB as JSON lines, about ``size`` bytes; the same ones again and again."""
    chooser = random.Random(1)
    words = [f"{first}{second}" for first in ("the", "of", "a", "in", "was") for second in ("", " tree", " model", "s")]
    documents = [" ".join(chooser.choices(words, k=chooser.randint(50, 1200))) for _ in range(min(size, 2**24) // 3500)]
    chunk = "".join(json.dumps({"text": document}) + "\n" for document in documents).encode()
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(chunk)
    return path


def started(directory: Path, corpus: Path) -> Start:
    """Train two steps of a small model on ``corpus``."""
    directory.mkdir()
    trainer = {"max_steps": 2, "export": False, "save_interval": "never"}
    data = {"dataset": str(corpus), "streaming": True, "seq_length": 64}
    config = write_config(directory, data=data, trainer=trainer)
    metrics = directory / "run" / "metrics.jsonl"
    begin_s, first_step_s, read_bytes = time.monotonic(), 0.0, 0
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(command(config), env=environment(), stdout=output, stderr=output)
    while True:
        found, status, usage = os.wait4(process.pid, os.WNOHANG)
        if not first_step_s and metrics.is_file() and metrics.stat().st_size:
            first_step_s = time.monotonic() - begin_s
        if found:
            break
        counts = Path(f"/proc/{process.pid}/io").read_text(encoding="utf-8")
        read_bytes = int(dict(line.split(": ") for line in counts.splitlines()).get("rchar", read_bytes))
        time.sleep(0.02)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (directory / "output").read_text(encoding="utf-8")
    assert len(losses(directory / "run")) == 2
    return Start(first_step_s, read_bytes, usage.ru_maxrss * 1024)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc")
def test_what_is_read_before_the_first_step_does_not_depend_on_the_size(tmp_path: Path) -> None:
    """Of 400 MB, one window of 10,000 documents for each split, some 40 MB, and no more memory than its text."""
    small = started(tmp_path / "1", write_corpus(tmp_path / "small.jsonl", MEGABYTE))
    large = started(tmp_path / "400", write_corpus(tmp_path / "large.jsonl", 400 * MEGABYTE))
    assert small.read_bytes and large.read_bytes - small.read_bytes < 100 * MEGABYTE
    # 64 MiB of a window's text are in memory, and the calls of the tokenizer.
    assert large.peak_bytes - small.peak_bytes < 2**28
