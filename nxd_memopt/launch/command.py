"""The launcher: turns a configuration, a platform and a set of hosts into an environment and a torchrun command.

    nxd-memopt launch --recipe gpt_neox_20b --platform trn1 --dry-run --model.tokenizer DIRECTORY

Options that the launcher does not know go to the training program. The launcher replaces itself by the command that it
starts, so signals and the exit status are torchrun's. ``--dry-run`` has the exit status of ``nxd-memopt certify``; an
error that a user caused has 2.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nxd_memopt.launch.certificate import DEVICES, certify_command
from nxd_memopt.launch.hosts import Hosts, find_hosts
from nxd_memopt.launch.machine import OPEN_FILES, Machine, set_open_files
from nxd_memopt.launch.platforms import INSTANCES, PLATFORMS, Platform
from nxd_memopt.launch.variables import Run, Variable, merged
from nxd_memopt.training.arguments import parse_config
from nxd_memopt.training.config import TrainConfig
from nxd_memopt.training.errors import user_errors


@dataclass(frozen=True)
class Launch:
    """What is about to be started.

    Args:
        variables: with their reasons.
        environment: what the ranks get in addition to the present environment.
        command: program and arguments.
        open_files: the soft limit to set before, ``None`` to leave it.
        notes: advice, which stops nothing.
    """

    config: TrainConfig
    platform: str
    world_size: int
    variables: list[Variable]
    environment: dict[str, str]
    command: list[str]
    open_files: int | None = None
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Return shell commands that do the same by hand."""
        reasons = {variable.name: variable.comment() for variable in self.variables}
        values = {variable.name: variable.value for variable in self.variables}
        lines = []
        if self.open_files is not None:
            lines.append(f"ulimit -S -n {self.open_files}  # sockets and files of a rank; the default is often 1024")
        for name, value in self.environment.items():
            reason = reasons[name] if value == values[name] else f"as the environment has it; default {values[name]}"
            lines.append(f"export {name}={shlex.quote(value)}  # {reason}")
        return "\n".join([*lines, shlex.join(self.command)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the run in this process's place, or show it; return the exit status.

    Args:
        arguments: options of the launcher and of the training program; by default the command line's.
    """
    options, train_options = parser().parse_known_args(arguments)
    with user_errors():
        launch = plan(options, train_options, os.environ)
        for note in launch.notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
        if options.dry_run:
            print(launch.text(), flush=True)
            if DEVICES.get(options.platform, ("cpu", None))[0] == "xla":  # the step is certified with torch_xla
                PLATFORMS[options.platform].require_package()
            return dry_run(launch, options.device_memory_gib)
        PLATFORMS[options.platform].require_package()
        if shutil.which(launch.command[0]) is None:
            raise ValueError(f"{launch.command[0]} is not on PATH: activate the environment that torch-neuronx is in")
        if launch.open_files is not None:
            set_open_files(launch.open_files)
        os.execvpe(launch.command[0], launch.command, os.environ | launch.environment)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nxd-memopt launch", description=__doc__, allow_abbrev=False)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", help="YAML file of the training program")
    source.add_argument("--recipe", help="name of an installed configuration")
    parser.add_argument(
        "--platform",
        type=lambda name: INSTANCES.get(name, name),
        choices=sorted(PLATFORMS),
        default="trn1",
        help="default: trn1; names of instances, such as trn1.32xlarge, are understood too",
    )
    parser.add_argument(
        "--processes-per-node", type=int, help="default: every logical core of Trainium's host, elsewhere T"
    )
    parser.add_argument("--nodes", type=int, help="hosts; default: SLURM's, else 1")
    parser.add_argument("--node-rank", type=int, help="this host's number; default: SLURM's, else 0")
    parser.add_argument("--master-addr", help="host 0; default: MASTER_ADDR")
    parser.add_argument("--master-port", type=int, help="on host 0; default: MASTER_PORT, else 29500")
    parser.add_argument(
        "--root-comm-port",
        type=int,
        help="on host 0, for the Neuron runtime; default: 62182 on trn1, a free one elsewhere",
    )
    parser.add_argument("--compile", action="store_true", help="compile every graph with neuron_parallel_compile")
    parser.add_argument("--dry-run", action="store_true", help="show environment and command, and certify the step")
    parser.add_argument("--device-memory-gib", type=float, help="with --dry-run: one rank's; default: the platform's")
    return parser


def plan(
    options: argparse.Namespace,
    train_options: Sequence[str],
    environ: Mapping[str, str],
    machine: Machine | None = None,
) -> Launch:
    """Check the configuration against the platform and the hosts, and work out what to start.

    Args:
        options: the launcher's.
        train_options: the training program's.
        environ: the present environment.
        machine: this host, unless a test pretends another.

    Raises:
        ValueError: for what does not fit; nothing has been started then.
    """
    machine = machine or Machine.here()
    source = ["--recipe", options.recipe] if options.recipe is not None else ["--config", options.config]
    config = parse_config([*source, *train_options])
    hosts = find_hosts(
        environ,
        nodes=options.nodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
    )
    platform = PLATFORMS[options.platform]
    _require_support(options, config, platform, hosts)
    size = config.parallel.tensor_model_parallel_size
    processes = platform.processes_per_host(options.processes_per_node, size, machine)
    config.accumulation_steps(processes * hosts.count)  # refuses a world that the configuration does not fit
    run = Run(config, processes, hosts, environ, machine, options.root_comm_port)
    variables = platform.variables(run)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *hosts.torchrun_options(processes)]
    command = [*torchrun, "-m", "nxd_memopt.training", *source, *train_options]
    return Launch(
        config,
        platform.name,
        processes * hosts.count,
        variables,
        merged(variables, environ),
        ["neuron_parallel_compile", *command] if options.compile else command,
        machine.raised_open_files() if platform.is_trainium else None,
        (*platform.notes(run), *_limit_note(platform, machine)),
    )


def _require_support(options: argparse.Namespace, config: TrainConfig, platform: Platform, hosts: Hosts) -> None:
    """Raise ``ValueError`` for options that mean nothing on ``platform``, or ports that collide."""
    if options.compile and not platform.compiles:
        raise ValueError(f"--compile is for trn1's ahead-of-time compiler, not for --platform {platform.name}: omit it")
    if config.trainer.enable_cuda_graph and platform.name != "cuda":
        raise ValueError(
            f"trainer.enable_cuda_graph is true, and --platform {platform.name} has no CUDA graphs: set it to false"
        )
    port = options.root_comm_port
    if port is None:
        if platform.root_comm_port == hosts.port:
            raise ValueError(
                f"the master port {hosts.port} is the Neuron runtime's on --platform {platform.name}: pass another "
                "--master-port, or move the runtime's with --root-comm-port"
            )
        return
    if not platform.is_trainium:
        raise ValueError(f"--root-comm-port is the Neuron runtime's, not --platform {platform.name}'s: omit it")
    if not 0 < port < 1 << 16 or port == hosts.port:
        raise ValueError(f"--root-comm-port {port} must be in [1, 65535] and differ from the master port {hosts.port}")


def _limit_note(platform: Platform, machine: Machine) -> list[str]:
    if not platform.is_trainium or not 0 <= machine.hard_limit < OPEN_FILES:
        return []
    return [
        f"a process may open {machine.hard_limit} files at most (ulimit -H -n), and AWS's launchers set {OPEN_FILES}: "
        "raise the hard limit in /etc/security/limits.conf if ranks fail with 'Too many open files'"
    ]


def dry_run(launch: Launch, device_memory_gib: float | None) -> int:
    """Certify the step without the platform's hardware; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="nxd-memopt-launch-") as directory:
        command = certify_command(
            launch.config,
            launch.platform,
            world_size=launch.world_size,
            device_memory_gib=device_memory_gib,
            directory=Path(directory),
        )
        print(shlex.join(command), flush=True)
        flags = {name: value for name, value in launch.environment.items() if name == "NEURON_CC_FLAGS"}
        return subprocess.run(command, env=os.environ | flags, check=False).returncode
