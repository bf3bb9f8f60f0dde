"""The launcher: turns a configuration, a platform and hosts into an environment and a command.

    nxd-memopt launch --recipe gpt_neox_20b --platform trn1 --dry-run --model.tokenizer DIRECTORY --data.dataset DATA

The launcher replaces its own process with the command that it starts, so signals and the exit status
are the command's. ``--dry-run`` runs ``nxd-memopt certify`` with the same options, and has its exit
status.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nxd_memopt._optional import require_installed
from nxd_memopt.child_process import run_child
from nxd_memopt.command_line import Parser, config_without_tokenizer, count, has_tokenizer
from nxd_memopt.launch.hosts import Hosts, find_hosts
from nxd_memopt.launch.machine import Machine
from nxd_memopt.launch.platforms import PLATFORMS, TORCH_XLA_PACKAGE, Platform, platform_named
from nxd_memopt.launch.variables import Run, Variable, merged
from nxd_memopt.training.config.train_config import TrainConfig


@dataclass(frozen=True)
class Launch:
    """Environment and command of a run on this host.

    Args:
        config: configuration of the run.
        platform: the platform.
        world_size: number of ranks on all hosts.
        variables: environment variables with their reasons.
        environment: values that the ranks get in addition to the present environment.
        command: program and arguments.
        train_arguments: the arguments that describe the run.
        open_files: soft limit of open files to set before the start; ``None`` leaves it
            unchanged.
        notes: advice that does not stop the launch.
    """

    config: TrainConfig
    platform: Platform
    world_size: int
    variables: list[Variable]
    environment: dict[str, str]
    command: list[str]
    train_arguments: list[str]
    open_files: int | None = None
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Return equivalent shell commands, with the reason of each variable as a comment."""
        reasons = {variable.name: variable.comment() for variable in self.variables}
        values = {variable.name: variable.value for variable in self.variables}
        lines = []
        if self.open_files is not None:
            lines.append(f"ulimit -S -n {self.open_files}  # sockets and files of a rank; the default is often 1024")
        # A value that differs from the variable's own comes from the present environment.
        for name, value in self.environment.items():
            reason = reasons[name]
            if value != values[name]:
                reason = f"as the environment has it; default {values[name]}"
            lines.append(f"export {name}={shlex.quote(value)}  # {reason}")
        return "\n".join([*lines, shlex.join(self.command)])


def main(arguments: Sequence[str]) -> int:
    """Replace this process with the run, or show it with ``--dry-run``; return the exit status.

    Args:
        arguments: flags of the launcher and options of the training program.

    Raises:
        ValueError: options, configuration, platform and hosts do not fit together.
    """
    options, train_arguments = parser().separate(arguments)
    require_installed("nxd-memopt launch", "yaml", extra="train")
    launch = plan(options, train_arguments, os.environ)
    for note in launch.notes:
        print(f"note: {note}", file=sys.stderr, flush=True)
    if options.dry_run:
        print(launch.text(), flush=True)
        # The package is needed only if the step is certified with torch_xla. Certificates of
        # other platforms are measured on the CPU backend, on any host.
        if launch.platform.package == TORCH_XLA_PACKAGE:
            launch.platform.require_package()
        return dry_run(launch, options.device_memory_gib)
    launch.platform.require_package()
    if shutil.which(launch.command[0]) is None:
        raise ValueError(f"{launch.command[0]} is not on PATH: activate the environment that torch-neuronx is in")
    if launch.open_files is not None:
        # Programs that this process starts, or is replaced with, inherit the limit.
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (launch.open_files, hard_limit))
    # exec instead of a subprocess: the command gets the signals, and its exit status is ours.
    os.execvpe(launch.command[0], launch.command, os.environ | launch.environment)


def parser() -> Parser:
    """Return the parser of the launcher's flags; other options are the training program's."""
    parser = Parser("launch", "Start training on a platform's ranks, with their environment, or show how.")
    platforms = (
        f"{', '.join(PLATFORMS)}, a GPU of plan --device, or an AWS instance such as trn1.32xlarge; default: trn1"
    )
    parser.add_argument("--platform", default="trn1", metavar="NAME", help=platforms)
    ranks = "ranks of each host; default: every logical core of Trainium's host, elsewhere T"
    parser.add_argument("--nproc", type=count, metavar="N", help=ranks)
    parser.add_argument("--nodes", type=int, help="hosts; default: SLURM's, else 1")
    parser.add_argument("--node-rank", type=int, help="this host's number; default: SLURM's, else 0")
    parser.add_argument("--master-addr", help="host 0 of several; default: MASTER_ADDR")
    parser.add_argument("--master-port", type=int, help="on host 0 of several; default: MASTER_PORT, else 29500")
    port = "on host 0, for the Neuron runtime; default: 62182 on trn1, a free one elsewhere"
    parser.add_argument("--root-comm-port", type=int, help=port)
    parser.add_argument("--compile", action="store_true", help="compile every graph with neuron_parallel_compile")
    parser.add_argument("--dry-run", action="store_true", help="show environment and command, and certify the step")
    memory = "with --dry-run: one rank's; default: the platform's"
    parser.add_argument("--device-memory-gib", type=float, help=memory)
    return parser


def plan(
    options: argparse.Namespace,
    train_arguments: Sequence[str],
    environ: Mapping[str, str],
    machine: Machine | None = None,
) -> Launch:
    """Check the configuration against the platform and the hosts, and return what to start.

    Args:
        options: the launcher's flags.
        train_arguments: options of the training program.
        environ: present environment variables.
        machine: this host by default; tests pass another.

    Raises:
        ValueError: options, configuration, platform and hosts do not fit together.
    """
    from nxd_memopt.training.config.parsing import parse_config

    machine = machine or Machine.here()
    # The ranks parse the same options again, so that their configuration cannot differ from the
    # one that is checked here.
    if options.dry_run:
        # Its certificate needs neither data nor tokenizer.
        config = config_without_tokenizer(train_arguments)
    else:
        config = parse_config(train_arguments)
        config.data.require_sources()
    hosts = find_hosts(
        environ,
        nodes=options.nodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
    )
    # From here on: what the platform supports, how many ranks a host has, whether the batch fits
    # the number of ranks, and the environment. Nothing is started by this function.
    platform = platform_named(options.platform)
    _require_support(options, platform, hosts)
    size = config.parallel.tensor_model_parallel_size
    processes = platform.processes_per_host(options.nproc, size, machine)
    config.accumulation_steps(processes * hosts.count)  # called for its checks of the world size
    run = Run(config, processes, hosts, environ, machine, options.root_comm_port)
    variables = platform.variables(run)
    # Modules instead of scripts: they run in this interpreter's environment even if another one
    # comes first on PATH. The agent of this package starts the ranks of one host, torchrun those of
    # several.
    starter = ["nxd_memopt.launch.agent", "--nproc", str(processes)]
    if hosts.count > 1:
        starter = ["torch.distributed.run", *hosts.torchrun_options(processes), "-m", "nxd_memopt.training"]
    command = [sys.executable, "-m", *starter, *train_arguments]
    # neuron_parallel_compile runs the command, records its graphs instead of executing them, and
    # compiles them in parallel into the cache that the next run reads.
    if options.compile:
        command = ["neuron_parallel_compile", *command]
    # On GPUs and CPUs a host has few ranks, and the present limit is left to the user.
    open_files = None
    if platform.is_trainium:
        open_files = machine.raised_open_files()
    return Launch(
        config,
        platform,
        processes * hosts.count,
        variables,
        merged(variables, environ),
        command,
        list(train_arguments),
        open_files,
        (*platform.notes(run), *_missing(config)),
    )


def _missing(config: TrainConfig) -> list[str]:
    """Return a note on what a dry run shows without and training needs; empty if there is nothing."""
    needed: list[str] = []
    if not has_tokenizer(config):
        needed.append("--model.tokenizer DIRECTORY")
    if not config.data.sources:
        needed.append("--data.dataset DATA")
    if not needed:
        return []
    return [f"to train, add {' and '.join(needed)} to the command"]


def _require_support(options: argparse.Namespace, platform: Platform, hosts: Hosts) -> None:
    """Raise ``ValueError`` for flags that ``platform`` does not support, or equal ports."""
    if options.compile and not platform.compiles:
        raise ValueError(f"--compile is for trn1's ahead-of-time compiler, not for --platform {platform.name}: omit it")
    # torchrun's rendezvous and the Neuron runtime's collectives both listen on host 0, so their
    # ports must differ. Platforms other than trn1 let the runtime take a free port.
    port = options.root_comm_port
    if port is None:
        # On one host nothing listens on the master port: the agent takes a free one.
        if hosts.count > 1 and platform.root_comm_port == hosts.port:
            raise ValueError(
                f"the master port {hosts.port} is the Neuron runtime's on --platform "
                f"{platform.name}: pass another --master-port, or move the runtime's with "
                "--root-comm-port"
            )
        return
    if not platform.is_trainium:
        raise ValueError(f"--root-comm-port is the Neuron runtime's, not --platform {platform.name}'s: omit it")
    if not 0 < port < 1 << 16 or (hosts.count > 1 and port == hosts.port):
        raise ValueError(f"--root-comm-port {port} must be in [1, 65535] and differ from the master port {hosts.port}")


def certify_arguments(launch: Launch, device_memory_gib: float | None) -> list[str]:
    """Return the arguments of ``nxd-memopt certify`` for one micro-batch of the run on one rank."""
    arguments = [*launch.train_arguments, "--device", launch.platform.certified_as or launch.platform.name]
    arguments += ["--devices", str(launch.world_size)]
    if device_memory_gib is not None:
        arguments += ["--device-memory-gib", str(device_memory_gib)]
    return arguments


def dry_run(launch: Launch, device_memory_gib: float | None) -> int:
    """Run ``nxd-memopt certify``, which needs no hardware; return its exit status."""
    command = [sys.executable, "-m", "nxd_memopt.cli", "certify", *certify_arguments(launch, device_memory_gib)]
    print(shlex.join(command), flush=True)
    # Of the ranks' environment, certify checks only the compiler's flags.
    flags = {name: value for name, value in launch.environment.items() if name == "NEURON_CC_FLAGS"}
    return run_child(command, os.environ | flags).returncode
