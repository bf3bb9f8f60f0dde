"""The summary of a run whose figures are at their limits: it must not fail after training."""

from __future__ import annotations

import pytest

from nxd_memopt.training.summary import Summary


def shown(backend="cpu", **figures) -> dict[str, str]:
    """Return the rows of the table by name."""
    table = Summary(backend, 1, 1, None, **figures).table()
    names, values = (list(column.cells) for column in table.columns)
    return {str(name): str(value) for name, value in zip(names, values, strict=True)}


@pytest.mark.parametrize("measured", [0, 2**29, -(2**20)])
def test_the_growth_of_a_process_is_not_compared_with_planned_tensors(measured):
    """A CPU has no figure of tensors alone: malloc keeps freed blocks, and may have had them before."""
    planned = shown(planned_memory_bytes=2**30, measured_memory_bytes=measured, freed_memory_bytes=2**28)[
        "planned memory"
    ]
    assert planned.startswith(f"1.00 GiB of tensors; the process grew by {measured / 2**30:.2f} GiB\n0.25 GiB of freed")
    assert "%" not in planned


def test_an_allocator_measures_what_is_planned():
    figures = {"planned_memory_bytes": 2**30, "measured_memory_bytes": 2**29}
    assert shown("cuda", **figures)["planned memory"] == "1.00 GiB; measured: 0.50 GiB (+100.0 %)"
    assert shown(planned_memory_bytes=2**30)["planned memory"] == "1.00 GiB"


def test_a_change_needs_a_loss_before():
    assert "change" not in shown(held_out_loss_before=0.0, held_out_loss_after=0.5)
    assert shown(held_out_loss_before=2.0, held_out_loss_after=1.0)["change"] == "-50.00 %"
