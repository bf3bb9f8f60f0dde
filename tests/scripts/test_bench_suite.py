"""The list of GPU races: what it asks the benchmarks for exists, and one race's end is not the others'."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from nxd_memopt.config import MemoryConfig
from scripts.bench.harness.steps import with_options
from scripts.bench.races import linear_cross_entropy, sharded_step, state_offload, suite, train_step
from scripts.bench.races.suite import Race

PARSERS = {
    "scripts.bench.races.train_step": train_step.argument_parser,
    "scripts.bench.races.linear_cross_entropy": linear_cross_entropy.argument_parser,
    "scripts.bench.races.state_offload": state_offload.argument_parser,
    "scripts.bench.races.sharded_step": sharded_step.argument_parser,
}


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_the_scripts_take_their_arguments(gpus):
    races = suite.races(gpus)
    assert len({race.name for race in races}) == len(races)
    for race in races:
        command = race.command(gpus, append=True, rows=suite.ROOT / "rows", traces=suite.ROOT / "traces")
        assert find_spec(race.module) is not None
        if race.module in PARSERS:
            args = PARSERS[race.module]().parse_args(command[command.index(race.module) + 1 :])
            with_options(MemoryConfig(), getattr(args, "memory", []))
        else:
            assert not race.options


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of scripts that do what races can do."""
    (tmp_path / "good.py").write_text("import os; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])")
    (tmp_path / "bad.py").write_text("raise SystemExit('no such GPU')")
    (tmp_path / "endless.py").write_text(
        "import os, time; print(f'{os.getpid()}\\n', end='', flush=True); time.sleep(600)"
    )
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(Race, "module", property(lambda race: race.benchmark))
    monkeypatch.setattr(suite, "races", lambda gpus: [Race(name, name, [1, 2]) for name in ("endless", "bad", "good")])
    monkeypatch.setattr(suite, "visible_gpus", lambda: 2)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    return tmp_path


def run(monkeypatch, *options: str) -> int:
    monkeypatch.setattr("sys.argv", ["suite.py", *options])
    return suite.main()


@pytest.mark.slow
def test_a_race_that_fails_or_hangs_leaves_the_others(folder, monkeypatch, capsys):
    logs = folder / "logs"
    assert run(monkeypatch, "--logs", str(logs), "--timeout-s", "5") == 1
    printed = capsys.readouterr().out
    assert "2 of 3 races failed" in printed and "stopped after 5 s" in printed and "good: done" in printed
    assert (logs / "good_T1.log").read_text().strip() == ":0:0"
    assert "no such GPU" in (logs / "bad_T1.log").read_text()
    assert_gone(logs / "endless_T1.log", processes=1)


def assert_gone(log: Path, *, processes: int) -> None:
    pids = [int(line) for line in log.read_text().splitlines() if line.isdigit()]
    assert len(pids) == processes
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_suite_that_is_ended_takes_its_race_along(folder):
    logs = folder / "logs"
    program = (
        "import sys; from pathlib import Path; from scripts.bench.races import suite; "
        "suite.ROOT = Path(sys.argv.pop(1)); suite.visible_gpus = lambda: 1; "
        "suite.Race.module = property(lambda race: race.benchmark); "
        "suite.races = lambda gpus: [suite.Race('endless', 'endless', [1])]; sys.exit(suite.main())"
    )
    command = [sys.executable, "-c", program, str(folder), "--logs", str(logs)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    log = logs / "endless_T1.log"
    while not (log.exists() and log.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert_gone(log, processes=1)


def test_chosen_races_and_unknown_ones(folder, monkeypatch, capsys):
    assert run(monkeypatch, "--only", "good", "--list") == 0
    printed = capsys.readouterr().out
    assert "-m good" in printed and "-m bad" not in printed
    for options, error in (
        (("--only", "god"), "no races called god"),
        (("--gpus", "0"), "--gpus must be at least 1"),
        (("--gpus", "3"), "2 are visible"),
    ):
        with pytest.raises(SystemExit):
            run(monkeypatch, *options)
        assert error in capsys.readouterr().err
