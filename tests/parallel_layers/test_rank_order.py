"""parallel_layers/rank_order against lists that neuronx-distributed's own functions return, written out here."""

from __future__ import annotations

import itertools

import pytest

from nxd_memopt.backends.neuron.topology import neuron_kv_rank_stride, trn1_order
from nxd_memopt.parallel_layers.rank_grid import rank_grid
from nxd_memopt.parallel_layers.rank_order import (
    kv_shard_of_rank,
    position_of_rank,
    rank_at_position,
    replica_groups,
    replica_ranks,
)

TRN1 = {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn1"}
# what neuronx-distributed's arrange_kv_groups makes on trn1 of one tensor-parallel group: (T, replicas) to groups
TRN1_GROUPS = {
    (8, 2): [[0, 4], [1, 5], [2, 6], [3, 7]],
    (8, 8): [[0, 1, 2, 3, 4, 5, 6, 7]],
    (16, 4): [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
    (32, 16): [list(range(0, 32, 2)), list(range(1, 32, 2))],
}
# which of T equal parts of q_proj's rows (and o_proj's columns) neuronx-distributed's checkpoint converter gives to
# ranks 0 to T-1 of trn1: (T, replicas) to parts; k_proj's rows are repeated as a whole: rank r has part r mod (T/m)
TRN1_QUERY_PARTS = {
    (4, 2): [0, 2, 1, 3],
    (8, 2): [0, 2, 4, 6, 1, 3, 5, 7],
    (8, 4): [0, 4, 1, 5, 2, 6, 3, 7],
}


@pytest.mark.parametrize(("size", "replicas"), TRN1_GROUPS)
def test_trn1_groups_are_neuronx_distributeds(size, replicas):
    stride = neuron_kv_rank_stride(TRN1, size, replicas)
    assert replica_ranks(size, replicas, stride) == TRN1_GROUPS[size, replicas]


@pytest.mark.parametrize(("size", "replicas"), TRN1_QUERY_PARTS)
def test_trn1_query_heads_are_neuronx_distributeds(size, replicas):
    stride = neuron_kv_rank_stride(TRN1, size, replicas)
    parts = [position_of_rank(rank, size, stride) for rank in range(size)]
    assert parts == TRN1_QUERY_PARTS[size, replicas]
    shards = [kv_shard_of_rank(rank, size, replicas, stride) for rank in range(size)]
    assert shards == list(range(size // replicas)) * replicas


@pytest.mark.parametrize("platform", ["trn2", "h100"])
def test_elsewhere_replicas_are_neighbours(platform):
    environment = {"NEURON_PLATFORM_TARGET_OVERRIDE": platform}
    assert neuron_kv_rank_stride(environment, 32, 4) == 1
    assert replica_ranks(8, 4, 1) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [position_of_rank(rank, 32, 1) for rank in range(32)] == list(range(32))


def test_several_tensor_parallel_groups():
    """Also where trn1's groups of four are not consecutive: replicas stay within their tensor-parallel group."""
    assert replica_groups([[0, 1, 2, 3], [4, 5, 6, 7]], 2, 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    tensor = rank_grid({"data": 8, "tensor": 4}, trn1_order(32, 4, workers_per_node=32))["tensor"]
    assert replica_groups(tensor, 2, 2)[:4] == [[0, 16], [8, 24], [1, 17], [9, 25]]


@pytest.mark.parametrize("size", [1, 6, 8, 12, 32])
def test_every_order_is_a_permutation_that_keeps_heads_together(size):
    """A rank's query shard attends to the KV shard of the same rank, whatever the stride."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    for stride, replicas in itertools.product(divisors, divisors):
        positions = [position_of_rank(rank, size, stride) for rank in range(size)]
        assert sorted(positions) == list(range(size))
        assert [rank_at_position(position, size, stride) for position in positions] == list(range(size))
        groups = replica_ranks(size, replicas, stride)
        assert sorted(itertools.chain(*groups)) == list(range(size))
        for shard, ranks in enumerate(groups):
            assert ranks == sorted(ranks)
            assert {position_of_rank(rank, size, stride) // replicas for rank in ranks} == {shard}
            assert {kv_shard_of_rank(rank, size, replicas, stride) for rank in ranks} == {shard}
