"""Owns README's file tree: one line per Python file, from the first line of its docstring.

python scripts/file_tree.py           # exit status 1 when README is out of date
python scripts/file_tree.py --write
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FOLDERS = ("nxd_memopt", "models", "scripts")
BEGIN, END = "<!-- file tree: scripts/file_tree.py --write -->\n", "<!-- end of file tree -->\n"


def purpose(path: Path) -> str:
    """First line of the module's docstring, without ``Owns`` and the full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring: say in its first line what it owns")
    return docstring.splitlines()[0].removeprefix("Owns ").rstrip(".")


def file_tree() -> str:
    lines = ["```"]
    for folder in FOLDERS:
        paths = sorted((ROOT / folder).rglob("*.py"), key=lambda path: (path.parent.parts, path.name))
        lines += [f"{path.relative_to(ROOT)!s:<52} {purpose(path)}" for path in paths]
    return "\n".join([*lines, "```", ""])


def main() -> int:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    expected = before + BEGIN + file_tree() + END + after
    if "--write" in sys.argv[1:]:
        README.write_text(expected, encoding="utf-8")
    elif text != expected:
        print("README's file tree is out of date: run python scripts/file_tree.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
