"""Tests the option reference: it is that of the present options, and an option without a text is noticed."""

from __future__ import annotations

import dataclasses

import pytest

from nxd_memopt.training.config.train_config import SECTIONS
from scripts import option_reference


def test_the_reference_has_every_option() -> None:
    text = option_reference.FILE.read_text(encoding="utf-8")
    assert text == option_reference.option_reference(), "run python -m scripts.option_reference --write"
    for section, cls in SECTIONS.items():
        assert f"\n## {section}\n" in text
        assert all(f"\n| `{field.name}` | " in text for field in dataclasses.fields(cls))


@pytest.mark.parametrize("described", ["a: one.", "a: one.\n        b: two.\n        c: three."])
def test_an_option_without_a_text_and_a_text_without_an_option(described: str) -> None:
    cls = dataclasses.make_dataclass("Options", [("a", int), ("b", int)])
    cls.__doc__ = f"""Options.

    Args:
        {described}
    """
    with pytest.raises(SystemExit, match="describes other options"):
        option_reference.descriptions(cls)
