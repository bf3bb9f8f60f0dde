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
    remedy = "use nxd_memopt.ops.parts.split_sizes, chunk or narrow"
    found: list[str] = []
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for line in refused_lines(file.read_text(encoding="utf-8")):
                found.append(f"{file.relative_to(ROOT)}:{line}: split of a tensor: {remedy}")
    print("\n".join(found) or "no tensor is split by Tensor.split")
    return int(bool(found))


def refused_lines(source: str) -> list[int]:
    """Return the numbers of lines with a split that is not a split of a string."""
    # Not only calls: a split that is assigned to a name or passed as an argument is refused where
    # it is named. Calls of strings' splits are recognized by their arguments, and the ``x.split``
    # node of such a call is then exempt.
    nodes = list(ast.walk(ast.parse(source)))
    exempt = {id(node.func) for node in nodes if isinstance(node, ast.Call) and _splits_string(node)}
    lines: set[int] = set()
    for node in nodes:
        if _names_split(node) and id(node) not in exempt:
            lines.add(node.lineno)  # pyright: ignore[reportAttributeAccessIssue]
    return sorted(lines)


def _names_split(node: ast.AST) -> bool:
    """Return whether a node names a split: an attribute, a ``getattr`` or an import from torch."""
    if isinstance(node, ast.Attribute):
        is_module = isinstance(node.value, ast.Name) and node.value.id in NO_TENSORS
        return node.attr in REFUSED and not is_module
    if isinstance(node, ast.ImportFrom):
        # A relative import has no module and is not torch's.
        is_torch = (node.module or "").partition(".")[0] == "torch"
        return is_torch and any(alias.name in REFUSED for alias in node.names)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    # ``getattr(x, "split")`` is what an attribute is; a name computed at run time is not found.
    names = node.args[1:2]
    is_getattr = node.func.id == "getattr"
    return is_getattr and any(isinstance(n, ast.Constant) and n.value in REFUSED for n in names)


def _splits_string(call: ast.Call) -> bool:
    """Return whether a call splits a string: ``text.split()``, ``text.split(",", 1)`` and alike."""
    # A tensor's split takes a size or a list first, so a literal text or no argument is a string's.
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if len(call.args) > 2 or not keywords.keys() <= {"sep", "maxsplit"}:
        return False
    # str.split(sep=None, maxsplit=-1): a separator that is not literally a text or None may be a
    # size, and a second argument that is not a literal number may be a dimension or a list.
    separator = keywords.get("sep")
    if call.args:
        separator = call.args[0]
    limit = keywords.get("maxsplit")
    if len(call.args) == 2:
        limit = call.args[1]
    return _is_literal(separator, (str, type(None))) and _is_literal(limit, (int,))


def _is_literal(node: ast.expr | None, types: tuple[type, ...]) -> bool:
    """Return whether an argument is absent or a literal of one of ``types``."""
    return node is None or (isinstance(node, ast.Constant) and isinstance(node.value, types))


if __name__ == "__main__":
    sys.exit(main())
