"""Options as fields of dataclasses: which types, ranges and words are accepted, and what the errors say."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from nxd_memopt.options import Resume, check_options, declaration, default_of, option
from tests.reference import assert_says, error_message

ANY = Resume.REPORTED


@dataclass(frozen=True)
class Sample:
    """Options of every kind."""

    count: int = option(1, resume=ANY, minimum=1)
    rate: float = option(0.5, resume=ANY, minimum=0, maximum=1)
    eps: float | None = option(None, resume=ANY, above=0)
    mode: Literal["fast", "exact"] | None = option(None, resume=ANY)
    tiles: int | Literal["auto"] = option("auto", resume=ANY, minimum=2)
    kept: bool | int = option(False, resume=ANY, minimum=1)
    names: tuple[str, ...] = option((), resume=ANY)
    weights: dict[str, float] = option(factory=dict, resume=ANY)
    directory: str | None = option(None, resume=Resume.SAME_CONTENT, is_path=True, nemo=["path"])

    def __post_init__(self) -> None:
        check_options(self, "sample")


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("rate", 1, 1.0),
        ("rate", "1e-1", 0.1),  # how YAML 1.1 reads a number without a point
        ("eps", None, None),
        ("mode", "exact", "exact"),
        ("tiles", "auto", "auto"),
        ("tiles", 2, 2),
        ("kept", True, True),
        ("kept", 3, 3),
        ("names", ["a", "b"], ("a", "b")),
        ("weights", {"a": 1.0}, {"a": 1.0}),
    ],
)
def test_values_are_stored_in_their_types(name: str, given: object, stored: object) -> None:
    found = getattr(Sample(**{name: given}), name)
    assert found == stored and type(found) is type(stored)


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"count": 0}, ("sample.count must be at least 1, got 0",)),
    ({"count": True}, ("sample.count must be int, got True of type bool", "a whole number without quotes")),
    ({"rate": -0.5}, ("sample.rate must be at least 0, got -0.5",)),
    ({"rate": 1.5}, ("sample.rate must be at most 1, got 1.5",)),
    ({"rate": math.inf}, ("sample.rate must be finite, got inf",)),
    ({"eps": 0}, ("sample.eps must be above 0 and finite, got 0",)),
    ({"eps": ""}, ("sample.eps must be float or null, got ''",)),
    ({"mode": "exakt"}, ("sample.mode 'exakt' is not one of [None, 'fast', 'exact']: did you mean 'exact'?",)),
    ({"tiles": "all"}, ("sample.tiles must be int or 'auto', got 'all'",)),
    ({"kept": 0}, ("sample.kept must be at least 1, got 0",)),
    ({"names": "ab"}, ("sample.names must be tuple", "got 'ab'", "a list in brackets")),
    ({"weights": ["a"]}, ("sample.weights must be dict", "a mapping")),
    ({"directory": " "}, ("sample.directory is empty: name a file or directory",)),
    ({"directory": "a\0b"}, ("sample.directory", "zero byte")),
]


@pytest.mark.parametrize(("given", "says"), REFUSED, ids=str)
def test_errors_name_the_option_the_value_and_how_to_write_it(given: dict[str, Any], says: tuple[str, ...]) -> None:
    assert_says(error_message(lambda: Sample(**given)), *says)


def test_declarations_and_defaults() -> None:
    fields = {field.name: field for field in dataclasses.fields(Sample)}
    assert declaration(fields["directory"]).resume is Resume.SAME_CONTENT
    assert declaration(fields["directory"]).nemo == {"path": None}
    first, second = default_of(fields["weights"]), default_of(fields["weights"])
    assert first == second == {} and first is not second
    assert default_of(fields["tiles"]) == "auto"
