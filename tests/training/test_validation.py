"""A validation dataset of one's own, training without held-out text, and what the start report says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.config.parsing import config_from_mapping
from nxd_memopt.training.data.packing import ID_MASK
from nxd_memopt.training.data.sources.corpora import open_corpus
from nxd_memopt.training.reporting.start_report import bytes_per_parameter
from tests.reference import assert_says
from tests.training.packed_tokens import recorded_held_out
from tests.training.runs import LINES, Outcome, byte_tokenizer, exact, rows, run_here, write_config, write_jsonl

OTHER = ["QRS " * (4 + i) for i in range(20)]
TRAINER = {"max_steps": 4, "save_interval": 2, "export": False}


def with_validation(directory: Path, **data: Any) -> Path:
    write_jsonl(directory / "other.jsonl", OTHER)
    return write_config(
        directory,
        data={"validation_dataset": str(directory / "other.jsonl"), **data},
        trainer=TRAINER | {"output_dir": str(directory / "run")},
        optimizer={"decay_steps": 6},
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_all_documents_are_trained_and_all_others_held_out(tmp_path: Path, streaming: bool) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", OTHER)
    data = DataConfig(write_jsonl(tmp_path / "a.jsonl", LINES), validation_dataset=other, streaming=streaming)
    for name, texts in ((data.source, LINES), (other, OTHER)):
        corpus = open_corpus(data.of_source(name), 0)
        assert sorted(str(text) for text, *_ in corpus.train.read(None)) == sorted(texts)
        assert not list(corpus.held_out.read(None))
    without = DataConfig(data.dataset, held_out_every=0, eval_sequences=0, streaming=streaming)
    corpus = open_corpus(without, 0)
    assert sorted(str(text) for text, *_ in corpus.train.read(None)) == sorted(LINES)
    assert not list(corpus.held_out.read(None))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("count", [1, 200])
def test_nothing_is_held_out_where_nothing_is_evaluated(tmp_path: Path, count: int, streaming: bool) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", LINES[:count])
    corpus = open_corpus(DataConfig(path, eval_sequences=0, streaming=streaming), 0)
    assert sorted(str(text) for text, *_ in corpus.train.read(None)) == sorted(LINES[:count])
    assert not list(corpus.held_out.read(None))
    # Asked for, it is.
    corpus = open_corpus(DataConfig(path, eval_sequences=0, held_out_every=20, streaming=streaming), 0)
    assert list(corpus.held_out.read(None))


@pytest.mark.slow
def test_a_resumed_run_keeps_what_is_held_out(tmp_path: Path) -> None:
    """Evaluation that is turned on or off on the way would train evaluated text, or evaluate trained text."""
    evaluated, without = (
        write_config(tmp_path / name, data={"eval_sequences": count}, optimizer={"decay_steps": 4}, trainer=trainer)
        for name, count in (("a", 6), ("b", 0))
        for trainer in [{"max_steps": 2, "export": False, "output_dir": str(tmp_path / name / "run")}]
        if not (tmp_path / name).mkdir()
    )
    outcome = run_here(evaluated)
    assert "which is not trained; an evaluation has 6 sequences, " in outcome.stdout
    more = ("--trainer.max-steps", "4")
    outcome = run_here(evaluated, *more, "--data.eval-sequences", "0")
    assert outcome.returncode == 2
    assert_says(outcome.stderr, "data.held_out_every was 20 and is 0: restore it", "auto is 0 with data.eval_sequences")
    outcome = run_here(evaluated, *more, "--data.eval-sequences", "0", "--data.held-out-every", "20")
    assert outcome.returncode == 0, outcome.stderr
    assert "one document in 20 is neither trained nor evaluated" in outcome.stdout
    outcome = run_here(without)
    assert_says(outcome.stdout, "held-out text: none, and nothing is evaluated")
    outcome = run_here(without, *more, "--data.eval-sequences", "6")
    assert_says(outcome.stderr, "data.held_out_every was 0 and is 20: restore it")
    validation = ("--data.validation-dataset", write_jsonl(tmp_path / "other.jsonl", OTHER))
    outcome = run_here(without, *more, "--data.eval-sequences", "6", "--data.held-out-every", "0", *validation)
    assert outcome.returncode == 0, outcome.stderr


def test_a_run_evaluates_the_validation_text_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = recorded_held_out(monkeypatch)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    config = with_validation(tmp_path / "a")
    outcome = run_here(config)
    assert outcome.returncode == 0, outcome.stderr
    known = byte_tokenizer()("QRS ")["input_ids"]
    assert np.isin(evaluated[0] & ID_MASK, [*known, 256]).all()
    assert_says(outcome.stdout, "trained parameters with 16 bytes each", "held-out text: ", "other.jsonl")
    assert " left" in outcome.stdout and outcome.stdout.count("expected end of training: 20") == 1
    assert len(rows(tmp_path / "a" / "run")) == 4
    # An interrupted run is the same one; other validation text is refused.
    config = with_validation(tmp_path / "b")
    assert run_here(config, "--trainer.max-steps", "2").returncode == 0
    assert run_here(config).returncode == 0
    assert exact(tmp_path / "b" / "run") == exact(tmp_path / "a" / "run")
    write_jsonl(tmp_path / "b" / "other.jsonl", OTHER[::-1] + ["QQQ " * 30] * 9)
    outcome = run_here(config, "--trainer.max-steps", "6")
    assert outcome.returncode == 2
    assert_says(outcome.stderr, "the held-out text has changed", "--trainer.allow-changes data.dataset")
    # Allowed, the training text goes on where it was.
    for run, more in (("a", ()), ("b", ("--trainer.allow-changes", "data.dataset"))):
        outcome = run_here(with_validation(tmp_path / run) if run == "a" else config, "--trainer.max-steps", "6", *more)
        assert outcome.returncode == 0, outcome.stderr
    assert "the training text goes on where it was" in outcome.stdout
    assert exact(tmp_path / "b" / "run") == exact(tmp_path / "a" / "run")


def changed(config: Path, **data: Any) -> Outcome:
    options = yaml.safe_load(config.read_text())
    options["data"] = {name: value for name, value in (options["data"] | data).items() if value is not ...}
    config.write_text(yaml.safe_dump(options))
    return run_here(config)


def test_wrong_validation_text(tmp_path: Path) -> None:
    lines = str(tmp_path / "lines.jsonl")
    same = tmp_path / "same.jsonl"
    wrong: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"validation_dataset": lines}, ("validation_dataset", "is the text that is trained")),
        ({"validation_dataset": str(same)}, ("same.jsonl", "has the documents of", "lines.jsonl")),
        ({"validation_dataset": None, "held_out_every": 0}, ("held_out_every 0 leaves nothing", "eval_sequences 6")),
        (
            {"dataset": ..., "mixture": {lines: 1.0}, "validation_dataset": lines},
            ("validation_dataset", "is the text that is trained"),
        ),
    ]
    for data, parts in wrong:
        config = with_validation(tmp_path)
        same.write_bytes(Path(lines).read_bytes())
        outcome = changed(config, **data)
        assert outcome.returncode == 2, data
        assert "Traceback" not in outcome.stderr
        assert_says(outcome.stderr, *parts)


@pytest.mark.parametrize(
    ("precision", "grad_reduce_in_fp32", "expected"),
    [("32-true", None, 16), ("bf16-mixed", None, 18), ("bf16-mixed", False, 16), ("bf16-true", None, 8)],
)
def test_bytes_of_a_parameter(precision: str, grad_reduce_in_fp32: bool | None, expected: int) -> None:
    """The table of docs/memory.md."""
    content = {
        "model": {"tokenizer": "none", "config_overrides": {"model_type": "llama"}},
        "trainer": {"precision": precision},
        "data_parallel": {"grad_reduce_in_fp32": grad_reduce_in_fp32},
    }
    assert bytes_per_parameter(config_from_mapping(content)) == expected
