"""The command line ``nxd-memopt``: train, prepare, launch, plan, profile, certify, convert and doctor."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nxd_memopt._optional import (
    MissingDependencyError,
    installed,
    require_installed,
    require_transformers,
)

_SIGNALLED = 128  # greater statuses are those of processes that a signal has stopped
_OPTIONAL = ("triton", "flash-attn-4")
Command = Callable[[], int | None]


@dataclass(frozen=True)
class Train:
    """Train or resume, with ``--nproc N`` on N ranks; ``nxd-memopt train --help`` shows the options."""

    arguments: tuple[str, ...] = ()

    def __call__(self) -> int:
        # The help is shown once, not by every rank.
        names = {argument.partition("=")[0] for argument in self.arguments}
        if "--nproc" in names and not names & {"-h", "--help"}:
            from nxd_memopt.launch.agent import main as start_ranks

            return start_ranks(self.arguments)
        from nxd_memopt.training.__main__ import main

        return main(self.arguments, program="nxd-memopt train")


@dataclass(frozen=True)
class Prepare:
    """Tokenize all text of a configuration before training; takes the options of ``nxd-memopt train``."""

    arguments: tuple[str, ...] = ()

    def __call__(self) -> int:
        from nxd_memopt.commands.prepare import main

        return main(self.arguments)


@dataclass(frozen=True)
class Launch:
    """Start training on a platform's ranks, or show how; ``nxd-memopt launch --help`` shows the options."""

    arguments: tuple[str, ...] = ()

    def __call__(self) -> int:
        from nxd_memopt.launch.__main__ import main

        return main(self.arguments)


@dataclass(frozen=True)
class PlanSettings:
    """Show which settings fit a device, and how fast they are; ``nxd-memopt plan --help`` shows the options."""

    arguments: tuple[str, ...] = ()

    def __call__(self) -> int:
        from nxd_memopt.commands.plan.command import main

        return main(self.arguments)


@dataclass(frozen=True)
class Profile:
    """Show where memory and time of training steps go; ``nxd-memopt profile --help`` shows the options."""

    arguments: tuple[str, ...] = ()

    def __call__(self) -> int:
        from nxd_memopt.commands.profile import main

        return main(self.arguments)


@dataclass(frozen=True)
class Doctor:
    """Show the versions, the backend and why it was chosen, the attention and the fused operations that run."""

    def __call__(self) -> None:
        # Imported here, so that the other commands and --help do not select a backend, which may
        # open a device.
        import torch

        from nxd_memopt import __version__
        from nxd_memopt.backends import BACKEND_REASON, BACKENDS, backend
        from nxd_memopt.ops.describe import describe_attention, describe_fused

        versions = [f"nxd_memopt {__version__}", f"torch {torch.__version__}"]
        versions += installed(*_OPTIONAL)
        print(", ".join(versions))
        print(f"models: {_describe_models()}")
        print(f"backend {backend.name}: {BACKEND_REASON}")
        for name, backend_class in BACKENDS.items():
            print(f"  {name}: {backend_class.unavailable_reason() or 'available'}")
        print(f"collectives: {backend.distributed_backend}; attention: {describe_attention()}")
        print(f"tensor parallelism: {backend.describe_overlap()}")
        print(f"data-parallel sharding: {_describe_sharding()}")
        print(f"host memory: {_describe_host_memory()}")
        for line in describe_fused():
            print(f"  {line}")
        for line in _describe_fused_paths():
            print(line)


def _describe_sharding() -> str:
    """Return the ZeRO stages that the backend supports."""
    from nxd_memopt.backends import backend

    refusal = backend.gradient_sharding_refusal()
    if refusal is None:
        return "zero1, zero2, zero3"
    return f"zero1; of gradients and parameters (zero2, zero3) it {refusal}"


def _describe_host_memory() -> str:
    """Return whether activations and optimizer states can be in host memory, and how much there is."""
    from nxd_memopt.backends import backend
    from nxd_memopt.memory.host_limits import available_host_bytes
    from nxd_memopt.planner.hardware import GIB

    transfers = backend.host_transfers()
    if transfers is None:
        return f"nothing is offloaded: the backend {backend.name} has no copies that overlap with its work"
    available = available_host_bytes()
    size = "an unknown size" if available is None else f"{available / GIB:.1f} GiB"
    kind = "page-locked, " if transfers.needs_pinned_memory else ""
    return f"activations and optimizer states can be offloaded ({kind}{size} available)"


def _describe_fused_paths() -> list[str]:
    """Return which fused paths of each architecture are on for this device; empty without transformers."""
    try:
        transformers = require_transformers("nxd_memopt.models")
    except MissingDependencyError:
        return []
    from nxd_memopt.models import MODELS, model_class

    lines: list[str] = []
    for model_type in MODELS:
        # One layer of small sizes on the meta device: the decisions do not depend on sizes.
        config = transformers.AutoConfig.for_model(
            model_type,
            num_hidden_layers=1,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=256,
        )
        lines.append(f"fused paths of {model_type}:")
        try:
            model = model_class(model_type)(config, device="meta")
        except ValueError as error:  # experts need options of their own where shapes are fixed
            lines.append(f"  not with the default options: {error}")
            continue
        lines += [f"  {line}" for line in model.fusions.describe()]
    return lines


def _describe_models() -> str:
    """Return whether the model classes can be used, which need transformers."""
    try:
        return f"available (transformers {require_transformers('nxd_memopt.models').__version__})"
    except MissingDependencyError as error:
        return f"not available: {error}"


def _parse(arguments: Sequence[str]) -> Command:
    """Return the command of the arguments, ready to be called."""
    # train and launch parse their own options, which override a configuration file's. doctor runs
    # without tyro and rich, because it reports which packages are missing.
    if arguments[:1] == ["train"]:
        return Train(tuple(arguments[1:]))
    if arguments[:1] == ["prepare"]:
        return Prepare(tuple(arguments[1:]))
    if arguments[:1] == ["launch"]:
        return Launch(tuple(arguments[1:]))
    # plan needs no package but PyYAML, and starts without torch.
    if arguments[:1] == ["plan"]:
        return PlanSettings(tuple(arguments[1:]))
    if arguments[:1] == ["profile"]:
        return Profile(tuple(arguments[1:]))
    if list(arguments) == ["doctor"]:
        return Doctor()
    # convert and certify: tyro builds their options from the fields of the dataclasses. train,
    # launch, plan and profile are in the table for --help only.
    require_installed("nxd-memopt (every command but doctor)", "tyro", "rich", extra="cli")
    import tyro

    from nxd_memopt.training.runtime.distributed import host_only

    # Neither opens a device, which a run may have: convert works in host memory, and certify
    # measures in a process of its own.
    with host_only():
        from nxd_memopt.certify.command import Certify
        from nxd_memopt.commands.convert import Convert

    commands: dict[
        str, Callable[..., Train | Prepare | Launch | PlanSettings | Profile | Doctor | Convert | Certify]
    ] = {
        "train": Train,
        "prepare": Prepare,
        "launch": Launch,
        "plan": PlanSettings,
        "profile": Profile,
        "certify": Certify,
        "convert": Convert,
        "doctor": Doctor,
    }
    return tyro.extras.subcommand_cli_from_dict(
        commands, prog="nxd-memopt", description="Memory-lean LLM training.", args=arguments
    )


def _status_of(arguments: Sequence[str]) -> int:
    """Run the command of the arguments, and return its exit status."""
    try:
        return _parse(arguments)() or 0
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
        status = _status_of(sys.argv[1:])
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
