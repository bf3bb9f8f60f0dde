"""Plans of certified steps are those of the training program, with the options of experts and adapters."""

from __future__ import annotations

import dataclasses

from nxd_memopt.training.config.parsing import parse_config
from scripts.bench.planner.certificates import plan_of


def recipe(*options):
    return parse_config(["--recipe", "llama3_8b", "--model.tokenizer", "none", *options])


def test_adapters_are_planned(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = recipe()
    adapted = dataclasses.replace(config, lora=dataclasses.replace(config.lora, lora_rank=8))
    full, small = (plan_of(each, 32).memory for each in (config, adapted))
    assert small.device["optimizer moments"] < full.device["optimizer moments"] / 10
