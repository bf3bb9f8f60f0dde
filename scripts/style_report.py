"""Prints measures of style per package: sizes, density, comments and words. A report, not a check.

python scripts/style_report.py            # a line for each package, and one for the library
python scripts/style_report.py FOLDER...  # other code, to compare with
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from source_lines import code_lines, comments, docstring_lines, docstrings

ROOT = Path(__file__).resolve().parent.parent
AVOIDED = ("beside", "behind", "whole", "anew")
COLUMNS = (
    *("files", "code", "file max", "fn p90", "fn max", "comments/code", "docs/code", "width p95"),
    *("ternaries", "packings", "comprehensions"),
    *AVOIDED,
)


@dataclass
class Measures:
    """Sums over files.

    Attributes:
        file_lines: lines of code of each file.
        function_lines: lines of code of each function.
        widths: of every line.
        words: of docstrings and comments.
    """

    file_lines: list[int] = field(default_factory=list)
    function_lines: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    comment_lines: int = 0
    docstring_lines: int = 0
    ternaries: int = 0
    packings: int = 0
    comprehensions: int = 0

    def add(self, path: Path) -> None:
        """Measure one file."""
        source = path.read_text(encoding="utf-8")
        code = code_lines(source)
        notes = comments(source)
        self.file_lines.append(len(code))
        self.widths += [len(line) for line in source.splitlines()]
        self.comment_lines += len(notes)
        self.docstring_lines += len(docstring_lines(source))
        self.words += re.findall(r"[a-z]+", " ".join([*notes, *docstrings(source)]).lower())
        for node in ast.walk(ast.parse(source)):
            self._add_node(node, code)

    def _add_node(self, node: ast.AST, code: set[int]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            self.function_lines.append(len(code & set(range(node.lineno, node.end_lineno + 1))))
        elif isinstance(node, ast.IfExp):
            self.ternaries += 1
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            self.comprehensions += 1
        # ``a, b = x, y``. Unpacking one value, as of a function that returns two, does not count.
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            self.packings += any(isinstance(target, ast.Tuple) for target in node.targets)

    def row(self) -> list[str]:
        """Return the cells of ``COLUMNS``.

        Comments and docstrings are per line of code, constructs per 1,000 lines of code and words
        per 10,000 words of comments and docstrings.
        """
        code = sum(self.file_lines)
        words = max(len(self.words), 1)
        constructs = (self.ternaries, self.packings, self.comprehensions)
        return [
            str(len(self.file_lines)),
            str(code),
            str(max(self.file_lines)),
            f"{_percentile(self.function_lines, 90):.0f}",
            str(max(self.function_lines, default=0)),
            f"{self.comment_lines / code:.3f}",
            f"{self.docstring_lines / code:.2f}",
            f"{_percentile(self.widths, 95):.0f}",
            *(f"{1000 * count / code:.1f}" for count in constructs),
            *(f"{1e4 * self.words.count(word) / words:.1f}" for word in AVOIDED),
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
    return 0


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
