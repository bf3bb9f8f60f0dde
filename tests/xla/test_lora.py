"""Tests runs that train adapters (LoRA) on simulated NeuronCores: the CPU's losses, adapters and merged export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.reference_models import llama_config
from tests.training.runs import LLAMA, TENSOR_AND_SEQUENCE, train
from tests.xla.test_training import XLA, config_in, require_equal_losses, succeed

LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_on_two_ranks_are_the_cpus(tmp_path: Path) -> None:
    """With recompute; the CPU's ranks are compared with PEFT in tests/dist/test_lora.py."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_config(llama_config(**LLAMA))
    base.save_pretrained(tmp_path / "base")
    sections: dict[str, Any] = {
        "model": {"pretrained": str(tmp_path / "base"), "config_overrides": {}},
        "parallel": TENSOR_AND_SEQUENCE,
        "memory": {"recompute_granularity": "full"},
        # A large eps: AdamW's first updates would otherwise amplify the rounding of gradients near 0.
        "optimizer": {"lr": 0.02, "eps": 1e-3},
    }
    for name, env in (("cpu", {}), ("xla", XLA)):
        file = config_in(tmp_path / name, **sections)
        with file.open("a", encoding="utf-8") as opened:
            opened.write(f"lora: {json.dumps(LORA)}\n")
        outcome = succeed(train(file, ranks=2, env=env))
        assert f"backend {name}" in outcome.stdout and "LoRA: rank 4, scale 2, in 10 layers" in outcome.stdout
    runs = [tmp_path / name / "run" for name in ("xla", "cpu")]
    require_equal_losses(*runs)
    for file in ("adapter/adapter_model.safetensors", "export/model.safetensors"):
        found, expected = (load_file(run / file) for run in runs)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    # The merged export is the base with the adapters, as PEFT adds them.
    loaded = peft.PeftModel.from_pretrained(base, str(runs[0] / "adapter")).merge_and_unload()  # pyright: ignore
    merged = AutoModelForCausalLM.from_pretrained(runs[0] / "export")
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight, loaded.get_parameter(name), rtol=1e-6, atol=1e-7)
