"""Plans the chunks of the fused loss; the first chunk's logits reuse the dW and dX buffers.

Logits are vocabulary-first, ``[V, R]``. The weight's gradient ``[V, H]`` is as large as the logits of H tokens, and
nothing is in it before the first chunk is done: that chunk's logits are put there, so that one chunk holds more than H
tokens, and their gradient's product with the input then overwrites them range by range. Later chunks use the rows of
the input's gradient that are not written yet, and ``spare`` elements beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ALIGNMENT = 8  # tokens: 16 bytes of bf16, what the fast matmuls ask of a stride
_MULTIPLE = 64  # tokens of a chunk that is not the last
_WINDOW_ROWS = (1024, 4096)  # at least, at most: vocabulary rows that are computed aside and copied at a time


def aligned(tokens: int, multiple: int = ALIGNMENT) -> int:
    return -(-tokens // multiple) * multiple


@dataclass(frozen=True)
class Chunk:
    """Local rows ``[start, stop)``; ``tokens`` are those of all ranks that gather theirs, padded to ``ALIGNMENT``."""

    start: int
    stop: int
    tokens: int
    in_weight_grad: bool = False


@dataclass(frozen=True)
class StoragePlan:
    """Sizes in elements of the logits.

    Args:
        rows: local rows of the input.
        gathered: how many ranks' rows make a chunk.
        exchanged: elements beside the logits that communication needs for each token of a chunk.
        vocab: V, local.
        hidden: H.
        spare: room beside the gradients.
        input_grad: the input's gradient is wanted.
        weight_grad: elements that the weight's gradient occupies for each of V; 0 if it may not be used.
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
        chunks, done = [], 0
        while done < self.rows:
            chunk = self._next(done)
            chunks.append(chunk)
            done = chunk.stop
        return tuple(chunks)

    @cached_property
    def tail(self) -> int:
        """Elements to allocate for the input's gradient and, behind it, what the chunks need beside."""
        return max([self._input_grad_rows(self.rows), *(self._tail_of(chunk) for chunk in self.chunks)])

    def kept(self, chunk: Chunk) -> int:
        """How many vocabulary rows of ``chunk`` lie in the weight gradient's memory; the others lie in the tail."""
        return min(self.vocab, self.vocab * self.weight_grad // chunk.tokens) if chunk.in_weight_grad else 0

    def offset(self, chunk: Chunk) -> int:
        """Where the tail is free for ``chunk``: behind its own rows of the input's gradient."""
        return aligned(self._input_grad_rows(chunk.stop))

    def window(self, chunk: Chunk) -> tuple[int, int]:
        """Offset in the tail, and vocabulary rows, of the window for what ``overwriting_ranges`` calls not direct."""
        offset = self.offset(chunk) + (self.vocab - self.kept(chunk)) * chunk.tokens
        return offset, min((self.tail - offset) // self.weight_grad, _WINDOW_ROWS[1])

    def _input_grad_rows(self, rows: int) -> int:
        return rows * self.hidden if self.input_grad else 0

    def _tail_of(self, chunk: Chunk) -> int:
        window = self._least_window if chunk.in_weight_grad else 0
        return self.offset(chunk) + (self.vocab - self.kept(chunk)) * chunk.tokens + window

    @property
    def _least_window(self) -> int:
        return min(self.vocab, _WINDOW_ROWS[0]) * self.weight_grad

    def _next(self, done: int) -> Chunk:
        free = self._input_grad_rows(self.rows) + self.spare - self._input_grad_rows(done)
        rows = self._fitting(done, free)
        if done or rows == self.rows or not self.weight_grad:
            return Chunk(done, done + rows, aligned(rows * self.gathered))
        rows = max(rows, self._fitting(done, free - self._least_window + self.vocab * self.weight_grad))
        return Chunk(0, rows, aligned(rows * self.gathered), in_weight_grad=True)

    def _fitting(self, done: int, free: int) -> int:
        """As many rows as ``free`` elements serve, at least the smallest chunk."""
        fitting = free // (self.gathered * (self.vocab + self.exchanged) + self._input_grad_rows(1))
        multiple = max(1, _MULTIPLE // self.gathered)
        rest = self.rows - done
        return rest if aligned(rest, multiple) <= fitting else min(rest, max(fitting // multiple, 1) * multiple)


def overwriting_ranges(
    vocab: int, kept: int, tokens: int, width: int, window_rows: int
) -> Iterator[tuple[int, int, bool]]:
    """Ranges of the vocabulary in an order in which ``[V, width]`` may overwrite the ``[kept, tokens]`` it is made of.

    Both start at the same address. Yields ``(start, stop, direct)``; a range that is not direct would overwrite what
    it is made of: it has at most ``window_rows`` rows, to be computed elsewhere and copied.
    """
    if tokens < width:
        assert kept == vocab, f"{kept} of {vocab} rows of {tokens} tokens lie where rows of {width} will"
        yield from _from_the_end(vocab, tokens, width, window_rows)
        return
    start = 0
    while start < vocab:
        end = kept if start < kept else vocab
        stop = min(end, start * tokens // width) if start < kept else end
        direct = stop - start >= min(window_rows, end - start)
        stop = stop if direct else min(end, start + window_rows)
        yield start, stop, direct
        start = stop


def _from_the_end(vocab: int, tokens: int, width: int, window_rows: int) -> Iterator[tuple[int, int, bool]]:
    stop = vocab
    while stop:
        start = -(-stop * tokens // width)
        direct = stop - start >= min(window_rows, stop)
        start = start if direct else max(0, stop - window_rows)
        yield start, stop, direct
        stop = start


def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> Tensor:
    """``out = a b`` or ``out += a b``; ``out`` may be wider than ``a`` and ``b``, and is then summed in its dtype."""
    if out.dtype == a.dtype:
        return torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    if out.is_cuda:
        wide = {"out_dtype": out.dtype, "out": out}
        return torch.addmm(out, a, b, **wide) if accumulate else torch.mm(a, b, **wide)
    product = a.to(out.dtype) @ b.to(out.dtype)
    return out.add_(product) if accumulate else out.copy_(product)
