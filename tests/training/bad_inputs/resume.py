"""Bad inputs: changes of a resumed run, and checkpoints to start from."""

from __future__ import annotations

from pathlib import Path

from nxd_memopt.checkpoint.sharded.index import read_checked_json, write_json
from tests.training.bad_inputs.case import BadInput
from tests.training.runs import run_here, write_config


def _half_done(directory: Path) -> Path:
    """The configuration of a run that has done 2 of its 8 steps."""
    config = write_config(directory, optimizer={"decay_steps": 8}, trainer={"export": False})
    outcome = run_here(config, "--trainer.max-steps", "2")
    assert outcome.returncode == 0, outcome.stderr
    return config


def _run_as_model(directory: Path) -> Path:
    _half_done(directory)
    return write_config(directory, model={"pretrained": str(directory / "run")})


def _damaged_index(directory: Path) -> Path:
    config = _half_done(directory)
    index = directory / "run" / "checkpoints" / "step_00000002" / "index.json"
    index.write_text(index.read_text(encoding="utf-8").replace('"step": 2', '"step": 1'), encoding="utf-8")
    return config


def _foreign_checkpoint(directory: Path) -> Path:
    """A checkpoint of version 0.2: the index says less about the run."""
    config = _half_done(directory)
    path = directory / "run" / "checkpoints" / "step_00000002" / "index.json"
    content = read_checked_json(path)
    content["shared"] = {"data_fingerprint": "0" * 64}
    write_json(path, content)
    return config


CASES: tuple[BadInput, ...] = (
    BadInput(
        "another_row_without_gradient",
        _half_done,
        ("model.config_overrides.pad_token_id was None and is 97", "restore it"),
        ("--model.config-overrides.pad-token-id", "97"),
    ),
    BadInput(
        "fewer_steps_than_done",
        _half_done,
        ("has done 2 steps, more than trainer.max_steps 1", "raise max_steps"),
        ("--trainer.max-steps", "1"),
    ),
    BadInput(
        "resume_from_nothing",
        write_config,
        ("trainer.resume_from /tmp has no complete checkpoint", "name a run's trainer.output_dir"),
        ("--trainer.resume-from", "/tmp"),
    ),
    BadInput(
        "run_as_model",
        _run_as_model,
        ("is a run", "name its export", "model.warm_start"),
    ),
    BadInput(
        "absent_directories",
        write_config,
        (
            "error: 3 problems:\n",
            "\n- model.tokenizer /no/tokenizer does not exist",
            "\n- trainer.resume_from /no/run does not exist",
            "\n- dataset '/no/data.jsonl' cannot be read: no such file",
        ),
        (
            *("--trainer.resume-from", "/no/run", "--model.tokenizer", "/no/tokenizer"),
            *("--data.dataset", "/no/data.jsonl"),
        ),
    ),
    BadInput(
        "foreign_checkpoint",
        _foreign_checkpoint,
        ("step_00000002 records no tokens", "--model.warm-start"),
    ),
    BadInput("altered_checkpoint_index", _damaged_index, ("index.json", "it was altered: copy it again")),
)
