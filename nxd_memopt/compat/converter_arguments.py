"""The command line of ``CheckpointConverterBase``."""

from __future__ import annotations

import argparse
from typing import Any


def to_bool(text: str) -> bool:
    """Return the boolean that ``text`` means. neuronx-distributed takes every text as true."""
    # neuronx-distributed has type=bool, and bool("False") is True. Scripts that pass "True" or an
    # empty text get the same value here; "False" gets the value that its author meant.
    values = {
        "1": True,
        "true": True,
        "yes": True,
        "0": False,
        "false": False,
        "no": False,
        "": False,
    }
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with neuronx-distributed's options."""
    # Options that are not offered exist too: a script's command line must parse, and
    # require_supported then says what to use instead.
    parser = argparse.ArgumentParser()
    _add_model_options(parser)
    _add_layer_options(parser)
    _add_conversions(parser)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for paths, the model and the parallel sizes."""
    add = parser.add_argument
    add(
        "--input_dir",
        type=str,
        help="a file with the full state dict, or the directory with the rank files",
    )
    add("--hf_model_name", type=str, help="not offered: download the model and pass --input_dir")
    add("--output_dir", type=str, required=True, help="directory to write")
    add(
        "--hw_backend",
        type=str,
        required=True,
        choices=("trn1", "trn2"),
        help="whose order of KV replicas",
    )
    add("--config", type=str, help="the model's config.json")
    add("--model_key", type=str, default="model", help="the state dict's entry in a rank's file")
    add("--tp_size", type=int, default=1, help="tensor parallel size")
    add("--pp_size", type=int, default=1, help="pipeline parallel size")
    add("--ep_size", type=int, default=1, help="expert parallel size")
    add("--virtual_pp_size", type=int, default=1, help="virtual pipeline parallel size")


def _add_layer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the names and shapes of attention and MLP weights."""
    add = parser.add_argument
    add("--n_layers", type=int, default=0, help="not needed: the layers are counted")
    add(
        "--coalesce_qkv",
        type=to_bool,
        default=False,
        help="concatenate q_proj, k_proj and v_proj to qkv_proj",
    )
    add("--kv_size_multiplier", type=int, default=1, help="ranks that hold the same KV heads")
    add("--qkv_linear", type=to_bool, default=False, help="GQAQKVColumnParallelLinear's names")
    add(
        "--fuse_qkv",
        type=to_bool,
        default=False,
        help="with --qkv_linear: one parameter weight_qkv",
    )
    add(
        "--i_tp_round_factor",
        type=int,
        default=0,
        help="pad each rank's expert width to a multiple of this",
    )
    add("--pad_attn_heads", type=to_bool, default=False, help="not offered")


def _add_conversions(parser: argparse.ArgumentParser) -> None:
    """Add the options for file formats and the four conversions."""
    add = parser.add_argument
    add(
        "--load_xser",
        type=to_bool,
        default=False,
        help="the rank files to read are in the xser format",
    )
    add("--save_xser", type=to_bool, default=False, help="write the xser format")
    add("--convert_from_xser", action="store_true", help="rank files: from xser to one file each")
    add("--convert_to_xser", action="store_true", help="rank files: to xser")
    add("--convert_from_full_state", action="store_true", help="full state dict to rank files")
    add("--convert_to_full_state", action="store_true", help="rank files to a full state dict")
    add(
        "--model_style",
        type=str,
        choices=("hf", "megatron"),
        default="hf",
        help="only hf is offered",
    )
    add("--nxdt_yaml_config", type=str, help="not offered: pass --config")


def require_supported(args: Any) -> None:
    """Raise ``ValueError`` for an option of neuronx-distributed that is not supported."""
    # Ignoring one of these would write files with other names or shapes than the script expects.
    refused = {
        "--model_style megatron": args.model_style == "megatron",
        "--pad_attn_heads": args.pad_attn_heads,
        "--nxdt_yaml_config": bool(args.nxdt_yaml_config),
        "--hf_model_name without --input_dir": bool(args.hf_model_name) and not args.input_dir,
    }
    unsupported = [name for name, is_set in refused.items() if is_set]
    if unsupported:
        raise ValueError(
            f"{', '.join(unsupported)} is not offered: pass --input_dir and --config of a model "
            "with Hugging Face's names, whose heads the ranks divide"
        )
    if args.coalesce_qkv and args.qkv_linear:
        raise ValueError("--coalesce_qkv and --qkv_linear are two forms of query, key and value: leave one out")
    if args.fuse_qkv and not args.qkv_linear:
        raise ValueError("--fuse_qkv needs --qkv_linear; without it, --coalesce_qkv joins query, key and value")
