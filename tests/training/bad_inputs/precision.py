"""Bad inputs: precision and loss scaling."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.bad_inputs.case import BadInput
from tests.training.runs import LLAMA, write_config


def _large_weight(directory: Path) -> Path:
    """Pretrained weights in fp32, one of which is beyond fp16's range."""
    sizes = {name: value for name, value in LLAMA.items() if name != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e6
    model.save_pretrained(directory / "pretrained")
    pretrained = {"pretrained": str(directory / "pretrained"), "config_overrides": {}}
    return write_config(directory, model=pretrained, trainer={"precision": "16-mixed"})


CASES: tuple[BadInput, ...] = (
    BadInput("weight_beyond_fp16", _large_weight, ("layers.1.mlp.up_proj.weight", "65504", "bf16-mixed")),
)
