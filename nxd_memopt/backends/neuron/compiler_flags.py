"""Reads neuronx-cc's optimisation level from NEURON_CC_FLAGS, and whether it allows recompute."""

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
    if not levels:
        return DEFAULT_LEVEL
    return levels[-1]


def with_optimization_level(flags: str, level: int) -> str:
    """Return ``flags`` with all their levels replaced by one ``-O<level>`` at the end."""
    other_words, _ = _parse(flags)
    return shlex.join([*other_words, f"-O{level}"])


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
    found = f"says -O{level}"
    if not levels:
        found = f"names no level, which means -O{level}"
    corrected = shlex.quote(with_optimization_level(flags, RECOMPUTE_LEVEL))
    return (
        f"activation recompute needs neuronx-cc at -O{RECOMPUTE_LEVEL}, but NEURON_CC_FLAGS "
        f"{found}: there it may merge the recomputation with the forward pass, and no memory is "
        f"saved; before the first compile set NEURON_CC_FLAGS={corrected}"
    )


def _parse(flags: str) -> tuple[list[str], list[int]]:
    """Return the words that name no level, and the levels in order."""
    try:
        words = iter(shlex.split(flags))
    except ValueError as error:
        raise ValueError(f"NEURON_CC_FLAGS {flags!r} cannot be split into words: {error}") from error
    other_words: list[str] = []
    levels: list[int] = []
    for word in words:
        found = re.fullmatch(r"-O(.*)|--optlevel(?:=(.*))?", word)
        if found:
            level = found[1] or found[2]
            # ``-O 1`` and ``--optlevel 1``: the level is the next word, if there is one. An empty
            # ``--optlevel=`` has no level.
            if not level and not word.endswith("="):
                level = next(words, "")
            if not level or not level.isdecimal():
                raise ValueError(f"NEURON_CC_FLAGS {flags!r}: {word} needs a level from 1 to 3, got {level!r}")
            levels.append(int(level))
        else:
            other_words.append(word)
    return other_words, levels
