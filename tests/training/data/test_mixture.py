"""Sources with weights: the share of each in every stretch, and runs that resume, repeat and prepare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from nxd_memopt.commands.prepare import main as prepare
from nxd_memopt.training.data.mixture import PERIOD, Blend
from nxd_memopt.training.data.packed.sequences import MixedSequences
from nxd_memopt.training.data.packing import ID_MASK
from tests.reference import assert_says, error_message
from tests.training.packed_tokens import recorded_held_out
from tests.training.runs import Outcome, byte_tokenizer, exact, losses, run_here, run_on_pool, write_config, write_jsonl

WEIGHTS = [{"a": 7.0, "b": 2.0, "c": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 0.999, "b": 0.001}, {"a": 5.0}]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_stretch_has_the_share_of_each_source(weights: dict[str, float]) -> None:
    blend = Blend(weights)
    sources = blend.sources(range(2 * PERIOD + 50))
    shares = np.array(list(weights.values())) / sum(weights.values())
    begins = [0, 1, 17, 500, PERIOD - 3, PERIOD, 2 * PERIOD]
    for begin in begins:
        # From the beginning of all sequences and from any other place.
        counts = [int((sources[:begin] == source).sum()) for source in range(len(weights))]
        assert blend.counts(begin) == counts
        assert np.abs(np.array(counts) - begin * shares).max() < len(weights)
        part = sources[begin : begin + 40]
        found = np.array([(part == source).sum() for source in range(len(weights))])
        assert np.abs(found - len(part) * shares).max() < len(weights)
        assert np.array_equal(blend.sources(range(begin, begin + 5)), sources[begin : begin + 5])


def test_a_share_that_no_sequence_would_have_is_an_error() -> None:
    message = error_message(lambda: Blend({"large.jsonl": 1.0, "small.jsonl": 1e-6}))
    assert_says(message, "small.jsonl", "1e-06", "0.0001")


class Listed:
    """Packed sequences whose tokens say their source and their number."""

    documents_per_row = 1

    def __init__(self, source: int) -> None:
        self.source = source

    def rows(self, positions: range) -> Any:
        return np.array([[self.source, position] for position in positions], dtype=np.int32)


def test_sequences_of_a_source_are_read_in_order_and_once() -> None:
    blend = Blend({"a": 3.0, "b": 1.0, "c": 2.0})
    mixed = MixedSequences(blend, Listed)  # pyright: ignore[reportArgumentType]
    whole = mixed.rows(range(60)).tolist()
    for source in range(3):
        assert [number for each, number in whole if each == source] == list(range(blend.counts(60)[source]))
    for size in (1, 4, 7):
        parts = [mixed.rows(range(start, min(start + size, 60))).tolist() for start in range(0, 60, size)]
        assert [row for part in parts for row in part] == whole


def mixture_config(directory: Path, **sections: dict[str, Any]) -> Path:
    """A run of 3 parts digits and 1 part letters; the letters have few sequences."""
    write_jsonl(directory / "digits.jsonl", [f"{i} " + "0123456789" * 5 for i in range(60)])
    write_jsonl(directory / "letters.jsonl", [f"{'xyz'[i % 3]} " + "abcdef" * (2 + i) for i in range(8)])
    data: dict[str, Any] = {"eval_sequences": 8, "held_out_every": 4}
    data["mixture"] = {str(directory / f"{name}.jsonl"): weight for name, weight in (("digits", 3), ("letters", 1))}
    config = write_config(directory, **{**sections, "data": data | sections.get("data", {})})
    return config


def succeeded(outcome: Outcome) -> str:
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


def test_a_run_resumes_exactly_and_counts_the_epochs_of_each_source(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    sections = {
        "trainer": {"max_steps": 24, "save_interval": 4, "export": False},
        "optimizer": {"decay_steps": 24},
    }
    output = succeeded(run_here(mixture_config(tmp_path / "a", **sections)))
    assert "75.00% of " in output and "25.00% of " in output
    begun = [line for line in output.splitlines() if "begins in step" in line]
    assert begun and all("letters.jsonl" in line for line in begun if "epoch 2 " in line)
    config = mixture_config(tmp_path / "b", **sections)
    succeeded(run_here(config, "--trainer.max-steps", "8"))
    succeeded(run_here(config))
    assert exact(tmp_path / "b" / "run") == exact(tmp_path / "a" / "run")


def test_two_data_parallel_ranks_train_the_same_sequences(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    trainer = {"max_steps": 6, "export": False, "save_interval": "never"}
    succeeded(run_here(mixture_config(tmp_path / "a", trainer=trainer)))
    run_on_pool(mixture_config(tmp_path / "b", trainer=trainer), ranks=2)
    assert losses(tmp_path / "b" / "run") == pytest.approx(losses(tmp_path / "a" / "run"), rel=1e-5)


def test_held_out_sequences_have_the_same_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = recorded_held_out(monkeypatch)
    trainer = {"max_steps": 2, "export": False, "save_interval": "never"}
    succeeded(run_here(mixture_config(tmp_path, trainer=trainer)))
    known = byte_tokenizer()("abcdef")["input_ids"]
    letters = [bool(np.isin(row & ID_MASK, known).any()) for row in evaluated[0]]
    assert (len(letters), sum(letters)) == (8, 2)


def test_a_mixture_is_evaluated_on_a_text_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = recorded_held_out(monkeypatch)
    monkeypatch.setenv("NXD_MEMOPT_BACKEND", "cpu")
    own = write_jsonl(tmp_path / "own.jsonl", ["QRS " * (4 + i) for i in range(20)])
    trainer = {"max_steps": 6, "save_interval": 2, "export": False}
    config = mixture_config(tmp_path, trainer=trainer, data={"validation_dataset": own})
    # All of the sources is trained, and none of the validation text.
    assert prepare(["--config", str(config)]) == 0
    prepared = capsys.readouterr().out
    assert_says(prepared, "from 60 documents of ", "from 8 documents of ", "own.jsonl in ", "held-out text")
    directories = list((tmp_path / "run" / "tokens").iterdir())
    splits = [{path.name.partition(".")[0] for path in directory.glob("*.safetensors")} for directory in directories]
    assert sorted(splits, key=str) == [{"held_out"}, {"train"}, {"train"}]
    succeeded(run_here(config, "--trainer.max-steps", "2", "--optimizer.decay-steps", "6"))
    output = succeeded(run_here(config, "--optimizer.decay-steps", "6"))
    assert "held-out text: all of" in output
    assert not [path for path in (tmp_path / "run" / "tokens").iterdir() if path not in directories]
    known = byte_tokenizer()("QRS ")["input_ids"]
    assert evaluated
    assert all(len(rows) == 8 and np.isin(rows & ID_MASK, [*known, 256]).all() for rows in evaluated)
    # Held-out text that is trained too, and other held-out text of a resumed run, are refused.
    copied = tmp_path / "copied.jsonl"
    copied.write_bytes((tmp_path / "letters.jsonl").read_bytes())
    outcome = run_here(config, "--data.validation-dataset", str(copied))
    assert outcome.returncode == 2
    assert_says(outcome.stderr, "copied.jsonl", "has the documents of", "letters.jsonl")
    other = write_jsonl(tmp_path / "other.jsonl", ["TUV " * 9] * 20)
    outcome = run_here(config, "--data.validation-dataset", other)
    assert outcome.returncode == 2
    assert_says(outcome.stderr, "the held-out text has changed")


def test_other_shares_or_sources_are_refused_and_moved_ones_reported(tmp_path: Path) -> None:
    config = mixture_config(
        tmp_path, trainer={"max_steps": 4, "save_interval": 2, "export": False}, optimizer={"decay_steps": 6}
    )
    succeeded(run_here(config))
    text = config.read_text()
    mixture = yaml.safe_load(text)["data"]["mixture"]

    def run_with(changed: dict[str, float], **data: Any) -> Outcome:
        options = yaml.safe_load(text)
        options["data"] |= {"mixture": changed, **data}
        options["trainer"]["max_steps"] = 6
        config.write_text(yaml.safe_dump(options, sort_keys=False))
        return run_here(config)

    digits, letters = mixture
    for outcome in (run_with({digits: 2, letters: 1}), run_with({}, dataset=digits)):
        assert outcome.returncode == 2
        assert_says(outcome.stderr, "data.mixture was [3.0, 1.0]", "warm-start")
    outcome = run_with({letters: 3, digits: 1})
    assert outcome.returncode == 2
    assert_says(outcome.stderr, "the packed tokens differ")
    other = write_jsonl(tmp_path / "other.jsonl", ["other text " * 9] * 2 + ["and more of it " * 8] * 6)
    outcome = run_with({digits: 3, other: 1}, eval_sequences=0)  # the sequences of training are compared too
    assert outcome.returncode == 2
    assert_says(outcome.stderr, "the packed tokens differ")
    Path(letters).rename(tmp_path / "moved.jsonl")
    output = succeeded(run_with({digits: 3, str(tmp_path / "moved.jsonl"): 1}))
    assert "moved.jsonl, with equal content" in output


def test_wrong_mixtures(tmp_path: Path) -> None:
    config = mixture_config(tmp_path)
    options = yaml.safe_load(config.read_text())
    digits, letters = options["data"]["mixture"]
    wrong: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({"mixture": {digits: 0.0, letters: 1.0}}, ("data.mixture", "digits.jsonl", "0.0", "positive")),
        ({"mixture": {digits: float("inf")}}, ("digits.jsonl", "inf")),
        ({"mixture": [digits, letters]}, ("mixture", "mapping")),
    ]
    copied = tmp_path / "copied.jsonl"
    copied.write_bytes(Path(digits).read_bytes())
    wrong.append(({"mixture": {digits: 1.0, str(copied): 1.0}}, ("copied.jsonl", "digits.jsonl", "the same text")))
    for data, parts in wrong:
        config.write_text(yaml.safe_dump({**options, "data": options["data"] | data}))
        outcome = run_here(config)
        assert outcome.returncode == 2, json.dumps(data)
        assert "Traceback" not in outcome.stderr
        assert_says(outcome.stderr, *parts)
