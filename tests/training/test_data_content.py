"""What a checkpoint records of the tokens, compared with those of a resumed run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nxd_memopt.training.data.packed.content import _differing_splits, content_at
from nxd_memopt.training.data.packed.log import Entry

ENTRIES = [Entry(1, 20, sha256="a"), Entry(2, 40, sha256="b"), Entry(3, 50, sha256="c", ended=True)]


def logs(entries: list[Entry]) -> Any:
    return {"train": SimpleNamespace(entries=entries), "held_out": SimpleNamespace(entries=[])}


@pytest.mark.parametrize(
    ("consumed", "entries", "same"),
    [
        (30, ENTRIES, True),
        (30, ENTRIES[:2], True),
        (30, [ENTRIES[0], Entry(2, 40, sha256="x")], False),  # as many rows of other text
        (30, [ENTRIES[0], Entry(2, 41, sha256="b")], False),
        (20, [ENTRIES[0], Entry(2, 40, sha256="x")], True),  # not read yet
        (60, ENTRIES, True),
        (60, [*ENTRIES[:2], Entry(3, 50, sha256="c")], False),  # the first epoch would be longer
        (60, [*ENTRIES[:2], Entry(3, 50, sha256="c"), Entry(4, 50, sha256="c", ended=True)], True),
    ],
)
def test_the_rows_that_were_read_must_be_the_same(consumed: int, entries: list[Entry], same: bool) -> None:
    content = content_at("f", logs(ENTRIES), {"train": consumed})
    stored: Any = SimpleNamespace(shared={"tokens": content}, directory="step")
    assert _differing_splits(stored, logs(entries)) == ([] if same else ["train"])


def test_a_source_of_a_mixture_may_have_no_sequence_yet() -> None:
    content = content_at("f", logs([]), {"train": 0, "held_out": 0})
    assert content["splits"]["train"] == {"sequences": 0, "sha256": "", "ended": False}
    stored: Any = SimpleNamespace(shared={"tokens": content}, directory="step")
    assert _differing_splits(stored, logs(ENTRIES)) == []


def test_the_split_that_differs_is_named() -> None:
    both = {"train.0": SimpleNamespace(entries=ENTRIES), "held_out.0": SimpleNamespace(entries=ENTRIES)}
    stored: Any = SimpleNamespace(shared={"tokens": content_at("f", both, dict.fromkeys(both, 20))}, directory="step")
    other = SimpleNamespace(entries=[Entry(1, 20, sha256="x")])
    assert _differing_splits(stored, both | {"held_out.0": other}) == ["held_out"]
    assert _differing_splits(stored, both | {"train.0": other}) == ["train"]
    assert _differing_splits(stored, {"held_out.0": both["held_out.0"]}) == ["train"]


def test_tokens_of_an_earlier_version_are_refused() -> None:
    stored: Any = SimpleNamespace(shared={"tokens": {"fingerprint": "f", "splits": {}}}, directory="step")
    with pytest.raises(ValueError, match="step was written by an earlier version"):
        _differing_splits(stored, logs(ENTRIES))
