"""Whether the setting that the planner chooses is as fast as the best of others, measured on one or two GPUs.

    NXD_MEMOPT_BACKEND=cuda python -m scripts.bench.planner.choice --problem llama --seconds 250 --append
    torchrun --nproc_per_node 2 -m scripts.bench.planner.choice --problem llama-two --seconds 250 --append
    python -m scripts.bench.planner.choice --problem llama --list
    python -m scripts.bench.planner.choice --problem llama --tiny --cells 0:4

A problem is a model, a length, a batch and a limit of the device's memory, which PyTorch's allocator then
has. The planner ranks the settings that fit. Measured are the ``BEST`` first ones and ``DRAWN`` others, which
``--seed`` draws, in the order of their ranks, as ``planner.memory`` measures a cell. The last lines
have the errors of the planned times, and the speed of the chosen setting, rank 0, as a part of the best
measured one. With ``--append`` settings that the file has from this commit are passed over, so that
repeated calls go on.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import share_texts
from nxd_memopt.parallel_layers.utils import leave_process_groups
from nxd_memopt.planner.hardware import GIB, Device, device_named, gpu_named, host_device
from nxd_memopt.planner.search.plan import Plan, plans
from nxd_memopt.planner.search.problem import Problem
from nxd_memopt.training.model import load_hf_config
from nxd_memopt.training.runtime.distributed import world_size
from scripts.bench.harness.record import append, bench_parser, environment, last_commit
from scripts.bench.planner.cells import DEVICE, Cell, part_of
from scripts.bench.planner.memory import expected_s, measured_row, say

BEST = 12
DRAWN = 4
SUFFICIENT = 0.98
Row = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """A problem.

    Args:
        cell: model, layers, tokens and precision; its micro-batch is the global batch.
        limit_gib: memory of each device that may be used.
        devices: number of GPUs.
    """

    cell: Cell
    limit_gib: float
    devices: int = 1


CHOICES = {
    "llama": Choice(Cell("llama", "llama-3-8b", 8, 16384, micro_batch=2), 30.0),
    "neox": Choice(Cell("neox", "gpt-neox-20b", 3, 8192, precision="bf16-mixed", micro_batch=4), 44.0),
    "smollm": Choice(Cell("smollm", "smollm2-135m", 30, 32768, precision="bf16-mixed", micro_batch=2), 16.0),
    "llama-two": Choice(
        Cell("llama-two", "llama-3-8b", 8, 8192, precision="bf16-mixed", micro_batch=8), 36.0, devices=2
    ),
}
"""Problems with few layers, so that all settings of one are measured in 250 s on an H200."""


def ranked(choice: Choice, device: Device, *, tiny: bool) -> list[Plan]:
    """Return the settings that fit, the one that the planner chooses first."""
    config = choice.cell.config(tiny=tiny)
    problem = Problem(
        model=model_spec(load_hf_config(config.model)),
        device=dataclasses.replace(device, memory_gib=choice.limit_gib),
        devices=choice.devices,
        sequence_length=config.data.seq_length,
        global_batch_size=config.data.global_batch_size,
        precision=choice.cell.precision,
        stages=("none",) if choice.devices == 1 else ("none", "zero1"),
        offloads_optimizer=True,
    )
    return plans(problem)


def measured_ranks(number: int, seed: int) -> list[int]:
    """Return the ranks of ``number`` settings that are measured: the best, and drawn ones."""
    others = range(BEST, number)
    drawn = random.Random(seed).sample(others, min(DRAWN, len(others)))
    return [*range(min(BEST, number)), *sorted(drawn)]


def cell_of(choice: Choice, plan: Plan) -> Cell:
    """Return the step of a setting, as the training program runs it."""
    setting = plan.setting
    replicas = choice.devices // setting.tensor_model_parallel_size
    defaults = {field.name: field.default for field in dataclasses.fields(MemoryConfig)}
    options = dataclasses.asdict(setting.memory)
    optimizer: dict[str, Any] = {}
    if setting.optimizer_offload_fraction:
        optimizer = {
            "optimizer_offload_fraction": setting.optimizer_offload_fraction,
            "optimizer_update_in_forward": setting.optimizer_update_in_forward,
            "store_param_remainders": setting.store_param_remainders,
        }
    return dataclasses.replace(
        choice.cell,
        memory={name: value for name, value in options.items() if value != defaults[name]},
        optimizer=optimizer,
        cuda_graph=setting.cuda_graph,
        micro_batch=setting.micro_batch_size,
        accumulation=choice.cell.micro_batch // (setting.micro_batch_size * replicas),
        tensor_parallel=setting.tensor_model_parallel_size,
        data_parallel=replicas,
        sharding=setting.sharding,
    )


def limit_memory(limit_gib: float) -> None:
    """Give the allocator of this process so much memory of the GPU."""
    if backend.name == "cuda":
        total = torch.cuda.get_device_properties(backend.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * GIB / total), backend.device)


def recorded(path: Path, about: Row, problem: str) -> list[Row]:
    """Return the rows that the file has of a problem from this commit, without failures."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    own = [row for row in rows if row["problem"] == problem and row["commit"] == about["commit"]]
    numbers = {"rank": int, "step_s": float, "ranked_step_s": float}
    return [row | {name: kind(row[name]) for name, kind in numbers.items()} for row in own if not row["failure"]]


def run(args: argparse.Namespace, found: Sequence[Plan]) -> list[Row]:
    """Measure, print and append setting by setting until ``--seconds`` would be exceeded; return all rows."""
    choice = CHOICES[args.problem]
    about = environment() | {"formulas": last_commit("nxd_memopt/planner")}
    rows = recorded(args.csv, about, args.problem) if args.append else []
    done = {row["rank"] for row in rows}
    begun = time.monotonic()
    for rank in chosen_ranks(args, len(found)):
        plan = found[rank]
        cell = cell_of(choice, plan)
        # The first rank's clock decides for all.
        passed = float(share_texts(repr(time.monotonic() - begun))[0])
        lasts = expected_s(plan, cuda_graph=cell.cuda_graph)
        if rank in done:
            continue
        if args.seconds is not None and passed + lasts > args.seconds:
            left = f"{lasts:.0f} s of {args.seconds - passed:.0f} s"
            say(f"{rank} {plan.setting.describe()}: left out, {left}")
            continue
        row = {"problem": args.problem, "limit_gib": choice.limit_gib, "rank": rank, "fitting": len(found)}
        row |= {"setting": plan.setting.describe(), "choice_seed": args.seed}
        # ``planner.memory`` plans with what the device has free; the ranking is of the limit.
        row |= measured_row(cell, about, tiny=args.tiny, limits=False) | {"ranked_step_s": round(plan.time.step_s, 4)}
        rows.append(row)
        shown = row["failure"] or f"{row['step_s']:.4g} s, planned {plan.time.step_s:.4g} s"
        say(f"{rank} {plan.setting.describe()}: {shown}")
        if args.append and parallel_state.is_global_rank_zero():
            append([row], args.csv)
    return rows


def chosen_ranks(args: argparse.Namespace, number: int) -> Sequence[int]:
    """Return the ranks of ``--cells``."""
    return part_of(measured_ranks(number, args.seed), args.cells)


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how fast the chosen setting is next to the best measured one, in words."""
    measured = [row for row in rows if not row["failure"]]
    failed = len(rows) - len(measured)
    chosen = [row["step_s"] for row in measured if row["rank"] == 0]
    if not chosen:
        return f"{len(measured)} settings measured, {failed} failed; the chosen one is not among the measured"
    best = min(measured, key=lambda row: row["step_s"])
    part = best["step_s"] / chosen[0]
    return (
        f"{len(measured)} settings measured, {failed} failed; the chosen one reaches {part:.1%} of the best, rank "
        f"{best['rank']}, which is {'at least' if part >= SUFFICIENT else 'below'} {SUFFICIENT:.0%}"
    )


def time_errors(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the errors of the times by which the settings are ranked, in words."""
    errors = [100 * (row["ranked_step_s"] / row["step_s"] - 1) for row in rows if not row["failure"]]
    if not errors:
        return "no time was measured"
    median = statistics.median(abs(error) for error in errors)
    return f"planned times: median error {median:.1f} %, {min(errors):+.1f} to {max(errors):+.1f} %"


def show(args: argparse.Namespace, found: Sequence[Plan]) -> None:
    """Print the settings that would be measured, and how long they take."""
    total_s = 0.0
    for rank in chosen_ranks(args, len(found)):
        plan = found[rank]
        lasts = expected_s(plan, cuda_graph=plan.setting.cuda_graph)
        total_s += lasts
        print(
            f"{rank:4} {plan.memory.device_bytes / GIB:6.1f} GiB {plan.memory.host_bytes / GIB:5.1f} host "
            f"{plan.time.step_s:6.2f} s a step, {lasts:3.0f} s  {plan.setting.describe()}"
        )
    print(f"{len(found)} settings fit; about {total_s:.0f} s")


def argument_parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__, "planned_choice")
    parser.add_argument("--problem", choices=tuple(CHOICES), required=True)
    parser.add_argument("--cells", default=":", metavar="A:B", help="part of the measured settings, as a slice")
    parser.add_argument("--seed", type=int, default=1, help="draws the settings besides the best ones")
    parser.add_argument("--seconds", type=float, help="leave out settings that would end later")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for trying the program out on a CPU")
    parser.add_argument("--list", action="store_true", help="print the settings with their plans and end")
    return parser


def ranked_device(args: argparse.Namespace) -> Device:
    """Return the device whose settings are ranked: this machine's GPU, and for ``--list`` without one ``DEVICE``."""
    if backend.name == "cuda":
        return gpu_named(backend.hardware_name()) or device_named(DEVICE)
    # The settings of a tiny problem are those of the device on which it runs.
    choice = CHOICES[args.problem]
    return host_device(choice.limit_gib, choice.devices) if args.tiny else device_named(DEVICE)


def main() -> None:
    parser = argument_parser()
    args = parser.parse_args()
    choice = CHOICES[args.problem]
    found = ranked(choice, ranked_device(args), tiny=args.tiny)
    if args.list:
        show(args, found)
        return
    if backend.name != "cuda" and not args.tiny:
        parser.error(f"needs an NVIDIA GPU, the backend is {backend.name}; --tiny tries the program out")
    backend.expand_segments()
    backend.init_process_group()
    if world_size() != choice.devices:
        parser.error(f"--problem {args.problem} is of {choice.devices} GPUs, and {world_size()} processes run")
    limit_memory(choice.limit_gib)
    rows = run(args, found)
    say(time_errors(rows))
    say(verdict(rows))
    leave_process_groups()


if __name__ == "__main__":
    main()
