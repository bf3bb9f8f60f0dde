"""Parses HLO text of a compiled module, without importing XLA."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nxd_memopt.planner.timing.collectives import Collective

# Types without a number of bits in their names. A token orders operations and has no memory.
_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
# "f32[2,3]"; then "%name = expression"; then the shape of the expression and its operation, where the
# shape of several results is a tuple, "(f32[2], f32[2])".
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.+)$")
_OPCODE = re.compile(r"^(\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_COLLECTIVES = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
}
_LISTED_GROUP = re.compile(r"replica_groups=\{\{([0-9,]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]")


class Shape(NamedTuple):
    """Type and dimensions of an HLO array, such as ``f32[2,3]``."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.dims) * element_bits(self.dtype) // 8


@dataclass(frozen=True)
class Instruction:
    """One line of an HLO computation.

    Args:
        name: name of the result.
        shapes: shape of the result; several for a tuple.
        opcode: operation, such as ``dot``.
        rest: operands and attributes.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    rest: str


def element_bits(dtype: str) -> int:
    """Return the bits of an HLO element type, such as ``f32``, ``bf16`` or ``f8e4m3fn``."""
    if dtype in _BITS:
        return _BITS[dtype]
    number = re.search(r"\d+", dtype)
    assert number is not None, f"HLO element type {dtype!r} has no width"
    return int(number[0])


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Return every shape in ``text``, in order: one for an array, several for a tuple."""
    shapes = []
    for dtype, dims in _SHAPE.findall(text):
        # A scalar is f32[]: splitting its dimensions gives one empty text.
        sizes = [int(size) for size in dims.split(",") if size]
        shapes.append(Shape(dtype, tuple(sizes)))
    return tuple(shapes)


def instructions(hlo: str) -> Iterator[Instruction]:
    """Yield the instructions of all computations of a module, in the order of the text."""
    for line in hlo.splitlines():
        # "%name = shape opcode(operands), attributes". Headers and braces of computations have no
        # such assignment and are skipped.
        assigned = _INSTRUCTION.match(line)
        if assigned is None:
            continue
        name, expression = assigned.groups()
        called = _OPCODE.match(expression)
        if called is not None:
            shapes, opcode = called.groups()
            yield Instruction(name, parse_shapes(shapes), opcode, expression[called.end() :])


def matmul_count(hlo: str) -> int:
    """Return the number of matmuls, including those that XLA:CPU replaced by library calls."""
    return sum(_is_matmul(instruction) for instruction in instructions(hlo))


def _is_matmul(instruction: Instruction) -> bool:
    """Return whether an instruction is a dot, or a custom call of a matmul library."""
    if instruction.opcode == "custom-call":
        # XLA:CPU may replace a dot by a call of a library, such as oneDNN's __onednn$matmul. Not
        # counting these would look like matmuls that the optimizer removed.
        target = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
        if target is None:
            return False
        return any(word in target[1].lower() for word in ("matmul", "gemm", "dot"))
    return instruction.opcode == "dot"


def collectives(hlo: str) -> Counter[Collective]:
    """Return how often each collective occurs in the module.

    Small collectives that XLA combined into one with a tuple of results count as one.
    """
    # torch_xla's all-reduce returns the tensor and a scalar, the token that chains collectives. The
    # scalar's bytes are not counted. Asynchronous collectives have a -start and a -done
    # instruction, of which the first counts.
    found: Counter[Collective] = Counter()
    for instruction in instructions(hlo):
        kind = _COLLECTIVES.get(instruction.opcode.removesuffix("-start"))
        if kind is None:
            continue
        shapes = instruction.shapes
        if len(shapes) > 1 and not shapes[-1].dims:
            shapes = shapes[:-1]
        full_bytes = sum(shape.nbytes for shape in shapes)
        size = group_size(instruction.rest)
        # A reduce-scatter's result is one shard of the full tensor.
        if kind == "reduce_scatter":
            full_bytes *= size
        found[Collective(kind, full_bytes, size)] += 1
    return found


def group_size(attributes: str) -> int:
    """Return the number of ranks per group of a collective.

    ``replica_groups`` is a list, ``{{0,1},{2,3}}``, or an iota, ``[groups,ranks]<=[...]``.

    Raises:
        ValueError: the collective has no ``replica_groups``.
    """
    listed = _LISTED_GROUP.search(attributes)
    if listed is not None:
        return len(listed[1].split(","))
    iota = _IOTA_GROUPS.search(attributes)
    if iota is None:
        raise ValueError(
            f"a collective without replica_groups spans all ranks, which HLO text does not count: {attributes}"
        )
    return int(iota[2])


def fingerprint(hlo: str) -> str:
    """Return a hash of the module without its name. Equal fingerprints mean one compiled graph."""
    # The first line is "HloModule NAME, attributes"; the name has a counter.
    header, _, body = hlo.partition("\n")
    return hashlib.sha256((header.partition(",")[2] + body).encode()).hexdigest()[:16]
