"""Writes the report of a profile: a plot, and one HTML file without references to other files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from nxd_memopt.files import write_text
from nxd_memopt.profiling.plots import draw_memory
from nxd_memopt.profiling.tables import Quantity, Table, comparison, headline, read_profile, tables

_STYLE = """
body { font: 14px sans-serif; margin: 2em; max-width: 75em; }
table { border-collapse: collapse; margin: 0.5em 0 2em; }
th, td { padding: 0.2em 0.8em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td:first-child, td.text { text-align: left; }
td.text { max-width: 45em; overflow-wrap: anywhere; }
img { max-width: 100%; }
"""


def write_report(directory: Path) -> list[str]:
    """Write ``report.html`` and the plot of a profile; return its tables as text.

    Args:
        directory: directory with the files of ``StepProfiler``.
    """
    ranks = read_profile(directory)
    profile = ranks[0]
    plot = None
    if profile["memory"] is not None:
        plot = directory / "memory.png"
        draw_memory(profile["memory"], plot)
    found = tables(ranks)
    write_html(directory / "report.html", f"Profile of {profile['model']}", headline(profile), found, plot)
    # In a terminal, stacks are too long for a table.
    lines = headline(profile)
    for table in found:
        if table.columns[-1] == "stack":
            table = Table(table.title, table.columns[:-1], [row[:-1] for row in table.rows])
        lines += ["", *table.lines()]
    return lines


def write_comparison(first: Path, second: Path, file: Path | None) -> list[str]:
    """Return the differences between two profiles as text; write them to an HTML file too, if one is named."""
    profiles = [read_profile(directory)[0] for directory in (first, second)]
    lines = [f"A: {first}", *(f"   {line}" for line in headline(profiles[0]))]
    lines += [f"B: {second}", *(f"   {line}" for line in headline(profiles[1]))]
    found = comparison(*profiles)
    if file is not None:
        write_html(file, "Comparison of two profiles", lines, found)
    for table in found:
        lines += ["", *table.lines()]
    return lines


def write_html(file: Path, title: str, lines: Sequence[str], found: Sequence[Table], plot: Path | None = None) -> None:
    """Write a page with texts, tables and, if there is one, a plot, which is embedded."""
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head>',
        f"<body><h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in lines),
    ]
    if plot is not None:
        content = base64.b64encode(plot.read_bytes()).decode()
        parts.append(f'<p><img alt="{escape(plot.stem)}" src="data:image/png;base64,{content}"></p>')
    for table in found:
        parts += [f"<h2>{escape(table.title)}</h2>", *_html_table(table)]
    # One file without references: it can be sent and opened anywhere.
    parts.append("</body></html>")
    write_text(file, "\n".join(parts))


def _html_table(table: Table) -> list[str]:
    """Return the lines of a table; a number has its exact value in seconds or bytes as ``data-value``."""
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    lines = [f"<table><tr>{head}</tr>"]
    for row in table.rows:
        cells = ""
        for cell in row:
            if isinstance(cell, Quantity):
                cells += f'<td data-value="{cell.value!r}">{escape(str(cell))}</td>'
            else:
                cells += f'<td class="text">{escape(cell)}</td>'
        lines.append(f"<tr>{cells}</tr>")
    return [*lines, "</table>"]
