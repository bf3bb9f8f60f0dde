"""Reads from NEURON_CC_FLAGS which optimisation level neuronx-cc will use, and whether recompute survives it."""

from __future__ import annotations

import re
import shlex

DEFAULT_LEVEL = 2
"""neuronx-cc's default, if no flag names a level."""
RECOMPUTE_LEVEL = 1
"""The only level for which AWS documents that recomputation is not merged with the forward pass."""


def optimization_level(flags: str) -> int:
    """Return the level that neuronx-cc will use, which is the last one in ``flags``.

    Accepted spellings are ``-O1``, ``-O 1``, ``--optlevel 1`` and ``--optlevel=1``.

    Raises:
        ValueError: the flags cannot be split into words, or a level is not a number.
    """
    _, levels = _parse(flags)
    return levels[-1] if levels else DEFAULT_LEVEL


def with_optimization_level(flags: str, level: int) -> str:
    """Return ``flags`` with all their levels replaced by one ``-O<level>`` at the end."""
    others, _ = _parse(flags)
    return shlex.join([*others, f"-O{level}"])


def recompute_error(flags: str | None) -> str | None:
    """Return why recompute would save no memory with these flags, or None if it would.

    The text includes the flags to set.

    Args:
        flags: value of NEURON_CC_FLAGS, or ``None`` if it is not set.
    """
    flags = flags or ""
    level = optimization_level(flags)
    if level == RECOMPUTE_LEVEL:
        return None
    _, levels = _parse(flags)
    found = f"says -O{level}" if levels else f"names no level, which means -O{level}"
    return (
        f"activation recompute needs neuronx-cc at -O{RECOMPUTE_LEVEL}, but NEURON_CC_FLAGS {found}: there it "
        "may merge the recomputation with the forward pass, and no memory is saved; before the first compile set "
        f"NEURON_CC_FLAGS={shlex.quote(with_optimization_level(flags, RECOMPUTE_LEVEL))}"
    )


def _parse(flags: str) -> tuple[list[str], list[int]]:
    """Return the words that name no level, and the levels in order."""
    try:
        words = iter(shlex.split(flags))
    except ValueError as error:
        raise ValueError(f"NEURON_CC_FLAGS {flags!r} cannot be split into words: {error}") from error
    others: list[str] = []
    levels: list[int] = []
    for word in words:
        found = re.fullmatch(r"-O(.*)|--optlevel(?:=(.*))?", word)
        if found:
            # the level is part of the word, or the next word except after an empty --optlevel=
            level = found[1] or found[2] or ("" if word.endswith("=") else next(words, ""))
            if not level.isdecimal():
                raise ValueError(f"NEURON_CC_FLAGS {flags!r}: {word} needs a level from 1 to 3, got {level!r}")
            levels.append(int(level))
        else:
            others.append(word)
    return others, levels
