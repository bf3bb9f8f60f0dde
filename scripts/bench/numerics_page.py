"""Makes docs/numerics.md, with the largest errors of each model, from the rows that parity programs record.

python -m scripts.bench.numerics_page            # exit 1 if the page is out of date
python -m scripts.bench.numerics_page --write
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS, PAGE = ROOT / "docs" / "numerics", ROOT / "docs" / "numerics.md"
LOSS_BOUND = 1e-6
GRADIENT_BOUND = 2e-5
# bf16 has 8 significant bits: each rounding is up to 2e-3 relative, and a reduction over T ranks
# rounds again.
BF16_BOUND = 1e-2
ON_OFF = {True: "on", False: "off"}
YES_NO = {True: "yes", False: "NO"}
Row = Mapping[str, str]


def record_rows(name: str, rows: Sequence[Row]) -> None:
    """Write ``docs/numerics/<name>.csv``, with the versions of this run in every row."""
    run = {
        "date": f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}",
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    with (ROWS / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], *run], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **run} for row in rows)


def rows_of(name: str) -> list[Row]:
    """Return the rows of ``docs/numerics/<name>.csv``."""
    with (ROWS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def model_lines(rows: Sequence[Row]) -> list[str]:
    """Return a table with the largest errors of each model over all its rows."""
    lines = ["| model | rows | loss error | gradient error | of | bit-equal |", "|---|---|---|---|---|---|"]
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        loss = max(own, key=lambda row: float(row["loss_error"]))
        worst = max(own, key=lambda row: float(row["gradient_error"]))
        equal = sum(row["bit_equal"] == "yes" for row in own)
        cells = [model, str(len(own)), loss["loss_error"], worst["gradient_error"], f"`{worst['worst_parameter']}`"]
        lines.append(f"| {' | '.join(cells)} | {equal} of {len(own)} |")
    return lines


def linear_lines(rows: Sequence[Row]) -> list[str]:
    """Return a table with the largest errors of each layer and dtype of its weight."""
    lines = ["| layer | weight | dX | dW | db |", "|---|---|---|---|---|"]
    for layer, weight in dict.fromkeys((row["layer"], row["weight"]) for row in rows):
        own = [row for row in rows if (row["layer"], row["weight"]) == (layer, weight)]
        worst = [max((row[name] for row in own), key=float) for name in ("dx", "dw", "db")]
        lines.append(f"| {layer} | {weight} | {' | '.join(worst)} |")
    return lines


def run_of(rows: Sequence[Row]) -> str:
    """Return date and versions of the last row's run."""
    row = rows[-1]
    return (
        f"{row['date']}, torch {row['torch']}, transformers {row['transformers']}, Python {row['python']}, "
        f"CPU ({row['machine']}), gloo"
    )


def page() -> str:
    """Return docs/numerics.md."""
    models, linear, experts = rows_of("models"), rows_of("linear"), rows_of("experts")
    parts = [
        "# Numerics",
        "Losses and gradients against transformers and float64, the largest error of each model over all its rows. "
        "`make parity` measures again.",
        "Loss errors are relative. A gradient error is the largest `|ours - theirs| / |theirs|` over all parameters, "
        f"gathered from all ranks. Bounds: {LOSS_BOUND:g} for losses, {GRADIENT_BOUND:g} for gradients.",
        "## Dense models, fp32",
        "T = 1, 2 and 4, with and without sequence parallelism, without recompute, selective and full. Random "
        "weights (norms and biases moved off one and zero), 2 layers, hidden 64, 8 heads, vocabulary 131 (not "
        "divisible by T), batch 2 x 32 tokens; the reference runs in one process. Bit-equal: loss and every gradient "
        "equal those without recompute on every rank, without dropout and with dropout 0.1. "
        f"{run_of(models)} ([rows](numerics/models.csv)).",
        "\n".join(model_lines(models)),
        "## Models with experts, fp32",
        "T and EP = 1, 2 and 4, up to 16 ranks, with and without sequence parallelism, both dispatchers. 2 layers, "
        "hidden 64, 2 x 32 tokens on each data-parallel rank. The loss includes transformers' balancing loss with "
        "coefficient 0.1; its error is the worst rank's. Gradients are of the mean loss over data-parallel "
        "ranks. Bit-equal: every gradient is the same without recompute, with recompute of the MoE layers and of full "
        "layers. "
        f"{run_of(experts)} ([rows](numerics/experts.csv)).",
        "\n".join(model_lines(experts)),
        "## Linear layers in bf16",
        "bf16 input 32 x 96, output 80, T = 2 and 4, with and without sequence parallelism, against float64 on the "
        "same bf16 values; fp32 weights run under autocast. The worst rank's relative error; bound "
        f"{BF16_BOUND:g}. "
        f"{run_of(linear)} ([rows](numerics/linear.csv)).",
        "\n".join(linear_lines(linear)),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/numerics.md")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        print(
            "docs/numerics.md differs from the rows of docs/numerics: run python -m scripts.bench.numerics_page --write"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
