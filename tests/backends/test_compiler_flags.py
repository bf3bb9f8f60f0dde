"""NEURON_CC_FLAGS: the level that neuronx-cc will use, and the flags that recompute needs."""

from __future__ import annotations

import pytest

from nxd_memopt.backends.neuron.compiler_flags import optimization_level, recompute_error, with_optimization_level
from tests.reference import assert_says, error_message

NXD_RECIPE = "--model-type=transformer -O1 --enable-saturate-infinity"


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("", 2),
        ("--model-type transformer", 2),
        ("-O 1", 1),
        ("--optlevel 1", 1),
        (NXD_RECIPE, 1),
        ("-O1 --optlevel=2", 2),
        ("--optlevel 3 -O1", 1),
        ("--cache_dir='/a -O2 b' -O1", 1),  # inside quotes it is a part of a path
        ("--internal-options='--optlevel=3'", 2),
    ],
)
def test_the_last_of_four_spellings_wins(flags, level):
    assert optimization_level(flags) == level
    assert (recompute_error(flags) is None) == (level == 1)


def test_level_is_replaced_and_the_rest_kept():
    assert with_optimization_level("-O2 --model-type=transformer --optlevel 3", 1) == "--model-type=transformer -O1"
    assert with_optimization_level("--cache_dir='/a b'", 1) == "'--cache_dir=/a b' -O1"
    for spelling in ("-O 2", "-O2", "--optlevel=2", "--optlevel 2"):
        assert with_optimization_level(f"--verbose 1 {spelling}", 1) == "--verbose 1 -O1"


@pytest.mark.parametrize(
    ("flags", "found", "remedy"),
    [
        (None, "names no level, which means -O2", "NEURON_CC_FLAGS=-O1"),
        ("--model-type=transformer -O2", "says -O2", "NEURON_CC_FLAGS='--model-type=transformer -O1'"),
    ],
)
def test_error_prints_the_flags_to_set(flags, found, remedy):
    assert_says(recompute_error(flags) or "", found, "-O1", remedy)


@pytest.mark.parametrize("flags", ["-O", "-O²", "--optlevel=", "-O '1"])
def test_malformed_flags_are_refused(flags):
    assert_says(error_message(lambda: optimization_level(flags)), "NEURON_CC_FLAGS")
