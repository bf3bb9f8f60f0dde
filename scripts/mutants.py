"""Plants faults in copies of the repository, one in each at a time, and names the test that detects each of them.

``python scripts/mutants.py [part of a name]``, or ``make mutants`` for all; exit 1 if a fault is not detected.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "tests" / "mutants"
COPIED = ("models", "nxd_memopt", "scripts", "tests", "docs", "requirements", "pyproject.toml", "setup.py", "README.md")
JOBS = 2
"""Copies, each of which has one fault at a time."""
TIMEOUT_S = 300
BASELINE_TIMEOUT_S = 1800
ENVIRONMENT_CHECK = "import nxd_memopt.models.llama as m, nxd_memopt as n; print(n.__file__); print(m.__file__)"


@dataclass(frozen=True)
class Mutant:
    """Fault that tests must detect.

    Args:
        name: unique description of the fault.
        file: path in the repository.
        old: text to replace, which must occur exactly once; TOML drops the newline at the start of
            a string of several lines.
        new: text with the fault.
        tests: files under ``tests/`` that are likely to detect it.
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
        copies = [copy_repository(Path(folder) / str(job)) for job in range(JOBS)]
        # Faults that cannot be planted, wrong imports and tests that fail without a fault are found
        # before the first mutant runs.
        for mutant in chosen:
            planted(copies[0], mutant)
        for venv in sorted({mutant.venv for mutant in chosen}):
            check_imports(copies[0], venv)
            check_baseline(copies[0], venv, [mutant for mutant in chosen if mutant.venv == venv])
        survivors = run_mutants(copies, chosen)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants were detected")
    return int(survivors > 0)


def run_mutants(copies: list[Path], mutants: list[Mutant]) -> int:
    """Try the mutants, as many at a time as there are copies, and print a line for each; return how many survived."""
    width = max(len(mutant.name) for mutant in mutants)
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def is_detected(mutant: Mutant) -> bool:
        copy = free.get()
        began = time.monotonic()
        try:
            test = try_mutant(copy, mutant)
        finally:
            free.put(copy)
        print(f"{mutant.name:{width}}  {time.monotonic() - began:4.0f} s  {test or 'SURVIVED'}", flush=True)
        return test is not None

    with ThreadPoolExecutor(len(copies)) as threads:
        return list(threads.map(is_detected, mutants)).count(False)


def copy_repository(folder: Path) -> Path:
    """Copy what tests import and return the copy's root.

    The link ``nxd_memopt/models`` stays a link, which points to the copy of ``models``.
    """
    # Without bytecode: Python compares it with its source by time, in seconds, and size, and
    # could take that of the text before a fault of the same length was planted.
    ignore = shutil.ignore_patterns("__pycache__")
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy2(source, folder / name)
    return folder


def run(copy: Path, venv: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
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
        timeout=timeout_s,
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


def run_tests(copy: Path, venv: str, *arguments: str, **options: float) -> subprocess.CompletedProcess[str]:
    """Run pytest in the copy, until the first failure."""
    # -rfE prints the lines FAILED and ERROR with a test's name, which try_mutant searches.
    words = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-rfE"]
    return run(copy, venv, "-m", "pytest", *words, *arguments, **options)


def check_baseline(copy: Path, venv: str, mutants: list[Mutant]) -> None:
    """Raise ``RuntimeError`` unless all tests of the mutants pass without a fault."""
    # One run of all files with any of the keywords: some tests run that no mutant asks for, but
    # files are imported and ranks are started once for each of the processes.
    files = sorted({f"tests/{test}" for mutant in mutants for test in mutant.tests})
    keyword = " or ".join(sorted({f"({mutant.keyword})" for mutant in mutants}))
    spread = ["--numprocesses", str(JOBS), "--dist", "loadgroup"]
    result = run_tests(copy, venv, *spread, *files, "-k", keyword, timeout_s=BASELINE_TIMEOUT_S)
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
    # The failure of a fixture counts as detected; a test file that cannot be imported does not,
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
