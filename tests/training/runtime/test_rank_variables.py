"""Tests that a start with contradictory environment variables of torchrun says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nxd_memopt.training.runtime.distributed import (
    NEEDED_WITH_RANK,
    RANK_VARIABLES,
    RankVariablesError,
    require_rank_variables,
)
from tests.training.runs import run_here, write_config

WORLD = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*RANK_VARIABLES, *NEEDED_WITH_RANK}:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "variables",
    [{}, {"WORLD_SIZE": "1"}, WORLD | {"RANK": "1"}, WORLD | {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}],
)
def test_variables_that_torchrun_sets_are_accepted(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    require_rank_variables()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc', not a number"),
        ({"RANK": "-1"}, "RANK is '-1', not a number"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4 and RANK is not set"),
        ({"RANK": "0"}, "RANK is 0 and ['WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'] are not set"),
        (WORLD | {"RANK": "2"}, "RANK is 2, not below WORLD_SIZE 2"),
        (WORLD | {"RANK": "0", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is 3, not below"),
    ],
)
def test_other_variables_are_named(variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankVariablesError, match=f"the environment variable {re.escape(says)}.*--nproc"):
        require_rank_variables()


def test_the_program_checks_them_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    outcome = run_here(write_config(tmp_path))
    assert outcome.returncode == 2 and outcome.stderr.startswith("error: the environment variable WORLD_SIZE is 4")
