"""The chunks of the fused loss: tokens whose logits exist at the same time."""

from __future__ import annotations

DEFAULT_LOGITS_BYTES = 256 << 20
_MULTIPLE = 64  # tokens; strides of 128 bytes and more, which fast GEMMs need


def chunk_ranges(
    rows: int, *, gathered: int, vocab: int, exchanged: int, logits_bytes: int, element_bytes: int
) -> list[tuple[int, int]]:
    """Return the ranges ``[start, stop)`` of local rows that are processed together.

    Args:
        rows: local tokens.
        gathered: number of ranks whose tokens are gathered into a chunk.
        vocab: local rows of the weight.
        exchanged: elements that communication needs for each token of a chunk, next to the logits.
        logits_bytes: memory for a chunk's logits and communication. The smallest chunk has 64
            tokens and may need more.
        element_bytes: bytes of an element of the logits.
    """
    # A chunk of n local rows has n x gathered tokens, each with V / T logits and what communication needs. Rounded down
    # to multiples of 64 gathered tokens, and at least one of them.
    fitting = logits_bytes // (gathered * (vocab + exchanged) * element_bytes)
    multiple = max(1, _MULTIPLE // gathered)
    size = max(fitting // multiple, 1) * multiple
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]
