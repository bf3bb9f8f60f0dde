"""What benchmarks of full training steps share: options, tokens, timed steps, and a row for each variant."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.profiling.exposure import exposure
from scripts.bench.harness.configs import CONFIGS
from scripts.bench.harness.gpu_race import first_line
from scripts.bench.harness.record import append, bench_parser, environment

WARM_UP_STEPS = 3
Row = dict[str, Any]
LossFunction = Callable[[Tensor], Tensor]


def step_parser(
    description: str | None, name: str, known_variants: Iterable[str], **defaults: Any
) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks of steps."""
    parser = bench_parser(description, name)
    parser.add_argument("--model", choices=CONFIGS, default="llama-tiny")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512], help="of a sequence")
    parser.add_argument("--variants", choices=list(known_variants), nargs="+", default=["ours"])
    parser.add_argument(
        "--memory",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="ours: an option of MemoryConfig with its YAML value, such as mlp_tile_tokens=auto; repeatable",
    )
    parser.add_argument("--cap-gib", type=float, help="limit of the device memory that tensors may use")
    parser.add_argument("--warm-up-steps", type=int, default=WARM_UP_STEPS)
    parser.add_argument("--steps", type=int, default=5)
    parser.set_defaults(**defaults)
    return parser


def with_options(memory: MemoryConfig, words: Sequence[str]) -> MemoryConfig:
    """Return ``memory`` with the options of ``words``, each ``OPTION=VALUE``.

    Raises:
        SystemExit: an option is unknown, or its value is invalid.
    """
    names = {field.name for field in fields(MemoryConfig)}
    options = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or name not in names:
            raise SystemExit(f"error: --memory {word} is not OPTION=VALUE with one of {', '.join(sorted(names))}")
        options[name] = yaml.safe_load(value)
    try:
        return replace(memory, **options)
    except ValueError as error:
        raise SystemExit(f"error: --memory: {error}") from error


def recompute_of_all_layers(recompute: str) -> MemoryConfig:
    """Return the memory options of ``--recompute``: all layers (``full``), or none."""
    if recompute == "full":
        return MemoryConfig(recompute_granularity="full")
    return MemoryConfig()


def limit_device_memory(cap_gib: float | None) -> None:
    """Let PyTorch's allocator use at most ``cap_gib`` GiB; None sets no limit."""
    if cap_gib is None:
        return
    if backend.name != "cuda":
        raise SystemExit(f"error: --cap-gib needs an NVIDIA GPU, the backend is {backend.name}")
    total = torch.cuda.get_device_properties(backend.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * 2**30 / total), backend.device)


def random_tokens(config: Any, count: int, tokens: int) -> Tensor:
    """Return token ids ``[count, 1, tokens]``, different on each data-parallel rank.

    Drawn on the CPU from a fixed seed: all tensor-parallel ranks and all variants train on the same
    tokens, so that the column of losses shows whether a variant computes something else.
    """
    generator = torch.Generator().manual_seed(3 + parallel_state.get_data_parallel_rank())
    return torch.randint(0, config.vocab_size, (count, 1, tokens), generator=generator).to(backend.device)


def timed_steps(loss_of: LossFunction, optimizer: Any, ids: Tensor, args: argparse.Namespace) -> Row:
    """Return time, peak memory and losses of ``args.steps`` steps after the warm-up.

    Args:
        loss_of: loss of token ids.
        optimizer: with ``step`` and ``zero_grad``.
        ids: ``[1, tokens]``.
        args: with ``steps``, ``warm_up_steps``, ``warm_up_tokens``, ``accumulation`` and ``read_loss``.
    """
    losses: list[Tensor] = []
    # Timed together, as steps between two reads of the loss in a training loop: the states that
    # return to the host after a step overlap with the next one.
    start = 0.0
    for i in range(args.warm_up_steps + args.steps):
        if i == args.warm_up_steps:
            backend.reset_peak_memory_stats()
            backend.synchronize()
            start = time.perf_counter()
        # A warm-up may be shorter: a step of 400,000 tokens takes minutes.
        tokens = ids.size(1)
        if i < args.warm_up_steps:
            tokens = args.warm_up_tokens or tokens
        for _ in range(args.accumulation):
            loss = loss_of(ids[:, :tokens])
            (loss / args.accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if args.read_loss:
            losses[-1].item()
    backend.synchronize()
    step_s = (time.perf_counter() - start) / args.steps
    values = [round(loss.item(), 4) for loss in losses]
    return figures([step_s], values, ids.numel() * args.accumulation * parallel_state.get_data_parallel_size())


def synchronized_steps(step: Callable[[], Tensor], tokens: int, args: argparse.Namespace) -> Row:
    """Return the median time, peak memory and losses of steps that are each timed until the device has finished.

    Peak memory counts from the end of the warm-up, which compiles kernels and records CUDA graphs.

    Args:
        step: runs a training step and returns its loss.
        tokens: tokens of a step of all devices together.
        args: with ``steps`` and ``warm_up_steps``.
    """
    times: list[float] = []
    losses: list[float] = []
    for i in range(args.warm_up_steps + args.steps):
        if i == args.warm_up_steps:
            backend.reset_peak_memory_stats()
        backend.synchronize()
        start = time.perf_counter()
        loss = step()
        backend.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(round(loss.item(), 4))
    return figures(times[args.warm_up_steps :], losses, tokens)


def figures(times: list[float], losses: list[float], tokens: int) -> Row:
    """Return the columns of timed steps.

    Args:
        times: seconds of each timed step.
        losses: of all steps, the warm-up included.
        tokens: tokens of a step of all devices together.
    """
    step_s = statistics.median(times)
    peak_bytes = backend.max_memory_allocated()
    return {
        "step_ms": round(step_s * 1e3, 2),
        "first_loss": losses[0],
        "loss": losses[-1],
        "peak_gib": None if peak_bytes is None else round(peak_bytes / 2**30, 2),
        "tokens_per_s_per_device": round(tokens / step_s / parallel_state.get_world_size(), 1),
    }


def exposed_ms(step: Callable[[], object], trace: Path | None = None) -> float:
    """Return the milliseconds in which a GPU only communicates in one profiled step; write a Chrome trace."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    # Host events (launches, synchronization) are in the profile too. Times are microseconds.
    ranges: list[tuple[str, float, float]] = []
    for event in profiler.events() or []:
        if event.device_type == DeviceType.CUDA:
            ranges.append((event.name, event.time_range.start / 1e3, event.time_range.end / 1e3))
    return exposure(ranges)["exposed_communication"]


def with_figures(row: Row, measure: Callable[[], Row]) -> Row:
    """Return ``row`` with the columns of ``measure()``, or with its failure."""
    # A peer that is not installed or does not fit is a row with its failure. All ranks fail alike,
    # so none waits in a collective for one that has failed.
    try:
        return row | {"failure": ""} | measure()
    except (RuntimeError, AttributeError, ValueError, ImportError) as error:
        return row | {"failure": first_line(error)}


def record_rows(args: argparse.Namespace, measured_row: Callable[[str, int], Row | None]) -> None:
    """Measure, print and append the row of each length and variant; without a row the variant is skipped.

    Row by row, so that a failure loses no earlier rows.
    """
    about = environment()
    for tokens in args.tokens:
        for variant in args.variants:
            row = measured_row(variant, tokens)
            free_memory()
            if row is None or not parallel_state.is_global_rank_zero():
                continue
            print({name: row[name] for name in row if name != "failure" or row[name]}, flush=True)
            if args.append:
                append([row | about], args.csv)


def free_memory() -> None:
    """Return the memory of the variant before to the device and the host."""
    gc.collect()
    if backend.name == "cuda":
        torch.cuda.empty_cache()
        # PyTorch keeps freed page-locked memory too, which the next variant may need.
        torch._C._host_emptyCache()
