"""Races forward + backward in one process against transformers, interleaved: time and memory.

    python -m scripts.bench.races.forward_backward --tokens 512 --append

A LLaMA with 12 layers, hidden size 768 and vocabulary 32,000; fp32 on a CPU (bf16 on a GPU), batch
1, no parallelism. Memory is the peak of bytes allocated during one forward + backward, without the
bytes allocated before, from torch's profiler.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import profile

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig
from scripts.bench.harness.configs import CONFIGS
from scripts.bench.harness.record import append, bench_parser, environment
from scripts.bench.races.peers import LossFunction
from scripts.bench.races.train_step import BUILDERS

VARIANTS = ("ours", "hf")


def timed_step(model: nn.Module, loss_of: LossFunction, ids: Tensor) -> float:
    """Return the seconds of one forward + backward, until the device has finished."""
    model.zero_grad(set_to_none=True)
    backend.synchronize()
    start = time.perf_counter()
    loss_of(ids).backward()
    backend.synchronize()
    return time.perf_counter() - start


def allocated_peak_mib(model: nn.Module, loss_of: LossFunction, ids: Tensor) -> float:
    """Return the peak of allocated minus freed MiB over one step, gradients included."""
    model.zero_grad(set_to_none=True)
    with profile(profile_memory=True) as recorded:
        loss_of(ids).backward()
    # The profiler records every allocation (+bytes) and free (-bytes) in order. Their running sum
    # starts at 0, so what was allocated before, such as the parameters, does not count. The CPU
    # has no other record of allocated bytes: resident memory contains what malloc retains.
    current = peak = 0
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events: Any = recorded.profiler.kineto_results.events()
    for event in events:
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return peak / 2**20


def run(tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row per variant; variants alternate, in reversed order every other round."""
    config = CONFIGS["llama-110m"]()
    ids = torch.randint(0, config.vocab_size, (1, tokens)).to(backend.device)
    steps = {name: BUILDERS[name](config, MemoryConfig()) for name in VARIANTS}
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    # The order changes every round, so that neither variant always runs with the caches and the
    # clock rate that the other one leaves.
    for round_index in range(rounds + 1):  # the first round warms up
        order = list(VARIANTS)
        if round_index % 2 == 0:
            order.reverse()
        for name in order:
            times[name].append(timed_step(*steps[name], ids))
    rows = []
    for name in VARIANTS:
        step_s = statistics.median(times[name][1:])
        row: dict[str, Any] = {
            "variant": name,
            "tokens": tokens,
            "threads": torch.get_num_threads(),
            "rounds": rounds,
            "median_ms": round(step_s * 1e3, 1),
            "fastest_ms": round(min(times[name][1:]) * 1e3, 1),
        }
        rows.append(row | {"peak_mib": round(allocated_peak_mib(*steps[name], ids), 1)})
    # VARIANTS ends with transformers' model, so the last row is the reference.
    for row in rows:
        row["time_over_hf"] = round(row["median_ms"] / rows[-1]["median_ms"], 3)
        row |= environment()
    return rows


def main() -> None:
    parser = bench_parser(__doc__, "forward_backward")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows = run(args.tokens, args.rounds)
    for row in rows:
        print(row)
    if args.append:
        append(rows, args.csv)


if __name__ == "__main__":
    main()
