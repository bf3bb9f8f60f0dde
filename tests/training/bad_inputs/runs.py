"""Bad inputs: output directories and data files in a state that a run must not go on with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from tests.training.bad_inputs.case import BadInput
from tests.training.runs import run_here, write_config

_HELD: list[FileLock] = []  # a lock ends with its object
FINISHED = {"max_steps": 1, "export": False, "save_interval": 1}


def _finished(directory: Path) -> Path:
    """A run that has done its last step."""
    config = write_config(directory, trainer=FINISHED, optimizer={"decay_steps": 1, "warmup_steps": 0})
    outcome = run_here(config)
    assert outcome.returncode == 0, outcome.stderr
    return config


def _in_use(directory: Path) -> Path:
    (directory / "run").mkdir()
    _HELD.append(FileLock(directory / "run" / "run.lock"))
    _HELD[-1].acquire()
    return write_config(directory)


def _altered(name: str, damage: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    """A finished run of which the file that matches ``name`` is damaged."""

    def prepare(directory: Path) -> Path:
        config = _finished(directory)
        (path,) = (directory / "run").glob(name)
        path.write_bytes(damage(path.read_bytes()))
        return config

    return prepare


def _checkpoints_are_a_file(directory: Path) -> Path:
    (directory / "run").mkdir()
    (directory / "run" / "checkpoints").write_text("x", encoding="utf-8")
    return write_config(directory)


def _tokens_are_a_file(directory: Path) -> Path:
    config = _finished(directory)
    (tokens,) = (directory / "run" / "tokens").iterdir()
    shutil.rmtree(tokens)
    tokens.write_text("text", encoding="utf-8")
    return config


def _dataset(content: bytes) -> Callable[[Path], Path]:
    """A dataset with ``content`` after two good lines."""

    def prepare(directory: Path) -> Path:
        config = write_config(directory)
        (directory / "lines.jsonl").write_bytes(b'{"text": "abc"}\n' * 2 + content)
        return config

    return prepare


def _linked_in_a_circle(directory: Path) -> Path:
    (directory / "run").symlink_to(directory / "run")
    return write_config(directory)


SKIP = "set data.on_bad_rows to skip"
AGAIN = "to tokenize again"

CASES: tuple[BadInput, ...] = (
    BadInput(
        "two_runs_in_one_directory",
        _in_use,
        ("/run is in use by another run", "choose another trainer.output_dir"),
    ),
    BadInput(
        "refused_start_of_a_finished_run",
        _finished,
        ("optimizer.lr was 0.01 and is 0.02",),
        ("--optimizer.lr", "0.02", "--data.seq-length", "16"),
    ),
    BadInput(
        "tokens_altered",
        _altered("tokens/*/held_out.000000.safetensors", lambda data: data[:-1] + b" "),
        ("checksums are not", AGAIN),
    ),
    BadInput(
        "metrics_damaged",
        _altered("metrics.jsonl", lambda data: b"damaged\n" + data),
        ("metrics.jsonl line 1 is not a row with a step", "rename the file"),
    ),
    BadInput(
        "evaluation_without_a_loss",
        _altered("evaluation.jsonl", lambda _: b'{"step": 0}\n'),
        ("evaluation.jsonl line 1 is not a row with a step and a held_out_loss", "rename the file"),
    ),
    BadInput("output_dir_links_to_itself", _linked_in_a_circle, ("/run is not writable", "choose another")),
    BadInput("tokens_are_a_file", _tokens_are_a_file, ("/run/tokens/", "File exists")),
    BadInput("checkpoints_is_a_file", _checkpoints_are_a_file, ("/run/checkpoints is not a directory", "rename it")),
    BadInput("broken_json_line", _dataset(b'{"text": "abc\n'), ("lines.jsonl line 3 is not JSON", SKIP)),
    BadInput("missing_column", _dataset(b'{"body": "abc"}\n'), ("lines.jsonl line 3 has no 'text'", "['body']")),
    BadInput(
        "no_row_is_left",
        _dataset(b'{"body": null}\n'),
        ("skip leaves no row", "without the column"),
        ("--data.on-bad-rows", "skip", "--data.columns.text", "body"),
    ),
)
