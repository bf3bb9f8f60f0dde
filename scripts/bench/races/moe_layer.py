"""Races the experts of one mixture-of-experts layer, forward and backward, on one GPU: time and memory.

    python -m scripts.bench.races.moe_layer --append

bf16. Every variant gets tokens, chosen experts and their weights, and computes the output and the
gradients of tokens, weights and experts; sorting by expert is part of it, the router is not.
``floor`` is six dense matmuls of the same work, as if one expert had all rows; ``batched floor``
is six batched matmuls, as if all experts had equally many. ``hf`` is transformers' experts with
``grouped_mm``. ``scattermoe`` and ``sonicmoe`` take part with a checkout of their repository
(``--scattermoe DIR``, ``--sonicmoe DIR``); SonicMoE needs the versions of quack and nvidia-cutlass-dsl
that its requirements name. All variants have equal weights. ``difference`` is the largest relative
difference, in the 2-norm, of the output and of each gradient from ours; a variant with more than
``TOLERANCE`` computes something else and is not timed. With the routing ``random`` each token chooses
different experts with equal probabilities, with ``two experts`` all choices are the first two experts.
Memory is the peak above weights and inputs; there are no gradients before the step.
"""

from __future__ import annotations

from collections.abc import Callable
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
from scripts.bench.harness.gpu_race import first_line, parse_on_gpu, peak_gib, race, race_parser
from scripts.bench.harness.record import publish
from scripts.bench.races.moe_peers import CHECKOUTS, Shape, Variant, peer_variants

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
    "difference",
    "failure",
)
# A few roundings to bf16, of 2^-9 = 0.002 each: the projections, their products and, by peers, the
# weights of the choices. A wrong row, order or weight differs by more than 0.1.
TOLERANCE = 0.02
# Of a turn before it is timed: dense matmuls take 45.8 ms after a pause and 50.4 ms after half a second
# (Mixtral's sizes, H200), and in training there is no pause.
BUSY_S = 0.7


SHAPES = {
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "olmoe-7b": Shape(2048, 1024, 64, 8),
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
}
Inputs = tuple[Tensor, Tensor, Tensor]
"""Tokens ``[N, H]``, weights ``[N, k]`` and chosen experts ``[N, k]``."""


def routed(shape: Shape, tokens: int, routing: str) -> Tensor:
    """Return the chosen experts, ``[N, k]``."""
    if routing == "two experts":
        return torch.arange(tokens * shape.top_k, device=backend.device).view(tokens, -1) % 2
    return torch.rand(tokens, shape.experts, device=backend.device).topk(shape.top_k).indices


def build_ours(shape: Shape) -> Variant:
    """Return our experts and their dispatcher, with random weights."""

    def initialize(weight: Tensor) -> Any:
        return nn.init.normal_(weight, std=0.02)

    options: dict[str, Any] = {"use_cpu_initialization": False, "dtype": torch.bfloat16, "device": backend.device}
    experts = Experts(shape.experts, shape.hidden, shape.width, "silu", init_method=initialize, **options)
    dispatcher = Dispatcher(shape.experts, "alltoall", None, False)

    def run(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return dispatcher.run(x, weights, chosen, None, experts)

    return Variant(run, experts.gate_up_proj, experts.down_proj)


VARIANTS = ("ours", "hf", "hf compiled", *CHECKOUTS)


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


def step(variant: Variant, inputs: Inputs, upstream: Tensor) -> None:
    """Run forward and backward, and drop the gradients."""
    variant.run(*inputs).backward(upstream)
    drop_gradients(variant, inputs)


def drop_gradients(variant: Variant, inputs: Inputs) -> None:
    for leaf in (inputs[0], inputs[1], variant.gate_up, variant.down):
        leaf.grad = None


def results(variant: Variant, inputs: Inputs, upstream: Tensor) -> dict[str, Tensor]:
    """Return the output and the gradients of tokens, weights and experts, in our order of rows."""
    out = variant.run(*inputs)
    out.backward(upstream)
    leaves = {"tokens": inputs[0], "weights": inputs[1], "gate_up": variant.gate_up, "down": variant.down}
    found = {"output": out.detach()}
    for name, leaf in leaves.items():
        if leaf.grad is None:
            raise RuntimeError(f"no gradient of {name}")
        found[name] = leaf.grad
    found["gate_up"] = variant.in_our_order(found["gate_up"])
    drop_gradients(variant, inputs)
    return found


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative difference of a tensor, in the 2-norm; a tensor that is not finite raises."""
    largest = 0.0
    for name, tensor in expected.items():
        # One expert after another: fp32 copies of all would need 8 GiB.
        pairs = [(found[name], tensor)]
        if tensor.dim() == 3:
            pairs = list(zip(found[name], tensor, strict=True))
        squared = sum((float((own.float() - other.float()).square().sum()) for own, other in pairs), 0.0)
        total = sum((float(other.float().square().sum()) for _, other in pairs), 0.0)
        difference = (squared / total) ** 0.5
        if not difference <= TOLERANCE:
            raise RuntimeError(f"{name} differs from ours by {difference:.3g} of its norm, more than {TOLERANCE}")
        largest = max(largest, difference)
    return largest


def add_variant(
    row: dict[str, Any],
    variant: Variant,
    inputs: Inputs,
    upstream: Tensor,
    ours: tuple[Variant, dict[str, Tensor]],
) -> Callable[[], None]:
    """Write a variant's difference and peak into its row, and return a call of its step.

    Args:
        row: its columns ``difference`` and ``peak_gib`` are written.
        variant: gets the weights of ours.
        inputs: tokens, weights and chosen experts.
        upstream: gradient of the output.
        ours: our experts, and their output and gradients.
    """
    reference, expected = ours
    variant.load(reference.gate_up, reference.down)
    row["difference"] = float(f"{largest_difference(results(variant, inputs, upstream), expected):.2e}")
    call = partial(step, variant, inputs, upstream)
    row["peak_gib"] = round(peak_gib(call), 3)
    return call


def measure(name: str, routing: str, args: Any) -> list[dict[str, Any]]:
    """Return a row of time, memory and difference from ours for each variant."""
    shape = SHAPES[name]
    torch.manual_seed(5)
    options: dict[str, Any] = {"device": backend.device, "dtype": torch.bfloat16}
    x = torch.randn(args.tokens, shape.hidden, **options).requires_grad_()
    chosen = routed(shape, args.tokens, routing)
    weights = torch.rand(args.tokens, shape.top_k, device=backend.device).softmax(-1).requires_grad_()
    inputs = (x, weights, chosen)
    upstream = torch.randn(args.tokens, shape.hidden, **options)
    reference = build_ours(shape)
    expected = results(reference, inputs, upstream)
    builders = {"ours": lambda _: reference} | peer_variants(vars(args))
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[], None]] = {
        "floor": floor_of(shape, args.tokens, 1),
        "batched floor": floor_of(shape, args.tokens, shape.experts),
    }
    for variant in args.variants:
        row: dict[str, Any] = {"shape": name, "routing": routing, "tokens": args.tokens, "variant": variant}
        rows.append(row)
        try:
            calls[variant] = add_variant(row, builders[variant](shape), inputs, upstream, (reference, expected))
        # A peer's compilers raise exceptions of their own; its row says which.
        except Exception as error:
            if variant == "ours":
                raise
            row["failure"] = first_line(error)
            x.grad = weights.grad = None
    del expected
    times = race(calls, args.turns, busy_s=BUSY_S)
    for row in rows:
        row["floor_ms"] = round(times["floor"], 3)
        row["batched_floor_ms"] = round(times["batched floor"], 3)
        if row["variant"] in times:
            row["ms"] = round(times[row["variant"]], 3)
            row["over_floor"] = round(times[row["variant"]] / times["floor"], 3)
    return rows


def main() -> None:
    parser = race_parser(__doc__, "moe_layer", turns=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--routings", choices=ROUTINGS, nargs="+", default=list(ROUTINGS))
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", help="default: all that are installed or given")
    for peer in CHECKOUTS:
        parser.add_argument(f"--{peer}", type=Path, metavar="DIR", help=f"checkout of {peer}'s repository")
    args = parse_on_gpu(parser)
    if args.variants is None:
        args.variants = [name for name in VARIANTS if name not in CHECKOUTS or getattr(args, name)]
    backend.init_process_group()
    parallel_state.initialize_model_parallel()
    for name in args.shapes:
        for routing in args.routings:
            rows = measure(name, routing, args)
            # At once: a run that is stopped keeps what it has measured.
            publish(rows, COLUMNS, f"experts of one layer, {name}, {routing}", args)
    leave_process_groups()


if __name__ == "__main__":
    main()
