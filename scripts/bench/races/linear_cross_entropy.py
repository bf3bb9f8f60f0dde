"""Races linear layer + cross entropy, forward and backward: time, memory and errors against the peers.

    python -m scripts.bench.races.linear_cross_entropy --tokens 8192 32768 --append
    torchrun --nproc_per_node 4 -m scripts.bench.races.linear_cross_entropy --tokens 8192 --append
    python -m scripts.bench.races.linear_cross_entropy --heads tiny --tokens 512 --plot memory.png

bf16, on a CPU fp32. ``floor`` is the three matmuls alone. With several processes the vocabulary is sharded, and
the tokens are sequence shards; the peers then all-gather the tokens first and reduce-scatter their
gradient last, as their users do. Memory is the peak without the inputs, with gradients and peer
memory. Errors are relative, against fp32 matmuls of the same bf16 inputs. The variants take turns
within one process; each time is the median of all turns. ``cce`` skips gradients that it considers
negligible, ``cce unfiltered`` skips none, ``cce exact`` also sums in fp32. ``cce exact`` and
vocabulary parallelism need CCE from its repository, which is newer than PyPI's 25.1.1. ``mgmalek`` is
a checkout of github.com/mgmalek/efficient_cross_entropy. ``not_close`` names what ``torch.allclose`` finds
different. ``--plot`` draws the memory of each variant over the time of one call.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import mappings, parallel_state
from nxd_memopt.parallel_layers.loss_functions import fused_linear_cross_entropy, parallel_cross_entropy
from nxd_memopt.parallel_layers.utils import leave_process_groups
from scripts.bench.harness.gpu_race import first_line, memory_over_time, peak_gib, race, race_parser
from scripts.bench.harness.record import publish
from scripts.bench.races.peers import dtype

HEADS = {"llama3-8b": (4096, 128256), "gpt-neox-20b": (6144, 50432), "tiny": (64, 500)}
REFERENCE_TOKENS = 8192  # longer sequences have no columns of errors
REFERENCE_ROWS = 1024
MALEK_CHUNKS = 8
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Relative tolerance of loss and gradients by dtype: about four roundings of the dtype, and in fp32
what sums of different order differ by. The absolute one is it times the largest reference value."""
CUSTOM = "custom"
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(**options: Any) -> LossFunction:
    """Return our fused loss, with sequence parallelism on several ranks."""

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        size = parallel_state.get_tensor_model_parallel_size()
        return fused_linear_cross_entropy(x, weight, target, sequence_parallel_enabled=size > 1, **options)

    return loss


def gathered(loss: LossFunction) -> LossFunction:
    """Return ``loss`` after an all-gather of the tokens, for peers without sequence parallelism."""
    gather = mappings.gather_from_sequence_parallel_region
    return lambda x, weight, target: loss(gather(x), weight, target)


def eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy((x @ weight.t()).float(), target)


def eager_vocab_parallel(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return parallel_cross_entropy(x @ weight.t(), target).mean()


def liger(chunk_mem_const: int, accum_dtype: torch.dtype | None = None) -> LossFunction:
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward as forward  # pyright: ignore[reportMissingImports]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            results = forward(
                x,
                weight,
                target,
                accum_dtype=accum_dtype,
                chunk_mem_const=chunk_mem_const,
                compute_gradients=True,
                weight_requires_grad=True,
            )
            # Liger returns the loss first, and dX and dW as the only 2-dimensional tensors. Their
            # position depends on Liger's version, so they are found by their dimensions.
            ctx.grads = [each for each in results if isinstance(each, Tensor) and each.dim() == 2]
            return results[0]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            # The incoming gradient is 1, for which Liger's own backward skips the product too. The
            # gradients are removed from ctx: autograd copies a gradient that has another reference.
            del grad
            grads, ctx.grads = ctx.grads, None
            return *grads, None

    return lambda x, weight, target: Function.apply(x, weight, target)  # pyright: ignore[reportReturnType]


def liger_vocab_parallel() -> LossFunction:
    from liger_kernel.transformers import LigerVocabParallelCrossEntropy  # pyright: ignore[reportMissingImports]

    group: Any = parallel_state.get_tensor_model_parallel_group()
    criterion = LigerVocabParallelCrossEntropy()

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return criterion((x @ weight.t()).unsqueeze(1), target.unsqueeze(1), group).mean()

    return loss


def cce(**options: Any) -> LossFunction:
    from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

    return lambda x, weight, target: linear_cross_entropy(x, weight, target, **options)


def cce_vocab_parallel(vocab: int, **options: Any) -> LossFunction:
    """Return CCE over vocabulary shards.

    CCE's own all-reduce of dX is off: the reduce-scatter in the all-gather's backward is cheaper.
    """
    from cut_cross_entropy import VocabParallelOptions  # pyright: ignore[reportMissingImports]

    start = parallel_state.get_tensor_model_parallel_rank() * vocab
    group = parallel_state.get_tensor_model_parallel_group()
    shard = VocabParallelOptions(start, start + vocab, group, reduce_e_grad=False)
    return cce(vocab_parallel_options=shard, **options)


def malek(directory: Path) -> LossFunction:
    """Return the loss of a checkout of mgmalek/efficient_cross_entropy, in up to ``MALEK_CHUNKS`` chunks."""
    spec = importlib.util.spec_from_file_location("malek_modules", directory / "modules.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        # It needs chunks of equal lengths.
        chunks = next(count for count in range(MALEK_CHUNKS, 0, -1) if x.size(0) % count == 0)
        with torch.device("meta"):  # its own weight is replaced
            criterion = module.FusedProjectionPlusCrossEntropyLoss(weight.size(1), weight.size(0), chunks)
        criterion.proj_weight = weight
        return criterion(x, target)

    return loss


def variants(
    gradient_bytes: int, tokens: int, vocab: int, checkout: Path | None = None
) -> dict[str, Callable[[], LossFunction]]:
    """Return a builder of each variant by name; the builder fails if a peer is not installed."""
    # ``logits_bytes`` limits our chunks: more bytes, fewer chunks and larger matmuls. 4 bytes per
    # logit are enough for one chunk. Liger's chunks depend on its constant in the same way, so it
    # takes part with several. CCE filters gradients below ``filter_eps``; None turns it off.
    table: dict[str, Callable[[], LossFunction]] = {
        "ours": ours,
        "ours, 5 % memory": lambda: ours(logits_bytes=gradient_bytes // 22),
        "ours, one chunk": lambda: ours(logits_bytes=4 * tokens * vocab),
        "ours, fp32 sums": lambda: ours(accumulate_dtype=torch.float32),
    }
    if parallel_state.get_tensor_model_parallel_size() > 1:
        return table | {
            "eager": lambda: gathered(eager_vocab_parallel),
            "liger vocab-parallel": lambda: gathered(liger_vocab_parallel()),
            "cce vocab-parallel": lambda: gathered(cce_vocab_parallel(vocab, filter_eps="auto")),
            "cce unfiltered, vocab-parallel": lambda: gathered(cce_vocab_parallel(vocab, filter_eps=None)),
        }
    table |= {"eager": lambda: eager, "compile": lambda: torch.compile(eager)}
    table |= {f"liger {const}": lambda const=const: liger(const) for const in (1, 2, 4, 8)}
    table |= {
        "liger fp32": lambda: liger(1, torch.float32),
        "cce": lambda: cce(filter_eps="auto"),
        "cce unfiltered": lambda: cce(filter_eps=None),
        "cce exact": lambda: cce(impl="cce_exact"),
    }
    if checkout is not None:
        table["mgmalek"] = lambda: malek(checkout)
    return table


def floor_of(x: Tensor, weight: Tensor) -> Callable[[], None]:
    """Return a call of the three matmuls, 8,192 tokens at a time, into preallocated memory.

    They are logits = X W^t, dX = dlogits W and dW = dlogits^t X.
    """
    # Each rank multiplies all tokens with its vocabulary shard, so x has the full sequence here,
    # without the time of an all-gather. Values do not matter, but zeros would: a GPU that
    # multiplies zeros consumes less power and has a higher clock rate.
    size = parallel_state.get_tensor_model_parallel_size()
    tokens = x.size(0) * size
    rows = min(8192, tokens)
    x = torch.randn(tokens, x.size(1), device=x.device, dtype=x.dtype)
    logits = torch.randn(rows, weight.size(0), device=x.device, dtype=x.dtype)
    dx = torch.empty_like(x[:rows])
    dw = torch.empty_like(weight)

    def matmuls() -> None:
        for chunk in x.split(rows):
            torch.mm(chunk, weight.t(), out=logits[: chunk.size(0)])
            torch.mm(logits, weight, out=dx)
            torch.mm(logits.t(), chunk, out=dw)

    return matmuls


def reference(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, dX and dW from fp32 matmuls, ``REFERENCE_ROWS`` tokens at a time."""
    # dlogits = (softmax(logits) - one_hot(target)) / tokens, from which dX = dlogits W and
    # dW = dlogits^t X. In chunks, because fp32 logits of 8,192 tokens and 128,256 words have
    # 4.2 GB, and the softmax needs them twice.
    weight_fp32 = weight.detach().float()
    dx = torch.empty_like(x, dtype=torch.float32)
    dw = torch.zeros_like(weight_fp32)
    total = torch.zeros((), device=x.device)
    for rows in torch.arange(x.size(0), device=x.device).split(REFERENCE_ROWS):
        chunk = x.detach()[rows].float()
        logits = chunk @ weight_fp32.t()
        log_sum_exp = logits.logsumexp(-1, keepdim=True)
        labels = target[rows].unsqueeze(-1)
        total += (log_sum_exp - logits.gather(-1, labels)).sum()
        dlogits = (logits - log_sum_exp).exp_()
        dlogits.scatter_add_(-1, labels, torch.full_like(labels, -1, dtype=torch.float32))
        dlogits /= x.size(0)
        dx[rows] = dlogits @ weight_fp32
        dw += dlogits.t() @ chunk
    return total / x.size(0), dx, dw


def errors(
    loss: LossFunction,
    inputs: tuple[Tensor, Tensor, Tensor],
    expected: tuple[Tensor, ...],
) -> dict[str, Any]:
    """Return the loss's absolute error, the relative errors of dX and dW in the 2-norm, and what is not close."""
    x, weight, target = inputs
    value = loss(x, weight, target)
    value.backward()
    assert x.grad is not None and weight.grad is not None
    found = {"loss": value.detach(), "dx": x.grad, "dw": weight.grad}
    tolerance = TOLERANCES[x.dtype]
    result: dict[str, Any] = {}
    different: list[str] = []
    for (name, tensor), reference_tensor in zip(found.items(), expected, strict=True):
        difference = (tensor.float() - reference_tensor).norm()
        if name != "loss":
            difference /= reference_tensor.norm()
        result[f"{name}_error"] = float(f"{difference.item():.2e}")
        absolute = tolerance * float(reference_tensor.abs().max())
        if not torch.allclose(tensor.float(), reference_tensor, rtol=tolerance, atol=absolute):
            different.append(name)
    x.grad = weight.grad = None
    return result | {"not_close": " ".join(different)}


def step(loss: LossFunction, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Run forward and backward, and drop the gradients."""
    loss(*inputs).backward()
    inputs[0].grad = inputs[1].grad = None


def peak_with_peer_memory_gib(call: Callable[[], None]) -> float:
    """Return the peak of memory of ``call`` in GiB, after a call that compiles."""
    # Release the peer memory of the previous variant, which is not this variant's memory. torch's
    # figures do not contain peer memory, so it is added.
    backend.release_groups()
    call()
    peer_bytes = 0
    if backend.name == "cuda":
        peer_bytes = (backend.memory_allocated() or 0) - torch.cuda.memory_allocated()
    return round(peak_gib(call) + peer_bytes / 2**30, 3)


def measure(head: str, tokens: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row of time, memory and errors for each variant."""
    hidden, vocab = (args.hidden, args.vocabulary) if head == CUSTOM else HEADS[head]
    size = parallel_state.get_tensor_model_parallel_size()
    generator = torch.Generator(backend.device).manual_seed(5)
    options: Any = {"device": backend.device, "dtype": dtype(), "generator": generator}
    x = torch.randn(tokens, hidden, **options)
    weight = torch.randn(vocab, hidden, **options) * 0.02
    target = torch.randint(0, vocab, (tokens,), device=backend.device, generator=generator)
    rank = parallel_state.get_tensor_model_parallel_rank()
    # The generator's seed is the same on every rank, so each rank computes the reference of the
    # full problem and keeps its shard; no collective is needed to compare.
    expected: tuple[Tensor, ...] | None = None
    if tokens <= REFERENCE_TOKENS:
        expected_loss, *full_grads = reference(x, weight, target)
        expected = (expected_loss, *(grad.chunk(size)[rank].clone() for grad in full_grads))
        del full_grads
    # Sequence shard of the tokens, vocabulary shard of the weight; targets are replicated.
    x = x.chunk(size)[rank].clone().requires_grad_()
    weight = nn.Parameter(weight.chunk(size)[rank].clone())
    inputs = (x, weight, target)
    gradient_bytes = x.nbytes + weight.nbytes
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[], None]] = {"floor": floor_of(x, weight.detach())}
    for name, build in variants(gradient_bytes, tokens, vocab // size, args.malek).items():
        if args.variants and name not in args.variants:
            continue
        row: dict[str, Any] = {
            "head": head,
            "tokens": tokens,
            "tensor_parallel": size,
            "variant": name,
        }
        rows.append(row)
        try:
            loss = build()
            call = partial(step, loss, inputs)
            row["peak_gib"] = peak_with_peer_memory_gib(call)
            if expected:
                row |= errors(loss, inputs, expected)
            calls[name] = call
        except (ImportError, RuntimeError, AssertionError) as error:  # out of memory, or no kernel for the device
            row["failure"] = first_line(error)
            x.grad = weight.grad = None
    # The race needs the memory of the reference, which has the bytes of two fp32 gradients.
    del expected
    times = race(calls, args.turns)
    floor_ms = times["floor"]
    if args.plot:
        timelines = {row["variant"]: memory_over_time(calls[row["variant"]]) for row in rows if row["variant"] in calls}
        draw_timelines(timelines, args.plot, f"memory of forward and backward, {head}, {tokens} tokens")
    for row in rows:
        row["floor_ms"] = round(floor_ms, 3)
        row["gradients_gib"] = round(gradient_bytes / 2**30, 3)
        if row["variant"] in times:
            row["ms"] = round(times[row["variant"]], 3)
            row["over_floor"] = round(row["ms"] / floor_ms, 4)
    return rows


def argument_parser() -> argparse.ArgumentParser:
    parser = race_parser(__doc__, "linear_cross_entropy", turns=4)
    parser.add_argument("--heads", choices=[*HEADS, CUSTOM], nargs="+", default=["llama3-8b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--hidden", type=int, help=f"H of the head {CUSTOM!r}")
    parser.add_argument("--vocabulary", type=int, help=f"V of the head {CUSTOM!r}")
    parser.add_argument("--variants", nargs="+", help="only these")
    parser.add_argument("--malek", type=Path, metavar="DIR", help="checkout of mgmalek/efficient_cross_entropy")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the memory of each variant over time")
    return parser


def draw_timelines(timelines: Mapping[str, Sequence[tuple[float, int]]], path: Path, title: str) -> None:
    """Draw memory timelines, name -> (seconds, bytes), in one plot; write a PNG file."""
    # A figure without pyplot needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5))
    axes = figure.subplots()
    axes.set_title(title)
    for name, points in timelines.items():
        axes.step([s * 1e3 for s, _ in points], [size / 2**20 for _, size in points], where="post", label=name)
    axes.set_xlabel("ms, slowed down by the recording of allocations")
    axes.set_ylabel("MiB")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    args = argument_parser().parse_args()
    if args.hidden and args.vocabulary:
        args.heads = [CUSTOM]
    backend.init_process_group()
    world = parallel_state.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    # Which variants exist depends on T, so argparse cannot check --variants: only their names are
    # used here, and no variant is built.
    names = list(variants(1, 1, 1, args.malek))
    unknown = sorted(set(args.variants or ()) - set(names))
    if unknown:
        raise SystemExit(f"error: no variants {unknown} on {world} GPUs, there are {names}")
    rows: list[dict[str, Any]] = []
    for head in args.heads:
        for tokens in args.tokens:
            rows += measure(head, tokens, args)
    columns = (
        "head",
        "tokens",
        "tensor_parallel",
        "variant",
        "ms",
        "over_floor",
        "floor_ms",
        "peak_gib",
        "gradients_gib",
        "loss_error",
        "dx_error",
        "dw_error",
        "not_close",
        "failure",
    )
    if parallel_state.is_global_rank_zero():
        publish(rows, columns, "linear + cross entropy", args)
    leave_process_groups()


if __name__ == "__main__":
    main()
