"""Finds, reads by name and slice, and writes the weight files of a Hugging Face directory."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nxd_memopt.checkpoint.directories import flush_to_disk, replaced_path
from nxd_memopt.checkpoint.stream import CODES, WRITER, Entry, bytes_of, encode_header, in_file_order
from nxd_memopt.lora_config import require_no_adapters
from nxd_memopt.parallel_layers.checkpointing import read_tensors
from nxd_memopt.parallel_layers.resharding import LazySlice

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_CANDIDATES = (WEIGHTS, WEIGHTS_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")  # transformers' order

Sources = dict[str, Tensor | LazySlice]


def require_directory(directory: str | Path) -> Path:
    """Return ``directory`` as a path.

    Raises:
        ValueError: there is no such directory; the message has a remedy.
    """
    path = Path(directory)
    if path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"{path} is a file: pass its directory, {path.absolute().parent}")
    # A kill between the two renames of ``replace_directory`` leaves only the previous version.
    remedy = "pass a local directory in Hugging Face format, for instance one fetched with 'hf download'"
    if replaced_path(path).is_dir():
        remedy = f"an export was cut off; its predecessor is complete: rename {replaced_path(path)} to {path}"
    raise ValueError(f"checkpoint directory {path} does not exist: {remedy}")


def find_weights(directory: Path) -> Path | None:
    """Return the weight file or index that transformers would read, or None."""
    for name in _CANDIDATES:
        if (directory / name).is_file():
            return directory / name
    return None


def find_gguf(directory: Path) -> Path | None:
    """Return the only GGUF file of a directory without other weights, or None.

    Raises:
        ValueError: the directory has several GGUF files.
    """
    files = sorted(directory.glob("*.gguf"))
    if not files or find_weights(directory) is not None:
        return None
    if len(files) > 1:
        raise ValueError(f"{directory} holds {len(files)} GGUF files, {[file.name for file in files]}: leave one")
    return files[0]


@contextmanager
def open_weights(directory: Path) -> Iterator[Sources]:
    """Open all weight files of ``directory``.

    Yield tensors by name, which are read from disk when they are indexed.

    Raises:
        ValueError: there are no weights, or a file is missing or damaged.
    """
    found = find_weights(require_directory(directory))
    if found is None:
        require_no_adapters(directory)
        # Such as checkpoints of training, which have a configuration and a tokenizer.
        if list(directory.glob("rank_*.safetensors")):
            raise ValueError(
                f"{directory} is a training checkpoint: convert it by nxd-memopt convert --from checkpoint, or name "
                "it as model.warm_start"
            )
        raise ValueError(f"{directory} holds no weights: expected one of {list(_CANDIDATES)} or one *.gguf file")
    with ExitStack() as stack:
        if found.suffix == ".json":
            yield _open_indexed(found, stack)
        else:
            yield _open_file(found, stack)


# Without the dtypes of one byte, which are quantized weights.
_DTYPES = {code: dtype for dtype, code in CODES.items() if dtype.is_floating_point and dtype.itemsize > 1}


def floating_dtype(sources: Sources) -> torch.dtype | None:
    """Return the dtype that has every value of the floating-point tensors exactly; None without such tensors."""
    found: set[torch.dtype] = set()
    for source in sources.values():
        dtype = source.dtype if isinstance(source, Tensor) else _DTYPES.get(cast(Any, source).get_dtype())
        if dtype is not None and dtype in _DTYPES.values():
            found.add(dtype)
    return functools.reduce(torch.promote_types, found) if found else None


def _open_indexed(index: Path, stack: ExitStack) -> Sources:
    """Return the tensors of all files that ``index`` lists."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} has no weight_map of file names: copy the index again from its source")
    shards = sorted(set(weight_map.values()))
    # A name with a path separator could point outside of the directory: treat it as missing.
    missing = [name for name in shards if Path(name).name != name or not (index.parent / name).is_file()]
    if missing:
        raise ValueError(
            f"{index} lists {len(missing)} of {len(shards)} files that are not there: {missing[:5]}: copy them"
        )
    opened = {shard: _open_file(index.parent / shard, stack) for shard in shards}
    # Check all names before a model changes: an index and its files may come from different
    # exports.
    for name, shard in weight_map.items():
        if name not in opened[shard]:
            raise ValueError(f"{index} places {name!r} in {shard}, which lacks it: copy both files again")
    return {name: opened[shard][name] for name, shard in weight_map.items()}


def _open_file(path: Path, stack: ExitStack) -> Sources:
    """Return the tensors of one file: slices of a safetensors file, tensors of a PyTorch file."""
    if path.suffix != ".safetensors":
        return read_tensors(path)
    try:
        # Slices read only their bytes; the handle stays open until the caller leaves
        # ``open_weights``.
        handle = stack.enter_context(safe_open(path, framework="pt"))
        return {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is damaged or cut short: {error}: copy or download it again"
        ) from error


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write ``tensors`` and flush them to the disk.

    Raises:
        OSError: the file cannot be written; the message has the file and the remedy.
    """
    # Not with safetensors' own writer, which writes several entries of metadata in a random order:
    # equal weights are equal files.
    entries = in_file_order(Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    try:
        with path.open("wb") as file:
            file.write(encode_header(entries))
            for entry in entries:
                file.write(bytes_of(tensors[entry.key].detach().cpu().contiguous()).numpy().data)
        flush_to_disk(path)
    except OSError as error:
        raise OSError(f"could not write {path}: {error}: free disk space or choose another directory") from error


def group_by_size(sizes: Mapping[str, int], max_shard_size_bytes: int) -> dict[str, list[str]]:
    """Return the tensors of each weight file, by transformers' file name.

    Files are filled in order up to ``max_shard_size_bytes``, unless a single tensor is larger.
    """
    groups: list[list[str]] = [[]]
    left_bytes = max_shard_size_bytes
    for name, size_bytes in sizes.items():
        if size_bytes > left_bytes and groups[-1]:
            groups.append([])
            left_bytes = max_shard_size_bytes
        groups[-1].append(name)
        left_bytes -= size_bytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def write_index(directory: Path, weight_map: Mapping[str, str], total_size_bytes: int) -> None:
    """Write the index by which transformers finds the file of each tensor. A single file needs none."""
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": total_size_bytes}, "weight_map": dict(weight_map)}
        (directory / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def is_own(path: Path) -> bool:
    """Return whether the metadata of the weights in ``path`` names this program as the writer."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("writer") == WRITER
    # Another format, or damaged.
    except (SafetensorError, OSError):
        return False


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``.

    Raises:
        ValueError: the file cannot be read or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}: copy or write it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
