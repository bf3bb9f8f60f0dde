"""Tests fp16 training over ranks: an overflow skips the step everywhere, losses are fp32's, resumption is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.training.optimizer import MasterWeightOptimizer
from tests.dist import pool
from tests.training.runs import TENSOR_AND_SEQUENCE, _run_rank, exact, rows, run_here, run_on_pool, write_config

ZERO1 = {"data_parallel": {"sharding": "zero1"}}
# Ranks and sections.
LAYOUTS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "data2_overlap": (2, {"optimizer": {"overlap_grad_reduce": True}}),
    "tensor2xdata2_zero1": (4, {"parallel": TENSOR_AND_SEQUENCE, **ZERO1}),
}
SCALE = {"initial_loss_scale": 4096}
STEPS = 6
OVERFLOWS = {2: 0, 3: 1}  # step, counted from 1, and the rank with the bad gradient


def layout(name: str) -> tuple[int, dict[str, dict[str, Any]]]:
    ranks, own = LAYOUTS[name]
    sections = {
        **own,
        "optimizer": SCALE | own.get("optimizer", {}),
        "trainer": {"max_steps": STEPS, "export": False, "save_interval": "never", "precision": "16-mixed"},
    }
    if name.startswith("data2"):
        sections["data"] = {"micro_batch_size": 1}
    return ranks, sections


def _run_with_overflows(config: str) -> list[bool]:
    """Run on this rank with one infinite gradient at each of ``OVERFLOWS``.

    Returns for each step whether the step left all of this rank's weights as they were.
    """
    unchanged: list[bool] = []
    reduce_gradients, step = MasterWeightOptimizer.reduce_gradients, MasterWeightOptimizer.step

    def reduce_with_overflow(self: MasterWeightOptimizer) -> torch.Tensor:
        if OVERFLOWS.get(len(unchanged) + 1) == dist.get_rank():
            matrix: Any = next(each for each in self.parameters if each.dim() == 2)
            matrix.main_grad[1, 2] = torch.inf
        return reduce_gradients(self)

    def recorded_step(self: MasterWeightOptimizer, lr: float) -> None:
        before = [parameter.detach().clone() for parameter in self.parameters]
        step(self, lr)
        pairs = zip(before, self.parameters, strict=True)
        unchanged.append(all(torch.equal(old, parameter.detach()) for old, parameter in pairs))

    with (
        mock.patch.object(MasterWeightOptimizer, "reduce_gradients", reduce_with_overflow),
        mock.patch.object(MasterWeightOptimizer, "step", recorded_step),
    ):
        _run_rank(config, ())
    return unchanged


@pytest.mark.parametrize("name", ["tensor2xdata2_zero1"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path, name: str) -> None:
    ranks, sections = layout(name)
    config = write_config(tmp_path, **sections)
    unchanged = pool.run_on_ranks(_run_with_overflows, ranks, str(config))
    assert unchanged == [[number in OVERFLOWS for number in range(1, STEPS + 1)]] * ranks
    steps = rows(tmp_path / "run")
    assert [row["skipped"] for row in steps] == unchanged[0]
    # The second overflow halves the scale.
    assert [row["loss_scale"] for row in steps] == [4096] * 3 + [2048] * 3
    assert [row["grad_norm"] is None for row in steps] == unchanged[0]
    assert all(row["loss"] > 0 for row in steps)  # the planted gradient leaves the loss as it is
    rates = [row["lr"] for row in steps]
    assert rates[1] == rates[2] == rates[3] != rates[4]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a run in fp32 on one process."""
    directory = tmp_path_factory.mktemp("wide")
    trainer = {"max_steps": STEPS, "export": False}
    assert run_here(write_config(directory, trainer=trainer)).returncode == 0
    return rows(directory / "run")


@pytest.mark.parametrize("name", ["tensor2xdata2_zero1", "data2_overlap"])
def test_losses_and_norms_are_those_of_fp32(tmp_path: Path, wide: list[dict[str, Any]], name: str) -> None:
    ranks, sections = layout(name)
    run_on_pool(write_config(tmp_path, **sections), ranks=ranks)
    half = rows(tmp_path / "run")
    assert not any(row["skipped"] for row in half)
    # fp16 has 11 significant bits; the norm has no factor of T, D or of the scale
    assert [row["loss"] for row in half] == pytest.approx([row["loss"] for row in wide], rel=1e-3)
    assert [row["grad_norm"] for row in half] == pytest.approx([row["grad_norm"] for row in wide], rel=2e-2)


@pytest.mark.parametrize(
    ("optimizer", "async_save"),
    [
        # The run is stopped after the first overflow; the second one halves the scale.
        ({"initial_loss_scale": 2.0**20}, False),
        # Every step is skipped, so the optimizer has no states to save.
        pytest.param({"initial_loss_scale": 2.0**60}, True, marks=pytest.mark.slow),
    ],
    ids=["overflows", "all_skipped"],
)
def test_a_resumed_run_continues_the_scale_exactly(tmp_path: Path, optimizer: dict[str, Any], async_save: bool) -> None:
    trainer = {"max_steps": 14, "precision": "16-mixed", "export": False, "async_save": async_save, "save_interval": 5}
    for name, stops in (("whole", ()), ("parts", ("1", "9"))):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, optimizer=optimizer | {"decay_steps": 14}, trainer=trainer)
        for stop in (*stops, "14"):
            outcome = run_here(config, "--trainer.max-steps", stop)
            assert outcome.returncode == 0, outcome.stderr
    found = exact(tmp_path / "parts" / "run")
    assert found == exact(tmp_path / "whole" / "run")
    if not async_save:
        scales = [row[4] for row in found]
        # The second overflow, after the first resume: the count of overflows came along.
        assert scales[0] == scales[1] == 2 * scales[2], scales
