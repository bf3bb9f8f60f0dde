"""Records golden losses (``make golden``): one process, no parallelism, no memory technique."""

from __future__ import annotations

import json

import torch

from nxd_memopt.selftest.golden import GOLDEN_FILE, MODELS, train


def main() -> None:
    """Train each model and write its losses with full precision."""
    # One thread: the order of sums in a matmul depends on the number of threads.
    torch.set_num_threads(1)
    recorded = f"fp32, CPU, T=1, by `make golden` with torch {torch.__version__}"
    losses = {name: train(name) for name in MODELS}
    # A float is written as the shortest text that reads back as the same float.
    GOLDEN_FILE.write_text(json.dumps({"recorded": recorded, "losses": losses}, indent=1) + "\n", encoding="utf-8")
    for name, values in losses.items():
        print(f"{name}: {values[0]:.6f} -> {values[-1]:.6f}")


if __name__ == "__main__":
    main()
