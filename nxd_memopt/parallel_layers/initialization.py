"""Draws a sharded parameter equal to a slice of the full one, without building the full one.

A torch CPU generator fills a tensor in memory order. A full parameter can therefore be drawn in
chunks of rows from one random stream, and each rank keeps its slice of every chunk. All ranks draw
the same stream and stay in the same state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nxd_memopt.parallel_layers.utils import shard_ranges

InitMethod = Callable[[Tensor], object]

_CHUNK_ELEMENTS = 1 << 22  # 16 MiB of fp32: less than most shards, and few calls for a large one
_VECTOR = 16  # torch's CPU normal_ draws blocks of 16 values; chunks must be multiples to match it
_RANDOM = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}
_ELEMENTWISE = {
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.mul_.Tensor,
    torch.ops.aten.add_.Tensor,
    torch.ops.aten.erfinv_.default,
    torch.ops.aten.clamp_.default,
}


_draws = True
_draws_meta = False


@contextmanager
def numbers_of_meta_weights() -> Iterator[None]:
    """Draw the numbers of weights on the meta device too, and drop them.

    A rank of a pipeline skips so the layers that other ranks have: its own weights are those of the full model.
    """
    global _draws_meta
    _draws_meta = True
    try:
        yield
    finally:
        _draws_meta = False


@contextmanager
def zeros_for_weights() -> Iterator[None]:
    """Fill weights that are initialized in the block with zeros, because values are loaded into all of them.

    Drawing takes 7 to 9 seconds of a core for each billion parameters, on every rank.
    """
    global _draws
    _draws = False
    try:
        yield
    finally:
        _draws = True


def is_skipped(weight: Tensor) -> bool:
    """Return whether initialization leaves ``weight`` out, and draws no numbers for it."""
    return weight.is_meta and not _draws_meta


class _Recorder(TorchDispatchMode):
    """Records in-place fills of one tensor; any other operation makes the recording incomplete."""

    def __init__(self) -> None:
        super().__init__()
        self.fills: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.complete = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # An operand that is a tensor may depend on the rows, or have the shape of the full
        # tensor: the operation could not be repeated on a chunk. ``detach`` and ``.data`` only
        # alias.
        scalars_only = not any(isinstance(arg, Tensor) for arg in (*args[1:], *kwargs.values()))
        if func in _RANDOM | _ELEMENTWISE and scalars_only:
            self.fills.append((func, args[1:], kwargs))
        elif func is not torch.ops.aten.detach.default:
            self.complete = False
        return func(*args, **kwargs)

    @property
    def streams(self) -> bool:
        """Whether chunks drawn in sequence equal the full tensor.

        True for recordings of fills only, with at most one random fill: a second one would begin
        after the first has filled the full tensor.
        """
        return self.complete and sum(func in _RANDOM for func, _, _ in self.fills) <= 1


def default_weight_init(weight: Tensor) -> Tensor:
    """Fill ``weight`` like torch.nn.Linear and Conv2d: uniform within 1 / sqrt(fan-in)."""
    return nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def default_bias_init(fan_in: int) -> InitMethod:
    """Return the init of torch.nn.Linear and Conv2d biases: uniform within 1 / sqrt(``fan_in``)."""
    bound = 1 / math.sqrt(max(fan_in, 1))
    return lambda bias: nn.init.uniform_(bias, -bound, bound)


def initialize_sharded_(param: Tensor, init_method: InitMethod, *, keep_full: bool = False) -> Tensor | None:
    """Fill this rank's shard with its slice of ``init_method(full)``, and padding with zeros.

    ``init_method`` gets the full, unpadded shape, so fan-in and fan-out are those of the full
    layer. It draws on the CPU from the default generator, in fp32 (fp64 for an fp64 parameter).
    Methods that consist of one ``normal_`` or ``uniform_`` and scalar arithmetic are drawn in
    chunks of 16 MiB; any other method (e.g. orthogonal) runs on a temporary full tensor. Meta
    parameters are skipped and draw nothing. See also ``zeros_for_weights``.

    Args:
        param: parameter described by ``set_tensor_model_parallel_attributes`` with ``full_shape``.
        init_method: fills the given tensor in place.
        keep_full: build the full tensor and return it.

    Returns:
        The full tensor if ``keep_full``, else None.
    """
    if is_skipped(param):
        return None
    description: Any = param
    # The draw does not depend on the dtype of the parameter, unless that is fp64: a bf16 model
    # has the rounded values of the fp32 model with the same seed.
    dtype = torch.promote_types(param.dtype, torch.float32)
    full: Tensor | None = None
    chunks: Iterable[tuple[int, Tensor]]
    if keep_full:
        full = _drawn(init_method, torch.empty(description.full_shape, dtype=dtype))
        chunks = [(0, full)]
    elif not _draws:
        chunks = []
    else:
        chunks = _chunks(description.full_shape, dtype, init_method)
    if param.is_meta:
        for _ in chunks:
            pass
        return None
    with torch.no_grad():
        # Padding is outside the full tensor, and no chunk covers it: it keeps these zeros.
        param.zero_()
        for first_row, rows in chunks:
            _copy_shard(param, rows, first_row)
    return full


def _drawn(init_method: InitMethod, tensor: Tensor) -> Tensor:
    with torch.no_grad():
        init_method(tensor)
    return tensor


def _chunks(shape: tuple[int, ...], dtype: torch.dtype, init_method: InitMethod) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(first row, rows)`` of ``init_method(full)``."""
    # Record the fills on a meta tensor: no memory, and fork_rng leaves the generator unchanged.
    recorder = _Recorder()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), recorder:
        init_method(torch.empty(shape, dtype=dtype, device="meta"))
    # E.g. orthogonal_, or a method that reads values: its chunks would differ from the full draw.
    if not recorder.streams:
        yield 0, _drawn(init_method, torch.empty(shape, dtype=dtype))
        return
    # Repeat the recorded fills chunk by chunk. The generator continues where the last chunk
    # ended, so the values are those of one fill of the full tensor, and the peak memory is one
    # chunk.
    for start, stop in _row_ranges(shape):
        rows = torch.empty((stop - start, *shape[1:]), dtype=dtype)
        for func, args, kwargs in recorder.fills:
            func(rows, *args, **kwargs)
        yield start, rows


def _row_ranges(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return row ranges of whole vectors of 16 values; the last one also has the remainder.

    The last range has at least 16 values, as ``normal_`` uses another algorithm for fewer.
    """
    # A multiple of 16 rows is a multiple of 16 elements for any number of elements per row.
    row_elements = max(torch.Size(shape[1:]).numel(), 1)
    rows = max(_CHUNK_ELEMENTS // row_elements // _VECTOR, 1) * _VECTOR
    starts = list(range(0, max(shape[0], 1), rows))
    if len(starts) > 1 and (shape[0] - starts[-1]) * row_elements < _VECTOR:
        starts.pop()
    return list(zip(starts, [*starts[1:], shape[0]], strict=True))


def _copy_shard(param: Tensor, rows: Tensor, first_row: int) -> None:
    """Copy this rank's part of ``rows``, the rows from ``first_row`` on of the full parameter."""
    description: Any = param
    if description.tensor_model_parallel:
        dim = description.partition_dim
        ranges = shard_ranges(param)
    else:
        dim = 0
        ranges = [(0, param.size(0))]
    # Intersect each of this rank's ranges with the chunk. Sharded along dim 0 the chunk covers
    # [first_row, first_row + n) of the sharded dimension, else all of it.
    offset = first_row if dim == 0 else 0
    local = 0
    for start, stop in ranges:
        low = max(start, offset)
        high = min(stop, offset + rows.size(dim))
        if low < high:
            target = param.narrow(dim, local + low - start, high - low)
            # Sharded along another dimension, the chunk's rows are a range of dim 0 here too.
            if dim != 0:
                target = target.narrow(0, first_row, rows.size(0))
            target.copy_(rows.narrow(dim, low - offset, high - low))
        local += stop - start
