"""Entry point of the launcher: ``python -m nxd_memopt.launch``, the same as ``nxd-memopt launch``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nxd_memopt._optional import require_installed
from nxd_memopt.training.runtime.errors import user_errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher and return its exit status. ``arguments`` default to the command line's."""
    with user_errors():
        # Before the import of command, which imports tyro and yaml itself: the error then names
        # the extra to install instead of a module.
        require_installed("nxd-memopt launch", "tyro", "yaml", extra="train")
        from nxd_memopt.launch import command

        return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
