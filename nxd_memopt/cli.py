"""The command line ``nxd-memopt``: a program for each of ``COMMANDS``."""

from __future__ import annotations

import importlib
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from nxd_memopt._optional import MissingDependencyError
from nxd_memopt.options import require_one_of

_SIGNALLED = 128  # greater statuses are those of processes that a signal has stopped


class Command(NamedTuple):
    """A command of ``nxd-memopt``.

    Args:
        module: has its ``main``. Imported when the command runs: plan and every --help need neither torch nor a device.
        summary: its line in the list of commands.
        is_host_only: it opens no device, which a run may have.
    """

    module: str
    summary: str
    is_host_only: bool = False


COMMANDS = {
    "train": Command("nxd_memopt.launch.train", "train or resume a run, with --nproc N on N ranks"),
    "prepare": Command("nxd_memopt.commands.prepare", "tokenize all text of a run before training", is_host_only=True),
    "launch": Command("nxd_memopt.launch.command", "start training on a platform's ranks, or show how"),
    "plan": Command("nxd_memopt.commands.plan.command", "show which settings fit a device, and how fast they are"),
    "profile": Command("nxd_memopt.commands.profile", "show where memory and time of training steps go"),
    "certify": Command(
        "nxd_memopt.certify.command",
        "show, without the hardware, that a step recomputes, communicates and fits as it should",
        is_host_only=True,
    ),
    "convert": Command(
        "nxd_memopt.commands.convert",
        "convert weights between Hugging Face directories, training checkpoints and neuronx-distributed's files",
        is_host_only=True,
    ),
    "chat": Command("nxd_memopt.commands.chat", "show what a model or an adapter answers"),
    "doctor": Command(
        "nxd_memopt.commands.doctor", "show versions, the backend and why it was chosen, and the fast paths that run"
    ),
    "selftest": Command(
        "nxd_memopt.selftest.command", "check the library on this device in ten minutes at most, for a bug report"
    ),
}


def _help() -> str:
    """Return the list of commands."""
    lines = [f"  {name:<8}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: nxd-memopt COMMAND ...", "", *lines, "", "nxd-memopt COMMAND --help shows the options of a command."]
    )


def _run(name: str, arguments: Sequence[str]) -> int:
    """Run a command and return its exit status."""
    if name.startswith("-") or name.endswith((".yaml", ".yml")):
        raise ValueError(f"no command is named before {name}: write nxd-memopt train {name}, or another command")
    require_one_of("command", name, tuple(COMMANDS))
    command = COMMANDS[name]
    if not command.is_host_only:
        return importlib.import_module(command.module).main(arguments)
    from nxd_memopt.training.runtime.distributed import host_only

    with host_only():
        return importlib.import_module(command.module).main(arguments)


def run(arguments: Sequence[str]) -> int:
    """Run the command of the arguments, and return its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    try:
        return _run(arguments[0], arguments[1:])
    except SystemExit as stop:
        if stop.code:
            raise
        return 0  # of --help


def main() -> int:
    """Run the command line and return its exit status.

    A user error is shown as one line on standard error, with exit status 2. A closed standard output
    ends the command without a line, with the status of SIGPIPE.
    """
    # Warnings are shown without the source line, which means nothing to a user of the command.
    # Exceptions other than the three below are defects and keep their traceback; with NXD_MEMOPT_TRACEBACK=1
    # every exception does.
    warnings.formatwarning = lambda message, *_, **__: f"nxd-memopt: warning: {message}\n"
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()  # here, where an error of it is handled
    except (ValueError, OSError, MissingDependencyError) as error:
        from nxd_memopt.training.runtime.distributed import shows_tracebacks
        from nxd_memopt.training.runtime.errors import OUTPUT_CLOSED, output_is_closed, text_of

        if isinstance(error, BrokenPipeError) and output_is_closed():  # the reader, such as head, has what it wants
            return OUTPUT_CLOSED
        if shows_tracebacks():
            raise
        print(f"nxd-memopt: error: {text_of(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # Ctrl-C before a command has its own handlers, or in one without
        print("nxd-memopt: stopped by SIGINT", file=sys.stderr)
        return _SIGNALLED + signal.SIGINT
    # Imports torch, which a plan does without.
    if status > _SIGNALLED:
        from nxd_memopt.training.runtime.signals import final_status

        return final_status(status)
    return status


# "python -m nxd_memopt.cli" would otherwise end with status 0 and do nothing.
if __name__ == "__main__":
    sys.exit(main())
