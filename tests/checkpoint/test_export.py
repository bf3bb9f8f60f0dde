"""Export to Hugging Face directories, in one process: transformers loads it, failures and kills lose nothing."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nxd_memopt.checkpoint import load_config, load_pretrained, save_pretrained
from nxd_memopt.checkpoint.directories import incomplete_path, replaced_path
from nxd_memopt.checkpoint.files import write_safetensors
from nxd_memopt.commands.convert import Convert
from tests.checkpoint_models import IDS, assert_same, build, llama_config, neox_config, run_killed_at


@pytest.mark.parametrize(
    ("make_config", "tied", "max_shard_size_bytes"),
    [(llama_config, False, 2**30), (llama_config, True, 6000), (neox_config, False, 6000), (neox_config, True, 2**30)],
)
def test_transformers_loads_an_export(make_config, tied, max_shard_size_bytes, tmp_path):
    model = build(make_config(tie_word_embeddings=tied)).eval()
    save_pretrained(model, tmp_path / "out", max_shard_size_bytes=max_shard_size_bytes)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(again, model)
    assert torch.equal(again.eval()(IDS).logits, model(IDS).logits)
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (max_shard_size_bytes == 6000)
    assert type(model).__name__ in json.loads((tmp_path / "out" / "config.json").read_text())["architectures"]


def test_export_dtype_is_on_disk_and_in_the_config(tmp_path):
    model = build(llama_config())
    save_pretrained(model, tmp_path / "out", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert load_config(tmp_path / "out").dtype == torch.bfloat16
    assert model.lm_head.weight.dtype == torch.float32 and model.config.dtype != torch.bfloat16


def test_second_export_replaces_weights_and_keeps_other_files(tmp_path):
    out = tmp_path / "out"
    save_pretrained(build(llama_config()), out, max_shard_size_bytes=6000)
    (out / "tokenizer.json").write_text("{}")
    model = build(llama_config(), seed=1)
    save_pretrained(model, out)
    assert_same(AutoModelForCausalLM.from_pretrained(out), model)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_export_refuses_to_replace_what_is_no_export(tmp_path):
    model = build(llama_config())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="neither empty nor an export"):
        save_pretrained(model, tmp_path)
    save_pretrained(model, tmp_path / "out")
    (tmp_path / "out" / "runs").mkdir()
    with pytest.raises(ValueError, match=r"subdirectories \['runs'\]"):
        save_pretrained(model, tmp_path / "out")
    with pytest.raises(ValueError, match="is a file"):
        save_pretrained(model, tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def content_of(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_weights_of_another_program_are_refused_and_unchanged(tmp_path):
    """A transformers model, and an own export of which another program has written one file anew."""
    source, foreign, mixed = (tmp_path / name for name in ("source", "foreign", "mixed"))
    for directory in (source, foreign):
        build(llama_config()).save_pretrained(directory)
    save_pretrained(build(llama_config()), mixed, max_shard_size_bytes=6000)
    file = next(mixed.glob("model-00002*"))
    save_file(load_file(file), file, metadata={"format": "pt"})
    before = content_of(tmp_path)
    for target in (foreign, mixed):
        for action in (lambda target=target: save_pretrained(build(llama_config()), target), Convert(source, target)):
            with pytest.raises(ValueError, match=r"neither empty nor an export of nxd_memopt: .*move this one away"):
                action()
    assert content_of(tmp_path) == before
    for _ in range(2):
        Convert(source, tmp_path / "new")()
    model = AutoModelForCausalLM.from_pretrained(source)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "new"), model)


def test_equal_weights_are_equal_files(tmp_path):
    """And safetensors' own reader sees what was written, of every kind of tensor."""
    weights = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.tensor(3), "c": torch.zeros(0, 2).bfloat16()}
    for name in ("first", "second"):
        write_safetensors(tmp_path / name, weights)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    found = load_file(tmp_path / "first")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def test_disk_without_room_is_an_error_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"needs \d+ bytes but .* has 1000 left"):
        save_pretrained(build(llama_config()), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="a file size limit stands for a full disk")
def test_failed_write_keeps_the_previous_export(tmp_path):
    out, previous = tmp_path / "out", build(llama_config())
    save_pretrained(previous, out)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=r"could not write .*model.safetensors: .*free disk space"):
            save_pretrained(build(llama_config(), seed=1), out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(AutoModelForCausalLM.from_pretrained(out), previous)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_kill_at_any_moment_leaves_a_complete_export(tmp_path):
    old, new = build(llama_config(num_hidden_layers=1)), build(llama_config(num_hidden_layers=1), seed=1)
    kills, outcomes, finished = 0, set(), False
    while not finished:
        parent = tmp_path / str(kills)
        out = parent / "out"
        save_pretrained(old, out)
        finished = run_killed_at(kills, parent, lambda out=out: save_pretrained(new, out, max_shard_size_bytes=6000))
        survivor = out if out.exists() else replaced_path(out)
        model = build(load_config(survivor), seed=2)
        load_pretrained(model, survivor)
        outcome = "new" if torch.equal(model.lm_head.weight, new.lm_head.weight) else "old"
        assert_same(model, new if outcome == "new" else old)
        outcomes.add(outcome)
        save_pretrained(old, out)
        assert [path.name for path in parent.iterdir()] == ["out"]
        kills += 1
    assert kills > 10 and outcomes == {"old", "new"}


def test_export_cut_off_between_the_renames_says_what_to_do(tmp_path):
    out = tmp_path / "out"
    save_pretrained(build(llama_config()), out)
    out.rename(replaced_path(out))
    incomplete_path(out).mkdir()
    with pytest.raises(ValueError, match=r"its predecessor is complete: rename .*\.out\.replaced"):
        load_config(out)
