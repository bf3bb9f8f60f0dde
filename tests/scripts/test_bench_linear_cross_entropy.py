"""The race of linear layer + cross entropy: on a CPU too, wrong gradients are named, and peaks are counted."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from scripts.bench.races import linear_cross_entropy
from scripts.bench.races.linear_cross_entropy import main, reference

OURS = ("ours", "ours, one chunk", "eager")
# A checkout's interface; the factor of its gradient makes it right or wrong.
STAND_IN = """
import torch
from torch import nn

class FusedProjectionPlusCrossEntropyLoss(nn.Module):
    def __init__(self, dim, n_classes, n_loop_iters=1, ignore_index=-100, reduction="mean"):
        super().__init__()
        assert n_loop_iters == 5
        self.proj_weight = nn.Parameter(torch.empty(n_classes, dim))

    def forward(self, x, target):
        x = x * FACTOR - (x * FACTOR - x).detach()
        return nn.functional.cross_entropy(x @ self.proj_weight.t(), target)
"""


@pytest.mark.parametrize(("factor", "different"), [(1.0, ""), (1.01, "dx")])
def test_variants_agree_and_a_wrong_gradient_is_not_close(tmp_path: Path, monkeypatch, factor, different):
    (tmp_path / "modules.py").write_text(STAND_IN.replace("FACTOR", str(factor)))
    options = ["--hidden", "32", "--vocabulary", "300", "--tokens", "100", "--turns", "1", "--append"]
    options += ["--variants", *OURS, "liger 1", "mgmalek", "--malek", str(tmp_path)]
    options += ["--csv", str(tmp_path / "rows.csv"), "--plot", str(tmp_path / "memory.png")]
    monkeypatch.setattr("sys.argv", ["linear_cross_entropy", *options])
    main()
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    # Liger-Kernel is not installed here, or has no kernel for a CPU.
    assert rows.pop("liger 1")["failure"]
    assert rows.keys() == {*OURS, "mgmalek"}
    for name, row in rows.items():
        assert row["not_close"] == (different if name == "mgmalek" else ""), (name, row)
        assert float(row["ms"]) > 0 and row["peak_gib"] and not row["failure"]
    assert float(rows["mgmalek"]["dx_error"]) == pytest.approx(factor - 1, abs=1e-5)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def inputs(tokens: int, vocabulary: int, hidden: int):
    x = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, requires_grad=True)
    return x, weight, torch.randint(0, vocabulary, (tokens,))


def test_the_reference_by_chunks_is_the_loss_of_all_rows(monkeypatch):
    values = inputs(100, 300, 32)
    expected = reference(*values)
    monkeypatch.setattr(linear_cross_entropy, "REFERENCE_ROWS", 7)
    for one, other in zip(reference(*values), expected, strict=True):
        assert (one - other).abs().max() <= 2e-6 * other.abs().max()  # another order of fp32 sums
