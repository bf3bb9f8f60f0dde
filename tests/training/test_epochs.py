"""Schedules in epochs: the steps of a known length, and the errors where it is not known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nxd_memopt.commands import prepare
from nxd_memopt.training.config.parsing import config_from_mapping
from nxd_memopt.training.data.packed.epochs import require_complete_epochs
from nxd_memopt.training.data.sources import corpora
from nxd_memopt.training.resume.plan import ResumePlan
from tests.training.packed_tokens import windows_of
from tests.training.runs import exact, rows, run_here, write_config

TRAINER = {"export": False, "save_interval": "never"}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "WINDOW_SEQUENCES", 20)
    # The rest of this process keeps its backend.
    monkeypatch.setenv("NXD_MEMOPT_BACKEND", "cpu")


def epochs(directory: Path, number: float, **sections: Any) -> Path:
    directory.mkdir(exist_ok=True)
    file = write_config(directory, **({"trainer": TRAINER} | sections))
    text = file.read_text(encoding="utf-8").replace("max_steps: 8", f"max_epochs: {number}")
    file.write_text(text, encoding="utf-8")
    return file


def sequences(run: Path) -> int:
    return windows_of(next(run.glob("tokens/*"))).last.rows


@pytest.mark.slow
def test_epochs_are_the_steps_of_all_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rounded up, and with the learning rates of so many steps."""
    data = {"data": {"streaming": True, "global_batch_size": 64}}
    file = epochs(tmp_path / "epochs", 1.5, **data)
    assert prepare.main(["--config", str(file)]) == 0
    outcome = run_here(file)
    assert outcome.returncode == 0, outcome.stderr
    count = sequences(tmp_path / "epochs" / "run")
    steps = -(-3 * count // (2 * 64))
    assert count % 64 and len(rows(tmp_path / "epochs" / "run")) == steps
    assert "epoch 2 of" in outcome.stdout
    # The same run in steps, on the same files.
    (tmp_path / "steps").mkdir()
    lines = str(tmp_path / "epochs" / "lines.jsonl")
    same = {"data": data["data"] | {"dataset": lines}, "trainer": TRAINER | {"max_steps": steps}}
    assert run_here(write_config(tmp_path / "steps", **same)).returncode == 0
    assert exact(tmp_path / "epochs" / "run") == exact(tmp_path / "steps" / "run")
    # The file of the resolved options has steps.
    assert run_here(tmp_path / "epochs" / "run" / "config.yaml").returncode == 0


def test_a_length_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    """Without tokens, and with the tokens of a run of a few steps, of which the text is longer."""
    file = epochs(tmp_path, 2)
    outcome = run_here(file)
    assert outcome.returncode == 2 and len(outcome.stderr.splitlines()) == 1
    for text in ("trainer.max_epochs 2", "lines.jsonl", "no sequence of it", "nxd-memopt prepare", "trainer.max_steps"):
        assert text in outcome.stderr
    steps = write_config(tmp_path, trainer=TRAINER | {"max_steps": 2})
    assert run_here(steps).returncode == 0
    outcome = run_here(epochs(tmp_path, 2))
    assert outcome.returncode == 2 and "20 sequences of it are in" in outcome.stderr, outcome.stderr


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"trainer": {"max_epochs": 2, "max_steps": 100}}, "trainer.max_steps and trainer.max_epochs are both given"),
        ({"trainer": {"max_epochs": 0}}, "trainer.max_epochs must be above 0 and finite, got 0"),
        ({"trainer": {"max_epochs": float("inf")}}, "trainer.max_epochs must be above 0 and finite, got inf"),
        ({"trainer": {"max_epochs": 1}, "data": {"mixture": {"a": 1, "b": 2}}}, "mixture end at different steps"),
        ({"data": {"dataset": "stdlib", "mixture": {"a": 1}}}, "data.dataset and data.mixture are both given"),
    ],
)
def test_options_that_exclude_each_other(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config_from_mapping({"model": {"tokenizer": "d", "config_overrides": {"model_type": "llama"}}} | sections)


def test_the_command_line_does_not_replace_without_a_word(tmp_path: Path) -> None:
    mixture = {str(tmp_path / "lines.jsonl"): 1.0, "stdlib": 1.0}
    file = write_config(tmp_path, data={"mixture": mixture})
    outcome = run_here(file, "--data.dataset", "stdlib")
    assert outcome.returncode == 2 and "data.dataset and data.mixture are both given" in outcome.stderr
    outcome = run_here(file, "--trainer.max-epochs", "2")
    assert outcome.stderr.startswith("error: trainer.max_epochs is 2.0 and data.mixture is {"), outcome.stderr
    assert outcome.stderr.endswith("change one of the two\n"), outcome.stderr
    outcome = run_here(write_config(tmp_path), "--trainer.max-steps=2", "--trainer.max-epochs", "2")
    assert outcome.returncode == 2 and "trainer.max_steps and trainer.max_epochs are both given" in outcome.stderr


def test_minus_one_is_not_given() -> None:
    """As in NeMo's and Lightning's files, which name both. NeMo ends at the first of two others."""
    nemo = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "tokenizer": "d"}
    nemo |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "normalization": "rmsnorm", "activation": "swiglu"}
    nemo |= {"bias": False, "position_embedding_type": "rope", "use_scaled_init_method": False}
    for steps, number, expected in ((10, -1, (10, None)), (-1, 3, (100, 3))):
        trainer = config_from_mapping({"model": nemo, "trainer": {"max_epochs": number, "max_steps": steps}}).trainer
        assert (trainer.max_steps, trainer.max_epochs) == expected
    with pytest.raises(ValueError, match=r"trainer.max_steps and trainer.max_epochs are both given"):
        config_from_mapping({"model": nemo, "trainer": {"max_epochs": 1000, "max_steps": 10}})


def test_epochs_do_not_go_on_in_steps_of_another_size() -> None:
    """50 steps of 10 sequences and then 25 of 20 are an epoch of 1,000; 50 steps of 20 end after half of the text."""
    values = {"model": {"tokenizer": "d", "config_overrides": {"model_type": "llama"}}}
    values |= {"trainer": {"max_steps": 50}, "data": {"global_batch_size": 20}}
    plan = ResumePlan(config_from_mapping(values), {}, sequence_offset=50 * 10 - 50 * 20)
    with pytest.raises(ValueError, match=r"max_epochs 1 is 50 steps .* set trainer.max_steps 75 instead"):
        require_complete_epochs(plan, 1.0)
    require_complete_epochs(plan, None)
    require_complete_epochs(replace(plan, sequence_offset=0), 1.0)
