"""Interruptions of runs as users start them: a terminal's Ctrl-C, plain torchrun, a second signal, a user's error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.runs import TENSOR_AND_SEQUENCE, command, environment, exact, rows, run_on_pool, write_config

AGENT = (sys.executable, "-m", "nxd_memopt.cli", "train")
LONG = {"save_interval": "auto", "max_steps": 100_000, "export": False}


def start(words: list[str], output: Path) -> subprocess.Popen[bytes]:
    """Start a program as a shell starts a job of a terminal: in a process group of its own."""
    with output.open("wb") as file:
        return subprocess.Popen(words, env=environment(), process_group=0, stdout=file, stderr=subprocess.STDOUT)


def wait_for_rows(process: subprocess.Popen[bytes], run: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").is_file() or len(rows(run)) < count:
        assert process.poll() is None, "the run ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(process: str) -> bool:
    """Whether a process exists that is no zombie."""
    file = Path(f"/proc/{process}/stat")
    return file.exists() and file.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_saves_once_and_the_run_goes_on_exactly(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    schedule = {"optimizer": {"decay_steps": 100, "warmup_steps": 2}, "data": {"global_batch_size": 2}}
    config = write_config(tmp_path, parallel=TENSOR_AND_SEQUENCE, trainer=LONG | {"max_steps": 900}, **schedule)
    words = [*AGENT, "--nproc", "2", "--config", str(config)]
    process = start(words, output)
    wait_for_rows(process, run, 5)
    os.killpg(process.pid, signal.SIGINT)  # the agent and the ranks, which get it from the agent too
    assert process.wait(60) == 130
    text = output.read_text(encoding="utf-8")
    stops = [line for line in text.splitlines() if line.startswith("stopped by")]
    (saved,) = (run / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step_"))
    assert stops == [
        f"stopped by SIGINT after step {step}: saved {run / 'checkpoints'}; start the same command to continue"
    ]
    assert "Traceback" not in text and "Error" not in text
    before = exact(run)
    assert [row[0] for row in before] == list(range(1, step + 1))
    # The pool's ranks need no start. An uninterrupted run of as many steps has the same rows.
    last = ("--trainer.max-steps", str(step + 4))
    assert f"resuming after step {step}" in run_on_pool(config, *last, ranks=2)
    run_on_pool(config, *last, "--trainer.output-dir", str(tmp_path / "whole"), ranks=2)
    assert exact(run) == exact(tmp_path / "whole")
    assert exact(run)[:step] == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_agent_or_to_one_rank_stops_all(tmp_path: Path, number: signal.Signals) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    config = write_config(tmp_path, parallel=TENSOR_AND_SEQUENCE, trainer=LONG)
    process = start([*AGENT, "--nproc", "2", "--config", str(config)], output)
    wait_for_rows(process, run, 3)
    target = process.pid
    if number == signal.SIGUSR1:  # the last rank alone
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8")
        target = int(children.split()[-1])
    os.kill(target, number)
    assert process.wait(60) == 128 + number
    text = output.read_text(encoding="utf-8")
    assert text.count(f"stopped by {number.name} after step") == 1 and "Traceback" not in text
    assert len(list((run / "checkpoints").iterdir())) == 1


@pytest.mark.slow
def test_under_torchrun_a_signal_saves(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    config = write_config(tmp_path, parallel=TENSOR_AND_SEQUENCE, trainer=LONG)
    process = start(command(config, ranks=2), output)
    wait_for_rows(process, run, 3)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    text = output.read_text(encoding="utf-8")
    assert text.count("stopped by SIGINT after step") == 1
    assert len(list((run / "checkpoints").iterdir())) == 1


@pytest.mark.slow
def test_a_second_signal_stops_at_once_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    """The second save never ends."""
    run, output = tmp_path / "run", tmp_path / "output"
    config = write_config(tmp_path, parallel=TENSOR_AND_SEQUENCE, trainer=LONG | {"save_interval": 2})
    hang = (
        "import sys, time; from nxd_memopt.checkpoint.sharded.saving import RankSave; original = RankSave.write\n"
        "def write(save, chunks):\n"
        "    original(save, chunks)\n"
        "    time.sleep(600 if '00000004' in save.target.name else 0)\n"
        "RankSave.write = write\n"
        "from nxd_memopt.training.__main__ import main; sys.exit(main())"
    )
    module = tmp_path / "hanging.py"
    module.write_text(hang, encoding="utf-8")
    agent = (
        "import sys; from nxd_memopt.launch import agent; agent.PROGRAM = (sys.executable, sys.argv.pop(1)); "
        "sys.exit(agent.main())"
    )
    process = start([sys.executable, "-c", agent, str(module), "--nproc", "2", "--config", str(config)], output)
    wait_for_rows(process, run, 4)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(2.5)
    assert process.poll() is None
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert time.monotonic() - started < 5
    text = output.read_text(encoding="utf-8")
    assert text.count("stopped at once by a second SIGINT") == 1 and "Traceback" not in text
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000002", "step_00000004.tmp"]


@pytest.mark.slow
def test_a_killed_agent_takes_its_ranks_with_it_and_a_killed_rank_all(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    config = write_config(tmp_path, parallel=TENSOR_AND_SEQUENCE, trainer=LONG)
    for victim in ("agent", "rank"):
        process = start([*AGENT, "--nproc", "2", "--config", str(config)], output)
        wait_for_rows(process, run, 3)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
        os.kill(process.pid if victim == "agent" else int(children[1]), signal.SIGKILL)
        assert process.wait(30) == (-9 if victim == "agent" else 137)
        time.sleep(1)
        assert not [child for child in children if is_running(child)]
        (run / "metrics.jsonl").unlink()
    assert "error: rank 1 was ended by SIGKILL" in output.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_user_error_of_all_ranks_is_one_line(tmp_path: Path) -> None:
    config = write_config(tmp_path, parallel={"tensor_model_parallel_size": 2})
    words = [*AGENT, "--nproc", "3", "--config", str(config)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: world size 3 is not divisible by tensor_model_parallel_size 2")
