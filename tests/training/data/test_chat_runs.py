"""Tests runs on conversations: the loss is that of transformers with the same labels, in every format of the rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from nxd_memopt.training.config.parsing import parse_config
from nxd_memopt.training.data.sources.conversations import conversation_text
from nxd_memopt.training.data.sources.documents import open_documents
from tests.training.chats import (
    CONVERSATIONS,
    MARKED,
    PAIRS,
    SHORTENED,
    TURNS,
    turns,
    write_chat_config,
    write_rows,
)
from tests.training.runs import run_here, summary


def loss_of_transformers(export: Path, texts: list[str]) -> float:
    """The mean loss of the assistant's tokens, by transformers: one conversation at a time, its own masks."""
    model, words = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    words.chat_template = MARKED
    losses = []
    for text in texts:
        found = words.apply_chat_template(
            json.loads(text)["messages"], return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        trained = found["assistant_masks"].bool()
        labels = found["input_ids"].masked_fill(~trained, -100)
        with torch.no_grad():
            logits = model(found["input_ids"]).logits
        losses.append(F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="none")[labels[0, 1:] != -100])
    return torch.cat(losses).mean().item()


def test_the_held_out_loss_is_that_of_transformers(tmp_path: Path) -> None:
    config = write_chat_config(
        tmp_path,
        TURNS,
        data={"micro_batch_size": 2},
        trainer={"max_steps": 3, "export": "verify"},
    )
    outcome = run_here(config)
    assert outcome.returncode == 0, outcome.stderr
    texts = open_documents(parse_config(["--config", str(config)]).data)
    held_out = [texts.text(part) for part in texts.held_out]
    expected = loss_of_transformers(tmp_path / "run" / "export", held_out)
    found = summary(tmp_path / "run")
    assert 3 < len(held_out) < 20 and len({len(text) for text in held_out}) > 1
    assert found["held_out_loss_after"] == pytest.approx(expected, rel=1e-5)  # fp32 sums in another order
    assert found["transformers_held_out_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_run_shows_what_it_trains_and_exports_its_template(tmp_path: Path) -> None:
    long = turns("l" * 40, "too long an answer")
    outcome = run_here(
        write_chat_config(
            tmp_path,
            data={"dataset": write_rows(tmp_path / "d.jsonl", [*CONVERSATIONS, *[long] * 3])},
            trainer={"max_steps": 2},
        )
    )
    assert outcome.returncode == 0, outcome.stderr
    before, _, _ = outcome.stdout.partition("step 2/2")
    sample = next(line for line in before.splitlines() if line.startswith("  | "))
    assert sample.count("⟦") == sample.count("⟧") == 2 and "a:⟦" in sample and "<end>⟧" in sample
    assert re.search(r"conversations: [45]\d read so far, of which 3 were cut", before), before
    assert "3 were cut (longer than data.seq_length)" in before
    assert (tmp_path / "run" / "export" / "chat_template.jinja").read_text(encoding="utf-8") == MARKED
    assert "would not stop" not in before


def test_a_start_says_which_held_out_conversations_are_cut_and_dropped(tmp_path: Path) -> None:
    """They are of another file, which the line about the training conversations does not count."""
    held_out = [turns("q", "a" * 60), turns("q" * 60, "a"), turns("q", "a")]
    data = {"validation_dataset": write_rows(tmp_path / "v.jsonl", held_out), "held_out_every": "auto"}
    outcome = run_here(write_chat_config(tmp_path, data=data, trainer={"max_steps": 1}))
    assert outcome.returncode == 0, outcome.stderr
    found = "held-out conversations: 3 read so far, of which 1 were cut (longer than data.seq_length), 1 were dropped"
    assert found in outcome.stdout, outcome.stdout
    assert "\nconversations: 60 read so far, of which 0 were cut" in outcome.stdout


CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d"}}


def test_all_columns_of_a_row_reach_the_template(tmp_path: Path) -> None:
    """The input of an instruction, a system message, tools and their calls; null in a table is no entry."""
    values = {"instruction": "q", "input": "i", "output": "a", "system": "s"}
    messages = json.loads(conversation_text(values, "instruction_output"))["messages"]
    assert [(each["role"], each["content"]) for each in messages] == [
        ("system", "s"),
        ("user", "q\n\ni"),
        ("assistant", "a"),
    ]
    calls = {"messages": [{"role": "user", "content": "q"}, CALL, {"role": "tool", "content": "1"}], "tools": [TOOL]}
    assert json.loads(conversation_text(calls, "messages")) == calls
    table = Dataset.from_list([calls, turns("q", "a")])
    assert [json.loads(conversation_text(row, "messages")) for row in table] == [calls, turns("q", "a")]  # pyright: ignore


def test_a_run_leaves_out_what_the_template_loses(tmp_path: Path) -> None:
    bad = [turns("q", "long answer", "more", "end") for _ in range(3)]
    good = [turns(*pair) for pair in PAIRS]
    outcome = run_here(
        write_chat_config(
            tmp_path,
            SHORTENED,
            data={"dataset": write_rows(tmp_path / "d.jsonl", [*good, *bad]), "on_bad_rows": "skip"},
            trainer={"max_steps": 2},
        )
    )
    assert outcome.returncode == 0 and "3 were skipped (not renderable)" in outcome.stdout
    # The place and the reason too, for the first one of each split that is read.
    assert re.search(
        r"left out 1 rows of .*d.jsonl' so far \(1 not renderable\), the last: .*d.jsonl line 6[123], the conversation "
        r"that begins with \"q\": the chat template renders the first messages in another way",
        outcome.stdout,
    )
