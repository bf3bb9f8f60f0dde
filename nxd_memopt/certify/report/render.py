"""Prints a certificate."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from nxd_memopt.certify.report.verdict import Certificate
from nxd_memopt.planner.collectives import Collective
from nxd_memopt.planner.hardware import GIB

_VERDICTS = {True: "[green]pass[/green]", False: "[red]FAIL[/red]", None: "note"}


def show(certificate: Certificate, title: str) -> None:
    """Print checks, measurements, collectives, memory and notes to the console."""
    console = Console(soft_wrap=False)
    console.print(title, highlight=False)
    for table in (_checks(certificate), _measured(certificate), _collectives(certificate), _memory(certificate)):
        console.print(table)
    for note in certificate.notes:
        console.print(f"- {note}", highlight=False)
    console.print("certified" if certificate.passed else "NOT certified", style="bold", highlight=False)


def _table(title: str, *columns: str) -> Table:
    """Return an empty table with a left-aligned first column and right-aligned others."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _checks(certificate: Certificate) -> Table:
    """Return the table of checks."""
    # The details have shapes such as f32[2,3]: rich would take [2,3] for markup.
    table = Table(title="Checks", title_justify="left")
    for column in ("check", "verdict", "figures"):
        table.add_column(column, overflow="fold")
    for check in certificate.checks:
        table.add_row(check.name, _VERDICTS[check.passed], check.detail.replace("[", r"\["))
    return table


def _measured(certificate: Certificate) -> Table:
    """Return the table of measurements, with and without recomputation at each depth."""
    table = _table("Measured", "layers, variant", "matmuls traced", "matmuls left", "held GiB", "of baseline")
    for layers, survival in sorted(certificate.survivals.items()):
        for name, measured in (("as configured", survival.recompute), ("no recompute", survival.baseline)):
            ratio = measured.held_bytes / max(1, survival.baseline.held_bytes)
            counts = (str(measured.traced_matmuls), str(measured.matmuls))
            table.add_row(f"{layers}, {name}", *counts, f"{measured.held_bytes / GIB:.3f}", f"{ratio:.3f}")
    return table


def _collectives(certificate: Certificate) -> Table:
    """Return the table of collectives at the model's full depth, from the formulas."""
    table = _table(
        "Collectives per rank at full depth", "kind", "over ranks", "MiB each", "per step", "per layer*", "GiB"
    )
    for collective, count in sorted(certificate.collectives.items()):
        in_layer = certificate.per_layer[collective]
        table.add_row(*_row(collective, count, in_layer))
    table.caption = "bytes of full tensors; * without recomputation"
    return table


def _row(collective: Collective, count: int, in_layer: int) -> tuple[str, ...]:
    """Return the cells of one collective."""
    each = collective.full_bytes
    return (
        collective.kind,
        str(collective.group_size),
        f"{each / 2**20:.2f}",
        str(count),
        str(in_layer),
        f"{each * count / GIB:.2f}",
    )


def _memory(certificate: Certificate) -> Table:
    """Return the table of one rank's memory."""
    memory = certificate.memory
    table = _table("Memory of one device", "term", "GiB")
    for name, nbytes in memory.terms.items():
        table.add_row(name, f"{nbytes / GIB:.2f}")
    table.caption = f"without recompute, activations and temporaries: {certificate.baseline_bytes / GIB:.2f} GiB"
    table.add_row("total", f"{memory.total_bytes / GIB:.2f}", style="bold")
    table.add_row("capacity", f"{memory.capacity_bytes / GIB:.2f}")
    return table
