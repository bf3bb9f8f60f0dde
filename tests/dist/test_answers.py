"""Generated answers of a run: transformers' greedy tokens with the same weights, and no trace in the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, RepetitionPenaltyLogitsProcessor

from nxd_memopt.training import answers
from nxd_memopt.training.data.packing import DOCUMENT_START, NOT_TRAINED, PADDING
from tests.training.chats import question, write_chat_config
from tests.training.runs import LLAMA, TENSOR_AND_SEQUENCE, exact, rows, run_here, run_on_pool

LENGTH = 96  # of the model, so that an answer is cut by its number of tokens
SECTIONS: dict[str, dict[str, Any]] = {
    "one": {"lora": {"lora_rank": 4, "lora_dropout": 0.2}},
    "T=2": {"parallel": TENSOR_AND_SEQUENCE},
    "D=2, ZeRO-3": {"data_parallel": {"sharding": "zero3"}},
}


def config(directory: Path, name: str = "run", **sections: Any) -> Path:
    overrides = LLAMA | {"max_position_embeddings": LENGTH, "attention_dropout": 0.1}
    if "parallel" in sections:
        del overrides["attention_dropout"]
    trainer = {"max_steps": 6, "output_dir": str(directory / name)}
    return write_chat_config(directory, model={"config_overrides": overrides}, trainer=trainer, **sections)


def expected(export: Path, prompt: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    found = model.generate(ids, max_new_tokens=answers.NEW_TOKENS, do_sample=False)
    return tokenizer.decode(found[0, ids.size(1) :], skip_special_tokens=True)


@pytest.mark.parametrize("layout", SECTIONS)
def test_answers_are_transformers_greedy_ones(tmp_path: Path, layout: str) -> None:
    file = config(tmp_path, **SECTIONS[layout])
    if layout == "one":
        outcome = run_here(file)
        assert outcome.returncode == 0, outcome.stderr
        printed = outcome.stdout
    else:
        printed = run_on_pool(file, ranks=2)
    run = tmp_path / "run"
    found = rows(run, "samples.jsonl")
    assert [row["step"] for row in found] == [0] * 3 + [6] * 3
    questions = [row["prompt"] for row in found[3:]]
    assert questions == [row["prompt"] for row in found[:3]] and len(set(questions)) == 3
    assert set(questions) <= {f"u:{question(number)}<end>a:" for number in range(60)}
    assert [row["answer"] for row in found[3:]] == [expected(run / "export", text) for text in questions]
    assert all(row["ended"] or row["tokens"] == answers.NEW_TOKENS for row in found)
    assert printed.count("  question  | u:") == printed.count("  before    | ") == printed.count("  step 6    | ") == 3


def test_answers_change_nothing_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses with dropout are equal bit by bit, also of a run that is resumed; its answers are recorded once."""
    decay = ("--optimizer.decay-steps", "6")
    assert run_here(config(tmp_path, "with"), *decay, "--trainer.max-steps", "3").returncode == 0
    for _ in range(2):
        outcome = run_here(config(tmp_path, "with"), *decay)
        assert outcome.returncode == 0, outcome.stderr
    # The answers after step 3 are of a run that ended there.
    assert [row["step"] for row in rows(tmp_path / "with", "samples.jsonl")] == [0] * 3 + [3] * 3 + [6] * 3
    assert "  before    | " in outcome.stdout
    monkeypatch.setattr(answers, "_refusal", lambda config: "of the test")
    outcome = run_here(config(tmp_path, "without"), *decay)
    assert "answers: none are generated: of the test" in outcome.stdout
    assert not (tmp_path / "without" / "samples.jsonl").exists()
    assert exact(tmp_path / "with") == exact(tmp_path / "without")


def test_tokens_of_a_text_are_penalized_as_transformers_does() -> None:
    """Of texts of different lengths, which transformers would have to pad."""
    scores, texts = torch.randn(2, 11, generator=torch.Generator().manual_seed(0)), [[3, 3, 7], [0, 10, 4, 2]]
    found = answers.penalized(scores, texts, 1.3)
    reference = RepetitionPenaltyLogitsProcessor(1.3)
    for text, before, after in zip(texts, scores, found, strict=True):
        torch.testing.assert_close(after, reference(torch.tensor([text]), before[None])[0], rtol=0, atol=0)
    assert torch.equal(answers.penalized(scores, texts, 1.0), scores)


def test_questions_end_before_the_first_trained_token() -> None:
    start, asked = DOCUMENT_START, NOT_TRAINED
    row = [
        1 | start | asked,
        2 | asked,
        3,
        4 | asked,
        5,
        1 | start | asked,
        6,
        7 | start,
        8,
        0 | start | asked | PADDING,
    ]
    again = [1 | start | asked, 6, 9 | start | asked, 9 | asked, 9 | asked, 9, *[0 | start | asked | PADDING] * 4]
    assert answers.prompts_of(np.array([row, again], dtype=np.int32), 64) == [[1, 2], [1], [9, 9, 9]]
    assert answers.prompts_of(np.array([row, again], dtype=np.int32), 3) == [[1, 2], [1]]
