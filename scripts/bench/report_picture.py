"""Draws README's picture: speed and memory of full training steps beside the fastest peer."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from scripts.bench.report_sections import Row

OURS, PEER = "#3867d6", "#b2bec3"
BAR = 0.38


def picture(pairs: Sequence[tuple[Row, Row]], speed_of: Callable[[Row], float]) -> str:
    """Return an SVG with two bars, ours and the peer's, for each pair: tokens/s/GPU on the left, GiB on the right."""
    # Text stays text and ids have a fixed salt: the same rows make the same file on every machine.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nxd_memopt", "font.size": 9}):
        figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
        names = [_name(ours) for ours, _ in pairs]
        _bars(speed, [(speed_of(ours), speed_of(peer)) for ours, peer in pairs], "{:,.0f}")
        _bars(memory, [(float(ours["peak_gib"]), float(peer["peak_gib"])) for ours, peer in pairs], "{:.0f}")
        speed.set(title="tokens/s per GPU (more is better)", yticks=range(len(names)), yticklabels=names)
        memory.set(title="peak memory in GiB (less is better)")
        speed.invert_yaxis()
        names = ["nxd_memopt", "fastest peer of the same run"]
        figure.legend(memory.containers, names, loc="outside lower center", ncols=2, frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    # matplotlib ends some lines with a space.
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def _name(row: Row) -> str:
    return f"{row['model']}, T={row['tensor_parallel']}, {int(row['tokens']) // 1024}K tokens"


def _bars(axes: Axes, values: Sequence[tuple[float, float]], form: str) -> None:
    """Draw two horizontal bars, with their values, at each position."""
    for index, color in enumerate((OURS, PEER)):
        places = [place + (index - 0.5) * BAR for place in range(len(values))]
        bars = axes.barh(places, [pair[index] for pair in values], BAR, color=color)
        axes.bar_label(bars, fmt=form, padding=2, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
