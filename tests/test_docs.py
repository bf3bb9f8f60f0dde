"""Documents: relative links lead to files and headings, and the messages that a page explains exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(document: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert text.startswith("# "), "a document begins with its title"
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in anchors(path), f"{target}: no such heading, there are {sorted(anchors(path))}"


def test_messages_of_troubleshooting() -> None:
    """Every message that the page explains is a text of the library's source."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "nxd_memopt").rglob("*.py"))
    assert len(messages) > 10
    assert [message for message in messages if message not in source] == []


def test_formulas_of_memory_exist() -> None:
    """The tables of bytes name the planner's functions."""
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`planner\.([\w.]+)\.(\w+)`", page))
    assert len(named) > 8
    missing = [
        f"{module}.{function}"
        for module, function in sorted(named)
        if not hasattr(importlib.import_module(f"nxd_memopt.planner.{module}"), function)
    ]
    assert missing == []
