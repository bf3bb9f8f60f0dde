"""Races attention implementations, forward and backward, on one GPU.

    python -m scripts.bench.races.attention --append

Causal, bf16, batch 1, in the memory layout of the models. ``auto`` is the models' default,
``torch`` is ``scaled_dot_product_attention`` with PyTorch's choice of kernel. TFLOP/s count half of
S x S: 2 matmuls in forward, 5 in backward. ``packed`` splits the row into four documents of S/4
tokens and counts half of each document's square.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.ops.attention import attention_implementation, core_attention
from nxd_memopt.ops.packed import PackedDocuments
from scripts.bench.harness.gpu_race import first_line, parse_on_gpu, peak_gib, race, race_parser
from scripts.bench.harness.record import publish

HEADS = {"llama3-8b": (32, 8, 128), "llama3-8b T=4": (8, 2, 128), "gpt-neox-20b": (64, 64, 96)}
DOCUMENTS = 4
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def implementation(name: str, mask: PackedDocuments | None = None) -> Attention:
    """Return attention with the library's implementation ``name``."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # The choice is part of the measured call, as in the models. An implementation that cannot
        # be had raises here, and the race records the message as the row's failure.
        chosen, _ = attention_implementation(
            query.shape,
            key.size(1),
            dtype=query.dtype,
            packed=mask is not None,
            attention_backend=name,
        )
        return core_attention(query, key, value, implementation=chosen, mask=mask)

    return attend


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return PyTorch's attention of ``[B, heads, S, d]`` tensors."""
    gqa = query.size(1) != key.size(1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa)


def variants(length: int) -> dict[str, Attention]:
    """Return the competitors for S = ``length`` by name."""
    # Boundaries count tokens cumulatively from 0 to S, like flash-attn's cu_seqlens. ``plain`` has
    # no packed variant: PyTorch's fused kernels do not support documents without a dense mask.
    boundaries = [length * i // DOCUMENTS for i in range(DOCUMENTS + 1)]
    documents = PackedDocuments.of(torch.tensor(boundaries, device=backend.device), 1, length)
    names = ("auto", "flash4", "cudnn", "flash", "efficient", "tiled")
    return {
        **{name: implementation(name) for name in names},
        "torch": plain,
        "auto, packed": implementation("auto", documents),
        "flash, packed": implementation("flash", documents),
    }


def teraflops(
    heads: int,
    length: int,
    head_dim: int,
    milliseconds: float,
    *,
    matmuls: int,
    documents: int,
) -> float:
    """Return TFLOP/s of ``matmuls`` causal matmuls in ``milliseconds``."""
    # Each document has (S / documents)^2 / 2 pairs of query and key, and each pair costs
    # 2 * d FLOPs per head and matmul.
    pairs = documents * (length / documents) ** 2 / 2
    return round(matmuls * 2 * heads * pairs * head_dim / milliseconds / 1e9, 1)


def measure(shape: str, length: int, turns: int) -> list[dict[str, Any]]:
    """Return a row of times and memory for each competitor."""
    heads, groups, head_dim = HEADS[shape]
    columns = [(heads, length), (groups, length), (groups, length)]
    # [B, heads, S, d] with the strides of a projection's output, in which the heads of a token are
    # adjacent: a transposed view of [B, S, heads, d].
    inputs: list[Tensor] = []
    for count, tokens in columns:
        x = torch.randn(1, tokens, count * head_dim, device=backend.device, dtype=torch.bfloat16)
        x = x.unflatten(-1, (count, -1)).transpose(1, 2)
        inputs.append(x.detach().requires_grad_())
    upstream = torch.randn_like(inputs[0])
    rows: list[dict[str, Any]] = []
    forward: dict[str, Callable[[], object]] = {}
    both: dict[str, Callable[[], object]] = {}
    for name, attend in variants(length).items():
        row: dict[str, Any] = {"shape": shape, "tokens": length, "variant": name}
        rows.append(row)

        # The default argument binds this iteration's ``attend``: the calls run after the loop, when
        # the variable has its last value.
        def run_both(attend: Attention = attend) -> object:
            return torch.autograd.grad(attend(*inputs), inputs, upstream)

        def run_forward(attend: Attention = attend) -> object:
            with torch.no_grad():
                return attend(*inputs)

        try:
            # The first call compiles kernels and creates workspaces, which the peak of the second
            # does not contain. Competitors that fail here do not take part in the race.
            run_both()
            row["peak_gib"] = peak_gib(run_both)
            forward[name], both[name] = run_forward, run_both
        except (RuntimeError, ValueError) as error:
            row["failure"] = first_line(error)
    forward_ms = race(forward, turns)
    both_ms = race(both, turns)
    for row in rows:
        name = row["variant"]
        if name not in both:
            continue
        documents = 1
        if "packed" in name:
            documents = DOCUMENTS
        # Forward has Q K^t and P V. Backward adds dV, dP, dQ and dK, and every kernel computes
        # Q K^t a second time instead of storing P: 5 matmuls.
        work: dict[str, Any] = {"documents": documents, "matmuls": 2}
        row["forward_ms"] = round(forward_ms[name], 3)
        row["ms"] = round(both_ms[name], 3)
        row["forward_tflops"] = teraflops(heads, length, head_dim, forward_ms[name], **work)
        work["matmuls"] = 7
        row["tflops"] = teraflops(heads, length, head_dim, both_ms[name], **work)
    return rows


def main() -> None:
    parser = race_parser(__doc__, "attention", turns=3)
    parser.add_argument("--shapes", choices=HEADS, nargs="+", default=list(HEADS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    args = parse_on_gpu(parser)
    rows: list[dict[str, Any]] = []
    for shape in args.shapes:
        for tokens in args.tokens:
            rows += measure(shape, tokens, args.turns)
    columns = (
        "shape",
        "tokens",
        "variant",
        "forward_ms",
        "forward_tflops",
        "ms",
        "tflops",
        "peak_gib",
        "failure",
    )
    title = "attention, forward and forward + backward"
    publish(rows, columns, title, args)


if __name__ == "__main__":
    main()
