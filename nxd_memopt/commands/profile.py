"""The command ``nxd-memopt profile``: where the memory and the time of training steps go."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nxd_memopt._optional import require_installed
from nxd_memopt.child_process import run_child
from nxd_memopt.files import require_new
from nxd_memopt.training.runtime.distributed import PROFILE_VARIABLE

USAGE = """nxd-memopt profile [options] -- COMMAND ...
       nxd-memopt profile [options] --config FILE [--nproc N] [options of nxd-memopt train]
       nxd-memopt profile --report DIRECTORY
       nxd-memopt profile --compare A B [--html FILE]"""


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
    mode = _mode(options, command)
    _require_read(options, mode)
    for name, default in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if mode in ("report", "compare"):
        _refuse(rest, command)
        return _show(options)
    output = Path(options.output)
    if mode == "command":
        _refuse(rest, [])
    else:
        if any(word.partition("=")[0].replace("_", "-") == "--trainer.output-dir" for word in rest):
            raise ValueError("--trainer.output-dir is that of the profiled run, in --output: leave it out")
        command = _training_command(options, rest, output)
    return _profile(options, command, output)


_OPTIONS = {
    "report": (),
    "compare": ("html",),
    "config": ("output", "skip", "steps", "nproc"),
    "recipe": ("output", "skip", "steps", "nproc"),
    "command": ("output", "skip", "steps"),
}
"""What is done -> the options that it reads."""
_DEFAULTS = {"output": "profile", "skip": 3, "steps": 3}


def _mode(options: argparse.Namespace, command: Sequence[str]) -> str:
    """Return which of ``_OPTIONS`` the arguments ask for."""
    asked = [name for name in _OPTIONS if getattr(options, name, None)]
    if command:
        asked.append("command")
    if not asked:
        raise ValueError("nothing to profile: pass -- COMMAND, --config, --report or --compare")
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(map(_flag, asked))} are different things to do: pass one")
    return asked[0]


def _require_read(options: argparse.Namespace, mode: str) -> None:
    """Raise ``ValueError`` for an option that is given and that ``mode`` does not read."""
    for name in dict.fromkeys(name for names in _OPTIONS.values() for name in names):
        if getattr(options, name) is not None and name not in _OPTIONS[mode]:
            readers = [_flag(each) for each, names in _OPTIONS.items() if name in names]
            raise ValueError(f"{_flag(name)} {getattr(options, name)} is read with {' or '.join(readers)} only")


def _flag(name: str) -> str:
    """Return an option of the parser, or a mode, as users write it."""
    return "-- COMMAND" if name == "command" else f"--{name.replace('_', '-')}"


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
    parser.add_argument(
        "--output", metavar="DIRECTORY", help=f"new directory of the files, by default {_DEFAULTS['output']}"
    )
    parser.add_argument("--skip", type=int, help=f"steps before the first profiled one, by default {_DEFAULTS['skip']}")
    steps = f"steps whose time is profiled, by default {_DEFAULTS['steps']}; one more is for memory"
    parser.add_argument("--steps", type=int, help=steps)
    parser.add_argument("--report", metavar="DIRECTORY", help="write the report of a profile again")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="differences by module and category")
    parser.add_argument("--html", metavar="FILE", help="file for the comparison")
    return parser


def _refuse(rest: Sequence[str], command: Sequence[str]) -> None:
    """Raise ``ValueError`` for arguments that would be ignored."""
    if rest:
        raise ValueError(f"unknown option {rest[0]}; nxd-memopt profile --help shows the options")
    if command:
        raise ValueError(f"-- {command[0]} is not run: leave it out")


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
        status = run_child(command, environment).returncode
    except OSError as error:
        raise ValueError(f"-- {command[0]} cannot be run ({error.strerror}): write -- PROGRAM ARGUMENTS") from error
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
