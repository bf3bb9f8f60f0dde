"""Checks the sizes of files, functions and the newcomer's reading path, in lines of code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from source_lines import code_lines

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("nxd_memopt", "models", "scripts", "tests")
FILE_LINES = 400
FUNCTION_LINES = 57
PATH_LINES = 1160
NEWCOMER_PATH = (  # one training step, each file calling the next; see docs/architecture.md
    "nxd_memopt/training/step.py",
    "nxd_memopt/modules/causal_lm.py",
    "models/llama.py",
    "nxd_memopt/parallel_layers/layers.py",
    "nxd_memopt/parallel_layers/functional/linear.py",
    "nxd_memopt/parallel_layers/fused_loss/linear_cross_entropy.py",
    "nxd_memopt/backends/collectives.py",
    "nxd_memopt/backends/c10d_collectives.py",
)


def main() -> int:
    """Print every breach; return the exit code."""
    breaches: list[str] = []
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            breaches += check(file)
    # The path has a limit of its own: files that are each within theirs may together be too much
    # to read at once.
    path_lines = sum(count_lines(ROOT / name) for name in NEWCOMER_PATH)
    if path_lines > PATH_LINES:
        files = f"the newcomer's path of {len(NEWCOMER_PATH)} files"
        breaches.append(f"{files} has {path_lines} lines, more than {PATH_LINES}")
    if breaches:
        print("\n".join(breaches))
        return 1
    print(f"sizes are within their limits; the newcomer's path has {path_lines} lines")
    return 0


def count_lines(file: Path) -> int:
    """Return the number of the file's lines of code."""
    return len(code_lines(file.read_text(encoding="utf-8")))


def check(file: Path) -> Iterator[str]:
    """Yield the breaches in one file."""
    name = file.relative_to(ROOT)
    source = file.read_text(encoding="utf-8")
    lines = code_lines(source)
    if len(lines) > FILE_LINES:
        yield f"{name} has {len(lines)} lines of code, more than {FILE_LINES}"
    # A function's lines include those of functions defined in it, so an inner function cannot hide
    # the length of the outer one.
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = len(lines & set(range(node.lineno, node.end_lineno + 1)))
            if length > FUNCTION_LINES:
                where = f"{name}:{node.lineno} {node.name}"
                yield f"{where} has {length} lines of code, more than {FUNCTION_LINES}"


if __name__ == "__main__":
    sys.exit(main())
