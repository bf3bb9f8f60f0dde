"""What every configuration compiles after the pass that collects graphs, and which operations its graphs have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from tests.training.runs import MIXTRAL, rows, write_config
from tests.xla.functionalization import VARIABLE
from tests.xla.test_compile_counts import counts, program

LOSS_BOUND = 2e-6  # fp32; measured: equal to seven digits
BF16_BOUND = 2e-3  # other fusions round at other places: measured 3e-4, and 9e-4 between both and the CPU backend
PADDED = {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
BLOCKS = {"moe_expert_block_size": 8}


def experts(**options: Any) -> dict[str, Any]:
    return {
        "model": {"config_overrides": MIXTRAL | {"num_hidden_layers": 1}},
        "moe": {"moe_z_loss_coeff": 0.01, **options},
    }


# Sections of the configuration; graphs of the first step, and of the first evaluation after an update.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], int, int]] = {
    "dense": ({"data": {"isolate_documents": False}}, 3, 0),
    "packed": ({"data": {"packing": "best_fit"}}, 3, 0),
    "lora": ({"lora": {"lora_rank": 2, "lora_dropout": 0.1}}, 3, 1),
    "bf16": ({"trainer": {"precision": "bf16-mixed"}}, 3, 1),
    "padded": (experts(**PADDED, moe_aux_loss_coeff=0.05), 3, 0),
    "padded, by position": (experts(**PADDED, moe_token_drop_policy="position"), 3, 0),
    "blocks": (experts(**BLOCKS, moe_aux_loss_coeff=0.05), 3, 0),
    "global_aux_loss": (
        experts(
            **PADDED,
            moe_aux_loss_coeff=0.05,
            moe_router_load_balancing_type="global_aux_loss",
            moe_input_jitter_eps=0.1,
        ),
        6,
        0,
    ),
    "expert bias": (
        experts(**BLOCKS, moe_router_score_function="sigmoid", moe_router_bias_update_rate=1e-3)
        | {"trainer": {"export": False}},  # transformers' Mixtral has no sigmoid
        3,
        0,
    ),
}
# It has most graphs: forwards that count tokens come before those of the step.
FAST = ("global_aux_loss",)


def each_configuration(fast: Sequence[str]) -> Any:
    """One test for each configuration, slow unless named; those of one run in one process."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=[pytest.mark.xdist_group(name), *([] if name in fast else [pytest.mark.slow])])
            for name in CONFIGURATIONS
        ],
    )


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run a configuration after its extraction, once for each setting of functionalization."""

    @cache
    def run_of(name: str, disabled: str) -> tuple[dict[str, Any], list[float]]:
        sections = dict(CONFIGURATIONS[name][0])
        directory = tmp_path_factory.mktemp("extracted")
        # Values are read after steps 3, 5 and 6 and before the evaluation after step 4.
        trainer = {"max_steps": 7, "save_interval": 5, "val_check_interval": 4, "log_every_n_steps": 3}
        config = write_config(
            directory,
            data={"micro_batch_size": 1} | sections.pop("data", {}),
            data_parallel={"sharding": "zero1"},
            trainer=trainer | sections.pop("trainer", {}),
            **sections,
        )
        result = program(directory / "counts", ["--extract", "--config", str(config)], **{VARIABLE: disabled})
        return result, [row["loss"] for row in rows(directory / "run")]

    return run_of


@each_configuration(FAST)
def test_extraction_sees_every_graph_and_no_operation_that_neuron_lacks(name, extracted):
    result, losses = extracted(name, os.environ[VARIABLE])
    _, first_step, later_evaluation = CONFIGURATIONS[name]
    before = {"phases": result["extracted"]}
    # The second step has the update of optimizer states that exist.
    assert counts(before, "run_step") == [first_step, 1]
    assert counts(before, "held_out_loss") == [3, later_evaluation]
    names = {phase for phase, _ in result["phases"]}
    assert {"run_step", "held_out_loss", "read", "save", "after_step"} <= names and len(losses) == 7
    assert all(count == 0 for phase, count in result["phases"] if phase != "finish")  # which gathers an export
    assert result["unsupported"] == []


@each_configuration(())
def test_losses_are_those_without_functionalization(name, extracted):
    bound = BF16_BOUND if name == "bf16" else LOSS_BOUND
    assert extracted(name, "0")[1] == pytest.approx(extracted(name, "1")[1], abs=bound)
