"""Draws of the fuzzer pass, or are refused for a listed reason; and it notices faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import library
from tests.fuzz.__main__ import draw_spec, parse_spec, records
from tests.fuzz.outcomes import FAILED, REFUSED, kind_of, reasons, summarize

SEED = 1
PARTS = 4


def check(numbers: range, tmp_path: Path) -> None:
    rows = list(records(SEED, numbers, None, seconds=1e9))
    (tmp_path / "draws.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lines, is_clean = summarize(rows)
    assert len(rows) == len(numbers)
    assert is_clean, "\n".join([*lines, f"run one again: python -m tests.fuzz --rerun {tmp_path}/draws.jsonl:LINE"])


def test_40_draws(tmp_path: Path) -> None:
    check(range(40), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_1000_draws(part: int, tmp_path: Path) -> None:
    check(range(40 + part, 1040, PARTS), tmp_path)


def test_a_draw_depends_on_seed_and_number_alone_and_is_read_from_texts_and_lines(tmp_path: Path) -> None:
    spec = draw_spec(3, 17)
    assert draw_spec(3, 17) == spec != draw_spec(4, 17)
    file = tmp_path / "draws.jsonl"
    file.write_text("\n" + json.dumps({"draw": 17, "spec": spec}), encoding="utf-8")
    assert parse_spec(f"{file}:2") == parse_spec(json.dumps(spec)) == spec


def test_kinds_have_no_values() -> None:
    message = (
        "sequence length 1000 is not divisible by tensor_model_parallel_size 3: pad to 1002 or use ['a', 2] of 'x'"
    )
    expected = "sequence length N is not divisible by tensor_model_parallel_size N: pad to N or use [..] of '..'"
    assert kind_of(message) == expected


def test_an_unlisted_refusal_is_not_clean() -> None:
    row: dict[str, Any] = {"draw": 0, "outcome": REFUSED, "message": "no reason 1", "spec": {"layer": "library"}}
    lines, is_clean = summarize([row])
    assert not is_clean and "NOT LISTED" in "\n".join(lines)
    listed = {**row, "message": next(iter(reasons()))}
    assert summarize([listed])[1]
    assert not summarize([{**row, "outcome": FAILED}])[1]


SMALL: dict[str, Any] = {
    "layer": "library",
    "seed": 3,
    "ranks": 2,
    "tensor": 2,
    "sequence": True,
    "expert": 1,
    "dtype": "float64",
    "config": {
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.15,
    },
    "lora": {},
    "moe": {},
    "memory": {},
    "batch": {"rows": 2, "length": 8, "kind": "plain", "labels": "all", "micro_batches": 1},
    "optimizer": {
        "kind": "torch",
        "lr": 0.01,
        "betas": [0.9, 0.95],
        "eps": 0.001,
        "clip": None,
        "groups": [["*", 0.1, 1]],
    },
    "steps": 2,
    "files": False,
    "loss_bytes": 1,
}


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ({"gradient": 1.5}, "gradients of rank 0: model.norm.weight differs by 5.0e-01"),
        ({"weights": 1.01}, "weights of rank 0"),
    ],
)
def test_a_difference_is_a_failure(fault: dict[str, float], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a reference with another gradient or weight of one parameter."""
    train = library.reference.train

    def faulty(*args: Any) -> dict[str, Any]:
        result = train(*args)
        for name, factor in fault.items():
            key = "gradients" if name == "gradient" else name
            result[key]["model.norm.weight"] = result[key]["model.norm.weight"] / factor
        return result

    assert library.run(SMALL).outcome == "passed"
    monkeypatch.setattr(library.reference, "train", faulty)
    outcome = library.run(SMALL)
    assert outcome.outcome == FAILED and what in outcome.message, outcome.message


def test_a_loss_that_is_no_number_is_a_difference() -> None:
    assert library._largest([1.0, float("nan")], [1.0, 1.0]) == float("inf")
