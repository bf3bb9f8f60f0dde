"""Races the experts of one mixture-of-experts layer, forward and backward, on one GPU: time and memory.

    python -m scripts.bench.moe_layer --append

bf16. Every variant gets tokens, chosen experts and their weights, and computes the output and the
gradients of tokens, weights and experts; sorting by expert is part of it, the router is not.
``floor`` is six dense matmuls of the same work, as if one expert had all rows; ``batched floor``
is six batched matmuls, as if all experts had equally many. ``hf`` is transformers' experts with
``grouped_mm``. With the routing ``random`` each token chooses different
experts with equal probabilities, with ``two experts`` all choices are the first two experts. Memory
is the peak above weights and inputs; there are no gradients before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.modules.moe.dispatcher import Dispatcher
from nxd_memopt.modules.moe.experts import Experts
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.utils import leave_process_groups
from scripts.bench.gpu_race import first_line, parse_on_gpu, peak_gib, race, race_parser
from scripts.bench.record import publish

CSV = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "moe_layer.csv"
ROUTINGS = ("random", "two experts")
COLUMNS = (
    "shape",
    "routing",
    "tokens",
    "variant",
    "ms",
    "over_floor",
    "floor_ms",
    "batched_floor_ms",
    "peak_gib",
    "failure",
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer: hidden size, width of an expert, experts, experts of a token."""

    hidden: int
    width: int
    experts: int
    top_k: int


SHAPES = {
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "olmoe-7b": Shape(2048, 1024, 64, 8),
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
}
Inputs = tuple[Tensor, Tensor, Tensor]
"""Tokens ``[N, H]``, weights ``[N, k]`` and chosen experts ``[N, k]``."""
Variant = Callable[[Tensor, Tensor, Tensor], Tensor]


def routed(shape: Shape, tokens: int, routing: str) -> Tensor:
    """Return the chosen experts, ``[N, k]``."""
    if routing == "two experts":
        return torch.arange(tokens * shape.top_k, device=backend.device).view(tokens, -1) % 2
    return torch.rand(tokens, shape.experts, device=backend.device).topk(shape.top_k).indices


def build_ours(shape: Shape) -> tuple[nn.Module, Variant]:
    """Return our experts and their dispatcher."""

    def initialize(weight: Tensor) -> Any:
        return nn.init.normal_(weight, std=0.02)

    options: dict[str, Any] = {"use_cpu_initialization": False, "dtype": torch.bfloat16, "device": backend.device}
    experts = Experts(shape.experts, shape.hidden, shape.width, "silu", init_method=initialize, **options)
    dispatcher = Dispatcher(shape.experts, "alltoall", None, False)
    return experts, lambda x, weights, chosen: dispatcher.run(x, weights, chosen, None, experts)


def build_hf(shape: Shape, *, compiles: bool) -> tuple[nn.Module, Variant]:
    """Return transformers' experts with its implementation ``grouped_mm``."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device(backend.device):
        experts = MixtralExperts(config).to(torch.bfloat16)
    for param in experts.parameters():
        nn.init.normal_(param, std=0.02)
    function: Any = torch.compile(experts) if compiles else experts
    # As its routers pass them: in the dtype of the tokens.
    return experts, lambda x, weights, chosen: function(x, chosen, weights.to(x.dtype))


VARIANTS: dict[str, Callable[[Shape], tuple[nn.Module, Variant]]] = {
    "ours": build_ours,
    "hf": partial(build_hf, compiles=False),
    "hf compiled": partial(build_hf, compiles=True),
}


def floor_of(shape: Shape, tokens: int, experts: int) -> Callable[[], None]:
    """Return a call of the six matmuls of ``tokens * k`` rows of ``experts``, into preallocated memory."""
    rows = tokens * shape.top_k // experts
    options: dict[str, Any] = {"device": backend.device, "dtype": torch.bfloat16}
    # Random values: a GPU that multiplies zeros consumes less power and has a higher clock rate.
    x = torch.randn(experts, rows, shape.hidden, **options)
    gate_up = torch.randn(experts, 2 * shape.width, shape.hidden, **options) * 0.02
    down = torch.randn(experts, shape.hidden, shape.width, **options) * 0.02
    projected = torch.randn(experts, rows, 2 * shape.width, **options)
    hidden = torch.randn(experts, rows, shape.width, **options)
    out = torch.empty_like(x)
    gate_up_grad = torch.empty_like(gate_up)
    down_grad = torch.empty_like(down)

    def matmuls() -> None:
        torch.bmm(x, gate_up.mT, out=projected)
        torch.bmm(hidden, down.mT, out=out)
        torch.bmm(x, down, out=hidden)
        torch.bmm(x.mT, hidden, out=down_grad)
        torch.bmm(projected, gate_up, out=out)
        torch.bmm(projected.mT, x, out=gate_up_grad)

    return matmuls


def step(function: Variant, experts: nn.Module, inputs: Inputs, upstream: Tensor) -> None:
    """Run forward and backward, and drop the gradients."""
    x, weights, chosen = inputs
    function(x, weights, chosen).backward(upstream)
    for leaf in (x, weights, *experts.parameters()):
        leaf.grad = None


def measure(name: str, routing: str, args: Any) -> list[dict[str, Any]]:
    """Return a row of time and memory for each variant."""
    shape = SHAPES[name]
    torch.manual_seed(5)
    options: dict[str, Any] = {"device": backend.device, "dtype": torch.bfloat16}
    x = torch.randn(args.tokens, shape.hidden, **options).requires_grad_()
    chosen = routed(shape, args.tokens, routing)
    weights = torch.rand(args.tokens, shape.top_k, device=backend.device).softmax(-1).requires_grad_()
    upstream = torch.randn(args.tokens, shape.hidden, **options)
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[], None]] = {
        "floor": floor_of(shape, args.tokens, 1),
        "batched floor": floor_of(shape, args.tokens, shape.experts),
    }
    for variant in args.variants:
        row: dict[str, Any] = {"shape": name, "routing": routing, "tokens": args.tokens, "variant": variant}
        rows.append(row)
        try:
            experts, function = VARIANTS[variant](shape)
            call = partial(step, function, experts, (x, weights, chosen), upstream)
            call()  # compiles
            row["peak_gib"] = round(peak_gib(call), 3)
            calls[variant] = call
        except (ImportError, RuntimeError) as error:  # out of memory too
            row["failure"] = first_line(error)
            x.grad = weights.grad = None
    times = race(calls, args.turns)
    for row in rows:
        row["floor_ms"] = round(times["floor"], 3)
        row["batched_floor_ms"] = round(times["batched floor"], 3)
        if row["variant"] in times:
            row["ms"] = round(times[row["variant"]], 3)
            row["over_floor"] = round(times[row["variant"]] / times["floor"], 3)
    return rows


def main() -> None:
    parser = race_parser(__doc__, CSV, turns=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--routings", choices=ROUTINGS, nargs="+", default=list(ROUTINGS))
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    args = parse_on_gpu(parser)
    backend.init_process_group()
    parallel_state.initialize_model_parallel()
    rows: list[dict[str, Any]] = []
    for name in args.shapes:
        for routing in args.routings:
            rows += measure(name, routing, args)
    publish(rows, COLUMNS, "experts of one layer", args, module="scripts.bench.moe_layer")
    leave_process_groups()


if __name__ == "__main__":
    main()
