"""Documents: links lead to files and headings, pages are in the navigation, and what they name and record is true."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.bench import numerics_page

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


def test_every_page_is_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    excluded = site["exclude_docs"].split()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages_of(site["nav"])) == sorted(pages.difference(excluded))


def pages_of(entries: list[dict[str, Any]]) -> list[str]:
    """The pages of a navigation, sections included."""
    found: list[str] = []
    for entry in entries:
        (target,) = entry.values()
        if isinstance(target, str):
            found.append(target)
        else:
            found += pages_of(target)
    return found


def test_recorded_errors_are_within_their_bounds_and_on_the_page() -> None:
    assert (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8") == numerics_page.page()
    for row in [*numerics_page.rows_of("models"), *numerics_page.rows_of("experts")]:
        assert float(row["loss_error"]) <= numerics_page.LOSS_BOUND, row
        assert float(row["gradient_error"]) <= numerics_page.GRADIENT_BOUND, row
        assert row["bit_equal"] == "yes", row
    for row in numerics_page.rows_of("linear"):
        assert max(float(row[name]) for name in ("dx", "dw", "db")) <= numerics_page.BF16_BOUND, row
