"""The command ``nxd-memopt profile``: where the memory and the time of training steps go."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nxd_memopt._optional import require_installed
from nxd_memopt.files import require_new
from nxd_memopt.training.distributed import PROFILE_VARIABLE

USAGE = """nxd-memopt profile [options] -- COMMAND ...
       nxd-memopt profile [options] --config FILE [--nproc N] [options of nxd-memopt train]
       nxd-memopt profile --report DIRECTORY
       nxd-memopt profile --compare A B [--html FILE]
       nxd-memopt profile --loss-race [--batch B] [--seq-length S] [--vocabulary V] [--hidden H] [--malek DIRECTORY]"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are the command's: one line, exit status 2."""

    def error(self, message: str) -> Any:
        raise ValueError(f"{message}; nxd-memopt profile --help shows the options")


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status, that of a failed COMMAND.

    Raises:
        ValueError: the arguments are not valid, or COMMAND has profiled nothing.
    """
    arguments = list(arguments)
    command: list[str] = []
    if "--" in arguments:
        start = arguments.index("--")
        arguments, command = arguments[:start], arguments[start + 1 :]
        if not command:
            raise ValueError("-- has no COMMAND after it: write nxd-memopt profile -- nxd-memopt train --config FILE")
    options, rest = _parser().parse_known_args(arguments)
    require_installed("nxd-memopt profile", "matplotlib", extra="train")
    if options.report is not None or options.compare is not None:
        _refuse(rest, command)
        return _show(options)
    output = Path(options.output)
    if options.loss_race:
        _refuse(rest, command)
        return _race(options, output)
    if options.config is not None or options.recipe is not None:
        if command:
            raise ValueError("--config and -- COMMAND both name a run: pass one")
        command = _training_command(options, rest, output)
    elif not command:
        raise ValueError("nothing to profile: pass -- COMMAND, --config, --report, --compare or --loss-race")
    else:
        _refuse(rest, [])
        if options.nproc is not None:
            raise ValueError(
                f"--nproc {options.nproc} starts the ranks of --config or --recipe: -- COMMAND starts its own"
            )
    return _profile(options, command, output)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nxd-memopt profile",
        usage=USAGE,
        allow_abbrev=False,
        description="Profile a few steps of a training run: time and memory by module, on every backend. The ranks "
        "that COMMAND starts run the training program, or a loop with nxd_memopt.profiling.StepProfiler.",
    )
    parser.add_argument("--config", metavar="FILE", help="profile this run, in a directory of its own, and stop")
    parser.add_argument("--recipe", metavar="NAME", help="the same with a recipe")
    parser.add_argument("--nproc", type=int, help="ranks of --config on this host")
    parser.add_argument("--output", default="profile", metavar="DIRECTORY", help="new directory of the files")
    parser.add_argument("--skip", type=int, default=3, help="steps before the first profiled one")
    parser.add_argument("--steps", type=int, default=3, help="steps whose time is profiled; one more is for memory")
    parser.add_argument("--report", metavar="DIRECTORY", help="write the report of a profile again")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="differences by module and category")
    parser.add_argument("--html", metavar="FILE", help="file for the comparison")
    race = parser.add_argument_group("race of losses")
    race.add_argument("--loss-race", action="store_true", help="linear layer + cross entropy: ours and others")
    race.add_argument("--batch", type=int, default=1, help="B")
    race.add_argument("--seq-length", type=int, help="S; default: 8192, on the CPU 512")
    race.add_argument("--vocabulary", type=int, help="V; default: 128256, on the CPU 8000")
    race.add_argument("--hidden", type=int, help="H; default: 4096, on the CPU 256")
    race.add_argument("--dtype", help="default: bfloat16, on the CPU float32")
    race.add_argument("--turns", type=int, default=5, help="measurements of each loss")
    race.add_argument("--malek", metavar="DIRECTORY", help="checkout of mgmalek/efficient_cross_entropy")
    return parser


def _refuse(rest: Sequence[str], command: Sequence[str]) -> None:
    """Raise ``ValueError`` for arguments that would be ignored."""
    if rest:
        raise ValueError(f"unknown option {rest[0]}; nxd-memopt profile --help shows the options")
    if command:
        raise ValueError(f"-- {command[0]} is not run with --report or --compare: leave it out")


def _show(options: argparse.Namespace) -> int:
    """Show the report of a profile, or the differences of two."""
    from nxd_memopt.profiling.report import write_comparison, write_report

    if options.report is not None:
        lines = write_report(Path(options.report))
    else:
        first, second = (Path(directory) for directory in options.compare)
        lines = write_comparison(first, second, Path(options.html) if options.html else None)
    print("\n".join(lines))
    return 0


def _race(options: argparse.Namespace, output: Path) -> int:
    """Race the losses and show the result."""
    from nxd_memopt.backends import backend
    from nxd_memopt.profiling.loss_race import Sizes, race_losses, write_race

    require_new("--output", output)
    # LLaMA-3-8B's head at its context length; on a CPU what takes seconds.
    defaults = (512, 8000, 256, "float32") if backend.name == "cpu" else (8192, 128256, 4096, "bfloat16")
    asked = (options.seq_length, options.vocabulary, options.hidden, options.dtype)
    chosen: list[Any] = [default if value is None else value for value, default in zip(asked, defaults, strict=True)]
    directory = None if options.malek is None else Path(options.malek)
    result = race_losses(Sizes(options.batch, *chosen), directory, options.turns)
    print("\n".join(write_race(output, result)))
    print(f"\nwrote {output / 'race.html'}, race.json and a plot of memory")
    return 0


def _training_command(options: argparse.Namespace, rest: Sequence[str], output: Path) -> list[str]:
    """Return the command of a training run whose files are in ``output``."""
    command = [sys.executable, "-m", "nxd_memopt.cli", "train"]
    if options.nproc is not None:
        command += ["--nproc", str(options.nproc)]
    for name in ("config", "recipe"):
        if getattr(options, name) is not None:
            command += [f"--{name}", getattr(options, name)]
    # Last, so that no step of the profile becomes a part of the real run.
    return [*command, *rest, "--trainer.output-dir", str(output / "run")]


def _profile(options: argparse.Namespace, command: Sequence[str], output: Path) -> int:
    """Run the command with the request in its environment, and show the report."""
    from nxd_memopt.profiling import ProfileRequest
    from nxd_memopt.profiling.report import write_report

    require_new("--output", output)
    is_own = options.config is not None or options.recipe is not None
    request = ProfileRequest(str(output.resolve()), options.skip, options.steps, stop=is_own)
    environment = os.environ | {PROFILE_VARIABLE: request.to_json()}
    try:
        status = subprocess.call(list(command), env=environment)
    except FileNotFoundError as error:
        raise ValueError(f"-- {command[0]} is not a program: write -- PROGRAM ARGUMENTS") from error
    if status:
        remains = f"; remove {output}, which has what it wrote, before the next attempt" if output.exists() else ""
        print(f"nxd-memopt profile: the command has ended with status {status}{remains}", file=sys.stderr)
        return status if status > 0 else 128 - status
    if not (output / "rank0.json").is_file():
        raise ValueError(
            f"the command has profiled no step: its ranks must run nxd_memopt's training program for at least "
            f"{request.total_steps} steps, or a loop of your own with nxd_memopt.profiling.StepProfiler"
        )
    print("\n".join(write_report(output)))
    print(f"\nwrote {output / 'report.html'}; next to it plots, Chrome traces and the figures of each rank as JSON")
    return 0
