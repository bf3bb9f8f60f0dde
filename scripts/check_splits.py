"""Refuses ``Tensor.split`` in the library, which gives wrong data on trn1 when it is passed a list of sizes.

The fault is in torch_xla 2.9 with functionalization disabled (pytorch/xla#8640).
``ops.parts.split_sizes``, ``chunk``, ``narrow`` and ``tensor_split`` are correct in both modes. A
list of sizes and a single size cannot be distinguished if the argument is a name, so every split of
a tensor is refused; only splits of strings are allowed.
"""

from __future__ import annotations

import ast
import sys
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
NO_TENSORS = ("re", "shlex", "str", "config")  # ``config.split`` is a dataset's


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


def refused_lines(source: str) -> list[int]:
    """Return the numbers of lines with a split that is not a split of a string."""
    tree = ast.parse(source)
    strings = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _splits_string(node)}
    return sorted({node.lineno for node in ast.walk(tree) if _names_split(node) and id(node) not in strings})  # pyright: ignore[reportAttributeAccessIssue]


def _names_split(node: ast.AST) -> bool:
    """Return whether a node names a split: an attribute, a ``getattr`` or an import from torch."""
    if isinstance(node, ast.Attribute):
        return node.attr in REFUSED and not (isinstance(node.value, ast.Name) and node.value.id in NO_TENSORS)
    if isinstance(node, ast.ImportFrom):
        is_torch = (node.module or "").partition(".")[0] == "torch"
        return is_torch and any(alias.name in REFUSED for alias in node.names)
    is_getattr = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
    return is_getattr and any(isinstance(each, ast.Constant) and each.value in REFUSED for each in node.args[1:2])  # pyright: ignore[reportAttributeAccessIssue]


def _splits_string(call: ast.Call) -> bool:
    """Return whether a call splits a string: ``text.split()``, ``text.split(",", 1)`` and alike."""
    # A tensor's split takes a size or a list first, so a literal text or no argument is a string's.
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if len(call.args) > 2 or not keywords.keys() <= {"sep", "maxsplit"}:
        return False
    separator = call.args[0] if call.args else keywords.get("sep")
    limit = call.args[1] if len(call.args) == 2 else keywords.get("maxsplit")
    has_text = separator is None or (isinstance(separator, ast.Constant) and isinstance(separator.value, str | None))
    has_number = limit is None or (isinstance(limit, ast.Constant) and isinstance(limit.value, int))
    return has_text and has_number


if __name__ == "__main__":
    sys.exit(main())
