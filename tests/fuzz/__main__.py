"""Draws configurations, runs them and prints a summary: ``python -m tests.fuzz --draws 100 --seed 7``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("NXD_MEMOPT_BACKEND", "cpu")  # the backend is chosen at import
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.dist import pool
from tests.fuzz import library, programs
from tests.fuzz.draws import Draw, Spec, draw_library, draw_program
from tests.fuzz.outcomes import FAILED, Outcome, summarize

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM_SHARE = 5
"""One draw in so many is of the program layer, which takes twice as long."""


def draw_spec(seed: int, number: int, layer: str | None = None) -> Spec:
    """Return the spec of draw ``number``, which depends on ``seed`` and the number alone."""
    draw = Draw(f"{seed} {number}")
    if layer is None:
        layer = "program" if number % PROGRAM_SHARE == PROGRAM_SHARE - 1 else "library"
    return draw_program(draw) if layer == "program" else draw_library(draw)


def run_spec(spec: Spec) -> Outcome:
    """Run one spec; an exception of the fuzzer itself is a failure too."""
    try:
        return programs.run(spec) if spec["layer"] == "program" else library.run(spec)
    except Exception as error:
        return Outcome(FAILED, f"{type(error).__name__}: {error}")


def records(seed: int, numbers: Sequence[int], layer: str | None, seconds: float) -> Iterator[dict[str, Any]]:
    """Run draws until all are done or ``seconds`` have passed; yield a record for each."""
    start = time.monotonic()
    for number in numbers:
        if time.monotonic() - start > seconds:
            return
        spec = draw_spec(seed, number, layer)
        before = time.monotonic()
        outcome = run_spec(spec)
        yield {
            "draw": number,
            "outcome": outcome.outcome,
            "message": outcome.message,
            "seconds": round(time.monotonic() - before, 2),
            "spec": spec,
        }


def parse_spec(text: str) -> Spec:
    """Return the spec of a JSON text, or of ``FILE:LINE`` of a record file."""
    if not text.lstrip().startswith("{"):
        file, _, line = text.rpartition(":")
        text = Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    value = json.loads(text)
    return value.get("spec", value)


def rerun(text: str) -> int:
    """Run one spec again; print its outcome."""
    outcome = run_spec(parse_spec(text))
    print(outcome.outcome, outcome.message)
    return int(outcome.outcome == FAILED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layer", choices=("library", "program"), help="default: both")
    parser.add_argument("--minutes", type=float, default=1e9, help="no draw begins later")
    parser.add_argument("--record", type=Path, default=ROOT / "build" / "fuzz.jsonl", help="one line for each draw")
    parser.add_argument("--rerun", help="run one draw again: its JSON text, or FILE:LINE of a record")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rerun:
        return rerun(arguments.rerun)
    arguments.record = arguments.record.resolve()
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with arguments.record.open("w", encoding="utf-8") as file:
        for record in records(arguments.seed, range(arguments.draws), arguments.layer, 60 * arguments.minutes):
            rows.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(f"{record['draw']:5} {record['outcome']:8} {record['seconds']:6} s {record['message'][:150]!r}")
    lines, is_clean = summarize(rows)
    print("\n".join([*lines, f"records: {arguments.record}; run one again with --rerun {arguments.record}:LINE"]))
    return int(not is_clean)


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        pool.close_all()
