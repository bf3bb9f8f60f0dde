"""Entry point ``python -m nxd_memopt.compat script.py ...`` or ``-m module ...``, with the alias in place."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from nxd_memopt.parallel_layers.utils import leave_process_groups

_USAGE = "usage: python -m nxd_memopt.compat (script.py | -m module) [arguments ...]"


def main(argv: list[str]) -> int:
    """Run a script or a module as ``__main__`` and return the exit status.

    ``sys.argv`` and ``sys.path[0]`` are those that Python sets for the script or module.
    """
    as_module = argv[:1] == ["-m"]
    if as_module:
        argv = argv[1:]
    if not argv or (argv[0].startswith("-") and not as_module):
        print(_USAGE, file=sys.stderr)
        return 2
    if not as_module and not Path(argv[0]).is_file():
        print(f"{_USAGE}\nno such script: {argv[0]}", file=sys.stderr)
        return 2
    # As the interpreter does: the script's folder comes first for a script, the current one for
    # -m. run_module replaces sys.argv[0] with the module's file.
    folder = Path.cwd() if as_module else Path(argv[0]).resolve().parent
    sys.argv = argv
    sys.path[0] = str(folder)
    try:
        if as_module:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        # Many scripts do not destroy their process groups.
        leave_process_groups()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
