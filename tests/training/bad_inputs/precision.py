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
        "tf32_on_the_cpu",
        _config(trainer={"allow_tf32": True}),
        ("trainer.allow_tf32 true needs an NVIDIA GPU", "set it to false"),
    ),
    BadInput(
        "loss_scale_below_the_smallest",
        _config(optimizer={"initial_loss_scale": 0.5}),
        ("optimizer.initial_loss_scale must be at least 1, got 0.5",),
    ),
    BadInput(
        "infinite_loss_scale",
        _config(optimizer={"initial_loss_scale": math.inf}),
        ("optimizer.initial_loss_scale must be finite, got inf",),
    ),
    BadInput("weight_beyond_fp16", _large_weight, ("layers.1.mlp.up_proj.weight", "65504", "bf16-mixed")),
    BadInput(
        "resume_with_another_precision",
        _half_done,
        ("trainer.precision was '32-true' and is '16-mixed'", "restore it"),
        ("--trainer.precision", "16-mixed"),
    ),
)
