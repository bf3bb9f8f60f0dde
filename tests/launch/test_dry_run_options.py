"""A certificate is of the step that runs: each option changes it, is refused, or is none of the step's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nxd_memopt.architectures.configs import NAMED_CONFIGS
from nxd_memopt.certify.command import _parser, asked_of
from nxd_memopt.command_line import Run
from nxd_memopt.config import MemoryConfig
from nxd_memopt.training.config.train_config import SECTIONS, TrainConfig
from tests.launch.launching import planned
from tests.reference import assert_says, error_message

BLOCKS = {"moe_expert_block_size": 128, "moe_token_dispatcher_type": "allgather"}
BLOCK = {"recompute_method": "block", "recompute_num_layers": 2}
# Option -> the changes of its section, of which the request or the optimizer must have a trace.
PASSED: dict[str, dict[str, Any]] = {
    "model.pretrained": {"pretrained": "llama-3-70b", "config_overrides": {}},
    "model.config_overrides": {"config_overrides": {**NAMED_CONFIGS["llama-3-8b"], "num_hidden_layers": 8}},
    "parallel.tensor_model_parallel_size": {"tensor_model_parallel_size": 4},
    "parallel.sequence_parallel_enabled": {"sequence_parallel_enabled": False},
    "parallel.reduce_dtype": {"reduce_dtype": "float32"},
    "memory.recompute_granularity": {"recompute_granularity": None},
    "memory.recompute_method": BLOCK,
    "memory.recompute_num_layers": {**BLOCK, "recompute_num_layers": 3},
    "memory.recompute_modules": {"recompute_granularity": "selective", "recompute_modules": ("norm",)},
    "memory.attention_backend": {"attention_backend": "tiled"},
    "data.seq_length": {"seq_length": 4096},
    "data.micro_batch_size": {"micro_batch_size": 2},
    "data.isolate_documents": {"isolate_documents": True},
    "data_parallel.sharding": {"sharding": "none"},
    "trainer.precision": {"precision": "bf16-true"},
    "moe.num_moe_experts": {"num_moe_experts": 4, **BLOCKS},
    "moe.moe_shared_expert_intermediate_size": {
        "num_moe_experts": 4,
        **BLOCKS,
        "moe_shared_expert_intermediate_size": 512,
    },
    "memory.fused_linear_cross_entropy": {"fused_linear_cross_entropy": False},
    "data_parallel.grad_reduce_in_fp32": {"grad_reduce_in_fp32": False},
    "optimizer.overlap_grad_reduce": {"overlap_grad_reduce": True},
    "optimizer.in_backward": {"in_backward": True, "clip_grad": 0.0},
    "lora.lora_rank": {"lora_rank": 8},
    "parallel.pipeline_model_parallel_size": {"pipeline_model_parallel_size": 2},
    "parallel.pipeline_model_parallel_layout": {
        "pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": (20, 12),
    },
}
# Options that training refuses on trn1, with the backend's name.
REFUSED: dict[str, dict[str, Any]] = {
    "memory.cpu_offloading_num_layers": {"cpu_offloading_num_layers": 2},
    "memory.cpu_offloading_activations": {"cpu_offloading_activations": True},
    "memory.cpu_offloading_weights": {"cpu_offloading_weights": True, "cpu_offloading_num_layers": 2},
    "memory.mlp_tile_tokens": {"mlp_tile_tokens": 4096},
    "memory.attention_head_groups": {"attention_head_groups": 2},
    "data_parallel.num_distributed_optimizer_instances": {
        "sharding": "zero2",
        "num_distributed_optimizer_instances": 2,
    },
    "data_parallel.reshard_after_forward": {"sharding": "zero3", "reshard_after_forward": False},
    "optimizer.optimizer_offload_fraction": {"optimizer_offload_fraction": 0.5},
    "optimizer.optimizer_staging_gib": {"optimizer_offload_fraction": 1.0, "optimizer_staging_gib": 1.0},
    "optimizer.optimizer_update_in_forward": {"optimizer_offload_fraction": 1.0, "optimizer_update_in_forward": True},
    "optimizer.store_param_remainders": {"optimizer_offload_fraction": 1.0, "store_param_remainders": True},
    "trainer.compile": {"compile": "layer"},
    "trainer.fp8": {"fp8": "hybrid"},
    "trainer.fp8_recipe": {"fp8": "hybrid", "fp8_recipe": "rowwise"},
    "trainer.first_last_layers_bf16": {"fp8": "hybrid", "first_last_layers_bf16": 1},
    "parallel.virtual_pipeline_model_parallel_size": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
}


def certified(config: TrainConfig) -> object:
    """Everything that a certificate depends on."""
    options, _ = _parser().separate(["--device", "trn1", "--backend", "xla"])
    asked = asked_of(options, Run("", config, frozenset(), is_bare=False))
    assert asked.planned is not None
    return asked.request, asked.states, asked.planned.plan.memory


def changed(config: TrainConfig, option: str, changes: dict[str, Any]) -> TrainConfig:
    """Without the checks of the configuration: those of the dry run are tested."""
    section = option.partition(".")[0]
    options = dataclasses.replace(getattr(config, section), **changes)
    copy = object.__new__(TrainConfig)
    for name in SECTIONS:
        object.__setattr__(copy, name, options if name == section else getattr(config, name))
    object.__setattr__(copy, "auto_memory", config.auto_memory)
    return copy


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    # transformers has no shared experts for an export.
    return planned("llama3_8b", "--trainer.no-export").config


def test_every_option_of_layout_and_memory_is_certified_or_refused():
    sections = ("parallel", "memory", "data_parallel")
    known = {f"{name}.{field.name}" for name in sections for field in dataclasses.fields(SECTIONS[name])}
    elsewhere = {
        "parallel.use_cpu_initialization",
        "parallel.expert_model_parallel_size",
        "memory.recompute_keep_core_attn",
    }
    assert known <= PASSED.keys() | REFUSED.keys() | elsewhere
    assert not PASSED.keys() & REFUSED.keys()


@pytest.mark.parametrize("option", PASSED)
def test_options_that_change_the_certified_step(option, config):
    base = config
    if option == "memory.recompute_num_layers":
        base = changed(config, option, BLOCK)
    # It updates in each backward: a step is one micro-batch.
    if option == "optimizer.in_backward":
        base = changed(config, "data", {"global_batch_size": 4})
    assert certified(base) != certified(changed(base, option, PASSED[option]))


def test_experts_of_other_ranks_change_the_certified_step(config):
    base = changed(config, "moe", {"num_moe_experts": 4, **BLOCKS})
    assert certified(base) != certified(changed(base, "parallel", {"expert_model_parallel_size": 2}))


def test_techniques_that_the_device_chooses_are_refused(config):
    assert_says(
        error_message(lambda: certified(dataclasses.replace(config, memory=MemoryConfig(), auto_memory=True))), "certif"
    )


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_training_refuses_on_the_device_are_refused(option, config):
    message = error_message(lambda: certified(changed(config, option, REFUSED[option])))
    assert_says(message, "the backend", "xla")


def test_kept_results_of_attention_that_is_no_single_operator_are_refused(config):
    kept = changed(config, "memory.recompute_keep_core_attn", {"recompute_keep_core_attn": True})
    assert_says(error_message(lambda: certified(kept)), "recompute_keep_core_attn", "'nki'", "leave it out")
