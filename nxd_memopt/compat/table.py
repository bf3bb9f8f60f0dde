"""Parses the short form in which alias tables are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Sources = Sequence[tuple[str, str]]
"""Pairs ``(our module, "name theirs=ours ...")``."""


def build_table(root: str, sources: Mapping[str, Sources]) -> dict[str, dict[str, str]]:
    """Return the table that ``alias.AliasFinder`` takes.

    Args:
        root: name of the aliased package.
        sources: module name below ``root`` -> pairs, such as
            ``{"pad": [("nxd_memopt.parallel_layers.pad", "pad_model")]}``; ``""`` is ``root``.
    """
    # rstrip: the entry "" is the root itself, without a dot.
    return {f"{root}.{module}".rstrip("."): dict(_entries(pairs)) for module, pairs in sources.items()}


def _entries(pairs: Sources) -> list[tuple[str, str]]:
    """Return (their name, ``"our.module:name"``) of every name in ``pairs``."""
    entries = []
    for owner, names in pairs:
        for entry in names.split():
            theirs, _, ours = entry.partition("=")
            entries.append((theirs, f"{owner}:{ours or theirs}"))
    return entries
