"""Refuses ``Tensor.split`` in the library, which gives wrong data on trn1 when it is passed a list of sizes.

torch_xla 2.9 with functionalization disabled (pytorch/xla#8640): ``ops.parts.split_sizes``, ``chunk``, ``narrow`` and
``tensor_split`` are right in both modes. A list of sizes and one size cannot be told apart where the argument is a
name, so every split of a tensor is refused; only splits of strings remain.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("nxd_memopt", "models")
REFUSED = (
    "split",
    "split_with_sizes",
    "split_copy",
    "split_with_sizes_copy",
    "unsafe_split",
    "unsafe_split_with_sizes",
)
STRING_MODULES = ("re", "shlex")


def main() -> int:
    """Print every split of a tensor; return the exit code."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    found = [
        f"{file.relative_to(ROOT)}:{line}: split of a tensor: use nxd_memopt.ops.parts.split_sizes, chunk or narrow"
        for file in files
        for line in refused_lines(file.read_text(encoding="utf-8"))
    ]
    print("\n".join(found) or "no tensor is split by Tensor.split")
    return 1 if found else 0


def refused_lines(source: str) -> Iterator[int]:
    """Yield the lines of ``source`` that call a split, other than one of a string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_split = node.func.attr in REFUSED and not _splits_string(node, node.func.value)
            if is_split:
                yield node.lineno


def _splits_string(call: ast.Call, receiver: ast.expr) -> bool:
    """True for ``text.split()``, ``text.split(",")`` and the splits of ``re`` and ``shlex``."""
    if isinstance(receiver, ast.Name) and receiver.id in STRING_MODULES:
        return True
    arguments = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "sep")]
    if not arguments:
        return not call.keywords
    return isinstance(arguments[0], ast.Constant) and isinstance(arguments[0].value, str)


if __name__ == "__main__":
    sys.exit(main())
