"""Plants faults in a copy of the repository, one at a time, and names the test that notices each; exit 1 if one lives.

Run it as ``make mutants`` or ``python scripts/mutants.py [part of a name]``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "tests" / "mutants"
COPIED = ("models", "nxd_memopt", "scripts", "tests", "docs", "requirements", "pyproject.toml", "setup.py", "README.md")
TIMEOUT_S = 600
ENVIRONMENT_CHECK = "import nxd_memopt.models.llama as m, nxd_memopt as n; print(n.__file__); print(m.__file__)"


@dataclass(frozen=True)
class Mutant:
    """Fault that tests must notice.

    Args:
        name: unique description of the fault.
        file: path in the repository.
        old: text to replace, which must occur exactly once; TOML drops the newline at the start of
            a string of several lines.
        new: text with the fault.
        tests: files under ``tests/`` that are likely to notice.
        keyword: pytest's ``-k`` expression, which selects tests of these files.
        venv: virtual environment whose Python runs the tests.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    keyword: str = "ranks2"
    venv: str = ".venv"


def load_mutants() -> list[Mutant]:
    """Return the mutants of every ``tests/mutants/<package>.toml``, sorted by file name."""
    # An unknown or a missing field is a TypeError of Mutant.
    mutants: list[Mutant] = []
    for path in sorted(TABLES.glob("*.toml")):
        for row in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            mutants.append(Mutant(**{**row, "tests": tuple(row["tests"])}))
    return mutants


def main() -> int:
    """Print one line per mutant; return the exit code."""
    part = " ".join(sys.argv[1:])
    chosen = [mutant for mutant in load_mutants() if part in mutant.name]
    if not chosen:
        print(f"no mutant has {part!r} in its name")
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copy_repository(Path(folder))
        # Faults that cannot be planted, wrong imports and tests that fail without a fault are found
        # before the first mutant runs.
        for mutant in chosen:
            planted(copy, mutant)
        for venv in sorted({mutant.venv for mutant in chosen}):
            check_imports(copy, venv)
            check_baseline(copy, venv, [mutant for mutant in chosen if mutant.venv == venv])
        width = max(len(mutant.name) for mutant in chosen)
        survivors = 0
        for mutant in chosen:
            began = time.monotonic()
            caught_by = try_mutant(copy, mutant)
            survivors += caught_by is None
            seconds = time.monotonic() - began
            result = caught_by or "SURVIVED"
            print(f"{mutant.name:{width}}  {seconds:4.0f} s  {result}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants were caught")
    return int(survivors > 0)


def copy_repository(folder: Path) -> Path:
    """Copy what tests import and return the copy's root.

    The link ``nxd_memopt/models`` stays a link, which points to the copy of ``models``.
    """
    # Without bytecode: Python compares it with its source by time, in seconds, and size, and
    # could take that of the text before a fault of the same length was planted.
    ignore = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy2(source, folder / name)
    return folder


def run(copy: Path, venv: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the environment's Python in the copy, on backend cpu."""
    # PYTHONPATH precedes the environment's own editable installation, which points to ROOT.
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NXD_MEMOPT_BACKEND": "cpu",
    }
    return subprocess.run(
        [str(ROOT / venv / "bin" / "python"), *arguments],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def check_imports(copy: Path, venv: str) -> None:
    """Raise ``RuntimeError`` unless Python imports both packages from the copy."""
    # If the checkout were imported instead, no fault would have an effect and every mutant would
    # survive.
    result = run(copy, venv, "-c", ENVIRONMENT_CHECK)
    files = result.stdout.split()
    if len(files) != 2 or not all(Path(file).is_relative_to(copy) for file in files):
        error = result.stderr[-500:]
        raise RuntimeError(f"the copy in {copy} is not what is imported: {files} {error}")


def run_tests(copy: Path, venv: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in the copy, until the first failure."""
    # -rfE prints the lines FAILED and ERROR with a test's name, which try_mutant searches.
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-rfE"]
    return run(copy, venv, "-m", "pytest", *options, *arguments)


def check_baseline(copy: Path, venv: str, mutants: list[Mutant]) -> None:
    """Raise ``RuntimeError`` unless all tests of the mutants pass without a fault."""
    # One run of all files with any of the keywords: some tests run that no mutant asks for, but
    # files are imported and ranks are started once.
    files = sorted({f"tests/{test}" for mutant in mutants for test in mutant.tests})
    keyword = " or ".join(sorted({f"({mutant.keyword})" for mutant in mutants}))
    result = run_tests(copy, venv, *files, "-k", keyword)
    if result.returncode != 0:
        output = f"{result.stdout[-3000:]}{result.stderr[-1000:]}"
        raise RuntimeError(f"the tests fail without any mutant:\n{output}")


def planted(copy: Path, mutant: Mutant) -> str:
    """Return the file's text with the fault; ``RuntimeError`` unless ``old`` occurs once."""
    text = (copy / mutant.file).read_text(encoding="utf-8")
    count = text.count(mutant.old)
    if count != 1:
        raise RuntimeError(f"{mutant.name}: {mutant.file} holds {count} times, not once: {mutant.old}")
    return text.replace(mutant.old, mutant.new)


def try_mutant(copy: Path, mutant: Mutant) -> str | None:
    """Plant a fault, run the tests and restore the file; return the first test that failed."""
    file = copy / mutant.file
    text = file.read_text(encoding="utf-8")
    file.write_text(planted(copy, mutant), encoding="utf-8")
    try:
        files = [f"tests/{test}" for test in mutant.tests]
        result = run_tests(copy, mutant.venv, *files, "-k", mutant.keyword)
    except subprocess.TimeoutExpired:
        return f"the tests hang: more than {TIMEOUT_S} s"
    finally:
        file.write_text(text, encoding="utf-8")
    if result.returncode == 0:
        return None
    # The failure of a fixture counts as noticed; a test file that cannot be imported does not,
    # because it has no test's name.
    pattern = r"^(?:FAILED|ERROR) (?:tests/)?(\S+::[^\s\[]+(?:\[[^\]]*\])?)"
    failed = re.search(pattern, result.stdout, re.MULTILINE)
    # pytest's exit code 1: tests ran and some failed. 2 to 5: interrupted, internal error, wrong
    # usage, no tests.
    if result.returncode != 1 or failed is None:
        output = f"{result.stdout[-3000:]}{result.stderr[-1000:]}"
        raise RuntimeError(f"{mutant.name}: the tests did not run:\n{output}")
    return failed[1]


if __name__ == "__main__":
    sys.exit(main())
