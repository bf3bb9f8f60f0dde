"""Writes docs/files.md: one line per Python file, from the first line of its docstring.

python scripts/file_tree.py           # exit status 1 when it is out of date
python scripts/file_tree.py --write
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "files.md"
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
        "",
        "Written by `scripts/file_tree.py --write`: what each file is responsible for.",
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


def main() -> int:
    """Write the document, or compare it with the file; return the exit code."""
    expected = file_tree()
    if "--write" in sys.argv[1:]:
        FILE.write_text(expected, encoding="utf-8")
    elif not FILE.exists() or FILE.read_text(encoding="utf-8") != expected:
        print("docs/files.md is out of date: run python scripts/file_tree.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
