"""Every option of the ``moe`` section in a run: it changes what it should and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_training import succeed
from tests.training.runs import MIXTRAL, rows, run_here, write_config

# Small losses of both routers' kinds, so that an option can change them.
BASE = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.05, "moe_z_loss_coeff": 0.01}
CAPACITY = {"moe_expert_capacity_factor": 0.7}

# Values of a step. Dropped tokens and jitter change the input of the later routers, and so everything.
VALUES = ("loss", "grad_norm", "load_balancing_loss", "z_loss")
ALL = set(VALUES)

# Option -> the section that has it, the section that it is compared with, and the values of a step that differ.
WORKS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "num_moe_experts": ({"num_moe_experts": 4}, {}, set()),
    "moe_router_topk": ({"moe_router_topk": 2}, {}, set()),
    "moe_router_load_balancing_type": (
        {"moe_router_load_balancing_type": "hf_aux_loss"},
        {},
        {"load_balancing_loss", "grad_norm"},
    ),
    "moe_aux_loss_coeff": ({"moe_aux_loss_coeff": 0.5}, {}, {"load_balancing_loss", "grad_norm"}),
    "moe_z_loss_coeff": ({"moe_z_loss_coeff": 1.0}, {}, {"z_loss", "grad_norm"}),
    "moe_input_jitter_eps": (
        {"moe_input_jitter_eps": 0.5},
        {},
        ALL,
    ),
    "moe_token_dispatcher_type": ({"moe_token_dispatcher_type": "alltoall"}, {}, set()),
    "moe_per_layer_logging": ({"moe_per_layer_logging": True}, {}, set()),
    "moe_expert_capacity_factor": (CAPACITY, {}, ALL),
    "moe_pad_expert_input_to_capacity": (CAPACITY | {"moe_pad_expert_input_to_capacity": True}, CAPACITY, set()),
    "moe_expert_block_size": ({"moe_expert_block_size": 16}, {}, set()),
    "moe_token_drop_policy": (CAPACITY | {"moe_token_drop_policy": "position"}, CAPACITY, ALL),
    "moe_router_score_function": ({"moe_router_score_function": "sigmoid"}, {}, ALL),
    "moe_router_dtype": ({"moe_router_dtype": "fp64"}, {}, set()),
    "moe_shared_expert_intermediate_size": ({"moe_shared_expert_intermediate_size": 16}, {}, ALL),
}


def first_step(directory: Path, moe: dict[str, Any]) -> dict[str, Any]:
    directory.mkdir()
    trainer = {"max_steps": 1, "export": False, "save_interval": "never"}
    # Weights far from 0: the loss depends on the experts.
    model = {"config_overrides": MIXTRAL | {"initializer_range": 0.3}}
    succeed(
        run_here(write_config(directory, model=model, moe=BASE | moe, trainer=trainer, optimizer={"warmup_steps": 0}))
    )
    return rows(directory / "run")[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_what_an_option_changes(tmp_path: Path, name: str) -> None:
    section, compared, changed = WORKS[name]
    found, base = first_step(tmp_path / "with", section), first_step(tmp_path / "without", compared)
    # fp32 sums in another order: below 1e-5. What an option changes is above 1e-3.
    for value in VALUES:
        difference = abs(found[value] - base[value]) / abs(base[value])
        assert (difference > 1e-3) == (value in changed) and (value in changed or difference < 1e-5), value
    assert ("tokens_per_expert" in found) == (name == "moe_per_layer_logging")
