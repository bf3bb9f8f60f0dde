"""Races the six matmuls of experts against torch's ``grouped_mm`` on one GPU.

    python -m scripts.bench.races.moe_matmuls --append

bf16, each token chooses different experts with equal probabilities. Operands of tokens are gathered:
inside our kernels, and by ``index_select`` before torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.modules.moe.assignment import assign
from nxd_memopt.ops.cuda.grouped_matmul import ExpertRows, matmul_of_rows, matmul_over_rows
from scripts.bench.harness.gpu_race import parse_on_gpu, race, race_parser
from scripts.bench.harness.record import publish
from scripts.bench.races.moe_layer import SHAPES, Shape, routed

COLUMNS = ("shape", "tokens", "matmul", "ours_ms", "torch_ms", "over_torch", "tflops")


def matmuls(shape: Shape, tokens: int) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], float]]:
    """Return for each matmul our call, torch's, and the floating-point operations."""
    assignment = assign(routed(shape, tokens, "random"), None, shape.experts, None)
    offsets = assignment.offsets
    assert offsets is not None
    rows = ExpertRows.of(assignment.choices.to(torch.int32), offsets, shape.top_k)
    source = assignment.choices // shape.top_k

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=backend.device, dtype=torch.bfloat16)

    count, width, hidden = source.numel(), shape.width, shape.hidden
    x, projected, inner = random(tokens, hidden), random(count, 2 * width), random(count, width)
    gate_up, down = random(shape.experts, 2 * width, hidden), random(shape.experts, hidden, width)
    torch_mm: Any = partial(torch.nn.functional.grouped_mm, offs=offsets)
    flops = 2.0 * count * hidden * width
    return {
        "gate and up": (
            lambda: matmul_of_rows(x, gate_up, rows, gathers=True),
            lambda: torch_mm(x.index_select(0, source), gate_up.mT),
            2 * flops,
        ),
        "down": (
            lambda: matmul_of_rows(inner, down, rows, gathers=False),
            lambda: torch_mm(inner, down.mT),
            flops,
        ),
        "gradient of the activation": (
            lambda: matmul_of_rows(x, down, rows, gathers=True, transposes=True),
            lambda: torch_mm(x.index_select(0, source), down),
            flops,
        ),
        "gradient of the tokens": (
            lambda: matmul_of_rows(projected, gate_up, rows, gathers=False, transposes=True),
            lambda: torch_mm(projected, gate_up),
            2 * flops,
        ),
        "gradient of gate and up": (
            lambda: matmul_over_rows(projected, x, rows, gathers_b=True),
            lambda: torch_mm(projected.mT, x.index_select(0, source)),
            2 * flops,
        ),
        "gradient of down": (
            lambda: matmul_over_rows(x, inner, rows, gathers_a=True),
            lambda: torch_mm(x.index_select(0, source).mT, inner),
            flops,
        ),
    }


def main() -> None:
    parser = race_parser(__doc__, "moe_matmuls", turns=3)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    args = parse_on_gpu(parser)
    lines: list[dict[str, Any]] = []
    for name in args.shapes:
        for matmul, (ours, theirs, flops) in matmuls(SHAPES[name], args.tokens).items():
            ours()  # compiles
            times = race({"ours": ours, "torch": theirs}, args.turns)
            lines.append(
                {
                    "shape": name,
                    "tokens": args.tokens,
                    "matmul": matmul,
                    "ours_ms": round(times["ours"], 3),
                    "torch_ms": round(times["torch"], 3),
                    "over_torch": round(times["ours"] / times["torch"], 3),
                    "tflops": round(flops / times["ours"] / 1e9),
                }
            )
    publish(lines, COLUMNS, "matmuls of experts", args)


if __name__ == "__main__":
    main()
