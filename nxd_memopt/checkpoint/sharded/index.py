"""The JSON index of a training checkpoint: the boxes of each full tensor, and the file of each box.

Version 2 of the format. ``tensors`` has the shape, the dtype and the boxes of each full tensor. A
box has an offset and a size in the full tensor, a file, a key in the file, and the CRC-32 of its
bytes. The index contains a checksum of itself. It is written last.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nxd_memopt import __version__
from nxd_memopt.checkpoint.directories import remedy_for_damage, write_text
from nxd_memopt.checkpoint.files import read_json
from nxd_memopt.checkpoint.layout import Part, Shape, overlap, within
from nxd_memopt.checkpoint.stream import DTYPES, Entry, TensorFile

INDEX = "index.json"
FORMAT = "nxd_memopt training checkpoint"
VERSION = 2
_ROWS = 512  # boxes per block of the pairwise comparison


def versions() -> dict[str, str]:
    """Return the versions that a checkpoint records."""
    return {"nxd_memopt": __version__, "torch": torch.__version__}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` with its checksum. The file is complete or absent, also after a crash of the host."""
    write_text(path, json.dumps({**content, "checksum": checksum_of(content)}, allow_nan=False) + "\n")


def read_checked_json(path: Path) -> dict[str, Any]:
    """Return the content that ``write_json`` wrote.

    Raises:
        ValueError: the file is damaged or was altered.
    """
    content = read_json(path)
    # JSON is normalized by sorting the keys: the checksum covers the content, not its formatting.
    recorded = content.pop("checksum", None)
    found = checksum_of(content)
    if recorded != found:
        raise ValueError(f"{path} has the checksum {recorded} and its content {found}: it was altered: copy it again")
    return content


def checksum_of(content: Mapping[str, Any]) -> str:
    """Return the CRC-32 of ``content`` as JSON with sorted keys."""
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def merge_tensors(fragments: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the boxes of all ranks.

    Raises:
        ValueError: ranks disagree on a full tensor, or the boxes do not cover it exactly once.
    """
    merged: dict[str, Any] = {}
    for rank, fragment in enumerate(fragments):
        for name, tensor in fragment["tensors"].items():
            # The first rank with a tensor sets shape and dtype; every other rank must agree.
            known = merged.setdefault(name, {"shape": tensor["shape"], "dtype": tensor["dtype"], "boxes": []})
            if (known["shape"], known["dtype"]) != (tensor["shape"], tensor["dtype"]):
                raise ValueError(
                    f"{name} is {tensor['dtype']} {tensor['shape']} on rank {rank} and {known['dtype']} "
                    f"{known['shape']} on a rank before it: build the same model on all ranks"
                )
            known["boxes"] += tensor["boxes"]
    for name, tensor in merged.items():
        _require_exact_cover(name, tensor)
    return merged


def merge_optimizers(stages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Merge the groups and numbers of the optimizers of a pipeline's stages; None without an optimizer.

    Groups at the same position with the same options are one group.
    """
    if not stages:
        return None
    groups: dict[str, dict[str, Any]] = {}
    numbers: dict[str, Any] = {}
    # Two groups may have the same options, as with weight decay 0: then their positions tell them apart.
    has_positions = len({len(stage["groups"]) for stage in stages}) == 1
    for stage in stages:
        for position, group in enumerate(stage["groups"]):
            key = json.dumps([group["options"], position if has_positions else None], sort_keys=True)
            known = groups.setdefault(key, {**group, "parameters": []})
            known["parameters"] += [name for name in group["parameters"] if name not in known["parameters"]]
        numbers |= stage["numbers"]
    return {"groups": list(groups.values()), "numbers": numbers}


def _require_exact_cover(name: str, tensor: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the boxes cover the full tensor exactly once.

    Boxes inside the tensor that do not overlap and have as many elements as the tensor cover it
    exactly.
    """
    shape = tensor["shape"]
    boxes = tensor["boxes"]
    # Inside, disjoint and of the right total size together imply an exact cover: n boxes need
    # n^2 comparisons of offsets, and no element of the tensor is enumerated.
    covered = sum(math.prod(box["size"]) for box in boxes)
    expected = math.prod(shape)
    dimensions = (len(boxes), len(shape))
    low = np.array([box["offset"] for box in boxes], dtype=int).reshape(dimensions)
    high = low + np.array([box["size"] for box in boxes], dtype=int).reshape(dimensions)
    inside = np.all(low >= 0) and np.all(high <= np.array(shape, dtype=int))
    if not inside:
        problem = "lie outside of it"
    elif _overlap(low, high):
        problem = "overlap"
    elif covered != expected:
        problem = f"leave {expected - covered} of its {expected} elements out"
    else:
        return
    raise ValueError(
        f"the ranks' boxes of {name} {shape} {problem}: every element must be stored once per "
        "copy of the model; check the parameter's description (shard_ranges)"
    )


def _overlap(low: np.ndarray, high: np.ndarray) -> bool:
    """Return whether any two boxes ``low`` to ``high`` share an element; both are ``[n, dimensions]``."""
    pairs = 0
    for first in range(0, len(low), _ROWS):
        rows = slice(first, first + _ROWS)
        # [rows, n, dimensions]: two boxes overlap if their ranges overlap in every dimension.
        # Blocks of rows bound the memory of the n x n comparison.
        shared = np.minimum(high[rows, None], high[None]) > np.maximum(low[rows, None], low[None])
        pairs += int(shared.all(axis=2).sum())
    return pairs > len(low)  # each overlaps itself


@dataclass(frozen=True)
class Box:
    """A stored box of a full tensor, with the file and the key of its bytes."""

    offset: Shape
    size: Shape
    file: str
    key: str
    checksum: int


@dataclass
class Index:
    """The index of a checkpoint, and access to its tensors.

    Args:
        directory: directory of the checkpoint.

    Raises:
        ValueError: the index is damaged, altered, or of an unsupported version.
    """

    directory: Path

    def __post_init__(self) -> None:
        path = self.directory / INDEX
        with remedy_for_damage(self.directory):
            self.content = read_checked_json(path)
        if self.content.get("format") != FORMAT or self.content.get("version") != VERSION:
            raise ValueError(
                f"{path} has format {self.content.get('format')!r}, version {self.content.get('version')!r}; "
                f"{FORMAT!r}, version {VERSION} is read here: install the version of nxd_memopt that wrote it"
            )
        # Files are opened when a box needs them: a rank reads only the files of its own boxes.
        self._files: dict[str, TensorFile] = {}
        self._last: tuple[tuple[str, str], Tensor] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.content["step"]

    @property
    def sizes(self) -> dict[str, int]:
        """World, tensor- and data-parallel size of the run that wrote the checkpoint."""
        return self.content["sizes"]

    @property
    def base(self) -> dict[str, Any] | None:
        """``TrainingState.base`` of the saved state: where the parameters are that are not stored here."""
        return self.content.get("base")

    def names(self, prefix: str) -> Iterator[str]:
        """Yield the names of the full tensors that start with ``prefix``, without the prefix."""
        for name in self.content["tensors"]:
            if name.startswith(prefix):
                yield name.removeprefix(prefix)

    def __contains__(self, name: str) -> bool:
        return name in self.content["tensors"]

    def shape(self, name: str) -> Shape:
        """Return the shape of a full tensor."""
        return tuple(self.content["tensors"][name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a full tensor."""
        return DTYPES[self.content["tensors"][name]["dtype"]]

    def assemble(self, name: str, parts: list[Part], shape: Shape) -> Tensor:
        """Return a host tensor of ``shape`` that contains ``parts`` of the full tensor ``name``.

        Padding is zero.

        Raises:
            ValueError: a file is missing, damaged or altered, or the boxes do not cover the
                parts.
        """
        local = torch.zeros(shape, dtype=self.dtype(name))
        boxes = [_box(box) for box in self.content["tensors"][name]["boxes"]]
        for part in parts:
            # Copy the intersection of the wanted box with each stored box. Stored boxes do not
            # overlap, so the copied elements must add up to the elements of the part.
            target = part.of(local)
            filled = 0
            wanted = (part.offset, part.size)
            for box in boxes:
                shared = overlap(wanted, (box.offset, box.size))
                if shared is not None:
                    # ``shared`` is in coordinates of the full tensor; ``within`` converts it to
                    # coordinates of the wanted box and of the stored box.
                    stored = self._read(box, self.dtype(name))
                    target[within(shared, wanted)] = stored[within(shared, (box.offset, box.size))]
                    filled += math.prod(shared[1])
            if filled != part.elements:
                raise ValueError(
                    f"{self.directory / INDEX} covers {filled} of the {part.elements} elements of "
                    f"{name} at offset {list(part.offset)}: copy the checkpoint again"
                )
        return local

    def plain_tensor(self, key: str) -> Tensor:
        """Return a tensor of the nested plain values."""
        stored = self.content["plain_tensors"][key]
        box = Box((), tuple(stored["shape"]), stored["file"], key, stored["crc32"])
        # A copy: the caller keeps it, and what is read is mapped from a file that will be removed.
        return self._read(box, DTYPES[stored["dtype"]]).clone()

    def _read(self, box: Box, dtype: torch.dtype) -> Tensor:
        """Return the verified tensor of a box.

        The last box is cached: consecutive parts of one parameter often need the same box.
        """
        # A box is read completely, because its checksum covers all of its bytes. Only the last
        # box is cached, which bounds the host memory.
        identity = (box.file, box.key)
        if self._last is None or self._last[0] != identity:
            self._last = None  # free the previous box before the next one is read
            with remedy_for_damage(self.directory):
                tensor = self._file(box.file).read(Entry(box.key, dtype, box.size), box.checksum)
            self._last = (identity, tensor)
        return self._last[1]

    def _file(self, name: str) -> TensorFile:
        """Return an open file of the checkpoint.

        Raises:
            ValueError: the name is not listed, or would lead out of the directory.
        """
        if name not in self._files:
            # The index may come from elsewhere: a name such as ``../x`` must not be opened.
            sizes = self.content["files"]
            if name not in sizes or Path(name).name != name:
                raise ValueError(
                    f"{self.directory / INDEX} places tensors in {name!r}: files must be listed and lie in the same "
                    "directory: copy the checkpoint again"
                )
            self._files[name] = TensorFile(self.directory / name, sizes[name])
        return self._files[name]


def _box(stored: Mapping[str, Any]) -> Box:
    """Return the box of a JSON entry."""
    return Box(tuple(stored["offset"]), tuple(stored["size"]), stored["file"], stored["key"], stored["crc32"])
