"""Reads and writes tensor files: those of ``torch.save``, and torch_xla's xser files with one file per tensor.

An xser checkpoint consists of the file ``NAME``, with a reference number N for each tensor, and the
directory ``NAME.tensors`` with ``tensor_N.pt``. neuronx-distributed's trainer adds ``NAME.info.pt``
with the dtype and shape of each tensor. The class of the references belongs to torch_xla, which need
not be installed: ``torch.load(weights_only=True)`` builds the substitute class below for that name.
No code is unpickled.
"""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.utils import map_leaves, map_tensors

XSER_REFERENCE = "torch_xla.utils.serialization.TensorReference"
XSER_INTERNAL_REFERENCE = "neuronx_distributed.trainer.checkpoint._InternalTensorReference"


class TensorReference:
    """Reference to the tensor in ``tensor_{tid}.pt``; written as torch_xla's class of this name."""

    tid: int

    def __init__(self, tid: int) -> None:
        self.tid = tid


class StoredTensor:
    """Tensor of an xser checkpoint that is not read yet; ``load()`` reads it.

    Args:
        path: the checkpoint's file, without ``.tensors``.
        tid: number of the tensor.
        info: entry of ``NAME.info.pt`` with ``dtype`` and ``shape``; empty without such a file.
    """

    def __init__(self, path: Path, tid: int, info: Mapping[str, Any]) -> None:
        self.path = path
        self.tid = tid
        self.info = info

    @property
    def file(self) -> Path:
        """Path of ``tensor_N.pt``."""
        return tensors_directory(self.path) / f"tensor_{self.tid}.pt"

    def load(self) -> Tensor:
        """Return the tensor, mapped from its file.

        Raises:
            ValueError: the file is missing or damaged, or differs from the checkpoint's
                description.
        """
        if not self.file.is_file():
            directory = tensors_directory(self.path)
            raise ValueError(
                f"{self.file} does not exist, {self.path} refers to it: copy {directory} completely. It is empty in a "
                "checkpoint of avoid_saving_lower_precision_weights=True, whose weights are the optimizer's master "
                "weights: load model and optimizer together"
            )
        # Mapped, so that a reader of a slice reads only the pages of that slice.
        tensor = _load(self.file, mmap=True)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{self.file} holds a {type(tensor).__name__}, not a tensor: copy or save it again")
        # tensor_N.pt of another save has the same name, and possibly another parameter: compare
        # with the description, if there is one.
        stored = (tuple(tensor.shape), tensor.dtype)
        expected = (tuple(self.info.get("shape", tensor.shape)), self.info.get("dtype", tensor.dtype))
        for name, found, wanted in zip(("shape", "dtype"), stored, expected, strict=True):
            if found != wanted:
                raise ValueError(
                    f"{self.file} has {name} {found}, {info_file(self.path).name} says {wanted}: "
                    "the files come from different saves, copy the checkpoint again"
                )
        return tensor


def tensors_directory(path: Path) -> Path:
    """Return ``NAME.tensors`` for the xser checkpoint ``path``."""
    return path.with_name(f"{path.name}.tensors")


def info_file(path: Path) -> Path:
    """Return ``NAME.info.pt`` for the xser checkpoint ``path``."""
    return path.with_name(f"{path.name}.info.pt")


# Reading


def read_tensors(path: Path, *, mmap: bool = True) -> Any:
    """Read a ``torch.save`` file or an xser checkpoint: tensors, containers and plain values.

    Args:
        path: path of the file.
        mmap: map the tensors, so only used parts are read; the file must then outlive them.

    Raises:
        ValueError: a file is missing, truncated, or has other Python objects.
    """
    content = read_stored(path, mmap=mmap)

    def load(stored: StoredTensor) -> Tensor:
        tensor = stored.load()
        # ``load`` maps the file; the clone is independent of it.
        if not mmap:
            tensor = tensor.clone()
        return tensor

    return map_leaves(content, StoredTensor, load)


def read_stored(path: Path, *, mmap: bool = True) -> Any:
    """Read like ``read_tensors``, but return a ``StoredTensor`` for each tensor of an xser file."""
    content = _load(path, mmap=mmap)
    references: list[TensorReference] = []
    map_leaves(content, TensorReference, references.append)
    if not references:
        return content
    # The number becomes part of a file name; text such as "../x" would name another file.
    # ``type`` instead of isinstance: True is an int.
    for reference in references:
        tid = getattr(reference, "tid", None)
        if type(tid) is not int or tid < 0:
            raise ValueError(f"{path} refers to the tensor {tid!r}, not to a number: copy or save it again")
    infos: Any = {}
    if info_file(path).is_file():
        infos = _load(info_file(path), mmap=False)
    if not isinstance(infos, Mapping) or not all(isinstance(info, Mapping) for info in infos.values()):
        raise ValueError(f"{info_file(path)} does not describe each tensor: copy or save it again")

    def stored(reference: TensorReference) -> StoredTensor:
        return StoredTensor(path, reference.tid, infos.get(reference.tid, {}))

    return map_leaves(content, TensorReference, stored)


def resolve(value: Tensor | StoredTensor) -> Tensor:
    """Return the tensor, read from disk if needed."""
    if isinstance(value, StoredTensor):
        return value.load()
    return value


def _load(path: Path, *, mmap: bool) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: check the directory and the tensor-parallel size it was saved with")
    # NxD's internal reference has a number too; it remains in files if a tensor was inside a
    # list.
    references = [(TensorReference, XSER_REFERENCE), (TensorReference, XSER_INTERNAL_REFERENCE)]
    try:
        with torch.serialization.safe_globals(references):  # pyright: ignore[reportArgumentType]
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
    except Exception as error:  # a damaged pickle raises TypeError, IndexError, struct.error, ...
        # torch's message recommends weights_only=False, which would run code of the file: cut it.
        reason = (str(error).splitlines() or [type(error).__name__])[0].split(" Re-running `torch.load`")[0]
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) cannot be read: {reason} "
            "It is cut short, or holds other objects than tensors and plain values: copy or save it again"
        ) from error


# Writing


def write_tensors(path: Path, checkpoint: Any) -> None:
    """Write a file for ``read_tensors``; replace an existing file when the new one is complete."""
    _write(path, checkpoint, pickle)


def _write(path: Path, checkpoint: Any, pickle_module: Any) -> None:
    # Write to a temporary name, then rename: the rename is atomic within one file system.
    path.parent.mkdir(parents=True, exist_ok=True)
    incomplete = _incomplete(path)
    try:
        torch.save(checkpoint, incomplete, pickle_module=pickle_module)
        incomplete.replace(path)
    except (RuntimeError, OSError) as error:  # torch.save reports a full disk as RuntimeError
        raise OSError(f"could not write {path}: {error}: free disk space or choose another directory") from error
    finally:
        incomplete.unlink(missing_ok=True)


def write_xser(path: Path, checkpoint: Any, *, info: bool = False) -> None:
    """Write an xser checkpoint: the file ``path`` and one file per tensor in ``path.tensors``.

    An earlier checkpoint at ``path`` is removed before the new tensors replace its tensors, so a
    kill cannot leave a file that refers to tensors of another save. Peak host memory: one tensor.

    Args:
        path: path of the file with the references.
        checkpoint: nested containers, plain values and tensors.
        info: also write ``path.info.pt``, which neuronx-distributed's trainer needs for loading.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Tensors are written to a temporary directory, which is renamed when it is complete, and the
    # file with the references is written last: a reader sees all of a save or none of it.
    directory = tensors_directory(path)
    infos: dict[int, dict[str, Any]] = {}
    incomplete = _incomplete(directory)
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir()

    def store(tensor: Tensor) -> TensorReference:
        tid = len(infos)
        infos[tid] = {"dtype": tensor.dtype, "shape": tensor.shape, "expert_model_parallel": False}
        # The clone is contiguous and has its own storage: torch.save writes full storages.
        host = tensor.detach().cpu()
        torch.save(host.clone(memory_format=torch.contiguous_format), incomplete / f"tensor_{tid}.pt")
        return TensorReference(tid)

    try:
        references = map_tensors(checkpoint, store)
        path.unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)
        incomplete.rename(directory)
        if info:
            write_tensors(info_file(path), infos)
        _write(path, references, _REFERENCE_PICKLE)
    except (RuntimeError, OSError) as error:
        raise OSError(f"could not write {path}: {error}: free disk space or choose another directory") from error
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)


def _incomplete(path: Path) -> Path:
    """Return the temporary name next to ``path``, unique for this rank."""
    return path.with_name(f"{path.name}.rank_{parallel_state.get_global_rank()}.incomplete")


_PICKLER: Any = pickle._Pickler  # pyright: ignore[reportAttributeAccessIssue] # the C class does not call save_global


class _ReferencePickler(_PICKLER):
    """Pickler that writes the substitute class under torch_xla's name without importing it."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        # The GLOBAL opcode names a class as "module\nname\n". The standard pickler imports the
        # module first to check that the class is there, and torch_xla need not be installed.
        if obj is TensorReference:
            module, _, qualified_name = XSER_REFERENCE.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{qualified_name}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


# ``torch.save`` derives its pickler from the ``Pickler`` of the module that it is passed.
_REFERENCE_PICKLE = SimpleNamespace(**{**vars(pickle), "Pickler": _ReferencePickler})
