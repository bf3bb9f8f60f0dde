"""Settings that a seed draws: the planned activations equal the storages that exist, as integers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from nxd_memopt.architectures.model_spec import model_spec
from tests.planner.test_activations import LAYERS, MOE_TECHNIQUES, TECHNIQUES, check, without_dense_layers
from tests.reference_models import CONFIGS

DENSE = [name for name, config in CONFIGS.items() if not model_spec(config()).has_experts]
EXPERTS = [name for name in CONFIGS if name not in DENSE]
MODULES = ("core_attn", "attn", "norm", "mlp_act", "mlp")


def draw(generator: random.Random) -> tuple[Any, torch.dtype, str, dict[str, Any]]:
    """Return model, dtype, attention and options of the memory section."""
    has_experts = generator.random() < 0.25
    name = generator.choice(EXPERTS if has_experts else DENSE)
    config = without_dense_layers(CONFIGS[name]())
    config.num_hidden_layers = LAYERS
    if getattr(config, "layer_types", None):
        types = [generator.choice(("full_attention", "sliding_attention")) for _ in range(LAYERS)]
        config.layer_types = types if config.sliding_window else ["full_attention"] * LAYERS
    dtype = generator.choice((torch.float32, torch.bfloat16, torch.float16))
    if has_experts:
        return (
            config,
            generator.choice((torch.float32, torch.bfloat16)),
            "sdpa",
            generator.choice(list(MOE_TECHNIQUES.values())),
        )
    options = generator.choice(
        [
            generator.choice(list(TECHNIQUES.values())),
            {
                "recompute_granularity": "selective",
                "recompute_modules": tuple(generator.sample(MODULES, generator.randint(1, 3))),
                "recompute_method": "block",
                "recompute_num_layers": generator.randint(1, LAYERS),
            },
            {
                "recompute_granularity": "full",
                "recompute_method": generator.choice(("block", "nested", "uniform")),
                "recompute_num_layers": generator.choice((1, 2, LAYERS)),
            },
        ]
    )
    options = {**options, "fused_linear_cross_entropy": generator.random() < 0.8}
    return config, dtype, generator.choice(("sdpa", "tiled", "math")), options


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 160))])
def test_storages_of_drawn_settings(seed):
    config, dtype, attention, options = draw(random.Random(seed))
    try:
        check(config, dtype, attention, options)
    except ValueError as error:
        # Of a kernel without windows, or of a number of layers that a chunk does not divide.
        assert "has no attention window" in str(error) or "recompute_num_layers" in str(error), error
