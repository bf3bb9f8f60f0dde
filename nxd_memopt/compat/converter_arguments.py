"""The command line of ``CheckpointConverterBase``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


def to_bool(text: str) -> bool:
    """Return the boolean that ``text`` means. neuronx-distributed takes every text as true."""
    # neuronx-distributed has type=bool, and bool("False") is True. Scripts that pass "True" or an
    # empty text get the same value here; "False" gets the value that its author meant.
    if text.lower() not in _BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return _BOOLEANS[text.lower()]


# Options that are not offered exist too: a script's command line must parse, and
# require_supported then says what to use instead.
_OPTIONS: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "--input_dir": (str, None, "a file with the full state dict, or the directory with the rank files"),
    "--hf_model_name": (str, None, "not offered: download the model and pass --input_dir"),
    "--config": (str, None, "the model's config.json"),
    "--nxdt_yaml_config": (str, None, "not offered: pass --config"),
    "--model_key": (str, "model", "the state dict's entry in a rank's file"),
    "--tp_size": (int, 1, "tensor parallel size"),
    "--pp_size": (int, 1, "pipeline parallel size"),
    "--ep_size": (int, 1, "expert parallel size"),
    "--virtual_pp_size": (int, 1, "virtual pipeline parallel size"),
    "--n_layers": (int, 0, "not needed: the layers are counted"),
    "--coalesce_qkv": (to_bool, False, "concatenate q_proj, k_proj and v_proj to qkv_proj"),
    "--kv_size_multiplier": (int, 1, "ranks that hold the same KV heads"),
    "--qkv_linear": (to_bool, False, "GQAQKVColumnParallelLinear's names"),
    "--fuse_qkv": (to_bool, False, "with --qkv_linear: one parameter weight_qkv"),
    "--i_tp_round_factor": (int, 0, "pad each rank's expert width to a multiple of this"),
    "--pad_attn_heads": (to_bool, False, "not offered"),
    "--load_xser": (to_bool, False, "the rank files to read are in the xser format"),
    "--save_xser": (to_bool, False, "write the xser format"),
}
CONVERSIONS = {
    "convert_from_full_state": "full state dict to rank files",
    "convert_to_full_state": "rank files to a full state dict",
    "convert_from_xser": "rank files: from xser to one file each",
    "convert_to_xser": "rank files: to xser",
}
"""Flags of the conversions, which are methods of the converter too."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with neuronx-distributed's options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True, help="directory to write")
    platforms = ("trn1", "trn2")
    parser.add_argument("--hw_backend", required=True, choices=platforms, help="whose order of KV replicas")
    parser.add_argument("--model_style", choices=("hf", "megatron"), default="hf", help="only hf is offered")
    for name, (kind, default, text) in _OPTIONS.items():
        parser.add_argument(name, type=kind, default=default, help=text)
    for name, text in CONVERSIONS.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser


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
