"""Prints a certificate."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from nxd_memopt.certify.report.verdict import Certificate
from nxd_memopt.planner.hardware import GIB

_VERDICTS = {True: "[green]pass[/green]", False: "[red]FAIL[/red]", None: "note"}


def show(certificate: Certificate, title: str) -> None:
    """Print checks, measurements, collectives, memory and notes to the console."""
    console = Console(soft_wrap=False)
    console.print(title, highlight=False)
    for table_of in (_checks, _measured, _collectives, _memory):
        console.print(table_of(certificate))
    for note in certificate.notes:
        console.print(f"- {note}", highlight=False)
    verdict = "NOT certified"
    if certificate.passed:
        verdict = "certified"
    console.print(verdict, style="bold", highlight=False)


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
    columns = ("layers, variant", "matmuls traced", "matmuls left", "held GiB", "of baseline")
    table = _table("Measured", *columns)
    for layers, survival in sorted(certificate.survivals.items()):
        variants = {"as configured": survival.recompute, "no recompute": survival.baseline}
        for name, measured in variants.items():
            # A step that saves nothing for backward is its own baseline with 0 bytes.
            ratio = measured.held_bytes / max(1, survival.baseline.held_bytes)
            table.add_row(
                f"{layers}, {name}",
                str(measured.traced_matmuls),
                str(measured.matmuls),
                f"{measured.held_bytes / GIB:.3f}",
                f"{ratio:.3f}",
            )
    return table


def _collectives(certificate: Certificate) -> Table:
    """Return the table of collectives at the model's full depth, from the formulas."""
    columns = ("kind", "over ranks", "MiB each", "per step", "per layer*", "GiB")
    table = _table("Collectives per rank at full depth", *columns)
    for collective, count in sorted(certificate.collectives.items()):
        # Recomputation repeats a part of a layer's collectives; the column per layer is without it.
        each = collective.full_bytes
        in_layer = str(certificate.per_layer[collective])
        sizes = (f"{each / 2**20:.2f}", str(count), in_layer, f"{each * count / GIB:.2f}")
        table.add_row(collective.kind, str(collective.group_size), *sizes)
    table.caption = "bytes of full tensors; * the last layer's, without recomputation"
    return table


def _memory(certificate: Certificate) -> Table:
    """Return the table of one rank's memory."""
    memory = certificate.memory
    table = _table("Memory of one device", "term", "GiB")
    for name, nbytes in memory.terms.items():
        table.add_row(name, f"{nbytes / GIB:.2f}")
    baseline_gib = certificate.baseline_bytes / GIB
    table.caption = f"without recompute, activations and temporaries: {baseline_gib:.2f} GiB"
    table.add_row("total", f"{memory.total_bytes / GIB:.2f}", style="bold")
    table.add_row("capacity", f"{memory.capacity_bytes / GIB:.2f}")
    return table
