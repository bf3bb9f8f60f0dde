"""Translates the sections ``tokenizer``, ``optim`` and ``data`` of a NeMo ``model`` section.

Every function gets such a section, the sections of this library to write to, and a list of problems, to which it adds
a text for each option that is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPTIMIZERS = ("fused_adam", "distributed_fused_adam", "adamw", "adam", "adamw_fp32OptState", "mcore_distributed_optim")
SHARDED_OPTIMIZERS = ("distributed_fused_adam", "mcore_distributed_optim")
SCHEDULES = {"CosineAnnealing": "cosine"}
OPTIMIZER_WITHOUT_EFFECT = frozenset(
    [
        "bucket_cap_mb",
        "overlap_grad_sync",
        "overlap_param_sync",
        "contiguous_grad_buffer",
        "contiguous_param_buffer",
        "grad_sync_dtype",
        "capturable",
        "foreach",
    ]
)
DATA_WITHOUT_EFFECT = frozenset(
    [
        "data_impl",
        "skip_warmup",
        "num_workers",
        "dataloader_type",
        "index_mapping_dir",
        "validation_drop_last",
        "no_seqlen_plus_one_input_tokens",
        "pad_samples_to_global_batch_size",
        "shuffle_documents",
        "train_ds",
        "validation_ds",
        "test_ds",
        "chat",
    ]
)
MISSING = "???"

Sections = dict[str, dict[str, Any]]


def read_tokenizer(tokenizer: Mapping[str, Any], sections: Sections, problems: list[str]) -> None:
    """Set ``model.tokenizer`` to the Hugging Face tokenizer of the section."""
    library, name = tokenizer.get("library"), tokenizer.get("type")
    if library == "huggingface" and isinstance(name, str) and name != MISSING:
        sections["model"].setdefault("tokenizer", name)
        return
    problems.append(
        f"model.tokenizer.library {library!r} is not supported: write model.tokenizer: DIRECTORY, with a Hugging Face "
        "tokenizer"
    )


def read_optimizer(optim: Mapping[str, Any], sections: Sections, problems: list[str]) -> None:
    """Set the section ``optimizer`` from ``optim``, with NeMo's values for options that it leaves out."""
    target = sections.setdefault("optimizer", {})
    for name, value in optim.items():
        if name in ("lr", "weight_decay", "betas", "eps"):
            target.setdefault(name, value)
        elif name == "name" and value in OPTIMIZERS:
            if value in SHARDED_OPTIMIZERS:
                sections.setdefault("data_parallel", {}).setdefault("sharding", "zero1")
            if value == "adam" and optim.get("weight_decay"):
                problems.append(
                    f"model.optim.name 'adam' with weight_decay {optim['weight_decay']!r} is not supported: in NeMo it "
                    "is torch.optim.Adam, whose decay is part of the gradient; write adamw"
                )
        elif name == "sched" and isinstance(value, Mapping):
            _read_schedule(value, optim, sections, problems)
        elif name not in OPTIMIZER_WITHOUT_EFFECT:
            problems.append(f"model.optim.{name} {value!r} is not supported: leave it out")
    # NeMo's values of what is left out: apex's AdamW or torch's, a constant rate, and no clipping.
    target.setdefault("weight_decay", 0.01 if optim.get("name") == "adamw" else 0.0)
    target.setdefault("betas", [0.9, 0.999])
    if "sched" not in optim:
        target.setdefault("lr_schedule", "constant")
    if "gradient_clip_val" not in sections.get("trainer", {}):
        target.setdefault("clip_grad", 0.0)


def _read_schedule(sched: Mapping[str, Any], optim: Mapping[str, Any], sections: Sections, problems: list[str]) -> None:
    target = sections["optimizer"]
    if sched.get("min_lr") is None:
        target.setdefault("min_lr_ratio", 0.0)
    for name, value in sched.items():
        if value is None:  # a reference that is reported already
            continue
        if name == "name" and value in SCHEDULES:
            target.setdefault("lr_schedule", SCHEDULES[value])
        elif name == "warmup_steps":
            target.setdefault("warmup_steps", value)
        elif name == "min_lr" and float(optim.get("lr") or 0) > 0:
            target.setdefault("min_lr_ratio", float(value) / float(optim["lr"]))
        elif name == "constant_steps":
            # The last steps, which are at the minimum. Without any, the decay ends at max_steps, also if the
            # command line changes it.
            max_steps = sections.get("trainer", {}).get("max_steps")
            if isinstance(max_steps, int) and isinstance(value, int) and max_steps > value > 0:
                target.setdefault("decay_steps", max_steps - value)
            elif value:
                problems.append(
                    f"model.optim.sched.constant_steps {value!r} needs a larger trainer.max_steps, got {max_steps!r}: "
                    "set it, or optimizer.decay_steps"
                )
        else:
            problems.append(f"model.optim.sched.{name} {value!r} is not supported: set the schedule in optimizer")


def read_data(data: Mapping[str, Any], sections: Sections, problems: list[str]) -> None:
    """Set the options of ``data``; paths without a suffix name Megatron's ``.idx`` files."""
    target = sections.setdefault("data", {})
    # Megatron's two options are one here; NeMo's default of both is False.
    isolated = {bool(data.get(name)) for name in ("reset_position_ids", "reset_attention_mask")}
    target.setdefault("isolate_documents", isolated == {True})
    for name, value in data.items():
        if name == "data_prefix":
            paths = value if isinstance(value, list) else [value]
            if paths == [MISSING]:
                continue
            if len(paths) == 1 and isinstance(paths[0], str):
                target.setdefault("dataset", f"{paths[0]}.idx")
                continue
            weights, names = paths[::2], paths[1::2]
            are_pairs = len(weights) == len(names) and all(isinstance(path, str) for path in names)
            if not are_pairs or not all(isinstance(weight, (int, float)) for weight in weights):
                problems.append(f"model.data.data_prefix {value!r} is neither a path nor pairs of a weight and a path")
                continue
            if len(names) == 1:
                target.setdefault("dataset", f"{names[0]}.idx")
                continue
            mixture: dict[str, float] = {}
            for path, weight in zip(names, weights, strict=True):
                mixture[f"{path}.idx"] = mixture.get(f"{path}.idx", 0) + weight
            target.setdefault("mixture", mixture)
        elif name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if len(isolated) > 1 or (name == "eod_mask_loss" and value):
                problems.append(f"model.data.{name} {value!r} is not supported: set data.isolate_documents")
        elif name == "seq_length":
            if value != sections["model"].get("encoder_seq_length", value):
                problems.append(f"model.data.seq_length {value!r} differs from encoder_seq_length: write one of them")
        elif name not in DATA_WITHOUT_EFFECT and value not in (None, False):
            problems.append(f"model.data.{name} {value!r} is not supported: see the options of data")
