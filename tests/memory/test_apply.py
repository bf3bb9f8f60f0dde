"""A refused call of apply_memory leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest

from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory, is_recomputed
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.wrapping import is_wrapped
from tests.reference import assert_says, error_message
from tests.reference_models import llama_config, mixtral_config, parallel_model

FULL: dict[str, Any] = {"recompute_granularity": "full"}
SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}
REFUSED = {
    "more layers than there are": (FULL | {"recompute_method": "block", "recompute_num_layers": 3}, "the 2 layers"),
    "parts of more layers than there are": (
        SELECTIVE | {"recompute_modules": ("norm",), "recompute_method": "block", "recompute_num_layers": 3},
        "2 layers",
    ),
    "chunks that do not divide": (FULL | {"recompute_method": "uniform", "recompute_num_layers": 3}, "2 layers"),
    "parts that do not exist": (SELECTIVE | {"recompute_modules": ("moe",)}, "'moe' names no module"),
    "attention of several operators": (
        FULL | {"recompute_keep_core_attn": True},
        "needs attention by one fused operator",
    ),
    "groups that do not divide": ({"attention_head_groups": 3}, "attention_head_groups 3"),
    "more layers on the host than there are": ({"cpu_offloading_num_layers": 3}, "cpu_offloading"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_leaves_the_techniques_before_it(name):
    parallel_state.initialize_model_parallel()
    model = parallel_model(llama_config(), attention_backend="tiled", **FULL, mlp_tile_tokens=4)
    layers, mlps = model.decoder_layers(), model.recompute_modules()["mlp"]
    assert all(map(is_recomputed, layers)) and all(is_wrapped(mlp, "tiles") for mlp in mlps)
    options, words = REFUSED[name]
    assert_says(error_message(lambda: apply_memory(model, MemoryConfig(**options))), words)
    assert all(map(is_recomputed, layers)) and all(is_wrapped(mlp, "tiles") for mlp in mlps)


def test_tiles_of_a_model_without_dense_mlps_are_refused():
    parallel_state.initialize_model_parallel()
    model = parallel_model(mixtral_config())
    message = error_message(lambda: apply_memory(model, MemoryConfig(mlp_tile_tokens=4)))
    assert_says(message, "mlp_tile_tokens 4", "no MLP to compute by tiles")
