"""Owns the recording of golden losses (``make golden``): one process, no parallelism, no memory technique."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.golden.runs import MODELS, STEPS, golden_file, train


def main() -> None:
    torch.set_num_threads(1)
    for name in MODELS:
        losses = train(name)
        header = (
            f"# {STEPS} losses of {name}, fp32, CPU, T=1; recorded by scripts/golden.py with torch {torch.__version__}"
        )
        text = "\n".join([header, *map(repr, losses)]) + "\n"
        golden_file(name).write_text(text, encoding="utf-8")
        print(f"{golden_file(name)}: {losses[0]:.6f} -> {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
