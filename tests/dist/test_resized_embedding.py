"""Tests rows of the embedding for tokens that were added to a tokenizer: their values, every layout, the export."""

from __future__ import annotations

from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from nxd_memopt.certify.command import _model_config
from nxd_memopt.checkpoint.huggingface import importing
from nxd_memopt.command_line import Run
from nxd_memopt.training.config.train_config import ModelConfig, TrainConfig
from nxd_memopt.training.data.tokenize.vocabulary import rows_for
from nxd_memopt.training.model import build_model, load_hf_config, load_initial_weights, load_vocabulary
from tests.reference_models import llama_config
from tests.training.runs import (
    LINES,
    LLAMA,
    TENSOR_AND_SEQUENCE,
    byte_tokenizer,
    losses,
    run_here,
    run_on_pool,
    summary,
    write_config,
    write_jsonl,
)

ADDED = ["<turn>", "<tool>", "<image>", "<pad>"]  # 261 rows: T = 2 pads them to 262
NEOX = {
    **{"model_type": "gpt_neox", "vocab_size": 257, "hidden_size": 24, "intermediate_size": 36, "eos_token_id": 256},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64},
}


def added_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(ADDED)
    tokenizer.pad_token = "<pad>"
    return tokenizer


def base_model(directory: Path, overrides: dict[str, Any], *, tied: bool = False) -> Path:
    """A model of 257 tokens next to a tokenizer of 261."""
    torch.manual_seed(1)
    values = {**overrides, "tie_word_embeddings": tied, "initializer_range": 0.3}
    config = llama_config(**values) if overrides is LLAMA else AutoConfig.for_model(values.pop("model_type"), **values)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")
    added_tokenizer().save_pretrained(directory / "model")
    return directory / "model"


def write_run(directory: Path, base: Path, name: str = "run", *, resize: bool = True, **sections: Any) -> Path:
    """A run on text with the added tokens."""
    texts = write_jsonl(directory / "added.jsonl", [ADDED[i % 3] + line for i, line in enumerate(LINES)])
    trainer = {"output_dir": str(directory / name), "max_steps": 4} | sections.pop("trainer", {})
    data = {"dataset": texts, "micro_batch_size": 4} | sections.pop("data", {})
    model = {"pretrained": str(base), "tokenizer": str(base), "config_overrides": {}, "resize_embedding": resize}
    # A large eps: AdamW's first updates would otherwise amplify the rounding of gradients near 0.
    optimizer = {"eps": 1e-3, "weight_decay": 0.0}
    return write_config(directory, model=model, data=data, trainer=trainer, optimizer=optimizer, **sections)


@pytest.mark.parametrize(("overrides", "tied"), [(LLAMA, True), (LLAMA, False), (NEOX, True), (NEOX, False)])
def test_new_rows_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, Any], tied: bool
) -> None:
    base = base_model(tmp_path, overrides, tied=tied)
    reference = AutoModelForCausalLM.from_pretrained(base)
    reference.resize_token_embeddings(261, mean_resizing=True)  # and noise, 3e-5 of the rows' deviation
    config = TrainConfig(model=ModelConfig(pretrained=str(base), resize_embedding=True))
    hf_config = load_hf_config(config.model)
    assert hf_config.vocab_size == 261 and load_vocabulary(config.model, hf_config).size == 261
    # The model is certified with its new rows.
    assert _model_config(Run("", config, frozenset(), is_bare=False))["vocab_size"] == 261
    monkeypatch.setattr(importing, "MEAN_ROWS", 100)  # the table is read in parts
    model = build_model(config, hf_config)
    load_initial_weights(model, config, hf_config)
    ids = torch.tensor([[257, 5, 6, 258, 7, 8, 259, 9, 260, 1]])
    with torch.no_grad():
        expected = reference(ids, labels=ids).loss
        plain = AutoModelForCausalLM.from_pretrained(base)
        assert abs(plain(ids.clamp(max=256), labels=ids.clamp(max=256)).loss - expected) > 1e-3
        loss = model(ids, labels=ids).loss
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
        for table in {reference.get_input_embeddings().weight, reference.get_output_embeddings().weight}:
            table[257:] = table[:257].mean(0)  # without the noise
        torch.testing.assert_close(loss, reference(ids, labels=ids).loss, rtol=1e-6, atol=0)
    assert (model.lm_head.weight is model.embedding_weight()) == tied


def test_any_range_of_rows_is_read() -> None:
    source = torch.arange(10.0).reshape(5, 2)
    full = torch.cat([source, source.mean(0).expand(3, -1)])
    rows = importing._MeanRows(source, 8)
    for start, stop in combinations_with_replacement(range(9), 2):
        assert torch.equal(rows[start:stop], full[start:stop]) and torch.equal(
            rows[(slice(start, stop),)], full[start:stop]
        )
    assert torch.equal(rows[...], full) and rows.get_shape() == [8, 2]


@pytest.mark.parametrize(
    "sections",
    [{"parallel": TENSOR_AND_SEQUENCE}, pytest.param({"data_parallel": {"sharding": "zero3"}}, marks=pytest.mark.slow)],
)
def test_every_layout_trains_the_new_rows_and_exports_them(tmp_path: Path, sections: dict[str, Any]) -> None:
    base = base_model(tmp_path, LLAMA)
    outcome = run_here(write_run(tmp_path, base, "one", trainer={"export": "verify"}))
    assert outcome.returncode == 0, outcome.stderr
    # A checkpoint at step 2 is continued.
    data = {"micro_batch_size": 2}
    for steps in (2, 4):
        file = write_run(tmp_path, base, "many", data=data, trainer={"max_steps": steps}, **sections)
        run_on_pool(file, "--optimizer.decay-steps", "4", ranks=2)
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=2e-5)
    found = summary(tmp_path / "one")
    assert found["transformers_difference"] < 1e-5 * found["held_out_loss_after"]
    trained, first = (
        AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().weight
        for path in (tmp_path / "one" / "export", base)
    )
    assert trained.shape == (261, 24)
    moved = (trained[257:] - first.mean(0)).abs().amax(1)
    assert moved[:3].min() > 3e-4 and moved[3] < 1e-6  # <pad> is in no text
    exported = AutoTokenizer.from_pretrained(tmp_path / "one" / "export")
    assert rows_for(exported) == 261 and exported.pad_token == "<pad>"


def test_added_tokens_without_a_row_are_an_error_where_text_has_them(tmp_path: Path) -> None:
    """And only there: a padding token that was added later is in no text."""
    base = base_model(tmp_path, LLAMA)
    outcome = run_here(write_run(tmp_path, base, resize=False))
    assert outcome.returncode == 2
    assert "token id 25" in outcome.stderr and "model.resize_embedding" in outcome.stderr
    lines = write_jsonl(tmp_path / "lines.jsonl", LINES)
    trainer = {"max_steps": 2, "export": "verify"}
    outcome = run_here(write_run(tmp_path, base, "plain", resize=False, data={"dataset": lines}, trainer=trainer))
    assert outcome.returncode == 0, outcome.stderr
    assert "4 added tokens of the tokenizer, such as '<turn>', are outside" in outcome.stdout.replace("\n", " ")
    # transformers builds the embedding with the row of the padding token, which must be one.
    assert AutoConfig.from_pretrained(tmp_path / "plain" / "export").pad_token_id is None


def test_adapters_do_not_train_new_rows(tmp_path: Path) -> None:
    file = write_run(tmp_path, base_model(tmp_path, LLAMA))
    outcome = run_here(file, "--lora.lora-rank", "4")
    assert outcome.returncode == 2 and "trainer.max_steps 0" in outcome.stderr
    outcome = run_here(file, "--trainer.max-steps", "0")
    assert outcome.returncode == 0, outcome.stderr
    assert AutoConfig.from_pretrained(tmp_path / "run" / "export").vocab_size == 261
