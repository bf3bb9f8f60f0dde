"""Entry point of the training program: ``torchrun --nproc_per_node N -m nxd_memopt.training --config FILE``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from nxd_memopt._optional import require_installed, require_transformers
from nxd_memopt.training.runtime.distributed import is_rank_zero, ranks_per_host, require_rank_variables, world_size
from nxd_memopt.training.runtime.errors import user_errors
from nxd_memopt.training.runtime.signals import Interrupted, Interrupts, exit_status, final_status
from nxd_memopt.training.runtime.start_phases import StartPhases


def main(arguments: Sequence[str] | None = None, *, program: str = "nxd_memopt.training") -> int:
    """Run the training program and return its exit status.

    Args:
        arguments: ``--config FILE`` or ``--recipe NAME``, and options that override the file's
            options; defaults to the command line's arguments.
        program: program name shown by ``--help`` and in messages.
    """
    phases = StartPhases()
    try:
        with Interrupts().handled() as interrupts:
            # Outside user_errors, in which a rank may be stopped while it waits for rank 0's report.
            try:
                with user_errors():
                    _run(arguments, program, interrupts, phases)
            except Interrupted as stop:
                return _end(stop)
    except Interrupted as stop:
        # Of a signal that arrived before its handler: the agent starts ranks with the signals blocked.
        return _end(stop)
    return 0


def _run(arguments: Sequence[str] | None, program: str, interrupts: Interrupts, phases: StartPhases) -> None:
    """Check the packages, read the configuration and run."""
    require_rank_variables()
    require_installed(program, "yaml", "rich", "tensorboard", extra="train")
    from nxd_memopt.training.config.parsing import parse_config
    from nxd_memopt.training.inputs import require_inputs

    if arguments is None:
        arguments = sys.argv[1:]
    # What a user mistypes most is known before the imports below, which take seconds.
    config = parse_config(arguments, program=program)
    require_inputs(config, is_one_host=world_size() == ranks_per_host())
    require_transformers(program, extra="train")

    # Imported inside user_errors: the first import of the library selects the backend, and a
    # backend that cannot be used raises there.
    from nxd_memopt.training.loop import run
    from nxd_memopt.training.profiled import ProfileFinishedError
    from nxd_memopt.training.runtime.distributed import destroy_distributed, init_distributed
    from nxd_memopt.training.runtime.out_of_memory import out_of_memory_advice

    phases.end("imports")
    init_distributed(config)
    phases.end("process groups")
    with suppress(ProfileFinishedError), out_of_memory_advice():
        run(config, interrupts, phases)
    destroy_distributed()


def _end(stop: Interrupted) -> int:
    """Show the line of a run that a signal has stopped; return the exit status."""
    if is_rank_zero():
        print(stop.line(), file=sys.stderr, flush=True)
    # Without an agreement the other ranks may be in a collective, so the groups are left as they
    # are: the agent ends the other ranks.
    if stop.is_agreed:
        from nxd_memopt.training.runtime.distributed import destroy_distributed

        destroy_distributed()
    return exit_status(stop.number)


if __name__ == "__main__":
    sys.exit(final_status(main()))
