"""References for the tests: hand-written sharding, seeded tensors, and checks across ranks.

Nothing here calls the library, so that a fault of the library cannot hide in its own helper.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def tensors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers that depend on the seed and shape alone: equal on all ranks that ask alike."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def integers(*shape: int, seed: int = 0, high: int = 9) -> Tensor:
    """Small integers as float64: sums are exact, so results can be compared with ``equal``."""
    numbers = torch.randint(-high, high, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(torch.float64)


def shard(full: Tensor, dim: int, *, size: int | None = None, rank: int | None = None, stride: int = 1) -> Tensor:
    """Rank's part of ``full``: blocks ``rank, rank + size, ...`` of ``size * stride`` equal blocks."""
    size = dist.get_world_size() if size is None else size
    rank = dist.get_rank() if rank is None else rank
    assert full.size(dim) % (size * stride) == 0
    return torch.cat(full.chunk(size * stride, dim)[rank::size], dim).clone()


def pad(full: Tensor, dim: int, multiple: int) -> Tensor:
    """Append zeros along ``dim`` up to a multiple."""
    missing = -full.size(dim) % multiple
    zeros_shape = list(full.shape)
    zeros_shape[dim] = missing
    return torch.cat([full, full.new_zeros(zeros_shape)], dim)


def from_all_ranks(local: Tensor) -> list[Tensor]:
    """Every rank's tensor of one shape, by rank."""
    parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.detach().contiguous())
    return parts


def unshard(local: Tensor, dim: int, *, stride: int = 1) -> Tensor:
    """Inverse of ``shard`` over the world."""
    blocks = [part.chunk(stride, dim) for part in from_all_ranks(local)]
    return torch.cat([rank_blocks[i] for i in range(stride) for rank_blocks in blocks], dim)


def assert_same_on_all_ranks(local: Tensor, what: str = "tensor") -> None:
    """Bit-equal everywhere; NaN equals NaN."""
    for rank, other in enumerate(from_all_ranks(local)):
        torch.testing.assert_close(other, local.detach(), rtol=0, atol=0, equal_nan=True, msg=f"{what} of rank {rank}")


def assert_float64_close(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal but for the order of float64 sums."""
    # float64 has 2.2e-16; sums of some thousand terms in another order, on values of order 1..100: below 1e-10
    torch.testing.assert_close(
        actual, expected, rtol=1e-10, atol=1e-10, msg=lambda detail: f"{what}: {detail}" if what else detail
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|`` in the 2-norm, float64."""
    difference = actual.detach().double() - expected.detach().double()
    return (difference.norm() / expected.detach().double().norm()).item()


def gradients(output: Tensor, upstream: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Vector-Jacobian product; zeros for an input that the output does not depend on."""
    grads = torch.autograd.grad(output, inputs, upstream, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]


@contextmanager
def unchanged(*watched: Tensor) -> Iterator[None]:
    """Fail if a tensor of the caller was written to inside."""
    before = [(tensor.detach().clone(), tensor._version) for tensor in watched]
    yield
    for tensor, (copy, version) in zip(watched, before, strict=True):
        assert tensor._version == version, "the caller's tensor was written to"
        torch.testing.assert_close(tensor.detach(), copy, rtol=0, atol=0, equal_nan=True)


class CountCollectives(TorchDispatchMode):
    """Counts c10d operators by name, e.g. ``{"allreduce_": 2}``, and the bytes of the larger of a call's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func.name().split("::")
        if namespace == "c10d":
            name = name.split(".")[0]
            self.calls[name] = self.calls.get(name, 0) + 1
            sizes = [each.nbytes for each in args if isinstance(each, torch.Tensor)]
            self.bytes[name] = self.bytes.get(name, 0) + max(sizes, default=0)
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.calls.values())


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """One process that believes to be ``rank`` of ``world_size``; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        from nxd_memopt.parallel_layers import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def laid_out_as(platform: str) -> Iterator[None]:
    """Lay ranks out as on this platform."""
    os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = platform
    try:
        yield
    finally:
        del os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"]


def error_message(function: Callable[[], object], kind: type[Exception] = ValueError) -> str:
    """The message of the error that ``function`` must raise."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def assert_says(message: str, *facts: object) -> None:
    """Every fact (a name, a value, a remedy) occurs in an error message."""
    missing = [str(fact) for fact in facts if str(fact) not in message]
    assert not missing, f"{message!r} does not state {missing}"
