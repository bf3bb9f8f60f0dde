"""Gathers whose rows arrive in pieces, and reductions that take them so: the layers give what they give at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.backends import backend
from nxd_memopt.modules.mlp import fused_gated_mlp
from nxd_memopt.ops.fp8 import GRANULARITIES, Fp8Recipe
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear, column_parallel_linears
from nxd_memopt.parallel_layers.loss_functions import fused_linear_cross_entropy
from tests.dist.pool import distributed
from tests.reference import assert_float64_close, relative_error, shard, tensors

F64 = {"dtype": torch.float64}
LENGTH, BATCH, HIDDEN = 12, 3, 8


def ranges(rows: int, *, own_first: bool) -> list[tuple[int, int]]:
    """This rank's rows and those on both sides of them, as a device that copies between neighbours has them."""
    size, rank = dist.get_world_size(), dist.get_rank()
    own = (rank * rows // size, (rank + 1) * rows // size)
    others = [each for each in ((own[1], rows), (0, own[0])) if each[1] > each[0]]
    return [own, *others] if own_first else [*others, own]


class PieceGathering:
    """Its rows' memory is used again by the next one."""

    last: torch.Tensor | None = None

    def __init__(self, shard, group, *, materialize: bool) -> None:
        if PieceGathering.last is not None:
            # 127 is NaN in the bytes of both float8 formats
            PieceGathering.last.fill_(torch.nan if PieceGathering.last.is_floating_point() else 127)
        self._whole, self._is_wanted = backend.all_gather(shard, group), materialize
        PieceGathering.last = self._whole
        self.length = self._whole.size(0)

    def chunks(self, operations_per_element) -> Iterator[tuple[int, torch.Tensor]]:
        assert operations_per_element > 0
        for start, stop in ranges(self.length, own_first=True):
            yield start, self._whole[start:stop].clone()

    def wait(self, *, copy=False):
        assert self._is_wanted
        return self._whole.clone() if copy else self._whole


class PieceReduction:
    def __init__(self, shape, dtype, group) -> None:
        self.chunks, self._parts, self._group = ranges(shape[0], own_first=False), {}, group
        self._shape, self._dtype = shape, dtype

    def abandon(self) -> None:
        raise AssertionError("nothing failed")

    def put(self, start, rows) -> None:
        assert rows.dtype == self._dtype
        self._parts[start] = rows

    def wait(self):
        whole = torch.cat([self._parts[start] for start in sorted(self._parts)])
        assert whole.shape == self._shape
        return backend.reduce_scatter_async(whole, self._group).wait()


@contextmanager
def in_pieces(monkeypatch) -> Iterator[list[str]]:
    """The backend as a device would have it whose copies overlap with matmuls; yields what was started."""
    started: list[str] = []
    at_once = backend.start_all_gather, backend.start_reduction

    def start_all_gather(tensor, group, *, materialize=True, hides_launch_latency=False):
        if group is None:
            return at_once[0](tensor, group)
        started.append("gather, host ahead" if hides_launch_latency else "gather")
        return PieceGathering(tensor, group, materialize=materialize)

    def start_reduction(shape, dtype, group, *, scattered, hides_launch_latency=False):
        if not scattered:
            return at_once[1](shape, dtype, group, scattered=scattered)
        started.append("reduction, host ahead" if hides_launch_latency else "reduction")
        return PieceReduction(shape, dtype, group)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "start_all_gather", start_all_gather)
        patch.setattr(backend, "start_reduction", start_reduction)
        patch.setattr(PieceGathering, "last", None)
        yield started


def layers(dimension: int, *, bias: bool, hidden: int = HIDDEN, width: int = 12):
    options = {"bias": bias, "sequence_parallel_enabled": True, "sequence_dimension": dimension, **F64}
    columns = [ColumnParallelLinear(hidden, n, gather_output=False, **options) for n in (width, width)]
    return torch.nn.ModuleList([*columns, RowParallelLinear(width, hidden, input_is_parallel=True, **options)])


def results(modules, x, *, gated: bool):
    *columns, row = modules
    modules.zero_grad()
    x = x.detach().requires_grad_()
    gate, up = column_parallel_linears(x, columns)
    output = fused_gated_mlp(gate, up, row, "silu") if gated else row(torch.nn.functional.silu(gate) * up)
    output.backward(tensors(*output.shape, seed=7 + dist.get_rank()))
    grads.allreduce_sequence_parallel_gradients(modules)
    return [output.detach(), x.grad, *(p.grad.clone() for p in modules.parameters())]


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dimension", [0, 1])
def test_layers(dimension, bias, joins):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    torch.manual_seed(0)
    modules = layers(dimension, bias=bias)
    if joins:
        weights = [layer.weight for layer in modules[:2]]
        for weight, part in zip(weights, torch.cat([w.detach() for w in weights]).chunk(2), strict=True):
            weight.data = part
    shape = (LENGTH, BATCH, HIDDEN) if dimension == 0 else (BATCH, LENGTH, HIDDEN)
    x = shard(tensors(*shape), dimension)
    expected = results(modules, x, gated=False)
    for gated in (False, True):
        with in_pieces(pytest.MonkeyPatch()) as started:
            found = results(modules, x, gated=gated)
        assert started.count("gather") == 3 and started.count("reduction") == 2
        for a, b in zip(found, expected, strict=True):
            assert_float64_close(a, b)


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dimension", [0, 1])
def test_float8_layers(dimension, granularity):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    torch.manual_seed(0)
    modules = layers(dimension, bias=True, hidden=16, width=64)
    for layer in modules:
        layer.fp8 = Fp8Recipe(granularity=granularity)
    shape = (LENGTH, BATCH, 16) if dimension == 0 else (BATCH, LENGTH, 16)
    x = shard(tensors(*shape), dimension)
    for gated in (False, True):
        expected = results(modules, x, gated=gated)
        with in_pieces(pytest.MonkeyPatch()) as started:
            found = results(modules, x, gated=gated)
        # rowwise gathers the gradient's columns too, which have scales of their own
        assert started.count("gather") == 3 + (granularity == "rowwise") and started.count("reduction") == 2
        for a, b in zip(found, expected, strict=True):
            assert relative_error(a, b) < 1e-6


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("logits_bytes", [0, 20_000])
def test_the_fused_loss(logits_bytes):
    """Whose next chunk arrives while one is worked on, in the same memory as the one before."""
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    x, weight = shard(tensors(64 * size, BATCH, HIDDEN), 0), shard(tensors(15 * size, HIDDEN, seed=1), 0)
    target = torch.arange(64 * size * BATCH).view(-1, BATCH) * 7 % (15 * size)

    def step():
        inputs = [t.detach().clone().requires_grad_() for t in (x, weight)]
        loss = fused_linear_cross_entropy(*inputs, target, sequence_parallel_enabled=True, logits_bytes=logits_bytes)
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    expected = step()
    with in_pieces(pytest.MonkeyPatch()) as started:
        found = step()
    assert started.count("gather, host ahead") == started.count("reduction, host ahead") == len(started) / 2 > 1
    for a, b in zip(found, expected, strict=True):
        assert_float64_close(a, b)


@distributed(world_size=2)
def test_a_failure_between_pieces_abandons_the_reduction():
    parallel_state.initialize_model_parallel(2)
    comm = RowParallelLinear(
        4, HIDDEN, input_is_parallel=True, sequence_parallel_enabled=True, **F64
    ).activation_sharding()
    abandoned = []

    def rows(start, stop):
        if start != comm_pieces[0][0]:
            raise MemoryError("the second piece")
        return torch.ones(stop - start, HIDDEN, **F64)

    comm_pieces = ranges(LENGTH, own_first=False)
    with in_pieces(pytest.MonkeyPatch()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(PieceReduction, "abandon", lambda self: abandoned.append(len(self._parts)))
        with pytest.raises(MemoryError):
            comm.reduce(rows, (LENGTH, HIDDEN), torch.float64)
    assert abandoned == [1]
