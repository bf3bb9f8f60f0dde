"""Tests that tokenizer, chat template and generation config travel with the weights, and what a GGUF file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoTokenizer, LlamaConfig

from nxd_memopt.checkpoint import save_pretrained
from nxd_memopt.checkpoint.huggingface.companions import companions_of
from nxd_memopt.checkpoint.huggingface.gguf_metadata import read_gguf_metadata
from nxd_memopt.checkpoint.huggingface.tokenizers import load_tokenizer
from nxd_memopt.commands.convert import Convert
from nxd_memopt.models import model_class
from tests.training.runs import LLAMA, byte_tokenizer

BOS, EOS, PAD = 1, 2, 3
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<im_end>{% endfor %}"


def write_gguf(path: Path, *, pre: str = "smollm") -> Path:
    """Write a GGUF file of LLaMA with a byte-level tokenizer of four special tokens, and no weights."""
    letters = sorted(byte_tokenizer().get_vocab())
    tokens = ["<unk>", "<im_start>", "<im_end>", "<pad>", *(token for token in letters if token != "<end>"), "12", "ab"]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 4 + [1] * (len(tokens) - 4))
    writer.add_token_merges(["1 2", "a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def model(**changes: Any) -> torch.nn.Module:
    return model_class("llama")(LlamaConfig(**{**LLAMA, **changes}))


def test_a_converted_tokenizer_has_the_special_tokens_of_the_gguf_file(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "model.gguf")
    tokenizer = load_tokenizer(str(tmp_path))
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    assert ids == (BOS, EOS, PAD, 0)
    assert tokenizer.chat_template == read_gguf_metadata(gguf)["tokenizer.chat_template"] == TEMPLATE
    # with companions_of, as convert writes it
    with companions_of(tmp_path) as directory:
        again = AutoTokenizer.from_pretrained(directory)
    assert (again.bos_token, again.eos_token, again.pad_token) == ("<im_start>", "<im_end>", "<pad>")
    assert again.chat_template == TEMPLATE


@pytest.mark.parametrize(("pre", "digits"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_digits_are_split_as_the_gguf_file_says(tmp_path: Path, pre: str, digits: list[str]) -> None:
    write_gguf(tmp_path / "model.gguf", pre=pre)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.tokenize("12") == digits
    text = "a b ▁ x² , y ."
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_words_are_split_as_the_gguf_file_says(tmp_path: Path) -> None:
    """LLaMA 3: digits by three, and a character before letters with them; an unknown rule is said."""
    write_gguf(tmp_path / "model.gguf", pre="llama-bpe")
    split = load_tokenizer(str(tmp_path)).backend_tokenizer.pre_tokenizer.pre_tokenize_str
    assert [word for word, _ in split("1234 a.com it's")] == ["123", "4", "Ġa", ".com", "Ġit", "'s"]
    write_gguf(tmp_path / "model.gguf", pre="tekken")
    with pytest.warns(UserWarning, match="splits text by rule 'tekken'"):
        load_tokenizer(str(tmp_path))


def test_a_damaged_gguf_file_is_named(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "model.gguf")
    content = gguf.read_bytes()
    for damaged in (content[:2000], b"GGML" + content[4:], content[:4] + b"\x09" + content[5:]):
        gguf.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.gguf is not a readable GGUF file: .*: download it again"):
            read_gguf_metadata(gguf)


def test_convert_keeps_tokenizer_template_and_generation_config(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save_pretrained(model(), source)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(source)
    generation = {"eos_token_id": [256, 7], "temperature": 0.6}
    (source / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    (source / "README.md").write_text("of the source", encoding="utf-8")
    Convert(source, target)()
    kept = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    assert [(target / name).read_bytes() for name in kept] == [(source / name).read_bytes() for name in kept]
    assert not (target / "README.md").exists()

    # a template of an earlier export does not stay next to another tokenizer
    (source / "chat_template.jinja").unlink()
    (target / "notes.txt").write_text("mine", encoding="utf-8")
    Convert(source, target)()
    assert not (target / "chat_template.jinja").exists()
    assert (target / "notes.txt").read_text(encoding="utf-8") == "mine"

    # a source without a tokenizer leaves the target's
    for path in list(source.iterdir()):
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    Convert(source, target)()
    assert (target / "tokenizer.json").is_file()


def test_companions_appear_with_the_weights_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nxd_memopt.checkpoint.huggingface import exporting

    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    seen: list[list[str]] = []

    def fail(incomplete: Path, target: Path) -> None:
        seen.append(sorted(path.name for path in incomplete.iterdir()))
        raise OSError("the disk is full")

    monkeypatch.setattr(exporting, "replace_directory", fail)
    with pytest.raises(OSError, match="the disk is full"):
        save_pretrained(model(), tmp_path / "export", companions=tmp_path / "tokenizer")
    assert seen == [["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]]
    assert not (tmp_path / "export").exists()
