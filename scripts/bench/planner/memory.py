"""Planned against measured memory and time of training steps on one, two or four GPUs.

    NXD_MEMOPT_BACKEND=cuda python -m scripts.bench.planner.memory --seed 2026 --seconds 540 --append
    torchrun --nproc_per_node 2 -m scripts.bench.planner.memory --seed 2026 --append  # T=2, D=2; or 4
    python -m scripts.bench.planner.memory --list
    python -m scripts.bench.planner.memory --tiny --cells 0:8

Each cell is built, planned and stepped as in the training program (``training/``), with random ids
instead of text. Cells run one after the other in one process, and a cell that fails is a row with its
failure. A cell whose plan is above the memory of the card or the host is named and passed over, as is
one that would end after ``--seconds``. ``--drawn`` cells follow the named ones; ``--seed`` draws them.
With ``--append`` cells that the file has from this commit are passed over, so that repeated calls go on
where the last one ended. The last lines sum up all rows of this commit.

Measured are steps after the warm-up: ``allocated`` is the allocator's peak, ``warm_up`` that of the
steps before, in which states are created and kernels compiled; ``reserved`` is what the allocator takes
from the device in the step with the smallest limit with which it runs (``limited_steps``), and
``unlimited_reserved`` in the steps before it; ``host`` the blocks and claims of the run's host memory.
Offloaded activations stay on the device while memory is left, so that such a step has no ``allocated``. With
several ranks, figures are the maximum over the ranks. Errors are planned / measured - 1, so that a
negative one of ``reserved`` promises too little memory. The time of a step that may wait for the host's
launches has a column of its own: it depends on the host's processor and load, and the plan gives a range
(``waiting_part``: its width, as a part of the expected time). ``formulas`` is
the last commit of the planner; ``rates`` says that the planned time has published rates.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import PretrainedConfig

from nxd_memopt.backends import backend
from nxd_memopt.backends.cuda.backend import CudaBackend
from nxd_memopt.config import MemoryConfig
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import share_texts
from nxd_memopt.parallel_layers.initialization import zeros_for_weights
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.parallel_layers.utils import leave_process_groups
from nxd_memopt.planner.hardware import GIB, PAGE_LOCKING_S_PER_GIB, device_named
from nxd_memopt.planner.search.plan import Plan, evaluate
from nxd_memopt.planner.search.problem import Problem
from nxd_memopt.profiling.calibration import launch_seconds
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.device_support import require_executable
from nxd_memopt.training.host_memory import new_host_pool
from nxd_memopt.training.loop import run_step
from nxd_memopt.training.lora import apply_lora
from nxd_memopt.training.memory_plan import planned
from nxd_memopt.training.model import apply_fp8, build_model, load_hf_config
from nxd_memopt.training.parallelize import parallelize
from nxd_memopt.training.runtime.distributed import world_size
from nxd_memopt.training.state import Training
from scripts.bench.harness.gpu_race import first_line
from scripts.bench.harness.record import BENCHMARKS, append, bench_parser, environment, last_commit
from scripts.bench.planner.cells import DEVICE, Cell, drawn, named, part_of, plan_of
from scripts.bench.planner.errors import Row, errors, recorded, summary, totals
from scripts.bench.planner.limited_steps import FRACTIONS, FRACTIONS_OF_OFFLOAD, QUICK_S, clean, least_reserved

CSV = BENCHMARKS / "planned_memory.csv"
SETUP_S = 6.0  # building a model of 8 billion parameters, the first kernels, and freeing it
LEFT_BYTES = 48 << 20
"""Most that the cells before may leave allocated, which counts as this cell's: the bound of ``allocated_error``."""
TIMED_S = 3.0


def steps_of(plan: Plan, *, cuda_graph: bool) -> tuple[int, int]:
    """Return the numbers of warm-up and of timed steps: few of long steps."""
    # The states exist from the second step on; a graph is captured in the third.
    warm_up = 2
    if cuda_graph:
        warm_up = 3
    elif plan.time.step_s > TIMED_S:
        warm_up = 1
    return warm_up, max(1, min(5, round(TIMED_S / plan.time.step_s)))


def expected_s(plan: Plan, *, cuda_graph: bool) -> float:
    """Return about how long a cell takes."""
    host_s = plan.memory.host_bytes / GIB * PAGE_LOCKING_S_PER_GIB
    return SETUP_S + host_s + sum(steps_of(plan, cuda_graph=cuda_graph)) * plan.time.step_s


def batches_of(config: TrainConfig, vocabulary: int) -> list[MicroBatch]:
    """Return a step's micro-batches of random ids, on the device."""
    generator = torch.Generator().manual_seed(3)
    shape = (config.data.micro_batch_size, config.data.seq_length)
    divisor = float(config.data.global_batch_size * (config.data.seq_length - 1))
    found: list[MicroBatch] = []
    for _ in range(config.accumulation_steps(world_size())):
        ids = torch.randint(0, vocabulary, shape, generator=generator)
        found.append(MicroBatch(ids, ids, torch.tensor([divisor])).to(backend.device))
    return found


def measure(cell: Cell, *, tiny: bool, limits: bool = True) -> Row:
    """Return the planned and measured columns of a cell; its memory is free again after ``clean``.

    Args:
        cell: the step.
        tiny: small sizes.
        limits: measure ``reserved``, which sets the process's limit and removes it.

    Raises:
        ValueError: the cell is not planned, the device does not have one of its techniques, or what the cells
            before have left counts in its memory.
    """
    _use_groups(cell)
    config = cell.config(tiny=tiny)
    hf_config = load_hf_config(config.model, config.moe)
    problem, plan = planned(config, hf_config)
    timed_plan = _with_launches(problem, plan)
    require_executable(config, hf_config)
    backend.reset_peak_memory_stats()
    before = _largest(backend.memory_allocated() or 0)
    if isinstance(backend, CudaBackend) and before > LEFT_BYTES:
        raise ValueError(f"{before} bytes of the cells before are still allocated: measure this cell alone")
    model_parallel_manual_seed(7)
    model = _random_model(cell, config, hf_config)
    apply_lora(model, config)
    apply_fp8(model, config)
    pool = new_host_pool(config)
    optimizer, forward_backward = parallelize(model, config, pool=pool)
    # A run's plan of resumption and its tokens are not read by a step.
    training = Training(model, optimizer, forward_backward, cast(Any, None), cast(Any, None))
    batches = batches_of(config, hf_config.vocab_size)
    warm_up, timed = steps_of(plan, cuda_graph=cell.cuda_graph)
    run = functools.partial(run_step, training, config, batches)
    times, losses, warm_up_bytes = _run_steps(lambda: run().loss.item(), warm_up, timed)
    allocated = backend.max_memory_allocated() or 0
    taken = 0
    if isinstance(backend, CudaBackend):
        taken = torch.cuda.max_memory_reserved() + backend.peer_memory_bytes()
    reserved = 0
    is_elastic = waits_for_memory(config.memory)
    if limits:
        reserved = least_reserved(
            run,
            limits=tried_limits(plan, _largest(allocated), is_elastic=is_elastic),
            planned=plan.memory.reserved_bytes,
            fails_alone=world_size() == 1,
        )
    # The next cell has the memory into which the states of a next step are being copied.
    optimizer.finish_update()
    if optimizer.skipped_steps:
        raise ValueError(f"{optimizer.skipped_steps} steps had an overflow, and so no update: lower the loss scale")
    return _columns(plan, timed_plan) | {
        "rates": "published",
        "moment": plan.memory.moment,
        "before_bytes": before,
        "warm_up_bytes": warm_up_bytes,
        "allocated_bytes": "" if is_elastic else _largest(allocated),
        "reserved_bytes": _largest(reserved) if reserved else "",
        "unlimited_reserved_bytes": _largest(taken) if taken else "",
        "host_bytes": _largest(0 if pool is None else pool.total_bytes),
        "step_s": round(statistics.median(times[warm_up:]), 4),
        "steps": f"{warm_up}+{timed}",
        "loss": round(losses[-1], 4),
    }


def _random_model(cell: Cell, config: TrainConfig, hf_config: PretrainedConfig) -> ParallelCausalLM:
    """Return the model with random weights; a pipeline's are drawn on the device.

    Each rank of a pipeline would draw the numbers of all ranks from one stream of the CPU, a minute for 8 billion.
    """
    if cell.stages[0] == 1:
        return build_model(config, hf_config)
    with zeros_for_weights():
        model = build_model(config, hf_config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=hf_config.initializer_range)
    return model


def _with_launches(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with the time that the slowest rank's host takes for a launch now, on GPUs.

    Hosts differ by 40 %, and so does the time of a step that waits for its host.
    """
    if not isinstance(backend, CudaBackend):
        return plan
    launch_s = max(float(text) for text in share_texts(repr(launch_seconds())))
    return evaluate(replace(problem, device=replace(problem.device, launch_s=launch_s)), plan.setting)


def _run_steps(step: Callable[[], float], warm_up: int, timed: int) -> tuple[list[float], list[float], int | None]:
    """Return the seconds and the losses of all steps, and the peak of memory of the warm-up; then reset the peak.

    Args:
        step: runs a step and returns its loss.
        warm_up: number of the first steps.
        timed: number of the others.
    """
    times: list[float] = []
    losses: list[float] = []
    warm_up_bytes: int | None = None
    for number in range(warm_up + timed):
        if number == warm_up:
            warm_up_bytes = backend.max_memory_allocated()
            backend.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(step())
        backend.synchronize()
        times.append(time.perf_counter() - start)
    return times, losses, warm_up_bytes


def waits_for_memory(memory: MemoryConfig) -> bool:
    """Return whether offloaded activations stay on the device while memory is left (``memory/offload.py``)."""
    return memory.cpu_offloading_num_layers > 0 and not (
        memory.cpu_offloading_activations or memory.cpu_offloading_weights
    )


def tried_limits(plan: Plan, allocated: int, *, is_elastic: bool) -> list[int]:
    """Return the limits besides the planned one with which a step is run, in bytes.

    Args:
        plan: plan of the step.
        allocated: peak of the allocated bytes without a limit.
        is_elastic: see ``waits_for_memory``. What such a step allocates says nothing of what it needs.
    """
    if is_elastic:
        return [round(plan.memory.device_bytes * (1 + part)) for part in FRACTIONS_OF_OFFLOAD]
    if plan.time.step_s > QUICK_S:
        return []
    return [round(allocated * (1 + part)) for part in FRACTIONS]


def _use_groups(cell: Cell) -> None:
    """Create the process groups of a cell.

    Peer memory belongs to a group and grows to the largest activation: that of the cell before must not count.
    """
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=cell.tensor_parallel, pipeline_model_parallel_size=cell.stages[0]
    )


def _largest(value: int) -> int:
    """Return the largest value of all ranks. Every rank calls."""
    return max(int(text) for text in share_texts(str(value)))


def _columns(plan: Plan, timed: Plan) -> Row:
    """Return the planned columns."""
    return {
        "planned_allocated_bytes": plan.memory.device_bytes,
        "planned_reserved_bytes": plan.memory.reserved_bytes,
        "planned_host_bytes": plan.memory.host_bytes,
        "planned_step_s": round(timed.time.step_s, 4),
        "waiting_part": round(timed.time.uncertain_s / timed.time.step_s, 3),
    }


def measured_row(cell: Cell, about: Row, *, tiny: bool, limits: bool = True) -> Row:
    """Return the row of a cell, with its failure if it does not run; arguments as ``measure``."""
    row: Row = {
        "cell": cell.name,
        "model": cell.model,
        "layers": cell.layers,
        "tokens": cell.tokens,
        "micro_batch": cell.micro_batch,
        "accumulation": cell.accumulation,
        "precision": cell.precision,
        "options": cell.options(),
        "seed": cell.seed_text(),
        "failure": "",
    }
    try:
        row |= measure(cell, tiny=tiny, limits=limits)
    except Exception as error:  # whatever stops one cell must not stop the others
        row["failure"] = first_line(error)
        # The frames of a step that was out of memory have the model and its states (11 GB of them measured
        # as the next cell's).
        traceback.clear_frames(error.__traceback__)
    row["failure"] = next((text for text in share_texts(row["failure"]) if text), "")
    if not row["failure"]:
        row |= errors(row)
    clean()
    return row | about


def obstacle(plan: Plan) -> str | None:
    """Return why a cell cannot run on this machine, or None."""
    memory = plan.memory
    if memory.reserved_bytes > plan.usable_bytes:
        return f"{memory.reserved_bytes / GIB:.1f} GiB of {plan.usable_bytes / GIB:.1f} on the device"
    if memory.host_bytes > plan.usable_host_bytes:
        return f"{memory.host_bytes / GIB:.1f} GiB of {plan.usable_host_bytes / GIB:.1f} on the host"
    return None


def chosen_cells(args: argparse.Namespace) -> dict[int, Cell]:
    """Return the cells of ``--cells`` by their numbers."""
    ranks = world_size()
    everything = dict(enumerate([*named(ranks), *drawn(args.drawn, args.seed, args.longest_s, ranks)]))
    return {number: everything[number] for number in part_of(range(len(everything)), args.cells)}


def run(cells: Mapping[int, Cell], args: argparse.Namespace) -> list[Row]:
    """Measure, print and append cell by cell, until ``--seconds`` would be exceeded; return all rows of this commit."""
    about = environment() | {"formulas": last_commit("nxd_memopt/planner")}
    done = recorded(args.csv, about) if args.append else {}
    say(f"{len(cells)} cells, {len(done)} recorded; formulas of {about['formulas']}, {about['device']}")
    begun = time.monotonic()
    rows: list[Row] = list(done.values())
    for number, cell in cells.items():
        if (cell.name, cell.seed_text()) in done:
            continue
        start = time.monotonic()
        left_s = None
        if args.seconds is not None:
            # The first rank's clock decides for all.
            left_s = float(share_texts(repr(args.seconds - (start - begun)))[0])
        reason = left_out(cell, left_s, tiny=args.tiny)
        if reason is not None:
            say(f"{number} {cell.name}: left out, {reason}")
            continue
        row = measured_row(cell, about, tiny=args.tiny)
        rows.append(row)
        say(f"{number} {cell.name}: {summary(row)} ({time.monotonic() - start:.0f} s)")
        if args.append and parallel_state.is_global_rank_zero():
            append([row], args.csv)
    return rows


def say(text: str) -> None:
    """Print ``text`` on the first rank."""
    if parallel_state.is_global_rank_zero():
        print(text, flush=True)


def left_out(cell: Cell, left_s: float | None, *, tiny: bool) -> str | None:
    """Return why a cell is not tried: it needs more memory than there is, or more than ``left_s`` seconds."""
    if left_s is not None:
        lasts = expected_s(plan_of(cell, device_named(DEVICE)), cuda_graph=cell.cuda_graph)
        if lasts > left_s:
            return f"{lasts:.0f} s of {left_s:.0f} s"
    try:
        return obstacle(plan_of(cell, tiny=tiny))
    except ValueError:
        return None  # not planned: the row has the failure


def show(cells: Mapping[int, Cell]) -> None:
    """Print each cell with its plan on an H200, and how long all of them take."""
    total_s = 0.0
    for number, cell in cells.items():
        plan = plan_of(cell, device_named(DEVICE))
        lasts = expected_s(plan, cuda_graph=cell.cuda_graph)
        total_s += lasts
        host_gib = plan.memory.host_bytes / GIB
        say(
            f"{number:3} {cell.name:<28} {cell.layers:>2} layers {cell.tokens:>6} tokens x {cell.micro_batch} x "
            f"{cell.accumulation} {cell.precision:<10} {plan.memory.device_bytes / GIB:6.1f} GiB "
            f"{host_gib:5.1f} host {plan.time.step_s:6.2f} s a step, {lasts:4.0f} s  {cell.options()}"
        )
    say(f"{len(cells)} cells, about {total_s:.0f} s")


def argument_parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__, "planned_memory")
    parser.add_argument("--cells", default=":", metavar="A:B", help="numbers of the cells, as a slice")
    parser.add_argument("--drawn", type=int, default=32, help="number of drawn cells, after the named ones")
    parser.add_argument("--seed", type=int, default=1, help="draws the drawn cells")
    parser.add_argument("--longest-s", type=float, default=8.0, help="longest planned step of a drawn cell")
    parser.add_argument("--seconds", type=float, help="leave out cells that would end later")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for trying the program out on a CPU")
    parser.add_argument("--list", action="store_true", help="print the cells with their plans on an H200 and end")
    return parser


def main() -> None:
    parser = argument_parser()
    args = parser.parse_args()
    if args.drawn < 0:
        parser.error(f"--drawn must be at least 0, got {args.drawn}")
    backend.expand_segments()
    backend.init_process_group()
    try:
        _measure(parser, args)
    except SystemExit:
        leave_process_groups()
        raise
    leave_process_groups()


def _measure(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """List or measure the chosen cells; the parser reports wrong arguments."""
    try:
        cells = chosen_cells(args)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        show(cells)
        return
    if backend.name != "cuda" and not args.tiny:
        parser.error(f"needs an NVIDIA GPU, the backend is {backend.name}; --tiny tries the program out")
    say("\n".join(totals(run(cells, args))))


if __name__ == "__main__":
    main()
