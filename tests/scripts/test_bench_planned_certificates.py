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


def test_the_ranks_are_the_given_ones(monkeypatch):
    moments = []
    for world in ("1", "256"):
        monkeypatch.setenv("WORLD_SIZE", world)
        moments.append(plan_of(recipe(), 32).memory.device["optimizer moments"])
    assert moments[0] == moments[1]
    assert plan_of(recipe(), 64).memory.device["optimizer moments"] < moments[0]
