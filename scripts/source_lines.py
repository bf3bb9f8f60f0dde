"""Counts lines of code: without blank lines, comments and docstrings."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator

_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


def code_lines(source: str) -> set[int]:
    """Return the numbers of lines with code; each line of a statement over several lines counts."""
    # By tokens: the syntax tree has neither comments nor the lines of closing brackets. A string
    # over several lines is one token, so all its lines count.
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(source)


def docstring_lines(source: str) -> set[int]:
    """Return the numbers of the lines of docstrings, those after constants and fields included."""
    lines: set[int] = set()
    for node in _docstrings(ast.parse(source)):
        assert node.end_lineno is not None
        lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


def comments(source: str) -> list[str]:
    """Return the comments, but for instructions to tools."""
    tools = ("# pyright:", "# noqa", "# type:", "#!")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return [comment for comment in found if not comment.startswith(tools)]


def docstrings(source: str) -> list[str]:
    """Return the texts of all docstrings."""
    return [ast.literal_eval(node.value) for node in _docstrings(ast.parse(source))]


def _docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    # ast.get_docstring knows the first statement of a body only. A string after a constant or a
    # field documents it, and is no code either.
    parents = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for parent in ast.walk(tree):
        if not isinstance(parent, parents):
            continue
        for node in parent.body:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield node
