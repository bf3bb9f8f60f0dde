"""Writes neuronx-distributed's checkpoint files by its documented layout, without the library's code."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch


class TensorReference:
    def __init__(self, tid):
        self.tid = tid


class _InternalTensorReference:
    def __init__(self, tid, shape, dtype, expert_model_parallel):
        self.tid, self.shape, self.dtype = tid, shape, dtype
        self.expert_model_parallel = expert_model_parallel


TensorReference.__module__ = "torch_xla.utils.serialization"
_InternalTensorReference.__module__ = "neuronx_distributed.trainer.checkpoint"


@contextmanager
def reference_classes():
    """Modules of the names that pickle looks the classes up in, for the time of a save or an unpickling load."""
    modules = {}
    for cls in (TensorReference, _InternalTensorReference):
        parts = cls.__module__.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            modules.setdefault(name, ModuleType(name))
            if end > 1:
                setattr(modules[".".join(parts[: end - 1])], parts[end - 1], modules[name])
        setattr(modules[cls.__module__], cls.__name__, cls)
    with mock.patch.dict(sys.modules, modules):
        yield


def write_rank(path: Path, content, *, xser: bool = False, info: bool = True) -> None:
    """One rank's file; xser: a reference for each tensor, and one file per tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not xser:
        torch.save(content, path)
        return
    folder = Path(f"{path}.tensors")
    folder.mkdir()
    infos = {}

    def replaced(value, in_list=False):
        if isinstance(value, torch.Tensor):
            tid = len(infos)
            infos[tid] = {"dtype": value.dtype, "shape": value.shape, "expert_model_parallel": False}
            torch.save(value.clone(), folder / f"tensor_{tid}.pt")
            # NxD's trainer turns its own class into torch_xla's in dicts only.
            return _InternalTensorReference(tid, value.shape, value.dtype, False) if in_list else TensorReference(tid)
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item, in_list=True) for item in value]
        return value

    references = replaced(content)
    with reference_classes():
        torch.save(references, path)
    if info:
        torch.save(infos, f"{path}.info.pt")


def read_xser(path: Path):
    """What torch_xla's own loader returns: it unpickles the references and reads each tensor's file."""
    with reference_classes():
        content = torch.load(path, weights_only=False)

    def resolved(value):
        if isinstance(value, TensorReference):
            return torch.load(Path(f"{path}.tensors") / f"tensor_{value.tid}.pt", weights_only=False)
        if isinstance(value, dict):
            return {key: resolved(item) for key, item in value.items()}
        return [resolved(item) for item in value] if isinstance(value, list) else value

    return resolved(content)


def write_tag(directory: Path, tag: str, files: dict, *, xser: bool = False, user_content=None) -> None:
    """A tag of ``nxd.save_checkpoint``: ``files`` maps ``model/...`` and ``optim/...`` names to contents."""
    for name, content in files.items():
        write_rank(directory / tag / name, content, xser=xser)
    if user_content is not None:
        torch.save(user_content, directory / tag / "user_content.pt")
    (directory / tag / "checkpoint").write_text("1")
    (directory / tag / "done").write_text("1")


def rank_name(tensor: int, pipeline: int = 0, data: int = 0) -> str:
    return f"dp_rank_{data:02d}_tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}.pt"


def row_shard(local: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """torch_xla's ZeRO-1 shard: dimension 0 padded with zeros to a multiple of ``size``, and cut."""
    missing = -local.size(0) % size
    padded = torch.cat([local, local.new_zeros(missing, *local.shape[1:])])
    return padded.chunk(size)[rank].clone()
