"""Says which parameters the optimizer files of another number of pipeline stages have, in the files' order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.parallel_layers.rank_files import RankFiles, find_rank_files
from nxd_memopt.parallel_layers.tensor_files import read_stored, resolve
from nxd_memopt.parallel_layers.utils import bit_equal

StageParameters = list[list[list[int | None]]]
"""[stage of the files][group][number in the group] -> position among this optimizer's parameters, None: elsewhere."""
_ELSEWHERE, _COPY, _OWN = "-cp"
"""Kinds of a tensor of the files on a rank; an earlier stage has the parameter of a ``_COPY`` too."""
_CHUNK = 500
"""Characters that ranks share at once; a text is cut at 2,048 bytes (``coordination``)."""

Entry = tuple[int, str]
"""A stage of the files, and the name of a tensor of it."""


def parameters_of_stages(source: Path, optimizer: Any, model: Any) -> StageParameters:
    """Return the parameters of each stage that has written ``source``; empty if this run has as many stages.

    The files of an optimizer number its parameters, group by group in the order of the model, without names. The
    names and their order are in the model's files; the group of each is known to the ranks that have it. Every rank
    calls.

    Raises:
        ValueError: on every rank, if files are missing, the groups are not in the model's order, or it is not clear
            which weights are tied.
    """
    if not isinstance(model, nn.Module):
        return []
    entries: list[Entry] = []
    with raise_together(f"loading {source}"):
        files = find_rank_files(source / "model")
        stages = files.pipeline_model_parallel_size
        if stages != parallel_state.get_pipeline_model_parallel_size():
            for stage in range(stages):
                entries += [(stage, name) for name in read_stored(files.file(0, stage))]
    if not entries:
        return []
    own = _own_parameters(optimizer, model)
    described = [_described(entry, entries, own) for entry in entries]
    shared = _shared("".join(kind for kind, _ in described) + "".join(group for _, group in described))
    with raise_together(f"loading {source}"):
        # All ranks that have a parameter say the same of it, but for a copy of a tied weight, which is less.
        known = [max(text[i] for text in shared) for i in range(2 * len(entries))]
        kinds, groups = known[: len(entries)], known[len(entries) :]
        originals = _originals(files, entries, kinds)
        return _in_order_of_files(entries, kinds, groups, own, originals, len(optimizer.param_groups))
    raise AssertionError("raise_together raises")


@dataclass(frozen=True)
class _Own:
    """A name of a parameter of this rank.

    Args:
        kind: ``_OWN`` or ``_COPY``.
        group: number of its parameter group.
        position: number among the optimizer's parameters.
        first_name: name of the same parameter that comes first; mostly its own.
    """

    kind: str
    group: int
    position: int
    first_name: str


def _own_parameters(optimizer: Any, model: nn.Module) -> dict[str, _Own]:
    """Return the optimizer's parameters by their names in the model."""
    places: dict[int, tuple[int, int]] = {}
    for group, options in enumerate(optimizer.param_groups):
        for param in options["params"]:
            places[id(param)] = (group, len(places))
    found: dict[str, _Own] = {}
    first_names: dict[int, str] = {}
    # The state dict has all names of a parameter, also of one that a rank has twice.
    for name, param in model.state_dict(keep_vars=True).items():
        if id(param) not in places:
            continue
        first_name = first_names.setdefault(id(param), name)
        kind = _COPY if name != first_name or getattr(param, "shared", False) else _OWN
        found[name] = _Own(kind, *places[id(param)], first_name)
    return found


def _described(entry: Entry, entries: Sequence[Entry], own: Mapping[str, _Own]) -> tuple[str, str]:
    """Return what this rank knows of a tensor of the files: its kind, and its group as a character."""
    stage, name = entry
    # A parameter with two names in one stage has one number.
    if name not in own or (own[name].first_name != name and (stage, own[name].first_name) in entries):
        return _ELSEWHERE, _ELSEWHERE
    return own[name].kind, chr(ord("0") + own[name].group)


def _shared(text: str) -> list[str]:
    """Return the text of every rank; all are equally long. Every rank calls."""
    chunks = [share_texts(text[start : start + _CHUNK]) for start in range(0, len(text), _CHUNK)]
    return ["".join(parts) for parts in zip(*chunks, strict=True)]


def _originals(files: RankFiles, entries: Sequence[Entry], kinds: Sequence[str]) -> dict[Entry, Entry]:
    """Return the tensor that each copy of the files is tied to, if one stage of them has both: equal values tell.

    Raises:
        ValueError: several tensors have the values of a copy.
    """
    found: dict[Entry, Entry] = {}
    for copy in (entry for entry, kind in zip(entries, kinds, strict=True) if kind == _COPY):
        stored = read_stored(files.file(0, copy[0]))
        values = resolve(stored[copy[1]])
        equal: list[Entry] = []
        for entry, kind in zip(entries, kinds, strict=True):
            if kind == _OWN and entry[0] == copy[0] and bit_equal(resolve(stored[entry[1]]), values):
                equal.append(entry)
        if len(equal) > 1:
            names = [name for _, name in equal]
            raise ValueError(
                f"{files.directory}: {copy[1]} is shared by stages, and has the values of each of {names}: use the "
                "checkpoint's pipeline_model_parallel_size"
            )
        if equal:
            found[copy] = equal[0]
    return found


def _in_order_of_files(
    entries: Sequence[Entry],
    kinds: Sequence[str],
    groups: Sequence[str],
    own: Mapping[str, _Own],
    originals: Mapping[Entry, Entry],
    num_groups: int,
) -> StageParameters:
    """Return the parameters of the files' stages, from kind and group of each of their tensors."""
    copied = {original: own[copy[1]].position for copy, original in originals.items() if copy[1] in own}
    found: StageParameters = [[[] for _ in range(num_groups)] for _ in range(1 + entries[-1][0])]
    for entry, kind, group in zip(entries, kinds, groups, strict=True):
        # Neither a buffer nor a parameter that no rank trains has a number; both names of a tied weight have one.
        if kind == _ELSEWHERE or entry in originals:
            continue
        stage, name = entry
        position = own[name].position if name in own else copied.get(entry)
        positions = found[stage][ord(group) - ord("0")]
        # A copy of a tied weight has a place of its own in the order, at the end of the last stage.
        others = [other for other in positions if other is not None and other not in copied.values()]
        if position is not None and kind != _COPY and entry not in copied and position < max(others, default=-1):
            raise ValueError(
                "a parameter group of the optimizer is not in the order of the model, in which files of another "
                "number of stages have it: build the groups in this order, or use the checkpoint's size"
            )
        positions.append(position)
    return found
