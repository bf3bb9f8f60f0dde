"""The race of losses: wrong gradients are named, peaks are independently counted, absent peers have a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxd_memopt.certify.measure.eager import _Recorder
from scripts.bench import loss_race
from scripts.bench.loss_race import Sizes, inputs, original, ours, race_losses, reference, write_race

SIZES = Sizes(2, 50, 300, 32, "float32")
# A checkout's interface; the factor of its gradient makes it right or wrong.
STAND_IN = """
import torch
from torch import nn

class FusedProjectionPlusCrossEntropyLoss(nn.Module):
    def __init__(self, dim, n_classes, n_loop_iters=1, ignore_index=-100, reduction="mean"):
        super().__init__()
        assert 100 % n_loop_iters == 0 and n_loop_iters == 5
        self.proj_weight = nn.Parameter(torch.empty(n_classes, dim))

    def forward(self, x, target):
        x = x * FACTOR - (x * FACTOR - x).detach()
        return nn.functional.cross_entropy(x @ self.proj_weight.t(), target)
"""


def checkout(directory: Path, factor: float) -> Path:
    (directory / "modules.py").write_text(STAND_IN.replace("FACTOR", str(factor)))
    return directory


def test_all_that_can_run_agree_and_the_others_are_named(tmp_path):
    result = race_losses(SIZES, checkout(tmp_path, 1.0), turns=1)
    assert set(result["losses"]) | set(result["absent"]) == {"original", "ours", "Liger", "mgmalek"}
    for name in ("original", "ours", "mgmalek"):
        each = result["losses"][name]
        assert all(each["allclose"].values()), (name, each)
        assert max(each["loss_error"], each["dx_error"], each["dw_error"]) < 1e-5
        assert each["seconds"] > 0 and each["peak_bytes"] > 0
    # Liger-Kernel is not installed here, or has no kernel for a CPU.
    assert "Liger" in result["absent"]
    lines = "\n".join(write_race(tmp_path / "race", result))
    assert f"Liger does not take part: {result['absent']['Liger']}" in lines


def test_a_wrong_gradient_is_not_close(tmp_path):
    result = race_losses(SIZES, checkout(tmp_path, 1.01), turns=1)
    each = result["losses"]["mgmalek"]
    assert each["allclose"] == {"loss": True, "dx": False, "dw": True}
    assert each["dx_error"] == pytest.approx(0.01, rel=1e-2)
    assert "not dx (2e-05)" in "\n".join(write_race(tmp_path / "race", result))


@pytest.mark.parametrize("builder", [original, ours])
def test_peaks_are_those_of_a_count_by_operations(builder):
    sizes = Sizes(1, 256, 1000, 64, "float32")
    name = builder.__name__
    peak = race_losses(sizes, turns=1)["losses"][name]["peak_bytes"]
    hidden, weight, target = inputs(sizes)
    recorder = _Recorder()
    with recorder:
        builder(sizes)(hidden, weight, target).backward()
    current = counted = 0
    for _, change in recorder._events:
        current += change
        counted = max(counted, current)
    assert peak == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    result = race_losses(Sizes(1, 64, 500, 32, dtype), turns=1)
    for name in ("original", "ours"):
        assert all(result["losses"][name]["allclose"].values()), (name, result["losses"][name])


def test_the_reference_by_chunks_is_the_loss_of_all_rows(monkeypatch):
    hidden, weight, target = inputs(SIZES)
    expected = reference(hidden, weight, target)
    monkeypatch.setattr(loss_race, "_REFERENCE_ROWS", 7)
    for one, other in zip(reference(hidden, weight, target), expected, strict=True):
        assert (one - other).abs().max() <= 2e-6 * other.abs().max()  # another order of fp32 sums
    assert (target < 0).sum() == 10 and target.max() == SIZES.vocabulary - 1
