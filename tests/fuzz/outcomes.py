"""What a draw ended in, and the kinds of refusals with the reasons for them."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REASONS = Path(__file__).with_name("refusals.toml")
PASSED, REFUSED, FAILED = "passed", "refused", "failed"


@dataclass(frozen=True)
class Outcome:
    """Result of a draw.

    Args:
        outcome: ``passed``, ``refused`` (by a ValueError on every rank) or ``failed``.
        message: the refusal, or what differs and by how much.
    """

    outcome: str
    message: str = ""


def kind_of(message: str) -> str:
    """Return a refusal's message without its values."""
    first = message.splitlines()[0]
    first = re.sub(r"\[[^\]]*\]|\{[^}]*\}", "[..]", first)
    first = re.sub(r"'[^']*'", "'..'", first)
    return re.sub(r"(?<![A-Za-z_])-?\d+(\.\d+)?(e-?\d+)?", "N", first)


def reasons() -> dict[str, str]:
    """Return the reason of each kind of refusal that is known, by a text that its message contains."""
    rows = tomllib.loads(REASONS.read_text(encoding="utf-8"))["refusal"]
    return {row["text"]: row["reason"] for row in rows}


def reason_of(message: str) -> str | None:
    """Return why the library refuses, or None for a refusal that is not listed."""
    for text, reason in reasons().items():
        if text in kind_of(message):
            return reason
    return None


def summarize(records: Iterable[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return the lines of the summary, and whether all draws passed or were refused for a listed reason."""
    records = list(records)
    lines: list[str] = []
    for layer in ("library", "program"):
        counts = Counter(record["outcome"] for record in records if record["spec"]["layer"] == layer)
        if counts:
            numbers = ", ".join(f"{counts[name]} {name}" for name in (PASSED, REFUSED, FAILED))
            lines.append(f"{layer}: {sum(counts.values())} draws, {numbers}")
    refused = [record["message"] for record in records if record["outcome"] == REFUSED]
    kinds = Counter(kind_of(message) for message in refused)
    unlisted = 0
    for kind, count in kinds.most_common():
        reason = reason_of(kind)
        unlisted += reason is None
        lines += [f"{count:5} x {kind}", f"        {reason or 'NOT LISTED in ' + REASONS.name}"]
    failed = [record for record in records if record["outcome"] == FAILED]
    lines += [f"FAILED draw {record['draw']}: {record['message'].splitlines()[0]}" for record in failed]
    return lines, not failed and not unlisted
