"""Checks the size limits of files, of functions without docstrings, and of the newcomer's reading path."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("nxd_memopt", "models", "scripts", "tests")
FILE_LINES = 400
FUNCTION_LINES = 57
PATH_LINES = 1500
NEWCOMER_PATH = (  # one training step, each file calling the next
    "nxd_memopt/training/step.py",
    "models/llama.py",
    "nxd_memopt/modules/attention.py",
    "nxd_memopt/parallel_layers/layers.py",
    "nxd_memopt/parallel_layers/functional/linear.py",
    "nxd_memopt/backends/c10d.py",
)


def main() -> int:
    """Print every breach; return the exit code."""
    breaches = [
        breach for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")) for breach in check(file)
    ]
    path_lines = sum(count_lines(ROOT / name) for name in NEWCOMER_PATH)
    if path_lines > PATH_LINES:
        breaches.append(
            f"the newcomer's path of {len(NEWCOMER_PATH)} files has {path_lines} lines, more than {PATH_LINES}"
        )
    print("\n".join(breaches) or f"sizes are within their limits; the newcomer's path has {path_lines} lines")
    return 1 if breaches else 0


def count_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def check(file: Path) -> Iterator[str]:
    """Breaches in one file."""
    name, lines = file.relative_to(ROOT), count_lines(file)
    if lines > FILE_LINES:
        yield f"{name} has {lines} lines, more than {FILE_LINES}"
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1 - docstring_lines(node)
            if length > FUNCTION_LINES:
                yield f"{name}:{node.lineno} {node.name} has {length} lines, more than {FUNCTION_LINES}"


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """A public function's arguments are explained at any length."""
    first = node.body[0]
    if ast.get_docstring(node) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


if __name__ == "__main__":
    sys.exit(main())
