"""Writes conversations about Python's standard library: a question about a function, and its docstring as the answer.

The rows are in the form that ``data.format: messages`` of the training program reads:
    python docs/examples/make_conversations.py conversations.jsonl
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

EXCLUDED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
MOST_CHARACTERS = 300
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def conversations() -> Iterator[list[dict[str, str]]]:
    """Yield the messages of each conversation, in an order that depends on the standard library alone."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if EXCLUDED & set(name.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # a file with errors on purpose
            continue
        module = ".".join(name.with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(tree):
            if isinstance(node, FUNCTION) and not node.name.startswith("_"):
                yield from _about(node, module)


def _about(function: FUNCTION, module: str) -> Iterator[list[dict[str, str]]]:
    """Yield a conversation about a function with a docstring: what it does, and its arguments."""
    text = (ast.get_docstring(function) or "").split("\n\n")[0].strip()
    if not 20 <= len(text) <= MOST_CHARACTERS:
        return
    arguments = ", ".join(argument.arg for argument in function.args.args)
    yield [
        {"role": "user", "content": f"What does {function.name} of Python's module {module} do?"},
        {"role": "assistant", "content": f"`{function.name}`: {' '.join(text.split())}"},
        {"role": "user", "content": "What are its arguments?"},
        {"role": "assistant", "content": f"`{function.name}({arguments})`"},
    ]


def main(path: Path) -> None:
    """Write one conversation in each line of ``path``."""
    rows = [json.dumps({"messages": messages}) for messages in conversations()]
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} conversations in {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
