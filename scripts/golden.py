"""Records golden losses (``make golden``): one process, no parallelism, no memory technique."""

from __future__ import annotations

import torch

from tests.golden.runs import MODELS, STEPS, golden_file, train


def main() -> None:
    """Train each model and write its losses with full precision."""
    # One thread: the order of sums in a matmul depends on the number of threads.
    torch.set_num_threads(1)
    for name in MODELS:
        losses = train(name)
        recorded = f"recorded by `make golden` with torch {torch.__version__}"
        header = f"# {STEPS} losses of {name}, fp32, CPU, T=1; {recorded}"
        # repr of a float is the shortest text that reads back as the same float.
        text = "\n".join([header, *map(repr, losses)]) + "\n"
        golden_file(name).write_text(text, encoding="utf-8")
        print(f"{golden_file(name)}: {losses[0]:.6f} -> {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
