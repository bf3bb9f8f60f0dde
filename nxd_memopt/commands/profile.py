"""The command ``nxd-memopt profile``: where the memory and the time of training steps go."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nxd_memopt._optional import require_installed
from nxd_memopt.child_process import run_child
from nxd_memopt.command_line import Parser, count
from nxd_memopt.files import require_new
from nxd_memopt.training.runtime.distributed import PROFILE_VARIABLE

USAGE = """nxd-memopt profile [options] -- COMMAND ...
       nxd-memopt profile [options] --config FILE [--nproc N] [options of nxd-memopt train]
       nxd-memopt profile --report DIRECTORY
       nxd-memopt profile --compare A B [--html FILE]"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status, of COMMAND if that failed.

    Raises:
        ValueError: the arguments are not valid, or COMMAND has profiled nothing.
    """
    # What follows "--" belongs to COMMAND, also if it has flags of the same names.
    arguments = list(arguments)
    command: list[str] = []
    if "--" in arguments:
        start = arguments.index("--")
        arguments, command = arguments[:start], arguments[start + 1 :]
        if not command:
            raise ValueError("-- has no COMMAND after it: write nxd-memopt profile -- nxd-memopt train --config FILE")
    options, rest = _parser().separate(arguments)
    require_installed("nxd-memopt profile", "matplotlib", extra="train")
    mode = _mode(options, rest, command)
    for name, reader in (("nproc", "run"), ("html", "compare")):
        if getattr(options, name) is not None and mode != reader:
            raise ValueError(f"--{name} {getattr(options, name)} is read with {_FLAGS[reader]} only")
    if mode in ("report", "compare"):
        return _show(options)
    if mode == "run":
        # Two output directories would leave the files of one run in two places.
        if any(word.partition("=")[0].replace("_", "-") == "--trainer.output-dir" for word in rest):
            raise ValueError("--trainer.output-dir of the profiled run is in --output: leave it out")
        command = _training_command(options, rest)
    return _profile(options, command, stop=mode == "run")


_FLAGS = {"report": "--report", "compare": "--compare", "run": "a run's options", "command": "-- COMMAND"}
"""What is done, and how a user asks for it."""


def _mode(options: argparse.Namespace, rest: Sequence[str], command: Sequence[str]) -> str:
    """Return which of ``_FLAGS`` the arguments ask for."""
    # The four read different flags: what one of them ignores would look as if it had been done.
    given = {"report": options.report, "compare": options.compare, "run": rest, "command": command}
    asked = [name for name, value in given.items() if value]
    if not asked:
        raise ValueError("nothing to profile: pass -- COMMAND, --config, --report or --compare")
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(_FLAGS[name] for name in asked)} are different things to do: pass one")
    return asked[0]


def _parser() -> Parser:
    parser = Parser(
        "profile",
        "Profile a few steps of a training run, in a directory of its own: time and memory by module, on every "
        "backend. The ranks that COMMAND starts run the training program, or a loop with "
        "nxd_memopt.profiling.StepProfiler.",
        usage=USAGE,
    )
    parser.add_argument("--nproc", type=count, metavar="N", help="ranks of the run on this host")
    parser.add_argument(
        "--output", type=Path, metavar="DIRECTORY", default="profile", help="new directory of the files"
    )
    parser.add_argument("--skip", type=int, default=3, help="steps before the first profiled one; default: 3")
    steps = "steps whose time is profiled, by default 3; one more is for memory"
    parser.add_argument("--steps", type=int, default=3, help=steps)
    parser.add_argument("--report", type=Path, metavar="DIRECTORY", help="write the report of a profile again")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="differences by module and category")
    parser.add_argument("--html", type=Path, metavar="FILE", help="file for the comparison")
    return parser


def _show(options: argparse.Namespace) -> int:
    """Show the report of a profile, or the differences of two."""
    from nxd_memopt.profiling.report import write_comparison, write_report

    if options.report is not None:
        lines = write_report(options.report)
    else:
        first, second = options.compare
        lines = write_comparison(first, second, options.html)
    print("\n".join(lines))
    return 0


def _training_command(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Return the command of a training run whose files are in ``output``."""
    command = [sys.executable, "-m", "nxd_memopt.cli", "train"]
    if options.nproc is not None:
        command += ["--nproc", str(options.nproc)]
    # Last, so that no step of the profile becomes a part of the real run.
    return [*command, *rest, "--trainer.output-dir", str(options.output / "run")]


def _profile(options: argparse.Namespace, command: Sequence[str], *, stop: bool) -> int:
    """Run the command with the request in its environment, and show the report."""
    from nxd_memopt.profiling import ProfileRequest
    from nxd_memopt.profiling.report import write_report

    output = options.output
    require_new("--output", output)
    # The ranks find the request in their environment, through torchrun or any script that starts
    # them: the command is not changed.
    request = ProfileRequest(str(output.resolve()), options.skip, options.steps, stop=stop)
    environment = os.environ | {PROFILE_VARIABLE: request.to_json()}
    try:
        status = run_child(command, environment).returncode
    except OSError as error:
        raise ValueError(f"-- {command[0]} cannot be run ({error.strerror}): write -- PROGRAM ARGUMENTS") from error
    # Files of a failed command stay: they may say why. The next attempt needs another directory.
    if status:
        remains = ""
        if output.exists():
            remains = f"; remove {output}, which has what it wrote, before the next attempt"
        print(f"nxd-memopt profile: the command has ended with status {status}{remains}", file=sys.stderr)
        # A negative status is a signal's; a shell has 128 plus its number.
        if status < 0:
            return 128 - status
        return status
    # A command that trains less than the profiled steps, or another program, leaves no profile.
    if not (output / "rank0.json").is_file():
        raise ValueError(
            f"the command has profiled no step: its ranks must run nxd_memopt's training program for at least "
            f"{request.total_steps} steps, or a loop of your own with nxd_memopt.profiling.StepProfiler"
        )
    print("\n".join(write_report(output)))
    print(f"\nwrote {output / 'report.html'}; next to it plots, Chrome traces and the figures of each rank as JSON")
    return 0
