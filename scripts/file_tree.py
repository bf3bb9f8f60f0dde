"""Prints what each Python file is responsible for, from the first line of its docstring.

python scripts/file_tree.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("nxd_memopt", "models", "scripts")


def purpose(path: Path) -> str:
    """Return the first line of the module's docstring, without the full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        name = path.relative_to(ROOT)
        raise SystemExit(f"{name} has no docstring: say in its first line what it is responsible for")
    return docstring.splitlines()[0].rstrip(".")


def file_tree() -> str:
    """Return the full document, with a section per folder."""
    lines = [
        "# Files",
    ]
    # Sorting by full path puts files of a folder between those of its subfolders, so a folder's
    # files are collected at its first file. rglob does not follow the link nxd_memopt/models:
    # each file is listed once.
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    for folder in dict.fromkeys(path.parent for path in paths):
        heading = f"## {folder.relative_to(ROOT)}/"
        lines += ["", heading, "", "| file | responsible for |", "|---|---|"]
        lines += [f"| `{path.name}` | {purpose(path)} |" for path in paths if path.parent == folder]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(file_tree())
