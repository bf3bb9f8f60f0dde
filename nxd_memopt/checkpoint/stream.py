"""Writes and reads safetensors files tensor by tensor, in bounded host memory, with a checksum of
each tensor.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the length of the header, a
JSON header with dtype, shape and byte range of each tensor, then the bytes of the tensors without
gaps. All sizes are known before the first byte is written, so tensors are streamed one after the
other.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nxd_memopt.checkpoint.layout import Shape

WRITER = "nxd_memopt"
"""Names this program in the metadata of the files that it writes."""
CHUNK_BYTES = 32 << 20
"""Chunk size, 32 MiB: bytes that are copied to the host, added to the checksum and written at a
time.
"""
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' names of the dtypes that can be stored."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
"""Dtypes that can be stored, by their name in the index."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    key: str
    dtype: torch.dtype
    shape: Shape

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """Return the name of ``dtype`` in the index.

    Raises:
        ValueError: safetensors cannot store the dtype; the message has the name ``tensor``.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{tensor} has dtype {dtype}, which safetensors does not store: use one of {sorted(DTYPES)}")
    return name


def in_file_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries by decreasing element size, which aligns every tensor in a memory-mapped
    file.
    """
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def encode_header(entries: Sequence[Entry]) -> bytes:
    """Return the length and the header of a file with ``entries`` in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "writer": WRITER}}
    begin = 0
    for entry in entries:
        end = begin + entry.size_bytes
        header[entry.key] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # Pad the header with spaces to a multiple of 8 bytes: the data then starts aligned.
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def write_file(path: Path, entries: Sequence[Entry], chunks_of: Callable[[int], Iterable[Tensor]]) -> list[int]:
    """Write ``entries`` to ``path``, flush it to the disk, and return the CRC-32 of each entry.

    Args:
        path: a new file.
        entries: the entries in the order of the file.
        chunks_of: yields the bytes of the i-th entry in order, as 1-D uint8 host tensors. Each
            chunk is used before the next one is requested, so the buffer may be reused.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    checksums = []
    try:
        # Unbuffered, because chunks are large; ``_write_all`` handles short writes.
        with path.open("xb", buffering=0) as file:
            _write_all(file, memoryview(encode_header(entries)))
            for i, entry in enumerate(entries):
                # One pass over the data, with one chunk in host memory at a time, whatever the
                # size of the entry.
                checksum = 0
                written = 0
                for chunk in chunks_of(i):
                    content = _view(chunk)
                    checksum = zlib.crc32(content, checksum)
                    _write_all(file, content)
                    written += len(content)
                assert written == entry.size_bytes, f"{entry.key}: {written} of {entry.size_bytes} bytes"
                checksums.append(checksum)
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(f"could not write {path}: {error}: free disk space or choose another directory") from error
    return checksums


def _write_all(file: Any, content: memoryview) -> None:
    """Write all bytes: an unbuffered ``write`` may write only some."""
    while content:
        content = content[file.write(content) :]


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as 1-D uint8, sharing the storage."""
    flat = tensor.view(-1)
    # There are no bytes to share: the result is on the host for every device.
    if not flat.numel():
        return torch.empty(0, dtype=torch.uint8)
    return flat.view(torch.uint8)


def _view(content: Tensor) -> memoryview:
    return memoryview(content.numpy())  # pyright: ignore[reportArgumentType]


class TensorFile:
    """A file of a checkpoint, read tensor by tensor. Every tensor is verified against the index.

    Args:
        path: the file.
        size_bytes: size of the file according to the index.

    Raises:
        ValueError: the file is missing, has another size, or has no readable header.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        if not path.is_file():
            raise ValueError(f"{path} does not exist: copy all files of the checkpoint")
        # Compared before the file is mapped into memory: reading a page of a map behind the end of
        # its file would end the process with SIGBUS.
        found = path.stat().st_size
        if found != size_bytes:
            raise ValueError(
                f"{path} has {found} bytes and its index says {size_bytes}: it is cut short or altered: copy it again"
            )
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} has no readable safetensors header: {error}: copy it again") from error

    def read(self, entry: Entry, checksum: int) -> Tensor:
        """Return the tensor ``entry`` on the host.

        Raises:
            ValueError: the header or the bytes differ from the index.
        """
        try:
            tensor = self._file.get_tensor(entry.key)
        except SafetensorError as error:
            raise ValueError(f"{self._path}: {error}, and its index lists {entry.key!r}: copy both again") from error
        # The checksum covers the bytes alone: an altered dtype or shape would give them another meaning.
        expected = (entry.dtype, entry.shape, checksum)
        found = (tensor.dtype, tuple(tensor.shape), zlib.crc32(_view(bytes_of(tensor))))
        if found != expected:
            raise ValueError(
                f"{self._path} has {entry.key!r} with dtype, shape and checksum {found}, and its index says "
                f"{expected}: one of the two was altered: copy both again"
            )
        return tensor
