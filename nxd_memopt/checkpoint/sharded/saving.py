"""Writes one rank's part of a training checkpoint, and on rank 0 the index that makes the
checkpoint complete.

Each rank writes ``rank_XXXXX.safetensors`` and then ``rank_XXXXX.json``, which lists the content
and marks the first file as complete. Rank 0 merges the JSON files into ``index.json`` and renames
the directory. A failed rank writes ``rank_XXXXX.failed``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nxd_memopt.checkpoint.directories import replace_directory, require_visible
from nxd_memopt.checkpoint.layout import Part
from nxd_memopt.checkpoint.plain import encode, require_plain
from nxd_memopt.checkpoint.sharded.fingerprint import flat_config, parallel_sizes
from nxd_memopt.checkpoint.sharded.index import (
    FORMAT,
    INDEX,
    VERSION,
    merge_optimizers,
    merge_tensors,
    read_checked_json,
    versions,
    write_json,
)
from nxd_memopt.checkpoint.sharded.logical import (
    TrainingState,
    model_tensors,
    optimizer_groups,
    optimizer_numbers,
    optimizer_tensors,
    owned_parts,
    parameter_names,
)
from nxd_memopt.checkpoint.sharded.markers import Heartbeat, rank_file, wait_for_ranks
from nxd_memopt.checkpoint.sharded.snapshot import SnapshotSource
from nxd_memopt.checkpoint.sharded.steps import incomplete_directory, prune, step_directory
from nxd_memopt.checkpoint.stream import DTYPES, Entry, dtype_name, encode_header, in_file_order, write_file
from nxd_memopt.parallel_layers import parallel_state

_COMPLETE = ".json"


class RankSave:
    """One rank's part of a checkpoint.

    Args:
        directory: directory of the run.
        step: optimizer steps done.
        state: the state to save. Plain values are copied now, tensors when they are read.
        config: recorded in the checkpoint and compared by a resumed run.
        keep: number of complete checkpoints to keep.
        keep_step: step of another checkpoint to keep, if any.

    Raises:
        ValueError: the state contains something that cannot be stored.
    """

    def __init__(
        self,
        directory: str | Path,
        step: int,
        state: TrainingState,
        config: Mapping[str, Any],
        keep: int,
        keep_step: int | None = None,
    ) -> None:
        self.parent = Path(directory)
        self.keep = keep
        self.keep_step = keep_step
        self.target = step_directory(directory, step)
        self.incomplete = incomplete_directory(directory, step)
        self._rank = parallel_state.get_global_rank()
        self.file = rank_file(self.incomplete, self._rank, ".safetensors").name
        self._fragment: dict[str, Any] = {"file": self.file, "tensors": {}, "plain_tensors": {}}
        # Key in the file -> JSON entry that receives the checksum.
        self._json_entries: dict[str, dict[str, Any]] = {}
        # The file order sorts by element size (alignment); keys are unique within the rank.
        sources = [*self._tensor_sources(state), *self._plain_sources(state)]
        by_key = {source.entry.key: source for source in sources}
        self.sources = [by_key[entry.key] for entry in in_file_order(source.entry for source in sources)]
        self._head = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "config": flat_config(config),
            "sizes": parallel_sizes(),
            "versions": versions(),
            "base": state.base,
        }

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        return sum(source.entry.size_bytes for source in self.sources)

    def _tensor_sources(self, state: TrainingState) -> list[SnapshotSource]:
        """Return the sources of this rank's boxes and record the boxes in the fragment."""
        logicals = list(model_tensors(state.model, frozen=state.base is None))
        if state.optimizer is not None:
            logicals += optimizer_tensors(state.optimizer, parameter_names(state.model))
        sources = []
        # Every tensor enters the fragment, also without boxes of this rank: ranks must agree on
        # all shapes.
        for logical, parts in owned_parts(logicals):
            boxes: list[dict[str, Any]] = []
            for part in parts:
                key = _key(logical.name, part.offset, part.size, logical.shape)
                # ``write`` adds the checksum to this entry, which the fragment contains too.
                box = {"offset": list(part.offset), "size": list(part.size), "file": self.file, "key": key}
                boxes.append(box)
                self._json_entries[key] = box
                entry = Entry(key, DTYPES[logical.dtype], part.size)
                sources.append(SnapshotSource(entry, logical.stored, part, logical.is_updated_by_optimizer))
            described = {"shape": list(logical.shape), "dtype": logical.dtype, "boxes": boxes}
            self._fragment["tensors"][logical.name] = described
        return sources

    def _plain_sources(self, state: TrainingState) -> list[SnapshotSource]:
        """Encode the nested plain values.

        Their tensors become sources that are copied when the save begins.
        """
        sources: list[SnapshotSource] = []

        def put(tensor: Tensor) -> str:
            key = f"plain.{self._rank}.{len(sources)}"
            tensor = tensor.detach()
            dtype = dtype_name(tensor.dtype, key)
            shape = tuple(tensor.shape)
            json_entry = {"shape": list(shape), "dtype": dtype, "file": self.file}
            self._fragment["plain_tensors"][key] = json_entry
            self._json_entries[key] = json_entry
            # One box that covers the complete tensor.
            part = Part((0,) * len(shape), shape, 0, shape, 0, 0, (0,))
            entry = Entry(key, DTYPES[dtype], shape)
            sources.append(SnapshotSource(entry, tensor, part, is_updated_by_optimizer=False))
            return key

        plain: dict[str, Any] = {"per_rank": dict(state.per_rank)}
        # Values that are equal on all ranks are stored once, by rank 0; what the optimizer has of a stage's parameters
        # by the first rank of the stage.
        if parallel_state.is_global_rank_zero():
            plain["shared"] = dict(state.shared)
        ranks = (parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
        if ranks == (0, 0) and state.optimizer is not None:
            names = parameter_names(state.model)
            plain["optimizer"] = {
                "groups": optimizer_groups(state.optimizer, names),
                "numbers": optimizer_numbers(state.optimizer, names),
            }
        for name, values in plain.items():
            require_plain(values, name)
            self._fragment[name] = encode(values, put)
        return sources

    def write(self, chunks_of: Callable[[int], Iterable[Tensor]]) -> None:
        """Write this rank's files and flush them.

        ``chunks_of(i)`` yields the bytes of ``sources[i]`` in chunks.

        Raises:
            OSError: the disk is full, or the directory was removed.
            ValueError: the directory is not visible on this host.
        """
        require_visible(self.incomplete)
        entries = [source.entry for source in self.sources]
        # Checksums are computed while the bytes are written: one pass over the data. Reading the
        # file again would double the input and output of a save.
        checksums = write_file(self.incomplete / self.file, entries, chunks_of)
        for entry, checksum in zip(entries, checksums, strict=True):
            self._json_entries[entry.key]["crc32"] = checksum
        # The fragment is written last: its presence means that the tensor file is complete.
        self._fragment["bytes"] = len(encode_header(entries)) + self.size_bytes
        write_json(rank_file(self.incomplete, self._rank, _COMPLETE), self._fragment)

    def wait_for_ranks(self, heartbeat: Heartbeat) -> None:
        """Wait until every rank's files are complete.

        Rank 0 calls, without collectives: it polls the directory.

        Raises:
            AbandonedError: a rank has failed.
        """
        wait_for_ranks(self.incomplete, self._head["sizes"]["world_size"], _COMPLETE, heartbeat)

    def complete(self) -> None:
        """Write the index, rename the directory, and remove old checkpoints.

        Rank 0 calls, after ``write`` of all ranks.

        Raises:
            ValueError: the boxes of the ranks do not cover every full tensor.
        """
        # Merge, write the index, remove the fragments, rename: before the rename the directory
        # does not count as a checkpoint.
        world_size = self._head["sizes"]["world_size"]
        paths = [rank_file(self.incomplete, rank, _COMPLETE) for rank in range(world_size)]
        fragments = [read_checked_json(path) for path in paths]
        # Keys contain the rank, so the tables of the ranks have no key in common.
        plain_tensors: dict[str, Any] = {}
        for fragment in fragments:
            plain_tensors.update(fragment["plain_tensors"])
        content = {
            **self._head,
            "files": {fragment["file"]: fragment["bytes"] for fragment in fragments},
            "tensors": merge_tensors(fragments),
            "plain_tensors": plain_tensors,
            "optimizer": merge_optimizers([fragment["optimizer"] for fragment in fragments if "optimizer" in fragment]),
            # Of the values that are equal on all ranks only rank 0 stores a copy.
            "shared": fragments[0]["shared"],
            "per_rank": [fragment["per_rank"] for fragment in fragments],
        }
        write_json(self.incomplete / INDEX, content)
        for path in paths:
            path.unlink()
        replace_directory(self.incomplete, self.target)
        prune(self.parent, self.keep, self.keep_step)


def _key(name: str, offset: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Return the name of the full tensor, with the range of a partial box:
    ``model.norm.weight[0:8]``.
    """
    if math.prod(size) == math.prod(shape):
        return name
    ranges = [f"{start}:{start + count}" for start, count in zip(offset, size, strict=True)]
    return f"{name}[{','.join(ranges)}]"
