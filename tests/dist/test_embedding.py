"""ParallelEmbedding in float64 against torch's dense lookup: output and gradient of the table."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from nxd_memopt.parallel_layers import layers, mappings, parallel_state
from tests.dist.pool import distributed
from tests.reference import assert_float64_close, assert_says, error_message, gradients, pad, shard, tensors

VOCAB, HIDDEN = 29, 6  # 29 is prime: no T divides it


def token_ids(size: int) -> torch.Tensor:
    """``[B, S]`` ids of which each occurs, the first and last of every shard included."""
    ids = torch.arange(VOCAB).repeat(size + 1)[: 3 * 5 * 2 * size]
    return ids.view(3, -1)  # S = 10 T


def check(size: int, *, vocabulary_sharded: bool = True, ids: torch.Tensor | None = None, **options) -> None:
    ids = token_ids(size) if ids is None else ids
    table = tensors(VOCAB, HIDDEN).requires_grad_()
    upstream = tensors(*ids.shape, HIDDEN, seed=1)
    want = F.embedding(ids, table, padding_idx=options.get("padding_idx"))
    (want_grad,) = gradients(want, upstream, [table])

    dim = 0 if vocabulary_sharded else 1
    options |= {"pad": True, "shard_across_embedding": not vocabulary_sharded, "dtype": torch.float64}
    layer = layers.ParallelEmbedding(VOCAB, HIDDEN, **options)
    with torch.no_grad():
        layer.weight.copy_(shard(pad(table.detach(), dim, size), dim))
    if options.get("sequence_parallel_enabled"):
        sequence = options.get("sequence_dimension") or 0
        if sequence == 0:  # [B, S, H] -> [S, B, H]
            want, upstream = want.transpose(0, 1), upstream.transpose(0, 1)
        want, upstream = shard(want, sequence), shard(upstream, sequence)
    got = layer(ids)
    assert_float64_close(got, want, "output")
    assert_float64_close(
        gradients(got, upstream, [layer.weight])[0], shard(pad(want_grad, dim, size), dim), "table gradient"
    )


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("vocabulary_sharded", [True, False])
@pytest.mark.parametrize("sequence_dimension", [None, 0, 1], ids=["whole", "dim0", "dim1"])
def test_equals_the_dense_lookup(vocabulary_sharded, sequence_dimension, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    options = {} if sequence_dimension is None else {"sequence_parallel_enabled": True}
    for padding_idx in (None, 0, VOCAB - 1, -2):
        options |= {"sequence_dimension": sequence_dimension, "padding_idx": padding_idx}
        check(world_size, vocabulary_sharded=vocabulary_sharded, **options)


@distributed(world_size=[2, 3])
def test_other_shapes_of_ids(world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    for ids in (
        torch.tensor([0, 28, 14]),
        torch.tensor(7),
        torch.zeros(0, 4, dtype=torch.long),
        torch.ones(2, 3, 5).int(),
    ):
        check(world_size, ids=ids)


@distributed(world_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keeps_the_dtype_exactly(dtype):
    """One rank alone adds a row that is not zero: no rounding in any dtype."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    layer = layers.ParallelEmbedding(8, 3, dtype=dtype)
    rows = layer(torch.arange(8))
    assert rows.dtype == dtype and torch.equal(shard(rows, 0), layer.weight)


@distributed(world_size=2)
@pytest.mark.parametrize("index", [-1, 29, 30])
def test_index_outside_the_vocabulary_is_refused(index):
    """29 is a row of padding, 30 is beyond it."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    layer = layers.ParallelEmbedding(VOCAB, HIDDEN, pad=True)
    message = error_message(lambda: layer(torch.tensor([[0, index]])))
    assert_says(message, f"index {index}", f"[0, {VOCAB})")


@distributed(world_size=2)
@pytest.mark.parametrize("vocabulary_sharded", [True, False])
def test_own_part_of_the_output(vocabulary_sharded):
    """``collect_output=False``: partial sums, or columns, that a collective makes whole."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    options = {"shard_across_embedding": not vocabulary_sharded, "dtype": torch.float64}
    layer = layers.ParallelEmbedding(8, HIDDEN, collect_output=False, **options)
    whole = layers.ParallelEmbedding(8, HIDDEN, **options)
    whole.load_state_dict(layer.state_dict())
    ids = torch.arange(8).view(2, 4)
    finish = mappings.reduce_from_tensor_model_parallel_region
    if not vocabulary_sharded:
        finish = mappings.gather_from_tensor_model_parallel_region
        assert layer(ids).size(-1) == HIDDEN // 2
    assert torch.equal(finish(layer(ids)), whole(ids))
