"""Entry point of the training program: ``torchrun --nproc_per_node N -m nxd_memopt.training --config FILE``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nxd_memopt._optional import require_installed, require_transformers
from nxd_memopt.training.errors import user_errors


def main(arguments: Sequence[str] | None = None, *, program: str = "nxd_memopt.training") -> int:
    """Run the training program and return its exit status.

    Args:
        arguments: ``--config FILE`` or ``--recipe NAME``, and options that override the file's
            options; defaults to the command line's arguments.
        program: program name shown by ``--help`` and in messages.
    """
    with user_errors():
        require_installed(program, "tyro", "yaml", "rich", "tensorboard", extra="train")
        require_transformers(program, extra="train")

        # Imported inside user_errors: the first import of the library selects the backend, and
        # a backend that cannot be used raises there.
        from nxd_memopt.training.arguments import parse_config
        from nxd_memopt.training.distributed import destroy_distributed, init_distributed
        from nxd_memopt.training.loop import run

        if arguments is None:
            arguments = sys.argv[1:]
        config = parse_config(arguments, program=program)
        init_distributed(config)
        run(config)
        destroy_distributed()
    return 0


if __name__ == "__main__":
    sys.exit(main())
