"""config: what is accepted, and that every refusal states relation, values and remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nxd_memopt.config import MemoryConfig, ParallelConfig, require_divisible
from tests.reference import assert_says, error_message


@pytest.mark.parametrize(
    ("value", "divisor", "facts"),
    [(1000, 3, ["1000", "3", "999", "1002"]), (2, 4, ["2", "4", "use 4"]), (8, 0, ["at least 1", "0"])],
)
def test_require_divisible_names_values_and_neighbours(value, divisor, facts):
    message = error_message(lambda: require_divisible("sequence length", value, "tensor_model_parallel_size", divisor))
    assert_says(message, "tensor_model_parallel_size", *facts)


@pytest.mark.parametrize(
    ("cls", "options", "facts"),
    [
        (
            ParallelConfig,
            {"sequence_parallel_enabled": True},
            ["sequence_parallel_enabled", "tensor_model_parallel_size", "got 1", "raise", "turn"],
        ),
        (MemoryConfig, {"recompute_method": "uniform"}, ["recompute_method", "uniform", "'full'"]),
        (
            MemoryConfig,
            {"recompute_method": "block", "recompute_num_layers": 2},
            ["recompute_method 'block'", "'full'", "None", "set it"],
        ),
        *(
            (
                MemoryConfig,
                {"recompute_granularity": "selective", "recompute_method": method, "recompute_num_layers": 2},
                [f"recompute_method {method!r}", "'full'", "'selective'", "use 'block'"],
            )
            for method in ("uniform", "nested")
        ),
        (
            MemoryConfig,
            {"recompute_granularity": "selective", "recompute_method": "block"},
            ["recompute_num_layers", "None", "set both or neither"],
        ),
        (
            MemoryConfig,
            {"recompute_granularity": "selective", "recompute_num_layers": 2},
            ["recompute_method None", "recompute_num_layers 2", "set both or neither"],
        ),
        (
            MemoryConfig,
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 0},
            ["recompute_num_layers", "at least 1", "0", "leave"],
        ),
        (MemoryConfig, {"recompute_granularity": "selective", "recompute_modules": ()}, ["recompute_modules"]),
        (MemoryConfig, {"recompute_modules": ("core_atn",)}, ["core_atn", "did you mean 'core_attn'"]),
        (
            MemoryConfig,
            {"recompute_granularity": "full", "recompute_method": "nested", "recompute_keep_core_attn": True},
            ["recompute_keep_core_attn", "'nested'", "use recompute_method 'uniform'"],
        ),
        (
            MemoryConfig,
            {"recompute_granularity": "selective", "recompute_keep_core_attn": 2},
            ["recompute_keep_core_attn=2", "'full'", "'selective'"],
        ),
        (
            MemoryConfig,
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 2,
                "recompute_keep_core_attn": 1,
            },
            ["recompute_keep_core_attn=1", "one layer per checkpoint", "'uniform'"],
        ),
        (
            MemoryConfig,
            {"cpu_offloading_activations": True},
            ["cpu_offloading_activations", "'full'", "None", "cpu_offloading_num_layers alone"],
        ),
        (
            MemoryConfig,
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 2,
                "cpu_offloading_activations": True,
                "cpu_offloading_num_layers": 3,
            },
            ["cpu_offloading_num_layers 3", "recompute_num_layers 2", "lower it"],
        ),
    ],
)
def test_refusals(cls, options, facts):
    assert_says(error_message(lambda: cls(**options)), *facts)


def test_lists_of_yaml_become_tuples():
    config = MemoryConfig(recompute_granularity="selective", recompute_modules=["norm", "mlp_act"])
    assert config.recompute_modules == ("norm", "mlp_act")


def test_the_attention_of_one_layer_is_not_that_of_all():
    """As keys of the planner's caches: 1 == True."""
    kept = [MemoryConfig(recompute_granularity="full", recompute_keep_core_attn=number) for number in (1, True, 1)]
    assert len(set(kept)) == 2 and kept[0] == kept[2] != kept[1]


def test_selective_recompute_is_that_of_core_attention():
    assert MemoryConfig(recompute_granularity="selective").recompute_modules == ("core_attn",)


def test_config_imports_without_torch():
    code = "import sys, nxd_memopt.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
