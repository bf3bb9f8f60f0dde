"""Import from Hugging Face directories and GGUF files, in one process; the models are transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from nxd_memopt.checkpoint import load_config, load_pretrained
from nxd_memopt.commands.plan import command as plan_command
from nxd_memopt.models import model_class
from tests.checkpoint_models import assert_same, build, llama_config, neox_config
from tests.reference import assert_says, error_message
from tests.reference_models import phi3_config


def write_bin(model, directory, *, shards=1, legacy=False):
    """Write what transformers 4 wrote."""
    directory.mkdir()
    model.config.save_pretrained(directory)
    state = dict(model.state_dict())
    new_format = {"_use_new_zipfile_serialization": not legacy}
    if shards == 1:
        torch.save(state, directory / "pytorch_model.bin", **new_format)
        return
    weight_map = {name: f"pytorch_model-{i % shards + 1:05d}-of-{shards:05d}.bin" for i, name in enumerate(state)}
    for file_name in set(weight_map.values()):
        shard = {name: state[name] for name in state if weight_map[name] == file_name}
        torch.save(shard, directory / file_name, **new_format)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


WRITERS = {
    "safetensors": lambda model, path: model.save_pretrained(path),
    "sharded safetensors": lambda model, path: model.save_pretrained(path, max_shard_size="5KB"),
    "bin": write_bin,
    "sharded bin": lambda model, path: write_bin(model, path, shards=3),
    "bin from before torch 1.6": lambda model, path: write_bin(model, path, legacy=True),
}


@pytest.mark.parametrize("layout", WRITERS)
def test_every_layout_loads_and_is_cast_to_the_parameters_dtype(layout, tmp_path):
    reference = build(llama_config())
    WRITERS[layout](reference, tmp_path / "in")
    model = build(load_config(tmp_path / "in"), seed=1).bfloat16()
    load_pretrained(model, tmp_path / "in")
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert_same(model, reference)


def test_buffers_of_old_checkpoints_are_passed_over(tmp_path):
    reference = build(neox_config())
    names = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")
    buffers = {f"gpt_neox.layers.1.{name}": torch.ones(3) for name in names}
    save_file({**reference.state_dict(), **buffers}, tmp_path / "model.safetensors")
    model = build(neox_config(), seed=1)
    load_pretrained(model, tmp_path)
    assert_same(model, reference)


UP = "model.layers.0.mlp.up_proj.weight"
REFUSED = {
    "other name": (
        lambda state: state.update({"model.norn.weight": state.pop("model.norm.weight")}),
        ("has 1", "norn"),
    ),
    "no head": (lambda state: state.pop("lm_head.weight"), ("lacks 1", "lm_head.weight", "tie_word_embeddings=true")),
    "eight bits": (
        lambda state: state.update({UP: state[UP].to(torch.float8_e4m3fn)}),
        (UP, "float8_e4m3fn", "quantized"),
    ),
    "integers": (lambda state: state.update({UP: state[UP].int()}), (UP, "int32", "quantized")),
    "other shape": (lambda state: state.update({UP: torch.ones(28, 16)}), (UP, "[28, 16]", "[24, 16]")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_of_another_model_are_refused_before_a_parameter_changes(case, tmp_path):
    model = build(llama_config())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = dict(build(llama_config(), seed=1).state_dict())
    change, facts = REFUSED[case]
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    assert_says(error_message(lambda: load_pretrained(model, tmp_path)), str(tmp_path), *facts)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_fused_weight_of_another_model_is_refused(tmp_path):
    state = dict(build(phi3_config()).state_dict())
    name = "model.layers.1.self_attn.qkv_proj.weight"
    state[name] = state[name][:-1].clone()
    save_file(state, tmp_path / "model.safetensors")
    message = error_message(lambda: load_pretrained(model_class("phi3")(phi3_config()), tmp_path))
    assert_says(message, str(tmp_path), f"{name} has 47 rows", "v_proj.weight", "[32, 8, 8]")


@pytest.mark.parametrize("make_config", [llama_config, neox_config, phi3_config])
def test_a_base_model_loads_as_in_transformers(make_config, tmp_path):
    """Saved from transformers' base class, whose names lack the prefix of the backbone; the head is tied."""
    reference = AutoModelForCausalLM.from_config(make_config(tie_word_embeddings=True))
    getattr(reference, reference.base_model_prefix).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = model_class(theirs.config.model_type)(load_config(tmp_path))
    load_pretrained(ours, tmp_path)
    ids = torch.arange(12)[None]
    torch.testing.assert_close(ours.eval()(ids).logits, theirs.eval()(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_meta_parameters_are_created_with_their_attributes_and_ties(tied, tmp_path):
    reference = build(llama_config(tie_word_embeddings=tied))
    reference.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = build(llama_config(tie_word_embeddings=tied))
    model.model.norm.weight.sequence_parallel_enabled = True
    model.model.norm.weight.requires_grad_(False)
    load_pretrained(model, tmp_path)
    assert_same(model, reference)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.model.norm.weight.sequence_parallel_enabled and not model.model.norm.weight.requires_grad
    assert isinstance(model.model.norm.weight, torch.nn.Parameter)


def test_tied_checkpoint_may_hold_the_output_head_too(tmp_path):
    reference = build(llama_config(tie_word_embeddings=True))
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    assert "lm_head.weight" in state
    save_file(state, tmp_path / "model.safetensors")
    model = build(llama_config(tie_word_embeddings=True), seed=1)
    load_pretrained(model, tmp_path)
    assert_same(model, reference)


@pytest.mark.parametrize("tied", [True, False])
def test_copies_of_a_tensor_that_differ_are_refused(tied, tmp_path):
    """A tied head that is stored with other values, and an untied one under both of its names."""
    make_config = llama_config if tied else neox_config
    state = {name: tensor.clone() for name, tensor in build(make_config(tie_word_embeddings=tied)).state_dict().items()}
    other = "lm_head.weight" if tied else "embed_out.weight"
    state[other] = state["lm_head.weight"] + 1
    save_file(state, tmp_path / "model.safetensors")
    message = error_message(lambda: load_pretrained(build(make_config(tie_word_embeddings=tied)), tmp_path))
    assert_says(message, other, "differ, and are one tensor of the model", "tie_word_embeddings")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "index.json cannot be read"),
        ('{"weight_map": {"a": "part.safetensors", "b": 3}}', "has no weight_map of file names"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "files that are not there"),
        ('{"weight_map": {"a": "part.safetensors"}}', "places 'a' in part.safetensors, which lacks it"),
    ],
)
def test_damaged_index_is_an_error(index, message, tmp_path):
    directory = tmp_path / "in"
    directory.mkdir()
    (directory / "model.safetensors.index.json").write_text(index)
    save_file({"b": torch.ones(2)}, directory / "part.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    with pytest.raises(ValueError, match=message):
        load_pretrained(build(llama_config()), directory)


@pytest.mark.parametrize("layout", ["safetensors", "bin"])
@pytest.mark.parametrize("kept_bytes", [4, 5000])
def test_truncated_weights_are_named_with_a_remedy(layout, kept_bytes, tmp_path):
    directory = tmp_path / "in"
    WRITERS[layout](build(llama_config()), directory)
    weights = next(path for path in directory.iterdir() if path.suffix in (".safetensors", ".bin"))
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    with pytest.raises(ValueError, match=rf"{weights.name} \({kept_bytes} bytes\) .*copy"):
        load_pretrained(build(llama_config()), directory)


class Payload:
    """Stands for code in a pickle: it would create a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_code_is_refused_and_not_run(tmp_path):
    torch.save({"a": Payload(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds other objects than tensors"):
        load_pretrained(build(llama_config()), tmp_path)
    assert not (tmp_path / "ran").exists()


def test_directories_without_weights_are_errors(tmp_path):
    model = build(llama_config())
    with pytest.raises(ValueError, match=r"absent does not exist: .*hf download"):
        load_pretrained(model, tmp_path / "absent")
    with pytest.raises(ValueError, match="holds no weights: expected one of"):
        load_pretrained(model, tmp_path)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ValueError, match=r"a.gguf is not a readable GGUF file"):
        load_pretrained(model, tmp_path)
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ValueError, match=r"2 GGUF files, \['a.gguf', 'b.gguf'\]"):
        load_pretrained(model, tmp_path)


def test_an_adapter_directory_is_named_as_one(tmp_path):
    """PEFT's own files, alone and beside a config.json, and with a base that PEFT does not know."""
    base = build(llama_config())
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    content = json.loads(file.read_text()) | {"base_model_name_or_path": "some/base"}
    file.write_text(json.dumps(content))
    remedy = ("has adapters (LoRA) of some/base, and no model", "with the adapters merged")
    assert_says(error_message(lambda: load_config(tmp_path)), str(tmp_path), *remedy)
    arguments = ["--model", str(tmp_path), "--device", "h200"]
    assert_says(error_message(lambda: plan_command.main(arguments)), str(tmp_path), *remedy)
    llama_config().save_pretrained(tmp_path)
    assert_says(error_message(lambda: load_pretrained(build(load_config(tmp_path)), tmp_path)), *remedy)
    file.write_text(json.dumps(content | {"base_model_name_or_path": None}))
    assert_says(error_message(lambda: load_pretrained(base, tmp_path)), "of a model that it does not name")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json"),
        ("[1]", "must hold a JSON object"),
        ("{", "config.json cannot be read"),
        ('{"model_type": "lama"}', "unknown model_type 'lama': did you mean 'llama'"),
        ("{}", "unknown model_type None"),
    ],
)
def test_config_that_cannot_be_used_is_an_error(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path)
