"""Compares held-out losses of the training program after the same steps in several precisions.

    NXD_MEMOPT_BACKEND=cuda python -m scripts.bench.races.precision --pretrained build/smollm2-135m-instruct --append

Each precision is a run of ``nxd_memopt.training`` in a process of its own: the same data, seed and
schedule. ``percent`` is the relative difference of the final
held-out loss from that of the first precision.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nxd_memopt.backends import backend
from nxd_memopt.training.config.precision import PRECISIONS
from scripts.bench.harness.record import append, bench_parser, environment


def train(args: argparse.Namespace, precision: str, directory: Path) -> dict[str, Any]:
    """Train in ``precision`` and return the row's figures.

    Raises:
        SystemExit: the training program failed.
    """
    options = {
        "--model.pretrained": args.pretrained,
        "--data.dataset": args.dataset,
        "--data.seq-length": args.tokens,
        "--data.micro-batch-size": args.batch,
        "--data.global-batch-size": args.batch,
        "--data.eval-sequences": args.eval_sequences,
        "--optimizer.lr": args.lr,
        "--optimizer.warmup-steps": args.warmup_steps,
        "--trainer.precision": precision,
        "--trainer.max-steps": args.steps,
        "--trainer.log-every-n-steps": max(1, args.steps // 10),
        "--trainer.output-dir": directory,
    }
    if precision == "16-mixed":
        options["--optimizer.initial-loss-scale"] = args.initial_loss_scale
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-m", "nxd_memopt.training", *words]
    command += ["--trainer.export", "false", "--trainer.save-interval", "never"]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(f"error: training in {precision} ended with status {code}")
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    skipped = sum(bool(json.loads(line).get("skipped")) for line in lines)
    return {
        "precision": precision,
        "steps": summary["steps"],
        "skipped": skipped,
        "held_out_before": summary["held_out_loss_before"],
        "held_out_after": summary["held_out_loss_after"],
        "tokens_per_s": round(summary["tokens_per_s"]),
        "peak_bytes": summary["peak_memory_bytes"][0],
    }


def argument_parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__, "precision")
    parser.add_argument("--pretrained", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--dataset", default="stdlib", help="as data.dataset")
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=["bf16-mixed", "16-mixed"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1024, help="S")
    parser.add_argument("--batch", type=int, default=8, help="B")
    parser.add_argument("--eval-sequences", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument("--initial-loss-scale", type=float, default=2.0**16)
    return parser


def main() -> None:
    args = argument_parser().parse_args()
    rows: list[dict[str, Any]] = []
    for precision in args.precisions:
        with tempfile.TemporaryDirectory() as directory:
            row = train(args, precision, Path(directory) / "run")
        if rows:
            row["percent"] = round(100 * (row["held_out_after"] / rows[0]["held_out_after"] - 1), 3)
        rows.append(row)
        print(row, flush=True)
    shared = {
        "model": args.pretrained.name,
        "backend": backend.name,
        "tokens": args.tokens,
        "batch": args.batch,
        "lr": args.lr,
    }
    if args.append:
        append([shared | row | environment() for row in rows], args.csv)


if __name__ == "__main__":
    main()
