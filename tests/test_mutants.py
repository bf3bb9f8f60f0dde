"""The faults of scripts/mutant_table.py can still be planted: each has exactly one place in the code of today."""

from __future__ import annotations

import pytest

from mutant_table import MUTANTS
from mutants import ROOT, planted


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_has_one_place(mutant):
    assert planted(ROOT, mutant) != (ROOT / mutant.file).read_text(encoding="utf-8")
    assert all((ROOT / "tests" / test).is_file() for test in mutant.tests)
