"""What is measured of one step: matmuls, saved bytes, collectives, the largest tensors."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nxd_memopt.planner.timing.collectives import Collective


@dataclass(frozen=True)
class LiveTensor:
    """Tensor that the step allocates.

    Args:
        dtype: dtype as text.
        shape: dimensions.
        nbytes: size in bytes.
        source: operation that allocated the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Measurement:
    """Measurement of one variant of a step, with or without recomputation.

    Args:
        matmuls: matmuls that the step executes; for a compiled step, in the optimized graph.
        traced_matmuls: matmuls before the compiler's optimizations; equals ``matmuls`` in eager
            mode.
        held_bytes: bytes saved for backward. XLA: temporary memory of the compiled step; eager:
            saved tensors without parameters and inputs, each storage once.
        peak_bytes: peak of allocated tensors without parameters, inputs and gradients.
        flops: floating-point operations of the full step; ``None`` if unknown.
        collectives: how often each collective occurs.
        largest: largest tensors of distinct shapes, in descending order.
        fingerprint: hash of the sequence of operations with their shapes; equal for equal graphs.
    """

    matmuls: int
    traced_matmuls: int
    held_bytes: int
    peak_bytes: int
    flops: int | None
    collectives: Counter[Collective]
    largest: tuple[LiveTensor, ...]
    fingerprint: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON; ``from_json`` is the inverse."""
        largest = [dataclasses.asdict(tensor) for tensor in self.largest]
        return vars(self) | {"collectives": collectives_to_json(self.collectives), "largest": largest}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measurement:
        """Return the measurement of plain data from ``to_json``."""
        # JSON has no Counter with structured keys and no tuples: a collective is one object with its
        # count, and shapes come back as lists.
        collectives: Counter[Collective] = Counter()
        for entry in data["collectives"]:
            collective = Collective(entry["kind"], entry["full_bytes"], entry["group_size"])
            collectives[collective] = entry["count"]
        largest = tuple(LiveTensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in data["largest"])
        return cls(**{**data, "collectives": collectives, "largest": largest})


def collectives_to_json(collectives: Counter[Collective]) -> list[dict[str, Any]]:
    """Return sorted plain data for JSON."""
    return [{**dataclasses.asdict(c), "count": n} for c, n in sorted(collectives.items())]


def largest_distinct(tensors: Iterable[LiveTensor], limit: int = 6) -> tuple[LiveTensor, ...]:
    """Return the largest tensors, at most ``limit``, one of each dtype and shape."""
    # Each layer has tensors of the same shapes: without this, one shape would fill the list.
    by_kind = {(tensor.dtype, tensor.shape): tensor for tensor in tensors}
    return tuple(sorted(by_kind.values(), key=lambda tensor: -tensor.nbytes)[:limit])


def is_square_in(tensor: LiveTensor, length: int) -> bool:
    """Return whether a tensor is attention scores, [..., S, S] with a dimension for the heads.

    Hidden states and weights are matrices, which are square too if S equals the hidden size.
    """
    return len(tensor.shape) > 2 and tensor.shape[-2:] == (length, length)


def is_logits(tensor: LiveTensor, tokens: int, vocabulary: Iterable[int]) -> bool:
    """Return whether a tensor has the logits of all tokens.

    The shape is ``[tokens, V]`` or ``[V, tokens]``, where ``tokens`` may be several dimensions.

    Args:
        tensor: tensor of a step.
        tokens: S * B.
        vocabulary: sizes of V: the full vocabulary and a rank's shard.
    """
    shape = tensor.shape
    sizes = set(vocabulary)
    if len(shape) < 2:
        return False
    is_vocabulary_last = shape[-1] in sizes and math.prod(shape[:-1]) == tokens
    is_vocabulary_first = shape[0] in sizes and math.prod(shape[1:]) == tokens
    return is_vocabulary_last or is_vocabulary_first
