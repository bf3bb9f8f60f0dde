"""The search tries every setting that could fit, plans none that the model cannot have, and explains all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nxd_memopt.architectures.configs import NAMED_CONFIGS, with_defaults
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.hardware import device_named
from nxd_memopt.planner.search.candidates import settings
from nxd_memopt.planner.search.plan import evaluate, plans
from nxd_memopt.planner.search.problem import Problem, Setting
from tests.planner.storages import named
from tests.planner.test_plan import problem
from tests.reference import assert_says, error_message


def test_no_setting_that_fits_is_passed_over():
    asked = problem("gpt-neox-20b", "h100", 8, 2048, global_batch_size=32)
    shown = {plan.setting for plan in plans(asked)}
    assert shown
    for setting in settings(asked):
        if setting.optimizer_offload_fraction == 0:
            assert evaluate(asked, setting).fits == (setting in shown), setting


@pytest.mark.parametrize("size", [6, 12])
def test_ranks_have_complete_kv_heads(size):
    """As in the model: T divides the KV heads or is a multiple of them."""
    heads = {"hidden_size": 6144, "num_attention_heads": 48, "num_key_value_heads": 8, "intermediate_size": 12288}
    asked = replace(problem(devices=size), model=model_spec(with_defaults({**NAMED_CONFIGS["llama-3-8b"], **heads})))
    message = error_message(lambda: evaluate(asked, Setting(size)))
    assert_says(message, f"tensor_model_parallel_size {size}", "num_key_value_heads 8", "use a")
    for possible in (4, 16):
        assert evaluate(replace(asked, devices=possible), Setting(possible)).memory.device_bytes


def test_a_model_with_windows_keeps_no_attention():
    """It is built with tiles of attention, also for sequences that its windows cover, and tiles cannot be kept."""
    config = {**NAMED_CONFIGS["llama-3-8b"], "model_type": "mistral", "sliding_window": 4096}
    asked = Problem(model_spec(with_defaults(config)), device_named("h200"), 1, 2048)
    assert not any(setting.memory.recompute_keep_core_attn for setting in settings(asked))
    refused = Setting(memory=MemoryConfig(attention_backend="sdpa"))
    assert_says(error_message(lambda: evaluate(asked, refused)), "sdpa", "window")
    kept = Setting(memory=MemoryConfig(recompute_granularity="full", recompute_keep_core_attn=True))
    assert_says(error_message(lambda: evaluate(asked, kept)), "recompute_keep_core_attn", "whatever the length")


def test_groups_that_a_ranks_heads_do_not_have_are_no_plan():
    problem = Problem(
        model=named("smollm2-135m"),
        device=device_named("h200"),
        devices=1,
        sequence_length=2048,
        global_batch_size=1,
    )
    memory = MemoryConfig(recompute_granularity="full", attention_head_groups=2)
    with pytest.raises(ValueError, match="attention_head_groups 2 does not divide a rank's 9 query heads and 3 KV"):
        evaluate(problem, Setting(1, "none", 1, memory))
    memory = MemoryConfig(recompute_granularity="full", attention_head_groups=3)
    assert evaluate(problem, Setting(1, "none", 1, memory)).fits
