"""The command ``nxd-memopt plan``: which settings fit a device and how fast they are, without the device."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nxd_memopt.architectures.model_spec import model_spec, require_positions
from nxd_memopt.command_line import OVERRIDES, Parser, Run, count, device_and_ranks, read_run, require_directory
from nxd_memopt.commands.plan.fixed import fixed_options, planned_moe, stated_size
from nxd_memopt.commands.plan.output import assumptions, document, draw, header, memory_line, missing_memory, table
from nxd_memopt.commands.plan.yaml_writer import configuration, missing_options, require_trainable, write_yaml
from nxd_memopt.files import require_new
from nxd_memopt.planner.hardware import DEVICES
from nxd_memopt.planner.search.explain import explanation
from nxd_memopt.planner.search.plan import Plan, closest_to_fitting, plans, remedies
from nxd_memopt.planner.search.problem import Problem, require_memory
from nxd_memopt.planner.sizes.states import STAGES

_EPILOG = f"""{OVERRIDES} Of a configuration, what the search chooses replaces its options: the micro-batch, the ZeRO
stage, techniques of the memory section, optimizer states on the host and CUDA graphs. Other options are planned and
kept, and exclude settings that the training program would refuse with them: sequence_parallel_enabled, reduce_dtype,
attention_backend, fused_linear_cross_entropy, reshard_after_forward, num_distributed_optimizer_instances,
grad_reduce_in_fp32, overlap_grad_reduce, in_backward and compile. Parallel sizes that a YAML states are fixed: remove
them from it to try all sizes. Those of a recipe are not, because they are of the devices that it was written for.
Options of the command line win: the search keeps --optimizer.optimizer-offload-fraction 0 (nothing of the optimizer in
host memory), --memory.cpu-offloading-num-layers 0, --data-parallel.sharding zero1 and the like. A model alone has a
global batch of about 4 million tokens, as the LLaMA models (arXiv:2302.13971)."""
_BATCH_TOKENS = 1 << 22
"""Tokens of the global batch of a model alone: LLaMA's, of all sizes from 7B to 65B (arXiv:2302.13971, table 2)."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0, or 1 if no setting fits.

    Raises:
        ValueError: the arguments, the model or the file to be written are not valid.
    """
    # Of the machine that it runs on, and so the one part that imports torch.
    if list(arguments[:1]) == ["--calibrate"]:
        return _calibrate(arguments[1:])
    options, overrides = _parse(arguments)
    run = read_run(options, overrides)
    problem = _problem(options, run)
    # A bare model has no configuration to check unless one is written.
    is_checked = not run.is_bare or options.write is not None
    if is_checked:
        require_positions(run.model_config(), problem.sequence_length)
    fixed = fixed_options(run)
    found = plans(problem, fixed)
    changes: list[str] = []
    if found:
        if options.row > len(found):
            raise ValueError(f"--row {options.row} must be at most {len(found)}, the settings that fit: lower it")
        best = found[options.row - 1]
    else:
        # The setting that exceeds the memory least, and what would make one fit.
        best = closest_to_fitting(problem, fixed)
        changes = remedies(problem, fixed)
    # A setting that fits and that the training program refuses would be found out on the hardware.
    content = configuration(problem, best.setting, run)
    if is_checked:
        require_trainable(content, problem, best.setting, run)
    if options.json:
        print(json.dumps(document(problem, found[: options.show], changes), indent=1))
    else:
        print("\n".join(_lines(options, run, problem, found, best, changes)))
    # Without a setting that fits, the smallest one shows which term is too large.
    if options.plot is not None:
        draw(options.plot, run.name, problem, found[: options.show] or [best])
    if not found:
        return 1
    if options.explain and not options.json:
        print("\n".join(["", *explanation(best.memory, best.time)]))
    if options.write is not None:
        notes = write_yaml(options.write, problem, best, content)
        lines = [*(f"note: {note}" for note in notes), f"wrote {options.write}"]
        lines += [f"  {command}" for command in next_commands(options, problem, content)]
        print("\n".join(lines), file=sys.stderr)
    return 0


def _lines(
    options: argparse.Namespace, run: Run, problem: Problem, found: Sequence[Plan], best: Plan, changes: Sequence[str]
) -> list[str]:
    """Return the settings as a table, or the smallest one and what to change if there is none."""
    # First what was planned, then what the figures assume, then the settings: a table is read
    # without its assumptions otherwise.
    shown = found[: options.show]
    lines = [header(run.name, problem, best, is_default_batch=_has_default_batch(run))]
    lines += assumptions(problem, best, shown)
    if not found:
        return lines + missing_memory(problem, best, changes)
    return [*lines, *table(problem, shown, len(found)), memory_line(options.row, best)]


def next_commands(options: argparse.Namespace, problem: Problem, content: Mapping[str, Any]) -> list[str]:
    """Return the commands that certify the written file, check the start, and train with it on the planned ranks.

    Args:
        options: the command's own flags.
        problem: what was planned.
        content: the written sections; what training lacks in them has a placeholder in the command.
    """
    file = ["--config", str(options.write)]
    certify = ["nxd-memopt", "certify", *file, "--device", options.device, "--devices", str(problem.devices)]
    for flag, gib in (
        ("--device-memory-gib", options.device_memory_gib),
        ("--host-memory-gib", options.host_memory_gib),
    ):
        if gib is not None:
            certify += [flag, str(gib)]
    ranks = problem.device.ranks_per_host
    hosts = -(-problem.devices // ranks)
    nproc = ["--nproc", str(problem.devices // hosts)]
    platform = "cuda" if options.device.endswith(".json") else options.device
    launch = ["nxd-memopt", "launch", "--platform", platform, *nproc]
    train = launch
    if hosts > 1:
        # Every host runs the command, each with its own number.
        several = ["--nodes", str(hosts), "--node-rank"]
        launch, train = ([*launch, *several, number, "--master-addr", "HOST_0"] for number in ("0", "NUMBER"))
    elif problem.device.kind != "neuron":
        train = ["nxd-memopt", "train", *nproc]
    checks = [[*launch, *file, "--dry-run"]]
    if options.device_memory_gib is not None:
        checks[0] += ["--device-memory-gib", str(options.device_memory_gib)]
    # A platform has no size of a machine that was measured: certify's is in its file.
    if options.device.endswith(".json"):
        checks = []
    train = [*train, *file]
    for option in missing_options(content):
        train += option
    return [shlex.join(command) for command in (certify, *checks, train)]


def _calibrate(arguments: Sequence[str]) -> int:
    """Measure this machine and write its rates; under torchrun also the rates of its collectives."""
    if len(arguments) != 1 or not arguments[0].endswith(".json"):
        raise ValueError("--calibrate takes the .json file to write and nothing else: plan --calibrate FILE.json")
    from nxd_memopt.backends import backend
    from nxd_memopt.parallel_layers import parallel_state
    from nxd_memopt.parallel_layers.coordination import raise_together
    from nxd_memopt.parallel_layers.utils import leave_process_groups
    from nxd_memopt.profiling.calibration import measure_device, write_device
    from nxd_memopt.training.runtime.distributed import is_rank_zero, world_size

    # One group of all ranks: the measured rates are those of tensor-parallel collectives.
    backend.init_process_group()
    # Rank 0 writes, and the measurement takes a minute.
    with raise_together("the file of plan --calibrate"):
        if is_rank_zero():
            _require_new_file("--calibrate", Path(arguments[0]))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size())
    device, found = measure_device()
    if is_rank_zero():
        write_device(Path(arguments[0]), device, found)
        rates = ", ".join(f"{dtype} {flops / 1e12:.3g}" for dtype, flops in device.matmul_flops.items())
        print(f"matmuls in TFLOP/s: {rates}; memory: {device.memory_bytes_per_s / 1e9:.4g} GB/s")
        print(f"wrote {arguments[0]}: nxd-memopt plan --device {arguments[0]} --model NAME")
    leave_process_groups()
    return 0


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the command's own flags, and the arguments that describe the run."""
    parser = Parser(
        "plan",
        "Show which settings of a training run fit a device, and how fast they are. No hardware is needed. "
        "plan --calibrate FILE.json measures the rates of a machine, also under torchrun: torchrun --nproc_per_node 8 "
        "-m nxd_memopt.cli plan --calibrate FILE.json",
        models=True,
        epilog=_EPILOG,
    )
    devices = f"{', '.join(DEVICES)}; an AWS instance; a FILE.json of plan --calibrate FILE.json, run on the machine"
    parser.add_argument("--device", required=True, help=devices)
    parser.add_argument("--devices", type=count, metavar="N", help="ranks in all; default: the ranks of one host")
    parser.add_argument("--device-memory-gib", type=float, help="instead of the device's")
    parser.add_argument("--host-memory-gib", type=float, help="host memory of one rank, instead of the device's")
    parser.add_argument("--show", type=count, default=10, help="number of settings to show")
    chosen = "the setting that --explain and --write take, counted from the fastest; default: 1"
    parser.add_argument("--row", type=count, default=1, metavar="N", help=chosen)
    parser.add_argument("--explain", action="store_true", help="show each term of the setting with its formula")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    written = "write the setting as YAML for nxd-memopt certify, launch and train --config"
    parser.add_argument("--write", type=Path, metavar="FILE", help=written)
    plotted = "draw the memory of the shown settings by term as a .png file"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=plotted)
    options, overrides = parser.separate(arguments)
    # Before the search, which may take a minute: what is wrong with a file or a size.
    require_memory("--device-memory-gib", options.device_memory_gib)
    require_memory("--host-memory-gib", options.host_memory_gib)
    if options.write is not None:
        _require_new_file("--write", options.write)
    if options.plot is not None:
        if options.plot.suffix != ".png":
            raise ValueError(f"--plot {options.plot} is not a .png file: name one")
        require_directory("--plot", options.plot)
    return options, overrides


def _require_new_file(option: str, file: Path) -> None:
    """Raise ``ValueError`` if ``file`` exists, or its directory does not."""
    require_directory(option, file)
    require_new(option, file)


def _problem(options: argparse.Namespace, run: Run) -> Problem:
    """Return what is asked."""
    # A device's name stands for a host with its usual number of ranks, unless --devices says more.
    device, ranks = device_and_ranks(options.device)
    device = device.with_given(memory_gib=options.device_memory_gib, host_memory_gib=options.host_memory_gib)
    config = run.model_config()
    data = run.config.data
    # A model alone is planned at its own length, and without a batch.
    length: int | None = data.seq_length
    batch = data.global_batch_size
    if run.is_bare and "seq_length" not in run.stated:
        length = config.get("max_position_embeddings")
    if length is None:
        raise ValueError("--seq-length is missing, and the model has no max_position_embeddings: pass --seq-length")
    devices = options.devices or ranks
    if _has_default_batch(run):
        # A multiple of the ranks, so that every data-parallel size divides it. A length below 2 is refused below.
        batch = -(-_BATCH_TOKENS // (max(1, length) * devices)) * devices
    spec = model_spec(config)
    return Problem(
        model=spec,
        device=device,
        devices=devices,
        sequence_length=length,
        global_batch_size=batch,
        precision=str(run.config.trainer.precision),
        isolate_documents=data.isolate_documents,
        stages=STAGES,
        offloads_optimizer=True,
        grad_reduce_in_fp32=run.config.data_parallel.grad_reduce_in_fp32 is not False,
        moe=planned_moe(run, config, device),
        lora=run.config.lora.config(),
        fp8=run.config.fp8_layers(spec.num_layers),
        tensor_model_parallel_size=stated_size(run, "tensor_model_parallel_size"),
    )


def _has_default_batch(run: Run) -> bool:
    """Return whether nothing says how many sequences a step has."""
    return run.is_bare and "global_batch_size" not in run.stated
