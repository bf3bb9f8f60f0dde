"""The command ``nxd-memopt plan``: which settings fit a device and how fast they are, without the device."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nxd_memopt._optional import require_installed
from nxd_memopt.architectures.configs import NAMED_CONFIGS
from nxd_memopt.architectures.experts import BALANCED_ROUTING
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.commands.plan.model_source import ModelSource, planned_moe, read_source
from nxd_memopt.commands.plan.yaml_writer import configuration, require_trainable, write_yaml
from nxd_memopt.files import require_new
from nxd_memopt.planner.hardware import DEVICES, GIB, ONLY_HARDWARE_SHOWS, device_named
from nxd_memopt.planner.search.explain import explanation
from nxd_memopt.planner.search.fixed_options import FixedOptions
from nxd_memopt.planner.search.plan import Plan, plans, remedies, smallest
from nxd_memopt.planner.search.problem import PRECISIONS, Problem, attention_notes, require_memory, require_size
from nxd_memopt.planner.sizes.states import STAGES
from nxd_memopt.planner.timing.step_time import StepTime, rates_of

_OF_A_YAML = """Of a YAML, what the search chooses replaces the YAML's options: the micro-batch, the ZeRO stage,
techniques of the memory section, optimizer states on the host and CUDA graphs. Other options are planned and kept, and
exclude settings that the training program would refuse with them: sequence_parallel_enabled, reduce_dtype,
attention_backend, fused_linear_cross_entropy, reshard_after_forward, num_distributed_optimizer_instances,
grad_reduce_in_fp32, overlap_grad_reduce, in_backward and compile. Parallel sizes that a YAML states are fixed: remove
them from it to try all sizes. Those of a recipe that is named without a path are not, because they are of the devices
that it was written for. Options of this command win."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0, or 1 if no setting fits.

    Raises:
        ValueError: the arguments, the model or the file to be written are not valid.
    """
    # Of the machine that it runs on, and so the one part that imports torch.
    if list(arguments[:1]) == ["--calibrate"]:
        return _calibrate(arguments[1:])
    options = _parse(arguments)
    source = read_source(options.model)
    problem = _problem(options, source)
    fixed = _fixed(options, source)
    found = plans(problem, fixed)
    # Where nothing fits, the setting that exceeds the memory least.
    best = found[0] if found else smallest(problem, fixed)
    content = configuration(problem, best.setting, source)
    if source.is_run or options.write is not None:
        require_trainable(content, problem, best.setting, options.model)
    changes = [] if found else remedies(problem, fixed)
    if options.json:
        print(json.dumps(_document(problem, found[: options.show], changes), indent=1))
    else:
        _print(options, problem, found, best, changes)
    if options.plot is not None:
        _draw(options, problem, found[: options.show] or [best])
    if not found:
        return 1
    if options.explain and not options.json:
        print()
        for line in explanation(best.memory, best.time):
            print(line)
    if options.write is not None:
        for note in write_yaml(Path(options.write), problem, best, content):
            print(f"note: {note}", file=sys.stderr)
        print(f"wrote {options.write}: nxd-memopt train --config {options.write}", file=sys.stderr)
    return 0


def _calibrate(arguments: Sequence[str]) -> int:
    """Measure this machine and write its rates; under torchrun also those of its collectives."""
    if len(arguments) != 1 or not arguments[0].endswith(".json"):
        raise ValueError("--calibrate takes the .json file to write and nothing else: plan --calibrate FILE.json")
    from nxd_memopt.backends import backend
    from nxd_memopt.parallel_layers import parallel_state
    from nxd_memopt.parallel_layers.coordination import raise_together
    from nxd_memopt.parallel_layers.utils import leave_process_groups
    from nxd_memopt.profiling.calibration import measure_device, write_device
    from nxd_memopt.training.runtime.distributed import is_rank_zero, world_size

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


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are the command's: one line, exit status 2."""

    def error(self, message: str) -> Any:
        raise ValueError(f"{message}; nxd-memopt plan --help shows the options")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = _Parser(
        prog="nxd-memopt plan",
        description="Show which settings of a training run fit a device, and how fast they are. No hardware is needed. "
        "plan --calibrate FILE.json measures the rates of a machine, also under torchrun: torchrun --nproc_per_node 8 "
        "-m nxd_memopt.cli plan --calibrate FILE.json",
        epilog=_OF_A_YAML,
    )
    models = ", ".join(NAMED_CONFIGS)
    parser.add_argument("--model", required=True, help=f"{models}; a config.json or its directory; a recipe or YAML")
    devices = f"{', '.join(DEVICES)}; a FILE.json of nxd-memopt plan --calibrate FILE.json, run on the machine"
    parser.add_argument("--device", required=True, help=devices)
    parser.add_argument("--devices", type=int, help="number of ranks; default: those of one host")
    parser.add_argument(
        "--tensor-model-parallel-size", type=int, metavar="T", help="T; default: the YAML's, or all are tried"
    )
    parser.add_argument("--expert-model-parallel-size", type=int, metavar="EP", help="EP; default as of T")
    parser.add_argument("--seq-length", type=int, help="tokens per sequence; default: the YAML's or the model's")
    parser.add_argument("--global-batch", type=int, help="sequences per step; default: one per data-parallel rank")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), help="default: bf16-mixed, fp32 master weights")
    parser.add_argument("--isolate-documents", action="store_true", help="documents do not attend to each other")
    parser.add_argument("--device-memory-gib", type=float, help="instead of the device's")
    parser.add_argument("--host-memory-gib", type=float, help="host memory of one rank, instead of the device's")
    parser.add_argument("--show", type=int, default=10, help="number of settings to show")
    parser.add_argument("--explain", action="store_true", help="show each term of the fastest setting with its formula")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--write", metavar="FILE", help="write the fastest setting as YAML for nxd-memopt train --config"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the memory of the shown settings by term as a .png file")
    options = parser.parse_args(list(arguments))
    if options.plot is not None and not options.plot.endswith(".png"):
        raise ValueError(f"--plot {options.plot} is not a .png file: name one")
    for name in ("devices", "tensor-model-parallel-size", "expert-model-parallel-size", "global-batch", "show"):
        require_size(f"--{name}", getattr(options, name.replace("-", "_")))
    require_size("--seq-length", options.seq_length, is_length=True)
    require_memory("--device-memory-gib", options.device_memory_gib)
    require_memory("--host-memory-gib", options.host_memory_gib)
    if options.write is not None:
        _require_new_file("--write", Path(options.write))
    if options.plot is not None:
        _require_directory("--plot", Path(options.plot))
    return options


def _require_new_file(option: str, file: Path) -> None:
    """Raise ``ValueError`` if ``file`` exists, or its directory does not."""
    _require_directory(option, file)
    require_new(option, file)


def _require_directory(option: str, file: Path) -> None:
    """Raise ``ValueError`` if ``file`` is a directory, or is in none."""
    if file.is_dir():
        raise ValueError(f"{option} {file} is a directory: name a file in it")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{option} {file}: {file.absolute().parent} is no directory: create it, or name another file")


def _problem(options: argparse.Namespace, source: ModelSource) -> Problem:
    """Return what is asked: the command's options before those of a configuration file."""
    device = device_named(options.device)
    config = source.model_config()
    moe = planned_moe(source, config, device)
    data = source.options.get("data", {})
    trainer = source.options.get("trainer", {})
    given = (options.seq_length, data.get("seq_length"), config.get("max_position_embeddings"))
    length = next((each for each in given if each is not None), None)
    if length is None:
        raise ValueError("--seq-length is missing, and the model has no max_position_embeddings: pass --seq-length")
    size = options.tensor_model_parallel_size
    return Problem(
        model=model_spec(config),
        device=device,
        devices=device.ranks_per_host if options.devices is None else options.devices,
        sequence_length=length,
        global_batch_size=data.get("global_batch_size") if options.global_batch is None else options.global_batch,
        precision=options.precision or str(trainer.get("precision") or "bf16-mixed"),
        isolate_documents=options.isolate_documents or bool(data.get("isolate_documents", False)),
        stages=STAGES,
        offloads_optimizer=True,
        grad_reduce_in_fp32=source.options.get("data_parallel", {}).get("grad_reduce_in_fp32") is not False,
        device_gib=options.device_memory_gib,
        host_gib=options.host_memory_gib,
        moe=moe,
        lora=source.lora.config(),
        tensor_model_parallel_size=source.tensor_model_parallel_size if size is None else size,
    )


def _fixed(options: argparse.Namespace, source: ModelSource) -> FixedOptions:
    """Return the options that the search keeps: the command's before those of a configuration file."""
    size = options.expert_model_parallel_size
    if size is None:
        return source.fixed
    return dataclasses.replace(source.fixed, expert_model_parallel_size=size)


def _print(
    options: argparse.Namespace, problem: Problem, found: Sequence[Plan], best: Plan, changes: Sequence[str]
) -> None:
    """Print the settings as a table, or the smallest one and what to change if there is none."""
    device = problem.device
    batch = problem.global_batch_size or "one sequence per data-parallel rank"
    # A calibrated device has as many ranks on a host as were measured.
    hosts = -(-problem.devices // device.ranks_per_host)
    shown = f" on {hosts} hosts of {device.ranks_per_host}" if hosts > 1 else ""
    print(
        f"{options.model} on {problem.devices} x {device.name}{shown}, {problem.sequence_length:,} tokens, "
        f"global batch {batch}, {problem.precision}; {max(0, best.usable_bytes) / GIB:.1f} of "
        f"{problem.placed_device.memory_gib:g} GiB for tensors"
    )
    if not rates_of(device).is_calibrated:
        known = "come from measured rates, and no step was compared" if device.measured else "are not calibrated"
        print(f"Times on {device.name} {known}: they order the settings, no more. docs/planner.md")
    if ONLY_HARDWARE_SHOWS[device.kind]:
        print(f"Only hardware shows: {'; '.join(ONLY_HARDWARE_SHOWS[device.kind])}.")
    for note in attention_notes(problem, best.setting):
        print(f"{note[0].upper()}{note[1:]}.")
    if any(plan.setting.expert_model_parallel_size > 1 for plan in found[: options.show]):
        print(f"With EP above 1 the figures are those of {BALANCED_ROUTING}.")
    if problem.moe is not None and problem.moe.moe_expert_block_size is not None:
        block = problem.moe.moe_expert_block_size
        print(f"Experts in blocks of {block} rows, of fixed shapes (moe.moe_expert_block_size).")
    if not found:
        print(
            f"Nothing fits. The smallest setting, {best.setting.describe()}, needs "
            f"{best.memory.reserved_bytes / GIB:.1f} GiB with margin and {best.memory.host_bytes / GIB:.1f} GiB of "
            f"host memory, of which a rank can use {problem.usable_host_bytes / GIB:.1f}."
        )
        print("\n".join(["Change one:", *(f"  {text}" for text in changes)]) if changes else "Use a larger device.")
        return
    print(f"{'tokens/s':>10}  {'step s':>11}  {'GiB':>6}  {'with margin':>11}  {'host':>5}  {'limit':<28} setting")
    for plan in found[: options.show]:
        memory = plan.memory
        print(
            f"{plan.tokens_per_s:>10,.0f}  {_seconds(plan.time):>11}  {memory.device_bytes / GIB:>6.1f}  "
            f"{memory.reserved_bytes / GIB:>11.1f}  {memory.host_bytes / GIB:>5.1f}  {plan.time.limit:<28} "
            f"{plan.setting.describe()}"
        )
    if len(found) > options.show:
        print(f"and {len(found) - options.show} slower ones: --show {len(found)}")
    memory = best.memory
    unit, name_of_unit = (GIB, "GiB") if memory.device_bytes >= GIB else (GIB >> 10, "MiB")
    terms = ", ".join(f"{name} {size / unit:.2f}" for name, size in memory.device.items() if size >= unit // 100)
    print(f"Memory of the first, in {name_of_unit}, at its peak ({memory.moment}): {terms}")


def _seconds(time: StepTime) -> str:
    """Return the time of a step, or its range if the step may wait for the host."""
    if not time.uncertain_s:
        return f"{time.step_s:.2f}"
    return f"{time.step_s:.2f}-{time.most_s:.2f}"


def _draw(options: argparse.Namespace, problem: Problem, found: Sequence[Plan]) -> None:
    """Write the plot of ``--plot``."""
    require_installed("nxd-memopt plan --plot", "matplotlib", extra="train")
    from nxd_memopt.planner.search.plot import draw_plans

    title = f"{options.model} on {problem.devices} x {problem.device.name}, {problem.sequence_length:,} tokens"
    draw_plans(found, title, Path(options.plot))
    print(f"wrote {options.plot}", file=sys.stderr)


def _document(problem: Problem, found: Sequence[Plan], changes: Sequence[str]) -> dict[str, Any]:
    """Return all figures as values of JSON."""
    return {
        "device": problem.device.name,
        "devices": problem.devices,
        "sequence_length": problem.sequence_length,
        "global_batch_size": problem.global_batch_size,
        "precision": problem.precision,
        "usable_bytes": problem.usable_bytes,
        "usable_host_bytes": problem.usable_host_bytes,
        "only_hardware_shows": ONLY_HARDWARE_SHOWS[problem.device.kind],
        "notes": attention_notes(problem, found[0].setting) if found else [],
        "remedies": list(changes),
        "plans": [
            {
                "setting": dataclasses.asdict(plan.setting),
                # Without a global batch it differs with the data-parallel size.
                "sequences_per_step": round(plan.tokens_per_s * plan.time.step_s / problem.sequence_length),
                "tokens_per_s": plan.tokens_per_s,
                "step_s": plan.time.step_s,
                "most_step_s": plan.time.most_s,
                "limit": plan.time.limit,
                "seconds": plan.time.terms,
                "peak": plan.memory.moment,
                "usable_bytes": plan.usable_bytes,
                "device_bytes": plan.memory.device,
                "with_margin_bytes": plan.memory.reserved_bytes,
                "host_bytes": plan.memory.host,
            }
            for plan in found
        ],
    }
