"""Tests that the profile of a run with stages has each stage's modules, activations, and waiting for messages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nxd_memopt.pipeline.runner import WAITING
from nxd_memopt.planner.techniques.pipeline_schedule import bubble
from nxd_memopt.profiling.operations import PART
from nxd_memopt.profiling.report import write_report
from nxd_memopt.profiling.tables import read_profile, tables
from nxd_memopt.training.runtime.distributed import PROFILE_VARIABLE
from tests.dist.pool import run_on_ranks
from tests.pipeline.test_training import LAYERS, sizes
from tests.profiling.test_report import values_of
from tests.training.runs import LLAMA, _run_rank, losses, run_here, write_config

TITLE = WAITING.removeprefix(PART)
MICRO_BATCHES = 4


def profiled_rank(config: str, options: tuple[str, ...], request: str) -> None:
    with mock.patch.dict(os.environ, {PROFILE_VARIABLE: request}):
        _run_rank(config, options)


def profile(directory: Path, config: Path, *options: str, ranks: int) -> list[dict[str, Any]]:
    """The figures of each rank of a profiled run."""
    request = json.dumps({"directory": str(directory / "profile"), "skip": 1, "steps": 1})
    arguments = ("--trainer.output-dir", str(directory / "run"), *options)
    run_on_ranks(profiled_rank, ranks, str(config), arguments, request)
    return read_profile(directory / "profile")


def kept(ranks: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes of activations by decoder layer."""
    return {
        layer: size for rank in ranks for layer, size in rank["memory"]["kept_by_layer"].items() if ".layers." in layer
    }


@pytest.mark.parametrize(
    ("chunks", "in_flight"), [(None, [(2,), (1,)]), pytest.param(2, [(4, 1), (2, 1)], marks=pytest.mark.slow)]
)
def test_stages_have_the_rows_of_one_rank(tmp_path: Path, chunks: int | None, in_flight: list[tuple[int, ...]]) -> None:
    config = write_config(
        tmp_path,
        model={"config_overrides": LLAMA | LAYERS},
        data={"micro_batch_size": 1, "isolate_documents": False, "global_batch_size": MICRO_BATCHES},
        trainer={"max_steps": 3, "save_interval": 0, "export": False},
    )
    assert run_here(config, "--trainer.output-dir", str(tmp_path / "plain")).returncode == 0
    whole = profile(tmp_path / "whole", config, ranks=1)
    stages = profile(tmp_path / "stages", config, *sizes(2, chunks), ranks=2)
    assert losses(tmp_path / "stages" / "run") == losses(tmp_path / "plain")

    # Together the stages have the complete model's modules, and messages.
    names = [set(rank["time"]["modules"]) for rank in stages]
    assert TITLE in names[0] & names[1]
    layers = {name for name in whole[0]["time"]["modules"] if ".layers." in name}
    assert {name for name in names[0] | names[1] if ".layers." in name} == layers
    assert not {name for name in names[0] & names[1] if ".layers." in name}

    # As many micro-batches as are in flight keep what one keeps without stages, and their received inputs.
    hidden = 24 * LLAMA["hidden_size"] * 4
    by_layer = kept(whole)
    for rank, counts in zip(stages, in_flight, strict=True):
        expected = {}
        for (first, last), count in zip(rank["pipeline"]["layers"], counts, strict=True):
            for layer in range(first, last + 1):
                # The stage after the layer has its output.
                sent = hidden if layer == last != LAYERS["num_hidden_layers"] - 1 else 0
                expected[f"model.layers.{layer}"] = count * (by_layer[f"model.layers.{layer}"] - sent)
        found, waiting = kept([rank]), 0
        if chunks is not None and rank["rank"] == 0:
            # A backward follows the forward before its output is sent.
            waiting = hidden
        assert found.keys() == expected.keys()
        assert sum(found.values()) == sum(expected.values()) + waiting
        assert all(0 <= size - expected[name] <= waiting for name, size in found.items())
        received = sum(counts) - (counts[0] if rank["rank"] == 0 else 0)
        outside = rank["memory"]["kept_by_layer"].get("outside of modules", 0)
        assert 0 <= outside - received * hidden < 64
        layers = expected.keys()
        assert rank["planned"]["layers"].keys() == layers
        planned = sum(rank["planned"]["layers"].values()) + rank["planned"]["around_layers"]
        assert sum(rank["memory"]["kept_by_layer"].values()) == pytest.approx(planned, rel=0.02)

    # The waiting of each rank is beside the schedule's, and its tables name the stage.
    found = tables(stages)
    ideal = bubble(2, chunks or 1, MICRO_BATCHES)
    for rank in stages:
        waits, step_s = rank["time"]["waiting_for_stages_s"], rank["step_s"][0]
        assert 0 < waits < step_s
        # A message that is received later than its operator ends is counted with the waiting alone.
        assert min(rank["time"]["classes"].values()) >= 0
        assert values_of(found, "Messages")[str(rank["rank"])] == pytest.approx([waits, waits / step_s, ideal])
        messages = values_of(found, f"Time by module (* stands for all layers); rank {rank['rank']}, stage")[TITLE]
        assert messages[3] == pytest.approx(waits, rel=0.1)
    assert whole[0]["pipeline"] is None and whole[0]["time"]["waiting_for_stages_s"] == 0
    lines = write_report(tmp_path / "stages" / "profile")
    stage = "stage 1" if chunks is None else "stage 1, 3"
    assert any(line.startswith("Kept by forward") and line.endswith(f"rank 1, {stage}") for line in lines)
