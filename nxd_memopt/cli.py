"""The command line ``nxd-memopt``: a program for each of ``COMMANDS``."""

from __future__ import annotations

import importlib
import signal
import sys
import warnings
from collections.abc import Sequence

from nxd_memopt._optional import MissingDependencyError
from nxd_memopt.options import require_one_of

_SIGNALLED = 128  # greater statuses are those of processes that a signal has stopped
COMMANDS = {
    "train": "train or resume a run, with --nproc N on N ranks",
    "prepare": "tokenize all text of a run before training",
    "launch": "start training on a platform's ranks, or show how",
    "plan": "show which settings fit a device, and how fast they are",
    "profile": "show where memory and time of training steps go",
    "certify": "show, without the hardware, that a step recomputes, communicates and fits as it should",
    "convert": "convert weights between Hugging Face directories and neuronx-distributed's files",
    "chat": "show what a model or an adapter answers",
    "doctor": "show versions, the backend and why it was chosen, and the fast paths that run",
    "selftest": "check the library on this device in ten minutes at most, for a bug report",
}
# Imported when the command runs: plan and every --help need neither torch nor a device.
_MODULES = {
    "prepare": "nxd_memopt.commands.prepare",
    "launch": "nxd_memopt.launch.command",
    "plan": "nxd_memopt.commands.plan.command",
    "profile": "nxd_memopt.commands.profile",
    "certify": "nxd_memopt.certify.command",
    "convert": "nxd_memopt.commands.convert",
    "chat": "nxd_memopt.commands.chat",
    "doctor": "nxd_memopt.commands.doctor",
    "selftest": "nxd_memopt.selftest.command",
}


def _help() -> str:
    """Return the list of commands."""
    lines = [f"  {name:<8}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        ["usage: nxd-memopt COMMAND ...", "", *lines, "", "nxd-memopt COMMAND --help shows the options of a command."]
    )


def _train(arguments: Sequence[str]) -> int:
    """Train in this process, or on the ranks that ``--nproc`` starts."""
    names = {argument.partition("=")[0] for argument in arguments}
    # The help is shown once, not by every rank.
    if "--nproc" in names and not names & {"-h", "--help"}:
        from nxd_memopt.launch.agent import main as start_ranks

        return start_ranks(arguments)
    from nxd_memopt.training.__main__ import main

    return main(arguments, program="nxd-memopt train")


def _run(name: str, arguments: Sequence[str]) -> int:
    """Run a command and return its exit status."""
    if name.startswith("-") or name.endswith((".yaml", ".yml")):
        raise ValueError(f"no command is named before {name}: write nxd-memopt train {name}, or another command")
    require_one_of("command", name, tuple(COMMANDS))
    if name == "train":
        return _train(arguments)
    if name not in ("convert", "certify"):
        return importlib.import_module(_MODULES[name]).main(arguments)
    from nxd_memopt.training.runtime.distributed import host_only

    # Neither opens a device, which a run may have: convert works in host memory, and certify
    # measures in a process of its own.
    with host_only():
        return importlib.import_module(_MODULES[name]).main(arguments)


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
