"""Bad inputs: precision and loss scaling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.bad_inputs.case import BadInput
from tests.training.runs import LLAMA, run_here, write_config


def _half_done(directory: Path) -> Path:
    """The configuration of an fp32 run that has done 2 of its 8 steps."""
    config = write_config(directory, optimizer={"decay_steps": 8}, trainer={"export": False})
    outcome = run_here(config, "--trainer.max-steps", "2")
    assert outcome.returncode == 0, outcome.stderr
    return config


def _large_weight(directory: Path) -> Path:
    """Pretrained weights in fp32, one of which is beyond fp16's range."""
    sizes = {name: value for name, value in LLAMA.items() if name != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e6
    model.save_pretrained(directory / "pretrained")
    pretrained = {"pretrained": str(directory / "pretrained"), "config_overrides": {}}
    return write_config(directory, model=pretrained, trainer={"precision": "16-mixed"})


def _config(**sections: dict[str, Any]) -> Any:
    return lambda directory: write_config(directory, **sections)


CASES: tuple[BadInput, ...] = (
    BadInput(
        "unknown_precision",
        _config(trainer={"precision": "fp16"}),
        ("trainer.precision 'fp16' is not one of", "16-mixed"),
    ),
    BadInput(
        "precision_against_dtype",
        _config(model={"dtype": "bfloat16"}, trainer={"precision": "16-mixed"}),
        ("trainer.precision 16-mixed means model.dtype float16, and model.dtype is bfloat16", "remove one"),
    ),
    BadInput(
        "precision_against_master_weights",
        _config(optimizer={"master_weights": True}, trainer={"precision": "bf16-true"}),
        ("trainer.precision bf16-true", "optimizer.master_weights is True", "remove one"),
    ),
    BadInput(
        "fp16_without_master_weights",
        _config(optimizer={"master_weights": False}, model={"dtype": "float16"}),
        ("model.dtype float16 with optimizer.master_weights False", "set optimizer.master_weights to true"),
    ),
    BadInput(
        "tf32_on_the_cpu",
        _config(trainer={"allow_tf32": True}),
        ("trainer.allow_tf32 needs an NVIDIA GPU", "set it to false"),
    ),
    BadInput(
        "smallest_scale_above_the_first",
        _config(optimizer={"min_loss_scale": 4.0, "initial_loss_scale": 2.0}),
        ("optimizer.min_loss_scale 4.0", "optimizer.initial_loss_scale 2.0", "not below min_loss_scale"),
    ),
    BadInput(
        "infinite_loss_scale",
        _config(optimizer={"initial_loss_scale": math.inf}),
        ("optimizer.initial_loss_scale inf",),
    ),
    BadInput(
        "no_hysteresis", _config(optimizer={"hysteresis": 0}), ("optimizer.hysteresis must be at least 1, got 0",)
    ),
    BadInput("weight_beyond_fp16", _large_weight, ("layers.1.mlp.up_proj.weight", "65504", "bf16-mixed")),
    BadInput(
        "overflow_at_the_smallest_scale",
        _config(
            optimizer={"min_loss_scale": 2.0**60, "initial_loss_scale": 2.0**60},
            trainer={"precision": "16-mixed", "max_steps": 24, "save_interval": "never"},
        ),
        ("20 consecutive steps", "smallest loss scale 1.15", "use precision bf16-mixed"),
    ),
    BadInput(
        "resume_with_another_precision",
        _half_done,
        ("model.dtype was 'float32' and is 'float16'", "restore it"),
        ("--trainer.precision", "16-mixed"),
    ),
    BadInput(
        "resume_with_another_hysteresis",
        _half_done,
        ("optimizer.hysteresis was 2 and is 3", "--trainer.allow-changes optimizer.hysteresis"),
        ("--optimizer.hysteresis", "3"),
    ),
)
