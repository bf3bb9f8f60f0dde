"""Initialisation: shards concatenate to what one process draws, and the random stream stays in step on all ranks."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxd_memopt.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_memopt.parallel_layers import layers, parallel_state
from tests.dist.pool import distributed
from tests.reference import assert_same_on_all_ranks, pad, shard, unshard

SEED = 77


def through_another_tensor(weight):
    """Draws on the CPU outside of the tensor that it is given."""
    weight.copy_(torch.randn(weight.shape, dtype=weight.dtype))


def scaled_by_a_draw(weight):
    return weight.normal_().mul_(torch.rand(()).item())


INIT_METHODS = {
    "normal": functools.partial(nn.init.normal_, std=0.02),
    "kaiming": functools.partial(nn.init.kaiming_uniform_, a=5**0.5),
    "truncated": functools.partial(nn.init.trunc_normal_, std=0.02, a=-0.04, b=0.04),
    "orthogonal": nn.init.orthogonal_,
    "constant": functools.partial(nn.init.constant_, val=0.5),
    "through another tensor": through_another_tensor,
    "scaled by a draw": scaled_by_a_draw,
}
# Widths that are no multiple of torch's vector of 16; fewer than 16 numbers; and more than the 4 Mi numbers of a chunk
SHAPES = [(12, 13), (12, 1), (48, 32), (36, 7), (3000, 1501), (4200012, 1)]


def initialize() -> int:
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    return size


def drawn(shape, init_method, dtype=torch.float32) -> torch.Tensor:
    """The dense parameter, and the default generator where it leaves it."""
    torch.manual_seed(SEED)
    full = torch.empty(shape, dtype=dtype)
    with torch.no_grad():
        init_method(full)
    return full


def assert_generator_follows_the_dense_draw(state: torch.Tensor) -> None:
    assert_same_on_all_ranks(torch.get_rng_state(), "default generator")
    assert torch.equal(torch.get_rng_state(), state), "the default generator is not where the dense draw left it"


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("name", INIT_METHODS)
def test_shards_equal_the_dense_draw(name, world_size):
    """Bit for bit: the numbers that one process draws."""
    initialize()
    init_method = INIT_METHODS[name]
    for kind, (rows, columns) in itertools.product(("column", "row", "embedding"), SHAPES):
        if rows * columns > 1e6 and (name == "orthogonal" or world_size == 3 or (columns == 1 and kind == "row")):
            continue  # a QR decomposition of that size takes minutes; two ranks show what three do
        shape = (columns, rows) if kind == "row" else (rows, columns)
        want = drawn(shape, init_method)
        state = torch.get_rng_state()
        torch.manual_seed(SEED)
        dim, layer = build(kind, rows, columns, init_method)
        assert torch.equal(layer.weight.detach(), shard(want, dim)), (kind, shape)
        assert_generator_follows_the_dense_draw(state)


def build(kind, rows, columns, init_method, **options):
    """A layer of the full weight ``[rows, columns]``, or its transpose for row; the sharded dimension is ``rows``."""
    if kind == "embedding":
        return 0, layers.ParallelEmbedding(rows, columns, init_method=init_method, **options)
    if kind == "column":
        return 0, layers.ColumnParallelLinear(columns, rows, bias=False, init_method=init_method, **options)
    return 1, layers.RowParallelLinear(rows, columns, bias=False, init_method=init_method, **options)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_strided_and_padded_shards(kind, world_size):
    """Padding is zero and draws nothing."""
    initialize()
    for rows, stride in ((15 * world_size, 3), (7 * world_size - 1, 1)):
        want = drawn((13, rows) if kind == "row" else (rows, 13), nn.init.normal_)
        state = torch.get_rng_state()
        torch.manual_seed(SEED)
        dim, layer = build(kind, rows, 13, nn.init.normal_, stride=stride, pad=stride == 1)
        assert torch.equal(unshard(layer.weight, dim, stride=stride), pad(want, dim, world_size))
        assert_generator_follows_the_dense_draw(state)


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_defaults_are_those_of_torch(dtype, world_size):
    """Bias too: what nn.Linear and nn.Embedding draw, bounds from the full fan-in. bf16 is rounded from fp32."""
    initialize()
    drawn_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    torch.manual_seed(SEED)
    column, row = nn.Linear(13, 12, dtype=drawn_dtype), nn.Linear(12, 13, dtype=drawn_dtype)
    embedding = nn.Embedding(24, 13, padding_idx=5, dtype=drawn_dtype)
    state = torch.get_rng_state()

    torch.manual_seed(SEED)
    pairs = [
        (layers.ColumnParallelLinear(13, 12, dtype=dtype), column, 0),
        (layers.RowParallelLinear(12, 13, dtype=dtype), row, 1),
        (layers.ParallelEmbedding(24, 13, padding_idx=5, dtype=dtype), embedding, 0),
    ]
    for layer, reference, dim in pairs:
        assert layer.weight.dtype == dtype
        assert torch.equal(layer.weight.detach(), shard(reference.weight.detach(), dim).to(dtype))
    for layer, reference in ((pairs[0][0], shard(column.bias.detach(), 0)), (pairs[1][0], row.bias.detach())):
        assert torch.equal(layer.bias.detach(), reference.to(dtype))
    assert_generator_follows_the_dense_draw(state)


@distributed(world_size=[1, 2, 4])
def test_joint_projection_draws_q_k_v_in_order(world_size):
    """One KV head per two ranks at T = 4."""
    initialize()
    torch.manual_seed(SEED)
    reference = [nn.Linear(13, size) for size in (24, 6, 6)]
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    multiplier = max(1, world_size // 2)
    layer = GQAQKVColumnParallelLinear(13, [24, 6], gather_output=False, kv_size_multiplier=multiplier)
    for name, dense in zip("qkv", reference, strict=True):
        replicas = 1 if name == "q" else multiplier
        place = {"size": world_size // replicas, "rank": dist.get_rank() // replicas}
        for kind in ("weight", "bias"):
            want = shard(getattr(dense, kind).detach(), 0, **place)
            assert torch.equal(getattr(layer, f"{kind}_{name}").detach(), want), (kind, name)
    assert_generator_follows_the_dense_draw(state)


@distributed(world_size=2)
def test_master_weight_is_the_full_draw():
    initialize()
    want = drawn((12, 13), nn.init.normal_)
    torch.manual_seed(SEED)
    options = {"bias": False, "init_method": nn.init.normal_}
    layer = layers.ColumnParallelLinear(13, 12, keep_master_weight=True, **options)
    assert torch.equal(layer.master_weight, want)
    assert layers.ColumnParallelLinear(13, 12, **options).master_weight is None


@distributed(world_size=2)
def test_meta_parameters_draw_nothing():
    initialize()
    state = torch.get_rng_state()
    for _, layer in (build(kind, 8, 6, nn.init.normal_, device="meta") for kind in ("column", "row", "embedding")):
        assert layer.weight.is_meta
    assert torch.equal(torch.get_rng_state(), state)


@distributed(world_size=2)
def test_own_generator_of_an_init_method():
    initialize()

    def draw(weight):
        weight.normal_(generator=generator)

    generator = torch.Generator().manual_seed(3)
    want = drawn((8, 6), draw)
    generator = torch.Generator().manual_seed(3)
    _, layer = build("column", 8, 6, draw)
    assert torch.equal(layer.weight.detach(), shard(want, 0))
