"""The summary of a run whose figures are at their limits: it must not fail after training."""

from __future__ import annotations

import pytest

from nxd_memopt.training.summary import Summary


def shown(**figures) -> dict[str, str]:
    """Return the rows of the table by name."""
    table = Summary("cpu", 1, 1, None, **figures).table()
    names, values = (list(column.cells) for column in table.columns)
    return {str(name): str(value) for name, value in zip(names, values, strict=True)}


@pytest.mark.parametrize(("measured", "words"), [(0, "0.00 GiB"), (2**29, "0.50 GiB (+100.0 %)"), (-(2**20), "GiB")])
def test_planned_memory_of_a_process_that_did_not_grow(measured, words):
    planned = shown(planned_memory_bytes=2**30, measured_memory_bytes=measured)["planned memory"]
    assert planned.startswith("1.00 GiB; measured: ") and words in planned
    assert ("%" in planned) == (measured > 0)


def test_a_change_needs_a_loss_before():
    assert "change" not in shown(held_out_loss_before=0.0, held_out_loss_after=0.5)
    assert shown(held_out_loss_before=2.0, held_out_loss_after=1.0)["change"] == "-50.00 %"
