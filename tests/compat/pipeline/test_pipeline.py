"""Pipeline stages through the alias: tests in a process with it, and two ranks that are compared with one."""

from __future__ import annotations

import re
from pathlib import Path

from tests.compat.test_compat import run

HERE = Path(__file__).parent


def test_aliased_process():
    files = [str(HERE / name) for name in ("aliased.py", "materialized.py")]
    finished = run("-m", "nxd_memopt.compat", "-m", "pytest", "-q", *files)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    passed = re.search(r"\b(\d+) passed", finished.stdout)
    assert passed and int(passed[1]) >= 16, finished.stdout


def test_two_stages_equal_one_rank():
    program = HERE / "ranks.py"
    checks = re.findall(r"^def (check_\w+)", program.read_text(encoding="utf-8"), re.M)
    finished = run("-m", "nxd_memopt.compat", str(program), ranks=2)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert re.findall(r"^passed (\w+)", finished.stdout, re.M) == checks
