"""Plans the chunks of the fused loss; the first chunk's logits reuse the dW and dX buffers.

Logits are vocabulary-first, ``[V, R]`` for R tokens. The weight gradient ``[V, H]`` has as many
elements as the logits of H tokens and is empty until the first chunk is done. The first chunk's
logits are therefore stored in the dW buffer, which allows a chunk of more than H tokens. Their
gradient times the input then overwrites them, one vocabulary range after another. Later chunks use
the rows of dX that are not written yet, plus ``spare`` elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ALIGNMENT = 8  # tokens; 16 bytes of bf16, the stride alignment that fast GEMMs need
_MULTIPLE = 64  # tokens; every chunk but the last has a multiple of this
_WINDOW_ROWS = (1024, 4096)  # minimum and maximum vocabulary rows computed in the window at a time


def aligned(tokens: int, multiple: int = ALIGNMENT) -> int:
    """Round ``tokens`` up to a multiple."""
    return -(-tokens // multiple) * multiple


@dataclass(frozen=True)
class Chunk:
    """Local rows ``[start, stop)`` of the input that are processed together.

    ``tokens`` counts the rows of all ranks that gather theirs, padded to ``ALIGNMENT``.
    ``in_weight_grad``: the chunk's logits are stored in the dW buffer.
    """

    start: int
    stop: int
    tokens: int
    in_weight_grad: bool = False


@dataclass(frozen=True)
class StoragePlan:
    """Chunks of one pass and the memory for their logits; sizes are in elements of the logits.

    Memory: the dW buffer, and the tail, one allocation of ``[dX | spare]``. A chunk may use the
    tail after its own rows of dX.

    Args:
        rows: local rows of the input.
        gathered: number of ranks whose rows are gathered into a chunk.
        exchanged: elements that communication needs for each token of a chunk, next to the logits.
        vocab: V, local rows of the weight.
        hidden: H.
        spare: elements available in addition to the gradients.
        input_grad: dX is needed and stored in the tail.
        weight_grad: elements of the dW buffer for each vocabulary row; 0 if logits must not use it.
    """

    rows: int
    gathered: int
    exchanged: int
    vocab: int
    hidden: int
    spare: int
    input_grad: bool
    weight_grad: int

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks, in order; they cover ``[0, rows)``."""
        chunks, done = [], 0
        while done < self.rows:
            chunk = self._next(done)
            chunks.append(chunk)
            done = chunk.stop
        return tuple(chunks)

    @cached_property
    def tail(self) -> int:
        """Elements to allocate for dX and, after it, the largest chunk's remaining logits."""
        return max([self._input_grad_rows(self.rows), *(self._tail_of(chunk) for chunk in self.chunks)])

    def kept(self, chunk: Chunk) -> int:
        """Return how many vocabulary rows of the logits are in dW; the tail has the rest."""
        return min(self.vocab, self.vocab * self.weight_grad // chunk.tokens) if chunk.in_weight_grad else 0

    def offset(self, chunk: Chunk) -> int:
        """Return where the tail is free for the chunk: after the chunk's own rows of dX."""
        return aligned(self._input_grad_rows(chunk.stop))

    def window(self, chunk: Chunk) -> tuple[int, int]:
        """Return tail offset and rows of the window for indirect ``overwriting_ranges``."""
        offset = self.offset(chunk) + (self.vocab - self.kept(chunk)) * chunk.tokens
        return offset, min((self.tail - offset) // self.weight_grad, _WINDOW_ROWS[1])

    def _input_grad_rows(self, rows: int) -> int:
        return rows * self.hidden if self.input_grad else 0

    def _tail_of(self, chunk: Chunk) -> int:
        """Return the elements of the tail that the chunk needs, including dX up to its end."""
        window = self._least_window if chunk.in_weight_grad else 0
        return self.offset(chunk) + (self.vocab - self.kept(chunk)) * chunk.tokens + window

    @property
    def _least_window(self) -> int:
        return min(self.vocab, _WINDOW_ROWS[0]) * self.weight_grad
        """Elements of the smallest window: rows of dW that are computed aside, then copied."""

    def _next(self, done: int) -> Chunk:
        # Free elements: rows of dX from ``done`` on, plus spare. ``_fitting`` subtracts the chunk's
        # own dX rows, which are written while its logits are still in use.
        free = self._input_grad_rows(self.rows) + self.spare - self._input_grad_rows(done)
        rows = self._fitting(done, free)
        if done or rows == self.rows or not self.weight_grad:
            return Chunk(done, done + rows, aligned(rows * self.gathered))
        # The first chunk can use the dW buffer too, less the window that overwriting it needs.
        rows = max(rows, self._fitting(done, free - self._least_window + self.vocab * self.weight_grad))
        return Chunk(0, rows, aligned(rows * self.gathered), in_weight_grad=True)

    def _fitting(self, done: int, free: int) -> int:
        """Return how many rows fit into ``free`` elements, at least the smallest chunk."""
        # Each row needs its logits and communication buffers on every gathering rank, and its dX.
        fitting = free // (self.gathered * (self.vocab + self.exchanged) + self._input_grad_rows(1))
        multiple = max(1, _MULTIPLE // self.gathered)
        rest = self.rows - done
        return rest if aligned(rest, multiple) <= fitting else min(rest, max(fitting // multiple, 1) * multiple)


def overwriting_ranges(
    vocab: int, kept: int, tokens: int, width: int, window_rows: int
) -> Iterator[tuple[int, int, bool]]:
    """Yield vocabulary ranges in an order in which dW can overwrite the logits' gradient.

    dW is ``[vocab, width]``. The gradient's first ``kept`` rows are ``[kept, tokens]``, start at
    the same address and are the operand of the GEMM that computes dW.

    Yields:
        ``(start, stop, direct)``. A range that is not direct would overwrite its own operand: it
        has at most ``window_rows`` rows, is computed in the window and then copied.
    """
    if tokens < width:
        assert kept == vocab, f"{kept} of {vocab} rows of {tokens} tokens lie where rows of {width} will"
        yield from _from_the_end(vocab, tokens, width, window_rows)
        return
    # tokens >= width: dW rows grow more slowly than gradient rows, so go forward. With the gradient
    # rows [0, start) consumed, dW rows up to start * tokens // width can be written directly. Rows
    # from ``kept`` on have their gradient in the tail and are always direct.
    start = 0
    while start < vocab:
        end = kept if start < kept else vocab
        stop = min(end, start * tokens // width) if start < kept else end
        direct = stop - start >= min(window_rows, end - start)
        # Ranges shorter than the window go through the window: fewer, larger GEMMs.
        stop = stop if direct else min(end, start + window_rows)
        yield start, stop, direct
        start = stop


def _from_the_end(vocab: int, tokens: int, width: int, window_rows: int) -> Iterator[tuple[int, int, bool]]:
    # tokens < width: dW rows are longer than gradient rows, so go backward. Rows [start, stop) of
    # dW begin at start * width, after the unconsumed gradient rows, which end at stop * tokens.
    stop = vocab
    while stop:
        start = -(-stop * tokens // width)
        direct = stop - start >= min(window_rows, stop)
        start = start if direct else max(0, stop - window_rows)
        yield start, stop, direct
        stop = start


def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> Tensor:
    """Compute ``out = a b`` or ``out += a b``.

    ``out`` may have a wider dtype than ``a`` and ``b``; the sum is then accumulated in that dtype.
    """
    if out.dtype == a.dtype:
        return torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    if out.is_cuda:
        wide = {"out_dtype": out.dtype, "out": out}
        return torch.addmm(out, a, b, **wide) if accumulate else torch.mm(a, b, **wide)
    product = a.to(out.dtype) @ b.to(out.dtype)
    return out.add_(product) if accumulate else out.copy_(product)
