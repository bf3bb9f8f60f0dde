"""Whole runs with a slow tokenizer: SIGKILL while a process tokenizes, and ranks that wait longer than a timeout."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.runs import environment, exact, rows, write_config, write_jsonl

pytestmark = pytest.mark.slow

PROGRAM = "tests.training.data.slow_program"
WORDS = ["abc", "xyz", "longer words", "0123456789", "einmal", "and so on"]
# Windows have 1,024 sequences of 24 tokens: about 200 documents, in 7 calls of the tokenizer. The last step needs the
# eighth window; each start tokenizes one or two of them before its process does.
STEPS = 900
DATA = {"streaming": True, "eval_sequences": 0, "held_out_every": 0}


def program(config: Path, calls: Path, seconds: float) -> list[str]:
    return [sys.executable, "-m", PROGRAM, str(seconds), str(calls), "--config", str(config)]


def entries(run: Path) -> int:
    return len(list(run.glob("tokens/*/train.*")))


def calls_of(calls: Path) -> list[tuple[int, int]]:
    """Process and number of texts of each call, without those of the fingerprint."""
    if not calls.exists():
        return []
    lines = [line.split() for line in calls.read_text(encoding="utf-8").splitlines()]
    return [(int(process), int(texts)) for process, texts in lines if int(texts) > 1]


def test_a_killed_run_tokenizes_on_where_it_was(tmp_path: Path) -> None:
    """Three kills of the program; its process ends too, and no document of a complete window is tokenized again."""
    numbers = random.Random(4)
    lines = [" ".join(numbers.choices(WORDS, k=numbers.randint(1, 30))) for _ in range(12_000)]
    dataset = write_jsonl(tmp_path / "many.jsonl", lines)
    options = {
        "data": DATA | {"dataset": dataset, "micro_batch_size": 8, "global_batch_size": 8},
        "trainer": {"max_steps": STEPS, "save_interval": 100},
    }
    texts, windows = {}, []
    for name in ("uninterrupted", "killed"):
        (tmp_path / name).mkdir()
        config, calls = write_config(tmp_path / name, **options), tmp_path / name / "calls"
        command = program(config, calls, 0.5)
        for kill in range(3 if name == "killed" else 0):
            process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            # The program tokenizes for 5 s, and then its process does: killed there, within a window.
            while len({each for each, _ in calls_of(calls)}) < 2 * kill + 2:
                assert process.poll() is None, "it ended before it was killed"
                time.sleep(0.02)
            time.sleep(numbers.random() * 3)
            windows.append(entries(tmp_path / name / "run"))
            process.send_signal(signal.SIGKILL)
            process.communicate()
            assert process.returncode == -signal.SIGKILL
            time.sleep(2)
            stopped = calls.read_bytes()
            time.sleep(1)
            assert calls.read_bytes() == stopped, "the process that tokenizes goes on without the run"
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
        texts[name] = sum(number for _, number in calls_of(calls))
    runs = [tmp_path / name / "run" for name in ("killed", "uninterrupted")]
    assert exact(runs[0]) == exact(runs[1]) and len(exact(runs[0])) == STEPS
    for pattern in ("tokens/*/train.*", "export/model.safetensors"):
        found, expected = ([path.read_bytes() for path in sorted(run.glob(pattern))] for run in runs)
        assert found == expected, pattern
    assert 0 < windows[0] < windows[1] < windows[2] < 8
    # A kill repeats the calls of one window at most, of 200 documents.
    assert texts["uninterrupted"] <= texts["killed"] < texts["uninterrupted"] + 3 * 300


def test_ranks_wait_longer_than_the_timeout_for_a_slow_tokenizer(tmp_path: Path) -> None:
    """Calls of 8 s, a timeout of one minute, and about two minutes until the first window: who waits says for what."""
    dataset = write_jsonl(tmp_path / "many.jsonl", [f"document {i} " + "abc xyz " * 6 for i in range(2000)])
    data = DATA | {"dataset": dataset, "micro_batch_size": 1}
    trainer = {"max_steps": 2, "distributed_timeout_minutes": 1, "export": False, "save_interval": "never"}
    command = program(write_config(tmp_path, data=data, trainer=trainer), tmp_path / "calls", 8.0)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    begin_s = time.monotonic()
    ranks = []
    for rank in ("0", "1"):
        # Each rank is the only one of its host.
        place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env = environment(**place, MASTER_ADDR="localhost", MASTER_PORT=str(port))
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=500)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
    assert time.monotonic() - begin_s > 90, "the ranks waited less than the timeout: use more text"
    line = "tokenizing train text: 0 of 8 sequences are complete"
    assert all(error.count(f"waiting for tokens: {line}") >= 2 for error in errors)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
