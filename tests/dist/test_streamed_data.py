"""Text that is tokenized while it is used: one order for all ranks and resumes, and kills of the whole process."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.runs import (
    TENSOR_AND_SEQUENCE,
    environment,
    losses,
    run_here,
    run_on_pool,
    write_config,
    write_jsonl,
)

pytestmark = pytest.mark.slow

WORDS = ["abc", "xyz", "longer words", "0123456789", "einmal", "and so on"]
DATA = {"streaming": True, "micro_batch_size": 1, "global_batch_size": 4}


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(2, {}), (4, TENSOR_AND_SEQUENCE), (4, {})], ids=["data2", "tensor2_data2", "data4"]
)
def test_a_run_resumes_on_other_ranks(tmp_path: Path, ranks: int, parallel: dict[str, object]) -> None:
    """The losses of one process that was not interrupted, although the text goes on where the first ranks stopped."""
    for name in ("uninterrupted", "resumed"):
        (tmp_path / name).mkdir()
    optimizer = {"decay_steps": 8}
    reference = write_config(tmp_path / "uninterrupted", data=DATA, optimizer=optimizer, trainer={"export": False})
    assert run_here(reference).returncode == 0
    dataset = {"dataset": str(tmp_path / "uninterrupted" / "lines.jsonl")}
    tokenizer = {"tokenizer": str(tmp_path / "uninterrupted" / "tokenizer")}
    options = {"model": tokenizer, "data": DATA | dataset, "optimizer": optimizer}
    first = write_config(tmp_path / "resumed", parallel=parallel, trainer={"max_steps": 3, "export": False}, **options)
    run_on_pool(first, ranks=ranks)
    second = write_config(tmp_path / "resumed", trainer={"export": False}, **options)
    outcome = run_here(second)
    assert outcome.returncode == 0, outcome.stderr
    assert "resuming after step 3" in outcome.stdout
    assert losses(tmp_path / "resumed" / "run") == pytest.approx(losses(tmp_path / "uninterrupted" / "run"), rel=2e-5)


def test_kills_of_prepare_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """SIGKILL at random times between the windows; the files are those of a process that nothing killed."""
    numbers = random.Random(4)
    lines = [" ".join(numbers.choices(WORDS, k=numbers.randint(1, 400))) for _ in range(6000)]
    dataset = write_jsonl(tmp_path / "many.jsonl", lines)
    files = {}
    kills = 0
    for name in ("uninterrupted", "killed"):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, data={"dataset": dataset, "streaming": True})
        command = [sys.executable, "-m", "nxd_memopt.cli", "prepare", "--config", str(config)]
        while True:
            process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            if name == "killed" and kills < 5:
                enough = entries(tmp_path / name) + numbers.randint(1, 6)
                while entries(tmp_path / name) < enough and process.poll() is None:
                    time.sleep(0.005)
                process.send_signal(signal.SIGKILL)
                process.communicate()
                assert process.returncode == -signal.SIGKILL, "it was finished before it was killed: use more text"
                kills += 1
                continue
            _, errors = process.communicate()
            assert process.returncode == 0, errors.decode()
            break
        files[name] = {path.name: path.read_bytes() for path in (tmp_path / name).glob("run/tokens/*/*.safetensors")}
    assert kills == 5 and len(files["killed"]) > 10
    assert files["killed"] == files["uninterrupted"]


def entries(directory: Path) -> int:
    """Return the windows of the training split."""
    return len(list(directory.glob("run/tokens/*/train.*")))
