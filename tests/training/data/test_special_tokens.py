"""Tests that the special token ids of tokenizer, config and generation config are compared and exported alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from nxd_memopt.checkpoint import save_pretrained
from nxd_memopt.models import model_class
from nxd_memopt.training.config.train_config import ModelConfig
from nxd_memopt.training.data.tokenize.special_tokens import SpecialTokens, special_tokens
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary, bytes_without_token
from nxd_memopt.training.model import load_hf_config, load_vocabulary
from nxd_memopt.training.sample import _end_notes
from tests.training.runs import END, LLAMA, byte_tokenizer, run_here, write_config

OTHER = 7


def decide(tmp_path: Path, *, generation: Any = None, end: int | str = "auto", **config: Any) -> SpecialTokens:
    """The ids of a model whose config.json has ``config``, with a tokenizer whose end-of-text is END."""
    tokenizer = byte_tokenizer()
    for name in ("eos_token", "bos_token", "pad_token"):
        if f"tokenizer_{name}" in config:
            setattr(tokenizer, name, config.pop(f"tokenizer_{name}"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config), encoding="utf-8")
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    model = ModelConfig(pretrained=str(tmp_path))
    return special_tokens(model, load_hf_config(model), tokenizer, end)


def test_lists_of_chat_models_are_kept(tmp_path: Path) -> None:
    tokens = decide(tmp_path, eos_token_id=OTHER, generation={"eos_token_id": [OTHER, END]})
    assert (tokens.end_of_text, tokens.config["eos_token_id"]) == (END, [OTHER, END])
    assert tokens.generation == {"eos_token_id": [OTHER, END]}
    assert tokens.notes == [
        f"end-of-text token: the tokenizer has {END}, config.json has {OTHER}, generation_config.json has "
        f"[{OTHER}, {END}]; documents end with {END}; the export has [{OTHER}, {END}]"
    ]


@pytest.mark.parametrize(("stated", "generating", "stops"), [([END, OTHER], END, False), (END, [END, OTHER], True)])
def test_a_note_says_whether_generation_stops_after_an_answer(
    tmp_path: Path, stated: Any, generating: Any, stops: bool
) -> None:
    """transformers stops at the tokens of the generation config; config.json counts only without it."""
    special = decide(tmp_path, eos_token_id=stated, generation={"eos_token_id": generating})
    vocabulary = Vocabulary(byte_tokenizer(), 257, END, special)
    answer = torch.tensor([1, 2, OTHER])
    assert bool(_end_notes(answer, answer, vocabulary)) is not stops


def test_a_contradiction_names_both_and_the_option(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{END} '<end>' and the model's is {OTHER} .*set data\.end_of_text"):
        decide(tmp_path, eos_token_id=OTHER)
    chosen = decide(tmp_path, eos_token_id=OTHER, end="<end>", generation={"eos_token_id": OTHER})
    assert (chosen.end_of_text, chosen.config["eos_token_id"]) == (END, [END])
    assert chosen.generation == {"eos_token_id": END}
    kept = decide(tmp_path, eos_token_id=OTHER, end=OTHER)
    assert (kept.end_of_text, kept.config["eos_token_id"]) == (OTHER, [OTHER])
    kept.write_companions(byte_tokenizer(), tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == OTHER


def test_ids_that_no_file_states_are_the_tokenizers(tmp_path: Path) -> None:
    stated = {name: value for name, value in LLAMA.items() if name != "eos_token_id"}
    model = ModelConfig(tokenizer="t", config_overrides=stated)
    hf_config = load_hf_config(model)
    assert (hf_config.eos_token_id, hf_config.bos_token_id) == (2, 1)  # transformers' defaults
    tokens = special_tokens(model, hf_config, byte_tokenizer())
    exported = tokens.config_of_export(hf_config)
    assert (exported.eos_token_id, exported.bos_token_id, exported.pad_token_id) == (END, None, None)
    assert hf_config.eos_token_id == 2 and tokens.notes == []


def test_begin_and_padding_are_the_tokenizers_and_a_line_says_so(tmp_path: Path) -> None:
    tokens = decide(tmp_path, bos_token_id=4, pad_token_id=5, tokenizer_bos_token="a", generation={"bos_token_id": 4})
    bos = byte_tokenizer().convert_tokens_to_ids("a")
    assert tokens.config == {"eos_token_id": [END], "bos_token_id": [bos], "pad_token_id": [5]}
    assert tokens.generation == {"eos_token_id": END, "bos_token_id": bos, "pad_token_id": 5}
    assert [note.split(":")[0] for note in tokens.notes] == ["begin-of-text token"]


def test_a_tokenizer_without_an_end_takes_the_models(tmp_path: Path) -> None:
    assert decide(tmp_path, tokenizer_eos_token=None).end_of_text == END
    with pytest.raises(ValueError, match=r"end-of-text token is none and the model's is 256 .* or 7 .*: set data"):
        decide(tmp_path, tokenizer_eos_token=None, eos_token_id=[END, OTHER])
    with pytest.raises(ValueError, match=r"data\.end_of_text '<eos>' is no token of the tokenizer: .*<end>"):
        decide(tmp_path, end="<eos>")
    with pytest.raises(ValueError, match=r"data\.end_of_text 300 is outside \[0, 257\)"):
        decide(tmp_path, end=300)


def test_a_run_exports_the_ids_it_trained_with(tmp_path: Path) -> None:
    """Documents end with the chosen id, and config, generation config and tokenizer of the export have it."""
    source = tmp_path / "source"
    overrides = ModelConfig(tokenizer="t", config_overrides=LLAMA | {"eos_token_id": OTHER})
    save_pretrained(model_class("llama")(load_hf_config(overrides)), source)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(source)
    generation = {"eos_token_id": [OTHER], "temperature": 0.5, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    model = {"pretrained": str(source), "tokenizer": None, "config_overrides": {}}
    trainer = {"max_steps": 1, "save_interval": "never", "export": "verify"}
    schedule = {"warmup_steps": 0}
    config = write_config(tmp_path, model=model, trainer=trainer, optimizer=schedule, data={"end_of_text": "<end>"})
    outcome = run_here(config)
    assert outcome.returncode == 0, outcome.stderr
    assert "end-of-text token: the tokenizer has 256" in " ".join(outcome.stdout.split())
    export = tmp_path / "run" / "export"
    loaded = GenerationConfig.from_pretrained(export)
    assert AutoConfig.from_pretrained(export).eos_token_id == loaded.eos_token_id == END
    assert (loaded.temperature, loaded.do_sample) == (0.5, True)
    exported = AutoTokenizer.from_pretrained(export)
    assert (exported.eos_token_id, exported.chat_template) == (END, "{{ messages }}")
    vocabulary = load_vocabulary(ModelConfig(pretrained=str(export)), AutoConfig.from_pretrained(export))
    assert (vocabulary.end_of_text, vocabulary.notes) == (END, [])


def test_bytes_that_the_tokenizer_drops_are_a_line() -> None:
    whole = byte_tokenizer()
    assert bytes_without_token(whole) == [] and Vocabulary(whole, 257, 256).notes == []
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = [symbol for symbol in symbols if symbol not in ("Ã", "©", "Ñ")]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(known)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    partial = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    # é is C3 A9 in UTF-8: nothing of it is left, which the line announces.
    assert partial("é")["input_ids"] == [] and bytes_without_token(partial) == [0xA9, 0xC3, 0xD1]
    (note,) = Vocabulary(partial, 300, 299).notes
    assert "no token for 3 of the 243 bytes" in note and "0xA9, 0xC3, 0xD1" in note


def test_ids_without_a_row_are_left_out(tmp_path: Path) -> None:
    """LLaMA's first config.json has -1 for no padding token; a token that only the tokenizer has comes with no row."""
    tokens = decide(tmp_path, pad_token_id=-1, generation={"pad_token_id": 999})
    assert "pad_token_id" not in tokens.config
    assert [note.split("; ")[-1] for note in tokens.notes] == ["the export has None"]
    tokens.write_companions(byte_tokenizer(), tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token is None
