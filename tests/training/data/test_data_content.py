"""What a checkpoint records of the tokens, compared with those of a resumed run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nxd_memopt.training.data.packed.content import _differing_splits, content_at
from nxd_memopt.training.data.packed.sequences import Facts, WindowFiles


class Listed(WindowFiles):
    """Windows whose facts are listed."""

    def __init__(self, *facts: Facts) -> None:
        super().__init__(Path("/absent"), "train", "f")
        self.count = len(facts)
        self._listed = facts

    def facts(self, number: int) -> Facts:
        return self._listed[number]


FIRST, SECOND, LAST = Facts("f", 20, "a"), Facts("f", 40, "b"), Facts("f", 50, "c", ended=True)
WINDOWS = Listed(FIRST, SECOND, LAST)


def with_rows(windows: WindowFiles) -> dict[str, WindowFiles]:
    return {"train": windows, "held_out": Listed()}


@pytest.mark.parametrize(
    ("consumed", "windows", "same"),
    [
        (30, WINDOWS, True),
        (30, Listed(FIRST, SECOND), True),
        (30, Listed(FIRST, Facts("f", 40, "x")), False),  # as many rows of other text
        (30, Listed(FIRST, Facts("f", 39, "b", ended=True)), False),
        (20, Listed(FIRST, Facts("f", 40, "x")), True),  # not read yet
        (60, WINDOWS, True),
        (60, Listed(FIRST, SECOND, Facts("f", 50, "c")), False),  # the first epoch would be longer
    ],
)
def test_the_rows_that_were_read_must_be_the_same(consumed: int, windows: WindowFiles, same: bool) -> None:
    content = content_at("f", with_rows(WINDOWS), {"train": consumed})
    stored: Any = SimpleNamespace(shared={"tokens": content}, directory="step")
    assert _differing_splits(stored, with_rows(windows)) == ([] if same else ["train"])


def test_a_source_of_a_mixture_may_have_no_sequence_yet() -> None:
    content = content_at("f", with_rows(Listed()), {"train": 0, "held_out": 0})
    assert content["splits"]["train"] == {"sequences": 0, "sha256": "", "ended": False}
    stored: Any = SimpleNamespace(shared={"tokens": content}, directory="step")
    assert _differing_splits(stored, with_rows(WINDOWS)) == []


def test_the_split_that_differs_is_named() -> None:
    both: dict[str, WindowFiles] = {"train.0": WINDOWS, "held_out.0": WINDOWS}
    stored: Any = SimpleNamespace(shared={"tokens": content_at("f", both, dict.fromkeys(both, 20))}, directory="step")
    other = Listed(Facts("f", 20, "x"))
    assert _differing_splits(stored, both | {"held_out.0": other}) == ["held_out"]
    assert _differing_splits(stored, both | {"train.0": other}) == ["train"]
    assert _differing_splits(stored, {"held_out.0": WINDOWS}) == ["train"]
