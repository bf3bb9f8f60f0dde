"""The faults of tests/mutants can still be planted: each has exactly one place in the code of today."""

from __future__ import annotations

from collections import Counter

import pytest

from scripts.mutants import ROOT, load_mutants, planted

MUTANTS = load_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_has_one_place(mutant):
    assert planted(ROOT, mutant) != (ROOT / mutant.file).read_text(encoding="utf-8")
    assert all((ROOT / "tests" / test).is_file() for test in mutant.tests)


def test_names_are_unique():
    repeated = [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1]
    assert repeated == []
