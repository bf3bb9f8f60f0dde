"""What is measured of one step: matmuls, bytes saved for backward, collectives, the largest tensors."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Collective:
    """One collective.

    Args:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.
        whole_bytes: of the unsharded tensor: what an all-gather returns, what a reduce-scatter or all-reduce is given.
            A ring sends ``(n - 1) / n`` of it from each of n ranks for a gather or scatter, twice that for a reduction.
        group_size: n.
    """

    kind: str
    whole_bytes: int
    group_size: int


@dataclass(frozen=True)
class LiveTensor:
    """One tensor that the step holds at some time: ``dtype[shape]``, and what made it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Measurement:
    """One variant of a step.

    Args:
        matmuls: matrix products that the step executes; of a compiled step, those left in the compiled graph.
        traced_matmuls: matrix products before the compiler's optimisations; equals ``matmuls`` where nothing compiles.
        held_bytes: what backward needs. XLA: temporary memory of the compiled step; eager: saved tensors, each storage
            once, parameters and inputs left out; torch.compile: tensors between the forward and the backward graph.
        peak_bytes: greatest sum of tensors alive at once, without parameters, inputs and gradients; ``None`` unknown.
        flops: of the whole step; ``None`` where unknown.
        collectives: how often each occurs.
        largest: distinct largest tensors, biggest first.
        fingerprint: hash of the sequence of operations with their shapes; equal for equal graphs.
    """

    matmuls: int
    traced_matmuls: int
    held_bytes: int
    peak_bytes: int | None
    flops: int | None
    collectives: Counter[Collective]
    largest: tuple[LiveTensor, ...]
    fingerprint: str

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``from_json`` is its inverse."""
        fields = {name: getattr(self, name) for name in ("matmuls", "traced_matmuls", "held_bytes", "peak_bytes")}
        return {
            **fields,
            "flops": self.flops,
            "collectives": collectives_to_json(self.collectives),
            "largest": [dataclasses.asdict(tensor) for tensor in self.largest],
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measurement:
        collectives = Counter(
            {Collective(c["kind"], c["whole_bytes"], c["group_size"]): c["count"] for c in data["collectives"]}
        )
        largest = tuple(LiveTensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in data["largest"])
        return cls(**{**data, "collectives": collectives, "largest": largest})


def collectives_to_json(collectives: Counter[Collective]) -> list[dict[str, Any]]:
    return [{**dataclasses.asdict(c), "count": n} for c, n in sorted(collectives.items())]


def largest_distinct(tensors: Iterable[LiveTensor], limit: int = 6) -> tuple[LiveTensor, ...]:
    """The biggest tensors, one of each dtype and shape."""
    by_kind = {(tensor.dtype, tensor.shape): tensor for tensor in tensors}
    return tuple(sorted(by_kind.values(), key=lambda tensor: -tensor.nbytes)[:limit])


def is_square_in(tensor: LiveTensor, length: int) -> bool:
    """Whether the last two dimensions are ``length x length``: attention's S x S."""
    return tensor.shape[-2:] == (length, length)


def is_logits(tensor: LiveTensor, tokens: int, vocabulary: Iterable[int]) -> bool:
    """Whether the shape is ``[tokens, V]`` or ``[V, tokens]``, with V or V/T; tokens' dimensions folded in any way."""
    shape, sizes = tensor.shape, set(vocabulary)
    if len(shape) < 2:
        return False
    return (shape[-1] in sizes and math.prod(shape[:-1]) == tokens) or (
        shape[0] in sizes and math.prod(shape[1:]) == tokens
    )
