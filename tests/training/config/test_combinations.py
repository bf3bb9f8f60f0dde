"""Each combination of the tables is refused with its reason."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from nxd_memopt.training.config.combinations import EXCLUDED, EXCLUDED_BY_GRAPHS, Excluded
from nxd_memopt.training.config.parsing import config_from_mapping
from nxd_memopt.training.config.train_config import SECTIONS

GRAPH = "trainer.enable_cuda_graph"
# A value of each option whose values are not listed in the tables.
VALUES: dict[str, Any] = {
    "data_parallel.num_distributed_optimizer_instances": 2,
    "optimizer.optimizer_offload_fraction": 0.5,
    "memory.mlp_tile_tokens": 64,
    "memory.attention_head_groups": 2,
    "memory.cpu_offloading_num_layers": 1,
    "lora.lora_rank": 4,
    "lora.lora_dropout": 0.1,
    "trainer.compile": "layer",
    "moe.num_moe_experts": 4,
    "trainer.fp8": "hybrid",
    "trainer.fp8_recipe": "rowwise",
    "trainer.first_last_layers_bf16": 1,
    "trainer.resume_from": "runs/a",
    "trainer.max_epochs": 2.0,
    "model.warm_start": "runs/b",
    "data.mixture": {"a.txt": 1.0},
    "parallel.pipeline_model_parallel_size": 2,
    "parallel.virtual_pipeline_model_parallel_size": 2,
}
# What an option needs in its section.
NEEDS: dict[str, dict[str, Any]] = {
    "lora.base_dtype": {"lora_rank": 4},
    "lora.lora_dropout": {"lora_rank": 4},
    "memory.cpu_offloading_weights": {"cpu_offloading_num_layers": 1},
    "memory.cpu_offloading_activations": {"recompute_granularity": "full"},
    "optimizer.optimizer_update_in_forward": {"optimizer_offload_fraction": 0.5},
    "optimizer.store_param_remainders": {"optimizer_offload_fraction": 0.5},
    "optimizer.in_backward": {"clip_grad": 0.0},
    "parallel.virtual_pipeline_model_parallel_size": {"pipeline_model_parallel_size": 2},
    "trainer.fp8": {"precision": "bf16-mixed"},
    "memory.recompute_method": {"recompute_granularity": "full", "recompute_num_layers": 1},
}


def sections(*options: tuple[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections that have the options, and what these need."""
    found: dict[str, dict[str, Any]] = {"model": {"tokenizer": "t", "config_overrides": {"model_type": "llama"}}}
    for name, value in options:
        section, _, option = name.partition(".")
        needed = NEEDS.get(name, {}) if value else {}
        found[section] = found.get(section, {}) | needed | {option: value}
    return found


def pairs(entry: Excluded) -> list[tuple[Any, Any]]:
    firsts, seconds = (
        values or (VALUES[name],) for name, values in ((entry.option, entry.values), (entry.other, entry.other_values))
    )
    return [(first, second) for first in firsts for second in seconds]


@pytest.mark.parametrize("entry", EXCLUDED, ids=lambda entry: f"{entry.option} and {entry.other}")
def test_excluded_values(entry: Excluded) -> None:
    for first, second in pairs(entry):
        values = sections((entry.option, first), (entry.other, second))
        with pytest.raises(ValueError, match="change one of the two"):
            config_from_mapping(values)
        # The entry's own message: the values may be in another one too.
        unchecked: Any = SimpleNamespace(**{name: cls(**values.get(name, {})) for name, cls in SECTIONS.items()})
        message = entry.conflict(unchecked)
        assert message is not None and entry.reason in message


@pytest.mark.parametrize(("name", "values", "reason"), EXCLUDED_BY_GRAPHS)
def test_what_graphs_exclude(name: str, values: tuple[Any, ...], reason: str) -> None:
    for value in values or (VALUES[name],):
        with pytest.raises(ValueError, match=re.escape(f"enable_cuda_graph is true and {name} is ")) as raised:
            config_from_mapping(sections((GRAPH, True), (name, value)))
        assert reason in str(raised.value)
        for remedy in (False, "auto"):
            config_from_mapping(sections((GRAPH, remedy), (name, value)))
