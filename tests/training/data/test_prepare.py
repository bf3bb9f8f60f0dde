"""The command ``nxd-memopt prepare``: the run reads what it wrote, and it goes on where it was stopped."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from nxd_memopt.commands.prepare import main
from nxd_memopt.training.data.packed.sequences import WindowFiles
from nxd_memopt.training.data.sources import corpora
from nxd_memopt.training.data.tokenize import windows as tokens
from nxd_memopt.training.data.tokenize import workers as token_workers
from nxd_memopt.training.data.tokenize.windows import Window
from nxd_memopt.training.reporting import tokenizing
from tests.training.runs import exact, run_here, write_config


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "WINDOW_SEQUENCES", 20)
    monkeypatch.setattr(tokens, "DOCUMENTS_PER_CALL", 5)
    # The rest of this process keeps its backend.
    monkeypatch.setenv("NXD_MEMOPT_BACKEND", "cpu")


def train_files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.glob("tokens/*/train.*")}


def test_a_run_reads_what_prepare_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"trainer": {"export": False, "save_interval": "never"}, "data": {"streaming": True}}
    for name in ("without", "with"):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, **options)
        # The corpora are copies of each other, with one time.
        os.utime(tmp_path / name / "lines.jsonl", ns=(1, 1))
        if name == "with":
            monkeypatch.setattr(tokenizing, "PROGRESS_S", 0.0)
            assert main(["--config", str(config)]) == 0
            written = train_files(tmp_path / "with" / "run")
            printed = capsys.readouterr().out
            assert "an epoch has" in printed and written
            assert re.search(r"lines.jsonl, held-out text: \d+\.\d% done", printed)
            shares = [float(share) for share in re.findall(r"lines.jsonl: (\d+\.\d)% done, .*tokens/s, about", printed)]
            assert len(shares) > 9 and shares == sorted(shares) and shares[0] < 20 < 90 < shares[-1] <= 100
            assert re.search(r"tokenized \d+,\d+ tokens in \d+ s \([\d,]+ tokens/s\)$", printed.strip())
        assert run_here(config).returncode == 0
    assert train_files(tmp_path / "with" / "run") == written
    assert exact(tmp_path / "with" / "run") == exact(tmp_path / "without" / "run")
    shorter = train_files(tmp_path / "without" / "run")
    assert 0 < len(shorter) < len(written) and shorter.items() <= written.items()


def test_a_stopped_preparation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path))
    other = ("--trainer.output-dir", str(tmp_path / "other"))
    assert main(["--config", config, *other]) == 0
    write = WindowFiles.write
    written: list[Window] = []

    def stop_after_three(files: WindowFiles, window: Window) -> None:
        write(files, window)
        written.append(window)
        if len(written) == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(WindowFiles, "write", stop_after_three)
    assert main(["--config", config]) == 143
    assert "stopped by SIGTERM while it tokenized: start the same command" in capsys.readouterr().out
    assert main(["--config", config]) == 0
    assert train_files(tmp_path / "run") == train_files(tmp_path / "other")
    # Held-out text has one window, and each window was written once.
    assert len(written) - 1 == len(train_files(tmp_path / "run"))


def tokens_of(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.glob("tokens/*/*.*") if path.suffix != ".lock"}


def test_the_number_of_workers_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the tokens and their restart state; and a preparation goes on with another number."""
    monkeypatch.setattr(token_workers, "FOREGROUND_S", 0.0)
    monkeypatch.setattr(token_workers, "WORKER_CHARACTERS", 200)  # calls of other documents than of one process
    config = str(write_config(tmp_path, data={"packing": "best_fit"}))
    started: list[int] = []
    leave = token_workers.TokenWorkers.__exit__
    monkeypatch.setattr(
        token_workers.TokenWorkers,
        "__exit__",
        lambda workers, *error: (started.append(len(workers.processes)), leave(workers, *error))[1],
    )
    found = {}
    for count in ("1", "2"):
        run = tmp_path / count
        assert main(["--config", config, "--workers", count, "--trainer.output-dir", str(run)]) == 0
        found[count] = tokens_of(run)
    assert started == [0, 2]
    assert found["1"] == found["2"]
    assert {"train.000000.safetensors", "held_out.000000.safetensors"} <= set(found["1"])


def test_a_number_of_workers_that_is_none(tmp_path: Path) -> None:
    config = str(write_config(tmp_path))
    for value in ("0", "-1", "two"):
        with pytest.raises(ValueError, match=f"--workers: must be at least 1, got '{value}'"):
            main(["--config", config, f"--workers={value}"])
    assert not (tmp_path / "run").exists()
