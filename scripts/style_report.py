"""Prints measures of style per package next to their targets: sizes, density, guards, comments and words.

python scripts/style_report.py            # a line for each package, and one for the library
python scripts/style_report.py FOLDER...  # other code, to compare with

A report, not a check. Comments and docstrings are lines per line of code; ternaries, packings (``a, b = x, y``)
and comprehensions are per 1,000 lines of code; words are per 10,000 words of comments and docstrings. Guards are
the percentage of code lines that raise: a ``raise`` statement, and an ``if`` whose body only raises with its
condition and what prepares the message.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from source_lines import code_lines, comments, docstring_lines, docstrings

ROOT = Path(__file__).resolve().parent.parent
WORDS = {
    "beside": r"\bbeside\b",
    "behind": r"\bbehind\b",
    "whole": r"\bwhole\b",
    "anew": r"\banew\b",
    "that of": r"\b(that|those) of\b",
    "has": r"\b(has|have)\b",
    "which": r"\bwhich\b",
    "whose": r"\bwhose\b",
}
"""Columns of words that the prose avoids, or uses less than other words."""
COLUMNS = (
    *("files", "code", "file max", "fn p90", "fn max", "comments/code", "docs/code", "width p95"),
    *("ternaries", "packings", "comprehensions", "guards %"),
    *WORDS,
)
TARGETS = {
    "fn max": "<= 57",
    "comments/code": ">= 0.10",
    "ternaries": "<= 10",
    "comprehensions": "<= 20",
    "guards %": "<= 6",
    "that of": "0",
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Measures:
    """Sums over files.

    Attributes:
        file_lines: lines of code of each file.
        function_lines: lines of code of each function.
        widths: of every line.
        counts: lines, constructs and words by column.
        words: number of words in docstrings and comments.
    """

    file_lines: list[int] = field(default_factory=list)
    function_lines: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    words: int = 0

    def add(self, path: Path) -> None:
        """Measure one file."""
        source = path.read_text(encoding="utf-8")
        code = code_lines(source)
        notes = comments(source)
        self.file_lines.append(len(code))
        self.widths += [len(line) for line in source.splitlines()]
        self.counts["comments"] += len(notes)
        self.counts["docs"] += len(docstring_lines(source))
        text = " ".join([*notes, *docstrings(source)]).lower()
        self.words += len(re.findall(r"[a-z]+", text))
        for column, pattern in WORDS.items():
            self.counts[column] += len(re.findall(pattern, text))
        guards: set[int] = set()
        for node in ast.walk(ast.parse(source)):
            self._add_node(node, code)
            if isinstance(node, ast.Raise) or _only_raises(node):
                guards |= _lines(node)
        self.counts["guards"] += len(guards & code)

    def _add_node(self, node: ast.AST, code: set[int]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.function_lines.append(len(code & _lines(node)))
        elif isinstance(node, ast.IfExp):
            self.counts["ternaries"] += 1
        elif isinstance(node, COMPREHENSIONS):
            self.counts["comprehensions"] += 1
        # ``a, b = x, y``. Unpacking one value, as of a function that returns two, does not count.
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            self.counts["packings"] += any(isinstance(target, ast.Tuple) for target in node.targets)

    def row(self) -> list[str]:
        """Return the cells of ``COLUMNS``."""
        code = sum(self.file_lines)
        constructs = ("ternaries", "packings", "comprehensions")
        return [
            str(len(self.file_lines)),
            str(code),
            str(max(self.file_lines)),
            f"{_percentile(self.function_lines, 90):.0f}",
            str(max(self.function_lines, default=0)),
            f"{self.counts['comments'] / code:.3f}",
            f"{self.counts['docs'] / code:.2f}",
            f"{_percentile(self.widths, 95):.0f}",
            *(f"{1000 * self.counts[name] / code:.1f}" for name in constructs),
            f"{100 * self.counts['guards'] / code:.1f}",
            *(f"{1e4 * self.counts[word] / max(self.words, 1):.1f}" for word in WORDS),
        ]


def main(folders: Sequence[str]) -> int:
    """Print the table."""
    packages = [Path(folder) for folder in folders] or list(_packages())
    total = Measures()
    print(" | ".join(["package", *COLUMNS]))
    for package in packages:
        measures = Measures()
        for path in _files(package):
            measures.add(path)
            total.add(path)
        if measures.file_lines:
            print(" | ".join([package.name, *measures.row()]))
    print(" | ".join(["all", *total.row()]))
    print(" | ".join(["target", *(TARGETS.get(column, "") for column in COLUMNS)]))
    return 0


def _only_raises(node: ast.AST) -> bool:
    """Return whether a node is an ``if`` without another branch whose body prepares a message and raises."""
    if not isinstance(node, ast.If) or node.orelse or not isinstance(node.body[-1], ast.Raise):
        return False
    return all(isinstance(statement, ast.Assign | ast.AnnAssign | ast.Raise) for statement in node.body)


def _lines(node: ast.AST) -> set[int]:
    """Return the numbers of a statement's lines."""
    assert isinstance(node, ast.stmt) and node.end_lineno is not None
    return set(range(node.lineno, node.end_lineno + 1))


def _packages() -> Iterator[Path]:
    library = ROOT / "nxd_memopt"
    folders = [path for path in library.iterdir() if path.is_dir()]
    yield from sorted(path for path in folders if path.name != "__pycache__")
    yield ROOT / "scripts"


def _files(package: Path) -> list[Path]:
    paths = sorted(package.rglob("*.py"))
    return [path for path in paths if path.read_text(encoding="utf-8").strip()]


def _percentile(values: Sequence[int], percent: int) -> float:
    if len(values) < 2:
        return float(next(iter(values), 0))
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
