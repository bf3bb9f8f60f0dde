"""Reads the metadata and the names of the tensors of a GGUF file, without the package gguf."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"GGUF"
STRING = 8
ARRAY = 9
# struct's formats by the type codes of the GGUF specification.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Elements and bytes of a block by the codes of the tensors' types (ggml.h): floating-point numbers, Q4_0 to
# Q8_0, and Q2_K to Q6_K.
BLOCKS = {0: (1, 4), 1: (1, 2), 28: (1, 8), 30: (1, 2)}
BLOCKS |= {2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34)}
BLOCKS |= {10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210)}


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return the scalar and string entries of a GGUF file by name; arrays are skipped.

    ``gguf.GGUFReader`` takes 5 s for a vocabulary of 49,152 tokens, because it makes an array of
    each token; this takes 0.1 s.

    Raises:
        ValueError: see ``_read_header``.
    """
    return _read_header(path)[0]


def read_gguf_tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors of a GGUF file.

    Raises:
        ValueError: see ``_read_header``.
    """
    return _read_header(path)[1]


def _read_header(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return metadata and names of tensors.

    Raises:
        ValueError: the file is not a GGUF file of version 2 or 3 in little-endian, or is cut
            short.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ValueError("it does not begin with GGUF")
            version, tensors, count = _unpack(file, "IQQ")
            if version not in (2, 3):
                raise ValueError(f"it has version {version}, supported are 2 and 3")
            metadata = {}
            for _ in range(count):
                name = _string(file).decode()
                value = _value(file, _unpack(file, "I")[0])
                if value is not None:
                    metadata[name] = value
            names = []
            end = 0
            for _ in range(tensors):
                names.append(_string(file).decode())
                (dimensions,) = _unpack(file, "I")
                *shape, kind, offset = _unpack(file, f"{dimensions}QIQ")
                elements, size = BLOCKS.get(kind, (1, 0))  # of other types only the beginning is checked
                end = max(end, offset + math.prod(shape) // elements * size)
            # The tensors begin at a multiple of the alignment after the header.
            alignment = metadata.get("general.alignment", 32)
            if names and -(-file.tell() // alignment) * alignment + end > path.stat().st_size:
                raise EOFError("it is cut short")
            return metadata, names
    except (ValueError, EOFError, KeyError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}: download it again") from error


def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
    """Return the little-endian values of ``form`` at the position of ``file``."""
    form = f"<{form}"
    return struct.unpack(form, _read(file, struct.calcsize(form)))


def _read(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError("it is cut short")
    return data


def _string(file: BinaryIO) -> bytes:
    return _read(file, _unpack(file, "Q")[0])


def _value(file: BinaryIO, kind: int) -> Any:
    """Return the value of type ``kind`` at the position of ``file``, or None for an array."""
    if kind == STRING:
        return _string(file).decode(errors="replace")
    if kind != ARRAY:
        return _unpack(file, SCALARS[kind])[0]
    item, count = _unpack(file, "IQ")
    # Numbers are skipped together; strings and arrays of arrays have lengths of their own.
    if item in SCALARS:
        _read(file, count * struct.calcsize(f"<{SCALARS[item]}"))
        return None
    for _ in range(count):
        if item == STRING:
            _string(file)
        else:
            _value(file, item)
    return None
