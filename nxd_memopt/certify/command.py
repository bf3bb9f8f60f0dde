"""The command ``nxd-memopt certify``: arguments, the measuring process, the certificate."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nxd_memopt._optional import is_importable, require_transformers
from nxd_memopt.certify.report.judge import Planned, judge
from nxd_memopt.certify.request import Answer, Request, request_of
from nxd_memopt.child_process import run_child
from nxd_memopt.command_line import Parser, Run, count, device_and_ranks, read_run, require_directory
from nxd_memopt.files import write_text
from nxd_memopt.options import require_one_of
from nxd_memopt.planner.hardware import Device, device_named, host_device
from nxd_memopt.planner.search.fixed_options import FixedOptions, require_possible
from nxd_memopt.planner.search.problem import require_memory, require_size
from nxd_memopt.planner.sizes.states import FP32_BYTES, StateLayout

BACKENDS = ("auto", "xla", "cpu", "cuda")
_WORKER = "nxd_memopt.certify.worker"


@dataclass(frozen=True)
class Asked:
    """What is to be certified.

    Args:
        options: the command's own flags.
        run: the run.
        device: one rank's device.
        planned: the plan of the run; None if the planner does not cover it.
        states: how the run stores parameters, gradients and the states of AdamW.
        request: what to measure.
    """

    options: argparse.Namespace
    run: Run
    device: Device
    planned: Planned | None
    states: StateLayout
    request: Request


def main(arguments: Sequence[str]) -> int:
    """Measure, judge and print the certificate.

    Returns:
        0: every check passed; 1: one failed.

    Raises:
        ValueError: arguments contradict each other or the model's configuration.
    """
    asked = read(arguments)
    # Checked here too, so that a missing package is reported before minutes of measuring.
    require_transformers("nxd-memopt certify")
    from nxd_memopt.certify.report.render import show

    found = judge(
        asked.request,
        run_worker(asked.request),
        device=asked.device,
        states=asked.states,
        planned=asked.planned,
        max_temp_ratio=asked.options.max_temp_ratio,
        # The run's dtype: backend xla measures fp16 instead of bf16 (see request_of).
        stands_for=asked.run.config.dtype,
        compiler_flags=os.environ.get("NEURON_CC_FLAGS"),
    )
    show(found, _title(asked))
    if asked.options.json is not None:
        document = {"request": dataclasses.asdict(asked.request), **found.to_json()}
        write_text(asked.options.json, json.dumps(document, indent=1) + "\n")
    return int(not found.passed)


def _parser() -> Parser:
    parser = Parser(
        "certify",
        "Show, without the hardware, that a step recomputes, communicates and fits as it should. One step is forward, "
        "backward and the sequence-parallel gradient hook. Exit status 0: every check passed; 1: one failed; 2: wrong "
        "arguments.",
        models=True,
    )
    parser.add_argument("--device", default="trn1", help="a device of nxd-memopt plan, cuda or cpu; default: trn1")
    parser.add_argument("--devices", type=count, metavar="N", help="ranks in all; default: those of one host")
    backends = (
        "xla: compile for a simulated NeuronCore; cpu, cuda: eager, no memory allocated; "
        "auto: xla for trn1 if torch_xla is installed, else cpu"
    )
    parser.add_argument("--backend", default="auto", help=backends)
    parser.add_argument("--device-memory-gib", type=float, help="memory of one device, instead of the device's")
    parser.add_argument("--host-memory-gib", type=float, help="host memory of one rank, instead of the device's")
    reserve = "GiB of the memory that tensors cannot use, instead of the device's, such as 1.25 on Trainium"
    parser.add_argument("--reserve-gib", type=float, help=reserve)
    depths = "two depths that are measured, by default 2 and 4; the line through them is drawn to the model's own"
    parser.add_argument("--measure-layers", type=int, nargs=2, metavar=("FEW", "MANY"), help=depths)
    ratio = "fail if the step with recomputation keeps more than this fraction of the bytes that it keeps without"
    parser.add_argument("--max-temp-ratio", type=float, help=ratio)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def read(arguments: Sequence[str]) -> Asked:
    """Return what the arguments of the command ask for.

    Raises:
        ValueError: arguments contradict each other or the model's configuration.
    """
    # Everything that can be refused is refused here, before minutes of measuring.
    options, overrides = _parser().separate(arguments)
    require_one_of("--backend", options.backend, BACKENDS)
    _require_valid_flags(options)
    run = read_run(options, overrides)
    require_size("data.seq_length", run.config.data.seq_length, is_length=True)
    if options.max_temp_ratio is not None and run.config.memory.recompute_granularity is None:
        raise ValueError(
            f"--max-temp-ratio {options.max_temp_ratio} needs recomputation: set memory.recompute_granularity, or "
            "leave it out"
        )
    return asked_of(options, run)


def asked_of(options: argparse.Namespace, run: Run) -> Asked:
    """Return what is asked of a run.

    Args:
        options: the command's own flags.
        run: the run.

    Raises:
        ValueError: training refuses the run on the device, or the step is neither measured nor planned.
    """
    # Imports transformers and the models.
    from nxd_memopt.modules.moe.gpt_neox_config import config_of
    from nxd_memopt.training.checks import require_startable

    device, devices = _device(options, run)
    run = _completed(run, devices)
    states = _states(run, devices)
    model = _model_config(run)
    hf_config = config_of(model)
    require_startable(run.config, hf_config, device, devices)
    planned, refusal = _planned(run, hf_config, device, devices)
    if planned is not None:
        require_possible(planned.problem, FixedOptions(planned.plan.setting))
    request = request_of(
        run.config,
        model,
        backend=_backend(options.backend, device),
        device=device.name,
        layer_counts=options.measure_layers,
        plan_refusal=refusal,
    )
    return Asked(options, run, device, planned, states, request)


def _planned(run: Run, hf_config: Any, device: Device, devices: int) -> tuple[Planned | None, str | None]:
    """Return the plan of the run, or None and why the planner does not cover it."""
    from nxd_memopt.training.memory_plan import planned

    try:
        return Planned(*planned(run.config, hf_config, device, ranks=devices)), None
    except ValueError as error:
        return None, str(error)


def _completed(run: Run, devices: int) -> Run:
    """Return the run of a model alone with what nobody stated: a batch that the ranks divide, and no export."""
    if not run.is_bare:
        return run
    config = run.config
    if "global_batch_size" not in run.stated:
        sequences = config.data.micro_batch_size * config.data_parallel_size(devices)
        config = replace(config, data=replace(config.data, global_batch_size=sequences))
    if "export" not in run.stated:
        config = replace(config, trainer=replace(config.trainer, export=False))
    return replace(run, config=config)


def _require_valid_flags(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for numbers without a meaning, or a file that cannot be written."""
    require_memory("--device-memory-gib", options.device_memory_gib)
    require_memory("--host-memory-gib", options.host_memory_gib)
    for name in ("reserve_gib", "max_temp_ratio"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 0 and finite, got {value}")
    if options.json is not None:
        require_directory("--json", options.json)


def _device(options: argparse.Namespace, run: Run) -> tuple[Device, int]:
    """Return the device, with the memory and the reserve that were given, and the number of ranks.

    Raises:
        ValueError: there is no such device, or nothing says how much memory it has.
    """
    # One host of a device has as many ranks as the device says, and at least one group of ranks with
    # all parts of the model.
    parallel = run.config.parallel
    ranks = parallel.tensor_model_parallel_size * parallel.expert_model_parallel_size
    if options.device in ("cuda", "cpu"):
        if options.device_memory_gib is None:
            raise ValueError(
                f"--device {options.device} has devices of many sizes: pass --device-memory-gib for one rank's"
            )
        # Any GPU runs the kernels of a known one.
        device = host_device(options.device_memory_gib, ranks)
        if options.device == "cuda":
            device = replace(device_named("h200"), name="cuda")
    else:
        device, host_ranks = device_and_ranks(options.device)
        ranks = max(ranks, host_ranks)
    device = device.with_given(
        memory_gib=options.device_memory_gib,
        reserve_gib=options.reserve_gib,
        host_memory_gib=options.host_memory_gib,
    )
    return device, options.devices or ranks


def _backend(chosen: str, device: Device) -> str:
    """Return the backend that measures: trn1 runs graphs of torch_xla, all other devices run eagerly."""
    if chosen != "auto":
        return chosen
    if device.backend == "xla" and is_importable("torch_xla"):
        return "xla"
    return "cpu"


def _model_config(run: Run) -> dict[str, Any]:
    """Return the model's complete config."""
    if not run.config.model.resize_embedding:
        return run.model_config()
    # The number of rows is the tokenizer's, and in no file yet.
    from nxd_memopt.training.model import load_hf_config

    content = load_hf_config(run.config.model, run.config.moe).to_dict()
    return json.loads(json.dumps(content, default=str))


def _states(run: Run, devices: int) -> StateLayout:
    """Return how the run stores parameters, gradients and the states of AdamW.

    Raises:
        ValueError: the parallel sizes do not divide the number of ranks.
    """
    config = run.config
    element_bytes = getattr(torch, config.dtype).itemsize
    # fp32 parameters are their own master weights. D matters for ZeRO-1 only, which shards states.
    has_masters = config.master_weights and element_bytes < FP32_BYTES
    replicas = config.data_parallel_size(devices)
    config.require_expert_ranks(devices)
    if config.data_parallel.sharding != "zero1":
        return StateLayout(element_bytes, has_masters)
    experts = config.parallel.expert_model_parallel_size
    return StateLayout(element_bytes, has_masters, "zero1", replicas, expert_ranks=experts)


def _title(asked: Asked) -> str:
    """Return one line that names the model and the configuration."""
    config = asked.run.config
    parallel = config.parallel
    size = f"T={parallel.tensor_model_parallel_size}"
    if parallel.sequence_parallel_enabled:
        size += " with sequence parallelism"
    if parallel.expert_model_parallel_size > 1:
        size += f", EP={parallel.expert_model_parallel_size}"
    return (
        f"{asked.run.name}: {asked.request.config['num_hidden_layers']} layers, {size}, S={config.data.seq_length}, "
        f"B={config.data.micro_batch_size}, {config.dtype}, recompute {config.memory.recompute_granularity}, "
        f"backend {asked.request.backend}"
    )


def run_worker(request: Request) -> Answer:
    """Run the measurement in a new process, with another backend and other XLA flags than this one.

    Raises:
        ValueError: the measurement failed; the message has the process's last line of output.
    """
    with tempfile.TemporaryDirectory(prefix="nxd-memopt-certify-") as directory:
        # Both are files and not pipes: the libraries in the worker may print to its stdout.
        question = Path(directory, "request.json")
        answer = Path(directory, "answer.json")
        question.write_text(json.dumps(dataclasses.asdict(request)), encoding="utf-8")
        environment = _worker_environment(request, Path(directory, "dump"))
        command = [sys.executable, "-m", _WORKER, str(question), str(answer)]
        done = run_child(command, environment, capture_output=True)
        # An exit status of 0 without an answer is a failure too. The last line of a traceback is
        # the exception with its message.
        if done.returncode != 0 or not answer.is_file():
            lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
            message = lines[-1] if lines else f"exit status {done.returncode} without a message"
            raise ValueError(f"measuring on backend {request.backend} failed: {message}")
        return Answer.from_json(json.loads(answer.read_text(encoding="utf-8")))


def _worker_environment(request: Request, dump: Path) -> dict[str, str]:
    """Return the environment of the measuring process, whose compiler dumps go to ``dump``."""
    # The worker is a single process even inside a torchrun job: it simulates its ranks.
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    environment["NXD_MEMOPT_BACKEND"] = request.backend
    if request.backend == "xla":
        from nxd_memopt.backends.neuron.xla_inspect import dump_flags

        # neuronx-cc's flags have their own check in the certificate. In the simulation wrong flags
        # must not raise, so the check at run time is reduced to a warning.
        environment |= {"PJRT_DEVICE": "CPU", "XLA_FLAGS": dump_flags(dump), "NXD_MEMOPT_RECOMPUTE_CHECK": "warn"}
    return environment
