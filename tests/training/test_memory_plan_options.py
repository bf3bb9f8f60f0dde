"""A run's plan is that of its step: each option of a configuration changes it, is refused, or is none of memory's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nxd_memopt.planner.hardware import device_named
from nxd_memopt.planner.search.plan import Plan
from nxd_memopt.training import device_support, memory_plan
from nxd_memopt.training.config.train_config import SECTIONS, TrainConfig
from nxd_memopt.training.memory_plan import planned
from nxd_memopt.training.model import load_hf_config
from tests.launch.launching import planned as launched
from tests.reference import assert_says, error_message

LORA = {"lora_rank": 8}
OFFLOADED = {"optimizer_offload_fraction": 1.0}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("norm",)}
BLOCK = {"recompute_method": "block", "recompute_num_layers": 2}
KEPT = {"recompute_keep_core_attn": True, "attention_backend": "flash4"}
STAGES = {"pipeline_model_parallel_size": 2}
# Option -> the changes of its section, and what they are compared with: other changes, by default none.
PLANNED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model.config_overrides": ({"config_overrides": {"num_hidden_layers": 8}}, {}),
    "parallel.tensor_model_parallel_size": ({"tensor_model_parallel_size": 4}, {}),
    "parallel.sequence_parallel_enabled": ({"sequence_parallel_enabled": False}, {}),
    "parallel.reduce_dtype": ({"reduce_dtype": "float32"}, {}),
    "memory.recompute_granularity": ({"recompute_granularity": None}, {}),
    "memory.recompute_method": ({"recompute_method": "nested"}, {}),
    "memory.recompute_num_layers": ({**BLOCK, "recompute_num_layers": 3}, BLOCK),
    "memory.recompute_modules": (SELECTIVE, {**SELECTIVE, "recompute_modules": ("mlp",)}),
    "memory.recompute_keep_core_attn": (KEPT, {}),
    "memory.cpu_offloading_num_layers": ({"cpu_offloading_num_layers": 2}, {}),
    "memory.cpu_offloading_activations": ({"cpu_offloading_activations": True}, {}),
    "memory.cpu_offloading_weights": (
        {"cpu_offloading_weights": True, "cpu_offloading_num_layers": 2},
        {"cpu_offloading_num_layers": 2},
    ),
    "memory.mlp_tile_tokens": ({"mlp_tile_tokens": 4096}, {}),
    "memory.attention_head_groups": (
        {"recompute_granularity": None, "attention_head_groups": 1},
        {"recompute_granularity": None},
    ),
    "memory.attention_backend": ({"attention_backend": "math"}, {}),
    "memory.fused_linear_cross_entropy": ({"fused_linear_cross_entropy": False}, {}),
    "data.seq_length": ({"seq_length": 4096}, {}),
    "data.micro_batch_size": ({"micro_batch_size": 2}, {}),
    "data_parallel.sharding": ({"sharding": "none"}, {}),
    "data_parallel.num_distributed_optimizer_instances": (
        {"sharding": "zero2", "num_distributed_optimizer_instances": 2},
        {"sharding": "zero2"},
    ),
    "data_parallel.reshard_after_forward": (
        {"sharding": "zero3", "reshard_after_forward": False},
        {"sharding": "zero3"},
    ),
    "data_parallel.grad_reduce_in_fp32": ({"grad_reduce_in_fp32": False}, {}),
    "optimizer.in_backward": ({"in_backward": True, "clip_grad": 0.0}, {}),
    "optimizer.optimizer_offload_fraction": (OFFLOADED, {}),
    "optimizer.optimizer_staging_gib": ({**OFFLOADED, "optimizer_staging_gib": 0.5}, OFFLOADED),
    "optimizer.store_param_remainders": ({**OFFLOADED, "store_param_remainders": True}, OFFLOADED),
    "trainer.precision": ({"precision": "bf16-true"}, {}),
    "trainer.fp8": ({"fp8": "hybrid"}, {}),
    "trainer.fp8_recipe": ({"fp8": "hybrid", "fp8_recipe": "rowwise"}, {"fp8": "hybrid"}),
    "trainer.first_last_layers_bf16": ({"fp8": "hybrid", "first_last_layers_bf16": 1}, {"fp8": "hybrid"}),
    "trainer.enable_cuda_graph": ({"enable_cuda_graph": True}, {"enable_cuda_graph": False}),
    "moe.num_moe_experts": ({"num_moe_experts": 4}, {}),
    "lora.lora_rank": (LORA, {}),
    "lora.target_modules": ({**LORA, "target_modules": ("o_proj", "down_proj")}, LORA),
    "parallel.pipeline_model_parallel_size": (STAGES, {}),
    "parallel.virtual_pipeline_model_parallel_size": (STAGES | {"virtual_pipeline_model_parallel_size": 2}, STAGES),
    "parallel.pipeline_model_parallel_layout": (STAGES | {"pipeline_model_parallel_layout": (9, 3)}, STAGES),
    "lora.lora_dropout": ({**LORA, "lora_dropout": 0.1}, LORA),
}
REFUSED: dict[str, dict[str, Any]] = {
    "memory.attention_head_groups": {"attention_head_groups": "auto"},
    "trainer.compile": {"compile": "layer"},
}
# Sections and options that are no memory of a step on its device, or only its time.


@pytest.fixture(scope="module")
def recipe() -> TrainConfig:
    return launched("llama3_8b").config


@pytest.fixture
def config(monkeypatch, recipe) -> TrainConfig:
    """Twelve layers of LLaMA-3-8B on four data-parallel ranks; with few tokens, so that the peak is not in the loss."""
    monkeypatch.setattr(memory_plan, "world_size", lambda: 32)
    monkeypatch.setattr(device_support, "world_size", lambda: 32)
    # Whether a graph can be captured is a question to the machine.
    monkeypatch.setattr(memory_plan, "uses_cuda_graph", lambda config, _: bool(config.trainer.enable_cuda_graph))
    found = recipe
    overrides = {**found.model.config_overrides, "num_hidden_layers": 12, "vocab_size": 8192}
    found = changed(found, "model.config_overrides", {"config_overrides": overrides})
    found = changed(found, "data.isolate_documents", {"isolate_documents": False})
    return changed(found, "trainer.enable_cuda_graph", {"enable_cuda_graph": False})


def changed(config: TrainConfig, option: str, changes: dict[str, Any]) -> TrainConfig:
    """Without the checks of the configuration."""
    section = option.partition(".")[0]
    if "config_overrides" in changes:
        changes = {"config_overrides": {**config.model.config_overrides, **changes["config_overrides"]}}
    options = dataclasses.replace(getattr(config, section), **changes)
    copy = object.__new__(TrainConfig)
    for name in SECTIONS:
        object.__setattr__(copy, name, options if name == section else getattr(config, name))
    return copy


def plan_of(config: TrainConfig, device: str = "h200") -> Plan:
    return planned(config, load_hf_config(config.model, config.moe), device_named(device))[1]


def peaks(plan: Plan) -> tuple[Any, ...]:
    return plan.memory.device, plan.memory.host, plan.memory.forward_backward_bytes


def test_every_option_of_layout_and_memory_is_planned():
    sections = ("parallel", "memory", "data_parallel")
    known = {f"{name}.{field.name}" for name in sections for field in dataclasses.fields(SECTIONS[name])}
    elsewhere = {
        "parallel.use_cpu_initialization",
        "parallel.expert_model_parallel_size",
    }
    assert known <= PLANNED.keys() | REFUSED.keys() | elsewhere


# Further values of options that are numbers, or words.
FURTHER = [
    ("trainer.precision", {"precision": "32-true"}, {"precision": "bf16-true"}),
    ("memory.recompute_keep_core_attn", {**KEPT, "recompute_keep_core_attn": 2}, KEPT),
    ("optimizer.optimizer_offload_fraction", {**OFFLOADED, "optimizer_offload_fraction": 0.5}, OFFLOADED),
]


@pytest.mark.parametrize(
    ("option", "changes", "compared"), [*((name, *values) for name, values in PLANNED.items()), *FURTHER]
)
def test_options_that_change_the_plan(option, changes, compared, config):
    assert peaks(plan_of(changed(config, option, changes))) != peaks(plan_of(changed(config, option, compared)))


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_are_refused(option, config):
    if option == "trainer.compile":
        config = changed(config, "memory.recompute_granularity", {"recompute_granularity": None})
    message = error_message(lambda: plan_of(changed(config, option, REFUSED[option])))
    assert_says(message, option.partition(".")[2], "plan")


def test_weights_that_stay_gathered_are_all_layers(config):
    """With zero3 and reshard_after_forward false each layer's weights wait for its backward."""
    sharded = changed(config, "data_parallel.sharding", {"sharding": "zero3"})
    kept = changed(sharded, "data_parallel.reshard_after_forward", {"reshard_after_forward": False})
    layer = (4096 * (4096 + 1024 + 4096) + 3 * 4096 * 14336) // 8 * 2 + 2 * 4096 * 2
    terms = [plan_of(each).memory.device["gathered weights"] for each in (sharded, kept)]
    # The peak is in the last layer but one, where the last one's weights are free. T = 8 has one KV head each for
    # key and value.
    assert terms[1] - terms[0] == 9 * (layer + 4096 * 1024 // 8 * 2)


def test_sums_in_fp32_are_larger_copies(config):
    wide = changed(config, "parallel.reduce_dtype", {"reduce_dtype": "float32"})
    shard = 8192 * 4096 // 8
    terms = [plan_of(each).memory for each in (config, wide)]
    slots = terms[1].device["peer memory"] - terms[0].device["peer memory"]
    # Two slots of reductions, of all ranks' shards.
    assert slots == 2 * 8 * shard * (4 - 2)
    # In the moment of the peak, if it is the same one: a partial sum and its shard in fp32.
    difference = terms[1].forward_backward_bytes - terms[0].forward_backward_bytes - slots
    assert 0 < difference <= (8 + 1) * shard * 4


def test_accumulation_and_averages_of_gradients(config):
    """Without sharding, a bucket's copy and its sum next to all gradients, or eight buckets during backward."""
    plain = changed(config, "data_parallel.sharding", {"sharding": "none"})
    alone = dataclasses.replace(plain.data, global_batch_size=4)
    accumulated = dataclasses.replace(plain.data, global_batch_size=8)
    once = changed(plain, "data.global_batch_size", vars(alone))
    first, second = plan_of(once).memory, plan_of(changed(plain, "data.global_batch_size", vars(accumulated))).memory
    assert second.forward_backward_bytes > first.forward_backward_bytes
    overlapped = plan_of(changed(once, "optimizer.overlap_grad_reduce", {"overlap_grad_reduce": True})).memory
    largest = 4096 * 14336 // 8 * 4
    # Of 25 MiB of bf16 parameters at most, in fp32.
    bucket = 50 << 20
    assert 8 * largest < overlapped.forward_backward_bytes - first.forward_backward_bytes <= 8 * bucket
    assert first.moment == "update" and first.device["gradient buckets"] == 2 * (128 << 20)


def test_isolated_documents_run_tiles_on_trainium(config):
    isolated = changed(config, "data.isolate_documents", {"isolate_documents": True})
    options = {"recompute_granularity": None}
    plans = [plan_of(changed(each, "memory.recompute_granularity", options), "trn1") for each in (config, isolated)]
    assert peaks(plans[0]) != peaks(plans[1])
