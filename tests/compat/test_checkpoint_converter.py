"""``CheckpointConverterBase``: files of each rank and back, subclasses' hooks, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from tests.alias_modules import import_without_alias
from tests.nxd_fixtures import rank_name, read_xser

CheckpointConverterBase = import_without_alias("checkpoint_converter").CheckpointConverterBase

HIDDEN, WIDTH, DIM = 16, 12, 2


def weights(kv_heads):
    torch.manual_seed(0)
    shapes = {"model.embed_tokens": (8, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (8, HIDDEN)}
    for i in range(3):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (kv_heads * DIM, HIDDEN) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj": (WIDTH, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (HIDDEN, WIDTH), f"{layer}.input_layernorm": (HIDDEN,)}
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


class Renaming(CheckpointConverterBase):
    """As an example's subclass: the model calls its final norm otherwise."""

    def pre_process_full_state_before_tp_conversion(self, full_state, args):
        full_state["norm_f.weight"] = full_state.pop("model.norm.weight")
        return full_state

    def post_process_full_state_after_tp_conversion(self, full_state, args):
        full_state["model.norm.weight"] = full_state.pop("norm_f.weight")
        return full_state


def convert(tmp_path, source, target, direction, *options, cls=Renaming):
    converter = cls()
    arguments = ["--input_dir", source, "--output_dir", target, "--config", tmp_path / "config.json"]
    parser = converter.get_arg_parser()
    args, _ = parser.parse_known_args([*map(str, arguments), f"--convert_{direction}", *map(str, options)])
    converter.run(args)


def prepare(tmp_path, kv_heads=2):
    state = weights(kv_heads)
    torch.save(state, tmp_path / "full.pt")
    config = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "hidden_size": HIDDEN, "num_hidden_layers": 3}
    config["ffn_config"] = {"ffn_hidden_size": WIDTH}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return state


@pytest.mark.parametrize(
    ("options", "kv_heads", "xser"),
    [
        ("--hw_backend trn1 --tp_size 2 --pp_size 3", 2, 0),
        ("--hw_backend trn1 --tp_size 2 --qkv_linear 1 --fuse_qkv 1", 2, 1),
        ("--hw_backend trn1 --tp_size 4 --pp_size 2 --kv_size_multiplier 2 --qkv_linear True --fuse_qkv True", 2, 1),
        ("--hw_backend trn2 --tp_size 4 --kv_size_multiplier 2 --qkv_linear 1", 2, 0),
        ("--hw_backend trn1 --tp_size 4 --coalesce_qkv 1 --qkv_linear False", 8, 1),
        ("--hw_backend trn1 --tp_size 2 --coalesce_qkv 1 --qkv_linear False --pp_size 3", 4, 0),
        ("--hw_backend trn1 --tp_size 2 --i_tp_round_factor 4", 2, 1),
        # A model without grouped heads, whose config.json has LLaMA's name of the width.
        ("--hw_backend trn1 --tp_size 2 --coalesce_qkv 1 --qkv_linear 0 --i_tp_round_factor 4", None, 0),
    ],
)
def test_there_and_back(options, kv_heads, xser, tmp_path):
    """Also through the other format, into which the rank files are converted in between."""
    state = prepare(tmp_path, kv_heads or 8)
    if kv_heads is None:
        config = {"num_attention_heads": 8, "hidden_size": HIDDEN, "num_hidden_layers": 3, "intermediate_size": WIDTH}
        (tmp_path / "config.json").write_text(json.dumps(config))
    words = options.split()
    convert(tmp_path, tmp_path / "full.pt", tmp_path / "nxd", "from_full_state", *words, "--save_xser", xser)
    direction = ("to_xser", "from_xser")[xser]
    convert(tmp_path, tmp_path / "nxd/model", tmp_path / "other", direction, *words)
    convert(tmp_path, tmp_path / "other/model", tmp_path / "x", "to_full_state", *words, "--load_xser", 1 - xser)
    back = torch.load(tmp_path / "x" / "checkpoint.pt", weights_only=True)
    assert back.keys() == state.keys()
    for name, want in state.items():
        assert torch.equal(back[name], want), name


def test_shards_in_trn1s_order(tmp_path):
    """T=4, two KV heads, each twice: K0 K1 K0 K1; of eight query heads, rank 1 has 4 and 5, rank 2 has 2 and 3."""
    state = prepare(tmp_path)
    options = ["--hw_backend", "trn1", "--tp_size", 4, "--kv_size_multiplier", 2, "--qkv_linear", 1, "--save_xser", 1]
    convert(tmp_path, tmp_path / "full.pt", tmp_path / "nxd", "from_full_state", *options)
    layer = "model.layers.1.self_attn"
    heads = {0: (0, 0), 1: (1, 4), 2: (0, 2), 3: (1, 6)}
    for rank, (kv, query) in heads.items():
        mine = read_xser(tmp_path / "nxd" / "model" / rank_name(rank))
        assert torch.equal(mine[f"{layer}.qkv_proj.weight_k"], state[f"{layer}.k_proj.weight"][kv * DIM :][:DIM])
        wanted = slice(query * DIM, (query + 2) * DIM)
        assert torch.equal(mine[f"{layer}.qkv_proj.weight_q"], state[f"{layer}.q_proj.weight"][wanted])
        assert torch.equal(mine[f"{layer}.o_proj.weight"], state[f"{layer}.o_proj.weight"][:, wanted])
        gate_up = [state[f"model.layers.1.mlp.{name}_proj.weight"].chunk(4)[rank] for name in ("gate", "up")]
        assert torch.equal(mine["model.layers.1.mlp.gate_up_proj.weight"], torch.cat(gate_up))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tp_size 4 --kv_size_multiplier 4 --qkv_linear 1", "4 times 2 KV heads is not tp_size 4: use"),
        ("--tp_size 2 --pp_size 4", "4 pipeline stages need as many layers, the state dict has 3"),
        ("--tp_size 5", "is not divisible by 5 ranks"),
        ("--tp_size 2 --fuse_qkv 1", "--fuse_qkv needs --qkv_linear"),
        ("--tp_size 2 --coalesce_qkv 1 --qkv_linear 1", "are two forms of query, key and value"),
        ("--tp_size 4 --coalesce_qkv 1 --qkv_linear 0", "KV heads 2 is not divisible by 4 ranks"),
        ("--tp_size 2 --model_style megatron", "megatron is not offered"),
        ("--tp_size 2 --pad_attn_heads 1", "--pad_attn_heads is not offered"),
        ("--tp_size 2 --convert_to_xser", "exactly one of"),
    ],
)
def test_refusals(options, message, tmp_path):
    prepare(tmp_path)
    with pytest.raises(ValueError, match=message):
        convert(
            tmp_path, tmp_path / "full.pt", tmp_path / "x", "from_full_state", "--hw_backend", "trn1", *options.split()
        )


def test_a_missing_rank_file_and_the_other_order_are_refused(tmp_path):
    prepare(tmp_path)
    options = ["--tp_size", 4, "--kv_size_multiplier", 2, "--qkv_linear", 1, "--hw_backend"]
    convert(tmp_path, tmp_path / "full.pt", tmp_path / "nxd", "from_full_state", *options, "trn1")
    model = tmp_path / "nxd" / "model"
    with pytest.raises(ValueError, match="pass the other --hw_backend"):
        convert(tmp_path, model, tmp_path / "x", "to_full_state", *options, "trn2")
    (model / rank_name(2)).unlink()
    with pytest.raises(ValueError, match=r"none of .*tp_rank_02.* exists: check --input_dir, --tp_size"):
        convert(tmp_path, model, tmp_path / "x", "to_full_state", *options, "trn1")


def test_padded_files_have_the_rounded_width(tmp_path):
    """Width 12 over two ranks is 6, rounded to 8; ``test_there_and_back`` reads them back without the padding."""
    state = prepare(tmp_path)
    options = ["--hw_backend", "trn1", "--tp_size", 2, "--i_tp_round_factor", 4]
    convert(tmp_path, tmp_path / "full.pt", tmp_path / "nxd", "from_full_state", *options)
    mine = torch.load(tmp_path / "nxd" / "model" / rank_name(1), weights_only=True)
    name = "model.layers.0.mlp.{}_proj.weight"
    gate_up, down = mine[name.format("gate_up")], mine[name.format("down")]
    assert gate_up.shape == (16, HIDDEN) and down.shape == (HIDDEN, 8)
    for part, stored in zip(("gate", "up"), gate_up.chunk(2), strict=True):
        assert torch.equal(stored[:6], state[name.format(part)][6:]) and not stored[6:].any()
    assert torch.equal(down[:, :6], state[name.format("down")][:, 6:]) and not down[:, 6:].any()
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace(f": {WIDTH}}}", ": 8}"))
    with pytest.raises(ValueError, match="6 elements on each rank, ffn_hidden_size over tp_size gives 4"):
        convert(tmp_path, tmp_path / "full.pt", tmp_path / "x", "from_full_state", *options)


def test_biases_of_a_joined_projection_are_taken_apart(tmp_path):
    """Each rank's bias is ``[q, k, v]``, as its weight is."""
    prepare(tmp_path, 8)
    options = ["--hw_backend", "trn1", "--tp_size", 2]
    full = {letter: torch.randn(HIDDEN) for letter in "qkv"}
    for rank in range(2):
        bias = torch.cat([full[letter].chunk(2)[rank] for letter in "qkv"])
        file = tmp_path / "nxd" / "model" / rank_name(rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model.layers.0.self_attn.qkv_proj.bias": bias}, file)
    convert(tmp_path, tmp_path / "nxd/model", tmp_path / "x", "to_full_state", *options, cls=CheckpointConverterBase)
    back = torch.load(tmp_path / "x" / "checkpoint.pt", weights_only=True)
    assert all(torch.equal(back[f"model.layers.0.self_attn.{letter}_proj.bias"], full[letter]) for letter in "qkv")


def test_files_of_a_fused_projection_need_its_options(tmp_path):
    prepare(tmp_path)
    options = ["--hw_backend", "trn1", "--tp_size", 2]
    linear = [*options, "--qkv_linear", 1, "--fuse_qkv", 1]
    convert(tmp_path, tmp_path / "full.pt", tmp_path / "nxd", "from_full_state", *linear)
    for given in (options, linear[:-2]):
        with pytest.raises(ValueError, match=r"qkv_proj.weight_qkv, of GQAQKVColumnParallelLinear: pass --qkv_linear"):
            convert(tmp_path, tmp_path / "nxd/model", tmp_path / "x", "to_full_state", *given)
