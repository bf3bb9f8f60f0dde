"""parallel_state: grids against hand-written groups, source ranks, refusals, and the single process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from tests.alias_modules import import_without_alias
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message, fake_world

# world size, sizes, groups written by hand in the order [pipeline, data, context, tensor], tensor fastest
GRIDS = {
    "tp2 pp2 of 8": (
        8,
        {"tensor": 2, "pipeline": 2},
        {
            "tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "data": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "pipeline": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "context": [[0], [1], [2], [3], [4], [5], [6], [7]],
        },
    ),
    "tp2 cp2 of 8": (
        8,
        {"tensor": 2, "context": 2},
        {
            "tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "context": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "data": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "pipeline": [[0], [1], [2], [3], [4], [5], [6], [7]],
        },
    ),
    "tp2 ep2 of 8": (
        8,
        {"tensor": 2, "expert": 2},
        {
            "tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "data": [[0, 2, 4, 6], [1, 3, 5, 7]],
            "expert": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "expert_data": [[0, 4], [1, 5], [2, 6], [3, 7]],
        },
    ),
}
OPTIONS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}


def initialize(sizes: dict[str, int]) -> None:
    parallel_state.initialize_model_parallel(**{OPTIONS[name]: size for name, size in sizes.items()})


def accessor(name: str, what: str):
    middle = "parallel" if name in ("data", "expert_data") else "model_parallel"
    return getattr(parallel_state, f"get_{name}_{middle}_{what}")


@pytest.mark.parametrize("name", GRIDS)
def test_grid_of_every_rank(name):
    world_size, sizes, expected = GRIDS[name]
    for rank in range(world_size):
        with fake_world(world_size, rank):
            initialize(sizes)
            for axis, groups in expected.items():
                mine = next(group for group in groups if rank in group)
                assert accessor(axis, "replica_groups")() == groups, axis
                assert accessor(axis, "group")(as_list=True) == groups, axis
                assert accessor(axis, "size")() == len(mine), axis
                assert accessor(axis, "rank")() == mine.index(rank), axis
                assert dist.get_process_group_ranks(accessor(axis, "group")()) == mine, axis
                if axis in ("tensor", "data"):
                    assert accessor(axis, "src_rank")() == mine[0], axis
            assert parallel_state.is_global_rank_zero() == (rank == 0)


@distributed(world_size=2)
def test_destroy_allows_other_sizes():
    for size in (2, 1, 2):
        initialize({"tensor": size})
        assert parallel_state.get_tensor_model_parallel_size() == size
        parallel_state.destroy_model_parallel()
        assert not parallel_state.model_parallel_is_initialized()
    assert dist.is_initialized(), "the world's own group stays"


@distributed(world_size=4)
def test_the_alias_replaces_groups_of_other_sizes():
    """As neuronx-distributed does; its tests of one process call it again and again."""
    initialize_again = import_without_alias("parallel_state").initialize_model_parallel
    initialize_again(2)
    column = ColumnParallelLinear(3, 8, bias=False, dtype=torch.float64)
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    output = column(x)
    parallel_state.initialize_kv_group(2)
    model_parallel_manual_seed(7)
    before = parallel_state.get_tensor_model_parallel_group()
    initialize_again(2)
    assert parallel_state.get_tensor_model_parallel_group() is before, "the same sizes change nothing"
    assert torch.equal(column(x), output) and parallel_state.kv_rank_strides() and parallel_state.rng_states()
    initialize_again(2, expert_model_parallel_size=2)
    assert parallel_state.get_expert_model_parallel_size() == 2
    initialize_again(4)
    assert not parallel_state.kv_rank_strides() and not parallel_state.rng_states(), "they are of the old groups"
    assert parallel_state.get_expert_model_parallel_size() == 1
    seen = torch.tensor([dist.get_rank()])
    dist.all_reduce(seen, group=parallel_state.get_tensor_model_parallel_group())
    assert seen.item() == 0 + 1 + 2 + 3


@distributed(world_size=2)
def test_a_world_without_model_parallelism_is_refused():
    for call in (parallel_state.get_tensor_model_parallel_size, parallel_state.get_data_parallel_group):
        assert_says(error_message(call, RuntimeError), "2 processes", "initialize_model_parallel")
    initialize({"tensor": 2})
    assert_says(error_message(lambda: initialize({"tensor": 2}), RuntimeError), "destroy_model_parallel")


@pytest.mark.parametrize(
    ("sizes", "facts"),
    [
        ({"tensor": 3}, ["world size 8", "3", "--nproc_per_node"]),
        ({"tensor": 2, "pipeline": 3}, ["world size 8", "6", "tensor", "2", "pipeline", "3"]),
        ({"tensor": 0}, ["tensor", "at least 1", "0"]),
    ],
)
def test_sizes_that_do_not_divide_the_world_are_refused(sizes, facts):
    with fake_world(8):
        assert_says(error_message(lambda: initialize(sizes)), *facts)


def test_single_process_without_distributed():
    for axis in ("tensor", "data", "pipeline", "context", "expert"):
        assert (accessor(axis, "size")(), accessor(axis, "rank")(), accessor(axis, "group")()) == (1, 0, None)
    assert not parallel_state.model_parallel_is_initialized()
    initialize({})
    assert parallel_state.model_parallel_is_initialized()
    assert parallel_state.get_tensor_model_parallel_src_rank() == 0
    assert_says(
        error_message(lambda: (parallel_state.destroy_model_parallel(), initialize({"tensor": 2}))), "world size 1"
    )


def test_mesh_only_creates_nothing():
    with fake_world(8):
        grid = parallel_state.initialize_model_parallel(tensor_model_parallel_size=4, mesh_only=True)
        assert grid["tensor"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert not parallel_state.model_parallel_is_initialized()


@distributed(world_size=4)
def test_equal_partitions_share_a_group_which_is_destroyed_once():
    initialize({"tensor": 4})
    assert parallel_state.get_tensor_model_parallel_group() is parallel_state.get_world_group() is dist.group.WORLD
    single = parallel_state.get_data_parallel_group()
    assert dist.get_process_group_ranks(single) == [dist.get_rank()]
    assert single is parallel_state.get_pipeline_model_parallel_group()
    assert single is parallel_state.get_expert_data_parallel_group()
    other = parallel_state.group_of([[0, 3], [1, 2]])
    assert other is parallel_state.group_of([[0, 3], [1, 2]]) and other in parallel_state.process_groups()
    assert dist.get_process_group_ranks(other) == ([0, 3] if dist.get_rank() in (0, 3) else [1, 2])
    parallel_state.destroy_model_parallel()
    assert not parallel_state.process_groups()
    seen = torch.ones(1)
    dist.all_reduce(seen)
    assert seen.item() == 4
    initialize({"tensor": 2})
    assert parallel_state.get_expert_data_parallel_group() is parallel_state.get_data_parallel_group()
    tensor = parallel_state.get_tensor_model_parallel_group()
    assert parallel_state.initialize_kv_group(2) is tensor, "both ranks have the only KV head"
    parallel_state.destroy_kv_group()
    first = dist.get_rank() - dist.get_rank() % 2
    assert dist.get_process_group_ranks(tensor) == [first, first + 1]


@distributed(world_size=4)
def test_a_group_stays_while_its_partition_is_used():
    initialize({"tensor": 4})
    neighbours = [[0, 1], [2, 3]]
    for create, destroy in (
        (lambda: parallel_state.initialize_kv_group(2), parallel_state.destroy_kv_group),
        (lambda: parallel_state.group_of(neighbours), lambda: None),
    ):
        created = create()
        found = parallel_state.group_of(neighbours)
        assert found is created
        destroy()
        assert len(dist.get_process_group_ranks(found)) == 2
    parallel_state.destroy_model_parallel()
    initialize({"tensor": 1})
    parallel_state.initialize_token_shuffle_group(2)
    assert parallel_state.group_of(neighbours) is not parallel_state.get_token_shuffle_group(), "tokens and gradients"
    parallel_state.destroy_model_parallel()
    assert not parallel_state.process_groups()


@distributed(world_size=4)
@pytest.mark.parametrize("axis", ["expert", "context"])
def test_activations_and_gradients_of_the_same_ranks_have_groups_of_their_own(axis):
    """One communicator would run an exchange of tokens after a reduction of gradients that began before it."""
    initialize({axis: 4})
    group = accessor(axis, "group")()
    assert dist.get_process_group_ranks(group) == [0, 1, 2, 3]
    others = [parallel_state.get_world_group()]
    others += [parallel_state.get_data_parallel_group()] if axis == "expert" else []
    assert all(group is not other for other in others)
    assert parallel_state.group_of([[0, 1, 2, 3]]) is dist.group.WORLD
    parallel_state.destroy_model_parallel()


@distributed(world_size=4)
def test_token_shuffle_and_kv_groups():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    parallel_state.initialize_token_shuffle_group(2)
    assert parallel_state.get_token_shuffle_replica_groups() == [[0, 1], [2, 3]]
    assert parallel_state.get_token_shuffle_group_size() == parallel_state.get_token_shuffle_group().size() == 2
    message = error_message(lambda: parallel_state.initialize_token_shuffle_group(3))
    assert_says(message, "token_shuffle_group_size 3", "data-parallel size 4")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
    parallel_state.initialize_kv_group(2)
    assert parallel_state.kv_rank_strides() == {2: 1}
    assert parallel_state.get_kv_shared_group(2, as_list=True) == [[0, 1], [2, 3]]
    first = dist.get_rank() - dist.get_rank() % 2
    assert dist.get_process_group_ranks(parallel_state.get_kv_shared_group(2)) == [first, first + 1]
    assert_says(error_message(lambda: parallel_state.initialize_kv_group(3)), "3", "tensor_model_parallel_size 4")
    parallel_state.destroy_kv_group()
    assert parallel_state.kv_rank_strides() == {}
    assert "no KV groups of size 2" in error_message(lambda: parallel_state.get_kv_shared_group(2), RuntimeError)


def test_groups_for_zero1_and_rings_of_contexts():
    with fake_world(16, rank=5):
        parallel_state.initialize_model_parallel(2, 2, context_parallel_size=2)
        # stage 0 has ranks 0 to 7, of which 2 data-parallel copies x 2 contexts hold the same shard
        assert parallel_state.get_zero1_sharding_groups() == [
            [0, 2, 4, 6],
            [1, 3, 5, 7],
            [8, 10, 12, 14],
            [9, 11, 13, 15],
        ]
        assert parallel_state.get_context_model_parallel_src_tgt_pairs() == [[5, 7], [7, 5]]
        parallel_state.destroy_model_parallel()
