"""``nxd-memopt chat`` answers as transformers generates, remembers the conversation, and names what is no model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nxd_memopt.commands import chat
from nxd_memopt.training.reporting.step_metrics import printable
from tests.reference import assert_says, error_message
from tests.reference_models import llama_config
from tests.training.chats import TURNS, tokenizer


def model_directory(directory: Path, template: str | None) -> Path:
    torch.manual_seed(1)
    made = tokenizer(template)
    config = llama_config(
        vocab_size=len(made), initializer_range=0.3, eos_token_id=made.eos_token_id, bos_token_id=None
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    made.save_pretrained(directory)
    return directory


def generated(directory: Path, text: str, tokens: int) -> str:
    """What transformers answers to ``text``, greedily."""
    model, made = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    ids = made(text, return_tensors="pt", add_special_tokens=False).input_ids
    ids_after = model.generate(input_ids=ids, max_new_tokens=tokens, do_sample=False, pad_token_id=made.eos_token_id)
    return made.decode(ids_after[0, ids.size(1) :], skip_special_tokens=True)


def test_one_answer_is_the_continuation(tmp_path, capsys):
    directory = model_directory(tmp_path / "model", None)
    assert chat.main([str(directory), "--prompt", "abc", "--max-tokens", "7"]) == 0
    assert capsys.readouterr().out.strip() == printable(generated(directory, "abc", 7)).strip()


def test_a_conversation_is_remembered(tmp_path):
    directory = model_directory(tmp_path / "model", TURNS)
    talk = chat.Chat(*chat.load(directory), max_tokens=6, temperature=0.0)
    end = talk._tokenizer.eos_token
    first = talk.answer("abc")
    assert first == generated(directory, f"u:abc{end}a:", 6)
    talk.forget_question()  # an answered one stays
    assert talk.answer("de") == generated(directory, f"u:abc{end}a:{first}{end}u:de{end}a:", 6)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), ("has no model", "config.json")),
        (("export/config.json",), ("is a run", "export")),
        (("rank_00000.safetensors", "config.json"), ("training checkpoint", "convert --from checkpoint")),
        (("checkpoints/step_00000001/index.json",), ("training checkpoint", "convert --from checkpoint")),
    ],
)
def test_what_is_no_model_is_named(tmp_path, files, words):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert_says(error_message(lambda: chat.main([str(tmp_path)])), *words)
    expected = ("is no directory", "hf download")
    if any("step_" in file for file in files):
        expected = ("has not finished", f"convert --from checkpoint --source {tmp_path} ")
    assert_says(error_message(lambda: chat.main([str(tmp_path / "adapter")])), *expected)


def test_weights_that_files_lack_and_a_conversation_that_is_too_long_are_errors(tmp_path):
    directory = model_directory(tmp_path / "model", TURNS)
    talk = chat.Chat(*chat.load(directory), max_tokens=6, temperature=0.0)
    positions = talk._model.config.max_position_embeddings
    assert_says(error_message(lambda: talk.answer("a" * positions)), f"{positions} positions", "start again")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert_says(error_message(lambda: chat.load(directory)), "lacks 1 weights", "up_proj")


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "warm"])
def test_no_temperature(value, tmp_path):
    assert_says(error_message(lambda: chat.main([str(tmp_path), "--temperature", value])), "--temperature", value)
