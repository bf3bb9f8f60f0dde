"""Weights in neuronx-distributed's rank files: LLaMA and GPT-NeoX there and back, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nxd_memopt.checkpoint.nxd import from_nxd, load_nxd, to_nxd
from nxd_memopt.checkpoint.nxd.parts import Layout
from nxd_memopt.checkpoint.nxd.writing import Target, write_weights
from nxd_memopt.models.gpt_neox import GPTNeoXForCausalLM
from nxd_memopt.models.llama import LlamaForCausalLM
from tests.checkpoint_models import assert_same, build, llama_config, neox_config
from tests.nxd_fixtures import rank_name, read_xser, write_rank


def silent(line):
    del line


# Weights of the samples

HEADS, KV_HEADS, DIM, HIDDEN = 8, 2, 4, 32


def gqa_config(**changes):
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_size": HIDDEN}
    return llama_config(**{**sizes, "num_hidden_layers": 3, "tie_word_embeddings": False, **changes})


def hugging_face(tmp_path, config):
    model = build(config)
    model.save_pretrained(tmp_path / "hf")
    return model


def heads_of(order, rank):
    """The query heads and the KV head of a rank: 8 heads in groups of 4, two KV heads, each on four of eight ranks."""
    if order == "consecutive":
        return [rank], rank // 4
    # trn1: the KV heads repeat as K0 K1 K0 K1 ..., the query heads are Q0 Q4 Q1 Q5 Q2 Q6 Q3 Q7
    return [[0, 4, 1, 5, 2, 6, 3, 7][rank]], rank % 2


def sample_state(state, order, rank, form="linear"):
    """A rank's state dict of NxD's LLaMA sample at T=8, spelled out head by head."""
    query, kv = heads_of(order, rank)
    mine = {}
    for name, full in state.items():
        if "q_proj" in name or "o_proj" in name:
            by_head = full.unflatten(0 if "q_proj" in name else 1, (HEADS, DIM))
            part = by_head[query].flatten(0, 1) if "q_proj" in name else by_head[:, query].flatten(1, 2)
            mine[name.replace("q_proj.weight", "qkv_proj.weight_q")] = part.clone()
        elif "k_proj" in name or "v_proj" in name:
            letter = "k" if "k_proj" in name else "v"
            part = full.unflatten(0, (KV_HEADS, DIM))[kv].clone()
            mine[name.replace(f"{letter}_proj.weight", f"qkv_proj.weight_{letter}")] = part
        elif "gate_proj" in name:
            up = state[name.replace("gate_proj", "up_proj")]
            joined = [full.chunk(8)[rank], up.chunk(8)[rank]]
            mine[name.replace("gate_proj", "gate_up_proj")] = torch.cat(joined)
        elif "up_proj" in name:
            continue
        elif "down_proj" in name:
            mine[name] = full.chunk(8, 1)[rank].clone()
        elif "embed_tokens" in name or "lm_head" in name:
            mine[name] = full.chunk(8)[rank].clone()
        else:
            mine[name] = full.clone()
    if form == "fused":
        for name in [name for name in mine if name.endswith("weight_q")]:
            mine[f"{name}kv"] = torch.cat([mine.pop(f"{name[:-1]}{letter}") for letter in "qkv"])
    return mine


def stage_of(name):
    """Three layers over two stages: one, and two; the embedding first, the rest last."""
    if "embed_tokens" in name or "layers.0." in name:
        return 0
    return 1


@pytest.mark.parametrize(("order", "form"), [("strided", "linear"), ("consecutive", "linear"), ("strided", "fused")])
def test_llama_with_kv_replicas(order, form, tmp_path):
    """Files written head by head load; files written here are those, tensor by tensor; stages and xser included."""
    model = hugging_face(tmp_path, gqa_config())
    state = model.state_dict()
    for rank in range(8):
        for stage in range(2):
            mine = {n: v for n, v in sample_state(state, order, rank, form).items() if stage_of(n) == stage}
            write_rank(tmp_path / "theirs" / "model" / rank_name(rank, stage), mine, xser=form == "fused")
    from_nxd(tmp_path / "theirs", tmp_path / "back", config=tmp_path / "hf" / "config.json", progress=silent)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == state.keys()
    for name, want in state.items():
        assert torch.equal(back[name], want), name
    ours = LlamaForCausalLM(gqa_config())
    load_nxd(ours, tmp_path / "theirs")
    assert_same(ours, model)

    target = Target(Layout(8, 4, order), form, 2, form == "fused")
    to_nxd(tmp_path / "hf", tmp_path / "ours", target, progress=silent)
    for rank in range(8):
        for stage in range(2):
            file = tmp_path / "ours" / "model" / rank_name(rank, stage)
            written = read_xser(file) if form == "fused" else torch.load(file, weights_only=True)
            want = {n: v for n, v in sample_state(state, order, rank, form).items() if stage_of(n) == stage}
            assert written.keys() == want.keys()
            for name in want:
                assert torch.equal(written[name], want[name]), (rank, name)


@pytest.mark.parametrize(
    ("form", "kv_heads", "files"), [("separate", 4, 1), ("stacked", 8, 5), ("linear", 4, 1), ("fused", 2, 5)]
)
def test_llama_there_and_back(form, kv_heads, files, tmp_path):
    """Hugging Face -> NxD -> Hugging Face is bit-equal, with grouped heads, over two ranks, in bf16."""
    model = build(gqa_config(num_key_value_heads=kv_heads)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    to_nxd(tmp_path / "hf", tmp_path / "nxd", Target(Layout(2), form, 3), progress=silent)
    lines: list[str] = []
    total_bytes = sum(param.numel() * 2 for param in model.parameters())
    size = 2 * total_bytes // (files + 1)  # no tensor is larger; half-filled files cannot be fewer than asked for
    config = tmp_path / "hf" / "config.json"
    from_nxd(tmp_path / "nxd", tmp_path / "back", config=config, max_shard_size_bytes=size, progress=lines.append)
    written = list((tmp_path / "back").glob("*.safetensors"))
    assert len(lines) == 1 + len(written) and len(written) == 1 if files == 1 else len(written) > 2
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert back.dtype == torch.bfloat16
    assert_same(back, model)


@pytest.mark.parametrize("stride", [1, 3])
def test_gpt_neox_there_and_back(stride, tmp_path):
    """stride 1 cuts query_key_value as the sample's attention reads it; stride 3 as its layer's stride cuts it."""
    model = hugging_face(tmp_path, neox_config())
    to_nxd(tmp_path / "hf", tmp_path / "nxd", Target(Layout(2, query_key_value_stride=stride)), progress=silent)
    second = torch.load(tmp_path / "nxd" / "model" / rank_name(1), weights_only=True)
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    full = model.state_dict()[name]
    assert torch.equal(second[name], torch.cat(full.chunk(2 * stride)[1::2]))
    assert torch.equal(second["embed_out.weight"], model.state_dict()["lm_head.weight"].chunk(2)[1])
    ours = GPTNeoXForCausalLM(neox_config())
    load_nxd(ours, tmp_path / "nxd", query_key_value_stride=stride)
    assert_same(ours, model)
    config = tmp_path / "hf" / "config.json"
    from_nxd(tmp_path / "nxd", tmp_path / "back", config=config, query_key_value_stride=stride, progress=silent)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "back"), model)


def test_entries_without_a_counterpart_are_listed(tmp_path):
    """``checkpointing.save``'s layout, with a step next to the model and buffers that the model computes."""
    model = hugging_face(tmp_path, neox_config())
    state = {**model.state_dict(), "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9)}
    state["embed_out.weight"] = state.pop("lm_head.weight")
    content = {"model": state, "global_step": 7, "optimizer": {"lr": 1.0}}
    write_rank(tmp_path / "nxd" / "tp_rank_00_pp_rank_00" / "checkpoint.pt", content)
    ours = GPTNeoXForCausalLM(neox_config())
    report = load_nxd(ours, tmp_path / "nxd")
    assert_same(ours, model)
    assert len(report) == 3 and all(line.startswith("left out: ") for line in report)
    assert any("global_step: int 7" in line for line in report) and any("masked_bias" in line for line in report)
    lines = []
    from_nxd(tmp_path / "nxd", tmp_path / "back", config=tmp_path / "hf" / "config.json", progress=lines.append)
    assert all(line in lines for line in report)


# What is refused


def converted(tmp_path, **changes):
    hugging_face(tmp_path, gqa_config())
    layout = Layout(8, 4, "strided")
    to_nxd(tmp_path / "hf", tmp_path / "nxd", Target(layout, "linear"), progress=silent)
    return lambda **options: from_nxd(
        tmp_path / "nxd", tmp_path / "back", config=tmp_path / "hf" / "config.json", progress=silent, **options
    )


def change(path, function):
    state = torch.load(path, weights_only=True)
    function(state)
    torch.save(state, path)


NAME = "model.layers.1.self_attn.qkv_proj.weight_k"


def test_the_order_of_kv_replicas_is_found_or_asked_for(tmp_path):
    convert = converted(tmp_path)
    convert(kv_order="strided")
    with pytest.raises(ValueError, match=r"equal in strided, not in consecutive: pass kv_order"):
        convert(kv_order="consecutive")
    for rank in range(8):  # equal heads in every layer: nothing tells the orders apart
        change(
            tmp_path / "nxd" / "model" / rank_name(rank),
            lambda state: [value.fill_(1) for name, value in state.items() if "weight_k" in name or "weight_v" in name],
        )
    with pytest.raises(ValueError, match=r"order of their 4 replicas cannot be found: pass kv_order"):
        convert()
    convert(kv_order="strided")
    # One layer alone that contradicts the order found in another.
    change(tmp_path / "nxd" / "model" / rank_name(5), lambda state: state[NAME].fill_(2))
    with pytest.raises(ValueError, match=r"neither order|differs between tensor-parallel ranks 1 and 5"):
        convert(kv_order="strided")


def test_ranks_of_other_saves_are_refused(tmp_path):
    convert = converted(tmp_path)
    folder = tmp_path / "nxd" / "model"
    change(folder / rank_name(3), lambda state: state["model.norm.weight"].fill_(9))
    with pytest.raises(ValueError, match=r"model.norm.weight differs between .* ranks 0 and 3.*accept_drift"):
        convert()
    assert not (tmp_path / "back").exists()
    # The last rank too: the ranks are read in order, and the first one counts.
    change(folder / rank_name(7), lambda state: state["model.norm.weight"].fill_(9))
    with pytest.warns(UserWarning, match=r"model.norm.weight differs .* rank 0's is taken"):
        convert(accept_drift=True)
    stored = torch.load(folder / rank_name(0), weights_only=True)["model.norm.weight"]
    (file,) = (tmp_path / "back").glob("*.safetensors")
    assert torch.equal(load_file(file)["model.norm.weight"], stored)
    shutil.rmtree(tmp_path / "back")
    (folder / rank_name(3)).unlink()
    with pytest.raises(
        ValueError, match=r"up to dp_rank 0 tp_rank 7 pp_rank 0 but lacks 1 of 8: \['dp_rank 0 tp_rank 3"
    ):
        convert()
    for rank in range(4, 8):
        (folder / rank_name(rank)).unlink()
    with pytest.raises(ValueError, match=r"written with tensor_model_parallel_size 3, .* not 8"):
        convert(tensor_model_parallel_size=8)
    with pytest.raises(ValueError, match=r"KV rows on each of 3 ranks, config.json says 8"):
        convert()


def test_a_bad_shard_is_found_before_any_parameter_changes(tmp_path):
    """The last parameters of the files: all others would have been loaded."""
    converted(tmp_path)
    file = tmp_path / "nxd" / "model" / rank_name(1)
    stored = torch.load(file, weights_only=True)
    model = LlamaForCausalLM(gqa_config())
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    norm, head = stored["model.norm.weight"], stored["lm_head.weight"]
    for name, value in (
        ("model.norm.weight", norm + 1),
        ("lm_head.weight", head[1:].clone()),
        ("lm_head.weight", head.half()),
        ("model.layers.2.self_attn.qkv_proj.weight_v", stored["model.layers.2.self_attn.qkv_proj.weight_v"] + 1),
    ):
        torch.save({**stored, name: value}, file)
        with pytest.raises(ValueError, match=name):
            load_nxd(model, tmp_path / "nxd")
        assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


def test_tied_tensors_with_a_nan_are_equal(tmp_path):
    """A NaN differs from itself in ``torch.equal``; a run that diverged can still be read."""
    config = gqa_config(tie_word_embeddings=True)
    state = {name: value.detach() for name, value in build(config).state_dict().items()}
    state["model.embed_tokens.weight"][0, 0] = float("nan")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    write_weights(state, config.to_dict(), tmp_path / "nxd", Target(Layout(2)), silent)
    assert "lm_head.weight" in torch.load(tmp_path / "nxd" / "model" / rank_name(0), weights_only=True)
    model = LlamaForCausalLM(config)
    load_nxd(model, tmp_path / "nxd")
    assert model.lm_head.weight[0, 0].isnan() and model.lm_head.weight is model.model.embed_tokens.weight
    config.save_pretrained(tmp_path)
    from_nxd(tmp_path / "nxd", tmp_path / "back", config=tmp_path / "config.json", progress=silent)
    assert "lm_head.weight" not in load_file(tmp_path / "back" / "model.safetensors")


def test_truncated_and_foreign_files_are_refused(tmp_path):
    convert = converted(tmp_path)
    file = tmp_path / "nxd" / "model" / rank_name(2)
    complete = file.read_bytes()
    file.write_bytes(complete[:-100])
    with pytest.raises(ValueError, match=rf"{file.name} \({len(complete) - 100} bytes\) cannot be read"):
        convert()
    torch.save(torch.zeros(2), file)
    with pytest.raises(ValueError, match="holds a Tensor, not a state dict"):
        convert()
    torch.save({"weight": torch.zeros(2)}, file)
    with pytest.raises(ValueError, match="differ in their entries"):
        convert()
    file.write_bytes(complete)
    for rank in range(8):
        change(tmp_path / "nxd" / "model" / rank_name(rank), lambda state: state.update(extra=torch.zeros(2)))
    with pytest.raises(ValueError, match=r"hold 1 unknown tensors, \['extra'\]"):
        convert()


def test_another_models_config_is_refused(tmp_path):
    converted(tmp_path)
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    for changes, message in (
        (
            {"intermediate_size": 32},
            r"gate_up_proj.weight of tensor-parallel rank 0 is \[6, 32\] .* expected \[8, 32\]",
        ),
        ({"num_hidden_layers": 2}, r"hold 8 unknown tensors"),
        ({"num_hidden_layers": 4}, r"lack 8 parameters of the model"),
        ({"model_type": "bert"}, "model_type 'bert': only"),
        ({"hidden_size": None}, "no positive integer hidden_size: pass the model's complete config.json"),
        ({"tie_word_embeddings": True}, "ties the output head to the embedding"),
    ):
        path.write_text(json.dumps({**config, **changes}))
        with pytest.raises(ValueError, match=message):
            from_nxd(tmp_path / "nxd", tmp_path / "back", config=path, progress=silent)


def test_rank_files_of_another_program_are_not_replaced(tmp_path):
    hugging_face(tmp_path, gqa_config())
    tag = tmp_path / "tag"
    for _ in range(2):
        to_nxd(tmp_path / "hf", tag, Target(Layout(2)), progress=silent)
    # neuronx-distributed writes this text into both of its markers.
    (tag / "done").write_text("1")
    before = {path: path.read_bytes() for path in tag.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="not only a checkpoint of weights of nxd_memopt: choose another"):
        to_nxd(tmp_path / "hf", tag, Target(Layout(1)), progress=silent)
    assert {path: path.read_bytes() for path in tag.rglob("*") if path.is_file()} == before


def test_an_interrupted_tag_is_refused(tmp_path):
    hugging_face(tmp_path, gqa_config())
    to_nxd(tmp_path / "hf", tmp_path / "tag", Target(Layout(2), "linear"), progress=silent)
    (tmp_path / "tag" / "done").unlink()
    for directory in (tmp_path / "tag", tmp_path / "tag" / "model"):
        with pytest.raises(ValueError, match="has the marker 'checkpoint' and no 'done': its save was interrupted"):
            from_nxd(directory, tmp_path / "back", config=tmp_path / "hf" / "config.json", progress=silent)
    (tmp_path / "tag" / "checkpoint").unlink()  # as neuronx-distributed's converter leaves it
    from_nxd(tmp_path / "tag", tmp_path / "back", config=tmp_path / "hf" / "config.json", progress=silent)


@pytest.mark.parametrize(
    ("layout", "form", "stages", "message"),
    [
        (Layout(8, 2, "strided"), "linear", 1, "num_key_value_heads 2 with kv_size_multiplier 2 is not divisible .* 8"),
        (Layout(4, 2), "separate", 1, "needs GQAQKVColumnParallelLinear"),
        (Layout(2), "stacked", 1, "num_key_value_heads 2 differs from num_attention_heads 8"),
        (Layout(2), "separate", 4, "pipeline_model_parallel_size 4 must be at least 1 and at most the 3 layers"),
        (Layout(4), "linear", 1, "num_key_value_heads 2 .*_size 4: use kv_size_multiplier 2"),
        (Layout(16, 8), "linear", 1, "num_attention_heads 8 is not divisible by tensor_model_parallel_size 16"),
        (Layout(2, query_key_value_stride=3), "separate", 1, "query_key_value_stride is GPT-NeoX's"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout, form, stages, message, tmp_path):
    hugging_face(tmp_path, gqa_config())
    with pytest.raises(ValueError, match=message):
        to_nxd(tmp_path / "hf", tmp_path / "nxd", Target(layout, form, stages), progress=silent)
    assert not (tmp_path / "nxd").exists()
    with pytest.raises(ValueError, match="is not divisible"):
        Layout(4, 3)
