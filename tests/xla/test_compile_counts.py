"""What a training run compiles, with collectives inside the graphs: four graphs of steps, one set of an evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nxd_memopt.backends.neuron import xla_inspect
from tests.training.runs import LLAMA, write_config

pytestmark = pytest.mark.xdist_group("compile counts")

ONE_LAYER = LLAMA | {"num_hidden_layers": 1}  # the number of graphs does not depend on it, compilation does
Phases = list[tuple[str, int]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A run of four steps, and its resumption to eight in another process, which saves in the background."""
    directory = tmp_path_factory.mktemp("compile_counts")
    config = write_config(
        directory,
        model={"config_overrides": ONE_LAYER},
        data={"micro_batch_size": 1},  # four micro-batches a step
        data_parallel={"sharding": "zero1"},
        optimizer={"decay_steps": 8},
        trainer={"save_interval": 2, "val_check_interval": 2, "log_every_n_steps": 1},
    )
    return {name: run(directory, config, name, steps) for name, steps in (("fresh", 4), ("resumed", 8))}


def run(directory: Path, config: Path, name: str, max_steps: int) -> dict[str, Any]:
    options = ["--trainer.max-steps", str(max_steps)]
    options += ["--trainer.async-save"] if name == "resumed" else []
    return program(directory / name, ["--config", str(config), *options])


def program(output: Path, arguments: list[str], **environment: str) -> dict[str, Any]:
    """Return what ``compile_counts`` writes."""
    dump = output.with_name(f"{output.name}_hlo")
    command = [sys.executable, "-m", "tests.xla.compile_counts", str(output), *arguments]
    command += ["--memory.recompute-granularity", "full"]
    env = {
        **os.environ,
        **environment,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "XLA_FLAGS": f"{xla_inspect.dump_flags(dump)} {os.environ['XLA_FLAGS']}",
    }
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(output.read_text(encoding="utf-8"))


def counts(run: dict[str, Any], phase: str) -> list[int]:
    return [count for name, count in run["phases"] if name == phase]


def test_training_has_four_graphs_and_compiles_none_again(runs):
    assert {run["process_group"] for run in runs.values()} == {"xla"}
    # first micro-batch, later ones, the update that makes AdamW's states; then the update of existing states
    assert counts(runs["fresh"], "run_step") == [3, 1, 0, 0]
    # between these steps: exchanges of texts, gathers of a tensor, an evaluation and two checkpoints
    assert counts(runs["resumed"], "run_step") == [3, 0, 0, 0]
    # A resumed process compiles no graph that a fresh one does not.
    assert set(runs["resumed"]["graphs"]) <= set(runs["fresh"]["graphs"])


@pytest.mark.parametrize("name", ["fresh", "resumed"])
def test_what_is_between_steps_compiles_once_or_never(name, runs):
    first, *later = counts(runs[name], "held_out_loss")
    assert first > 0 and later and set(later) == {0}
    assert counts(runs[name], "gather_full_tensor") == [1, 0, 0, 0]
    for phase in ("save", "after_step", "share_texts", "resume"):
        assert set(counts(runs[name], phase)) == {0}, phase
