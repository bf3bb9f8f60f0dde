"""Finds the rank files of a checkpoint that neuronx-distributed or this library wrote, and which ranks they belong to.

Layouts, with ``XX`` a rank of at least two digits:

- ``dp_rank_XX_tp_rank_XX_pp_rank_XX.pt``: the trainer, in ``TAG/model`` and ``TAG/optim``;
  also xser.
- ``tp_rank_XX_pp_rank_XX/checkpoint.pt``, ``tp_rank_XX_pp_rank_XX`` (xser), both optionally with
  ``_dp_rank_XX``: ``parallel_layers.checkpointing.save``.
- ``optim.dp_rank_XX.tp_rank_XX``: ``NeuronZero1Optimizer.save_sharded_state_dict``.
- ``full_tp_rank_XX_pp_rank_XX.pt``: NxD's ``convert_zero_checkpoints.py``, one file for all
  data-parallel ranks.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

_TRAINER = re.compile(r"dp_rank_(?P<dp>\d+)_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt")
_PATTERNS = {
    "model": (_TRAINER, re.compile(r"tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)(_dp_rank_(?P<dp>\d+))?")),
    "optim": (
        _TRAINER,
        re.compile(r"optim\.dp_rank_(?P<dp>\d+)\.tp_rank_(?P<tp>\d+)"),
        re.compile(r"full_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt"),
    ),
}
_EXPERT_PARALLEL = re.compile(r"dp_rank_\d+_ep_rank_\d+_tp_rank_\d+_pp_rank_\d+\.pt")

Ranks = tuple[int, int, int]
"""Data-, tensor- and pipeline-parallel rank."""


@dataclass(frozen=True)
class RankFiles:
    """Files of one directory, one for each combination of ranks.

    Attributes:
        directory: directory of the files.
        files: files by data-, tensor- and pipeline-parallel rank.
        data_parallel_size: size in the run that wrote the files; 1 for replicated content.
        tensor_model_parallel_size: size in the run that wrote the files.
        pipeline_model_parallel_size: size in the run that wrote the files.
    """

    directory: Path
    files: dict[Ranks, Path]
    data_parallel_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int

    def file(self, tensor_rank: int, pipeline_rank: int = 0, data_rank: int = 0) -> Path:
        """Return the file of the given ranks.

        Raises:
            ValueError: the checkpoint has no such rank.
        """
        ranks = (data_rank, tensor_rank, pipeline_rank)
        if ranks not in self.files:
            raise ValueError(
                f"{self.directory} has no file of {_format_ranks(ranks)}: it was written with {self.sizes()}"
            )
        return self.files[ranks]

    def of_stage(self, rank: int, size: int) -> RankFiles:
        """Return the files of one pipeline stage, as those of a run without stages; all files in a run of one stage.

        Args:
            rank: the stage.
            size: number of stages of this run.

        Raises:
            ValueError: the files are of another number of stages.
        """
        if size == 1:
            return self
        if self.pipeline_model_parallel_size != size:
            raise ValueError(
                f"{self.directory} was written with {self.sizes()}, this run has pipeline_model_parallel_size {size}: "
                "load the model and the optimizer together, or use the checkpoint's size"
            )
        own = {(data, tensor, 0): path for (data, tensor, stage), path in self.files.items() if stage == rank}
        return replace(self, files=own, pipeline_model_parallel_size=1)

    def sizes(self) -> str:
        """Return the sizes as text for messages."""
        return (
            f"tensor_model_parallel_size {self.tensor_model_parallel_size}, pipeline_model_parallel_size "
            f"{self.pipeline_model_parallel_size} and {self.data_parallel_size} data-parallel shards"
        )


def find_rank_files(directory: str | Path, kind: Literal["model", "optim"] = "model") -> RankFiles:
    """Return the rank files of ``directory``.

    Args:
        directory: the directory of the files, not its parent.
        kind: content of the files; a directory may have both kinds.

    Raises:
        ValueError: there are no files, ranks are missing, several layouts are mixed, or the layout
            is not supported: expert parallelism or torch.distributed.checkpoint
            (``use_zero1_dcp=True``).
    """
    path = Path(directory)
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory: pass the one that holds the rank files")
    names = sorted(entry.name for entry in path.iterdir())
    _refuse_other_layouts(path, names)
    # Each pattern is one layout. With files of two layouts it is unknown which save is meant.
    found = [_match(path, names, pattern) for pattern in _PATTERNS[kind]]
    layouts = [files for files in found if files]
    if not layouts:
        other = "tp_rank_XX_pp_rank_XX" if kind == "model" else "optim.dp_rank_XX.tp_rank_XX"
        expected = f"dp_rank_XX_tp_rank_XX_pp_rank_XX.pt or {other}"
        raise ValueError(f"{path} holds no rank files, expected {expected}, found {names[:5]}: check the directory")
    if len(layouts) > 1:
        examples = [next(iter(files.values())).name for files in layouts]
        raise ValueError(f"{path} holds files of several layouts, such as {examples}: leave one of them there")
    return _complete(path, layouts[0])


def _refuse_other_layouts(path: Path, names: list[str]) -> None:
    """Raise ValueError for torch.distributed.checkpoint and expert-parallel files."""
    if ".metadata" in names:
        raise ValueError(
            f"{path} holds .metadata, a torch.distributed.checkpoint of use_zero1_dcp=True, whose metadata is a "
            "pickle: save the optimizer with neuronx-distributed and use_zero1_dcp=False"
        )
    expert = [name for name in names if _EXPERT_PARALLEL.fullmatch(name)]
    if expert:
        raise ValueError(
            f"{path} holds {expert[0]}, a file of an expert-parallel rank, which is not supported: "
            "save it with expert_model_parallel_size 1"
        )


def _match(path: Path, names: list[str], pattern: re.Pattern[str]) -> dict[Ranks, Path]:
    """Return the files with names that match ``pattern``, by rank.

    Raises:
        ValueError: two files belong to the same ranks.
    """
    files: dict[Ranks, Path] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if not match:
            continue
        groups = match.groupdict()
        ranks = (int(groups.get("dp") or 0), int(groups["tp"]), int(groups.get("pp") or 0))
        # E.g. names with and without ``_dp_rank_00``: reading either file would be a guess.
        if ranks in files:
            other = files[ranks].relative_to(path).parts[0]
            raise ValueError(
                f"{path} holds two files of {_format_ranks(ranks)}, {other} and {name}: remove the one of another save"
            )
        # A directory has torch.save's checkpoint.pt; a file is xser or the trainer's.
        file = path / name
        if file.is_dir():
            file /= "checkpoint.pt"
        files[ranks] = file
    return files


def _complete(path: Path, files: dict[Ranks, Path]) -> RankFiles:
    """Return the files of all ranks up to the largest ones.

    Raises:
        ValueError: a rank's file is missing.
    """
    # The sizes of the run that wrote the files follow from the largest ranks. Files that are
    # missing at the end are not noticed here: readers check the sizes against shapes.
    data, tensor, pipeline = (1 + max(ranks[i] for ranks in files) for i in range(3))
    expected = list(itertools.product(range(data), range(tensor), range(pipeline)))
    missing: list[str] = []
    for ranks in expected:
        if ranks not in files or not files[ranks].is_file():
            missing.append(_format_ranks(ranks))
    if missing:
        last = _format_ranks((data - 1, tensor - 1, pipeline - 1))
        raise ValueError(
            f"{path} has files of ranks up to {last} but lacks {len(missing)} of {len(expected)}: "
            f"{missing[:5]}: copy the missing files, or save the checkpoint again"
        )
    return RankFiles(path, files, data, tensor, pipeline)


def _format_ranks(ranks: Ranks) -> str:
    return "dp_rank {} tp_rank {} pp_rank {}".format(*ranks)
