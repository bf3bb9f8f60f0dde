"""Tests that runs on conversations have the same losses in every layout: trained tokens differ between ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.chats import turns, write_chat_config, write_rows
from tests.training.runs import TENSOR_AND_SEQUENCE, rows, run_here, run_on_pool

# From one trained token to nearly all of a row.
UNEQUAL = [turns("q" * (3 + 7 * n % 30), "a" * (1 + (11 * n) % 29)) for n in range(80)]


ZERO1 = {"data_parallel": {"sharding": "zero1"}}


def config(directory: Path, name: str, **sections: Any) -> Path:
    trainer = {"max_steps": 3, "output_dir": str(directory / name), "export": False}
    data = {"dataset": write_rows(directory / "chats.jsonl", UNEQUAL)} | sections.pop("data", {})
    # A large eps: AdamW's first updates would otherwise amplify the rounding of gradients near 0.
    return write_chat_config(directory, data=data, trainer=trainer, optimizer={"lr": 0.01, "eps": 1e-3}, **sections)


def values(directory: Path, name: str) -> list[float]:
    found = [row[value] for value in ("loss", "grad_norm") for row in rows(directory / name)]
    return [*found, *(row["held_out_loss"] for row in rows(directory / name, "evaluation.jsonl"))]


@pytest.mark.parametrize(
    ("ranks", "size", "sections"),
    [
        pytest.param(2, 1, {}, id="D=2"),
        pytest.param(2, 2, {"parallel": TENSOR_AND_SEQUENCE}, id="T=2"),
        pytest.param(4, 2, ZERO1 | {"parallel": TENSOR_AND_SEQUENCE}, id="T=2, D=2, ZeRO-1", marks=pytest.mark.slow),
        pytest.param(4, 1, {"data_parallel": {"sharding": "zero3"}}, id="D=4, ZeRO-3", marks=pytest.mark.slow),
    ],
)
def test_losses_and_norms_of_every_layout(tmp_path: Path, ranks: int, size: int, sections: dict[str, Any]) -> None:
    data = {"global_batch_size": 8}
    outcome = run_here(config(tmp_path, "one", data=data | {"micro_batch_size": 8}))
    assert outcome.returncode == 0, outcome.stderr
    expected = values(tmp_path, "one")
    run_on_pool(config(tmp_path, "many", data=data | {"micro_batch_size": size}, **sections), ranks=ranks)
    assert values(tmp_path, "many") == pytest.approx(expected, rel=2e-5)  # fp32 sums in another order
