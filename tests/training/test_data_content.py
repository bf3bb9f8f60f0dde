"""What a checkpoint records of the tokens, compared with those of a resumed run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nxd_memopt.training.data_content import _is_same, content_at
from nxd_memopt.training.token_log import Entry

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
    assert _is_same(stored, logs(entries)) is same


def test_tokens_of_an_earlier_version_are_refused() -> None:
    stored: Any = SimpleNamespace(shared={"tokens": {"fingerprint": "f", "splits": {}}}, directory="step")
    with pytest.raises(ValueError, match="step was written by an earlier version"):
        _is_same(stored, logs(ENTRIES))
