"""backends/topology: tensor-parallel groups on Trainium nodes, against the groups that neuronx-distributed makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxd_memopt.backends.neuron.topology import logical_nc_config, neuron_order, platform_target, trn1_order, trn2_order
from nxd_memopt.parallel_layers.rank_grid import rank_grid
from tests.reference import assert_says, error_message


def tensor_groups(order, size):
    return rank_grid({"data": len(order) // size, "tensor": size}, order)["tensor"]


def neighbours(world_size, size):
    return [list(range(start, start + size)) for start in range(0, world_size, size)]


def test_trn1_groups_of_four_are_strided_within_each_node():
    groups = tensor_groups(trn1_order(64, 4, workers_per_node=32), 4)
    assert groups[:3] == [[0, 8, 16, 24], [1, 9, 17, 25], [2, 10, 18, 26]]
    assert groups[7:9] == [[7, 15, 23, 31], [32, 40, 48, 56]] and groups[-1] == [39, 47, 55, 63]


@pytest.mark.parametrize(("world_size", "size", "workers"), [(32, 2, 32), (64, 32, 32), (4, 4, 2), (6, 4, 6)])
def test_trn1_takes_neighbours_otherwise(world_size, size, workers):
    assert trn1_order(world_size, size, workers_per_node=workers) == list(range(world_size))


@pytest.mark.parametrize(("lnc", "row"), [(2, 16), (1, 32)])
def test_trn2_groups_of_half_a_node_are_linked_rows(lnc, row):
    node = 4 * row
    groups = tensor_groups(trn2_order(2 * node, 2 * row, logical_nc_config=lnc, workers_per_node=node), 2 * row)
    outer, inner = [*range(row), *range(3 * row, 4 * row)], [*range(row, 3 * row)]
    assert groups == [outer, inner, [node + rank for rank in outer], [node + rank for rank in inner]]


@pytest.mark.parametrize(
    ("world_size", "size", "lnc", "workers"),
    # a whole node, half of one, and a quarter, which is one row
    [(64, 64, 2, 64), (32, 32, 2, 32), (128, 32, 1, 128)],
)
def test_trn2_takes_neighbours_otherwise(world_size, size, lnc, workers):
    order = trn2_order(world_size, size, logical_nc_config=lnc, workers_per_node=workers)
    assert tensor_groups(order, size) == neighbours(world_size, size)


@pytest.mark.parametrize("size", [2, 4, 32])
def test_every_rank_occurs_once_and_groups_ascend(size):
    """torch.distributed numbers a group's ranks in ascending order."""
    orders = [trn1_order(64, size, workers_per_node=32), trn2_order(64, size, logical_nc_config=2, workers_per_node=64)]
    for order in orders:
        assert sorted(order) == list(range(64))
        assert all(group == sorted(group) for group in tensor_groups(order, size))


def test_platform(monkeypatch):
    assert platform_target({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}) == "trn2"
    assert platform_target({"NEURON_PLATFORM_TARGET_OVERRIDE": "TRN3pre"}) == "trn3"
    monkeypatch.setattr(Path, "exists", lambda self: True)
    for product, platform in {"trn2u.48xlarge\n": "trn2", "Standard PC": ""}.items():
        monkeypatch.setattr(Path, "read_text", lambda self, product=product, **options: product)
        assert platform_target({}) == platform


def test_logical_nc_config():
    names = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
    assert logical_nc_config({}) == 2
    assert [logical_nc_config({name: "1"}) for name in names] == [1, 1]
    assert_says(error_message(lambda: logical_nc_config(dict(zip(names, "12", strict=True)))), *names, "differs")
    assert_says(error_message(lambda: logical_nc_config({names[0]: "4"})), f"{names[0]}=4", "neither 1 nor 2")


def test_order_follows_the_machine():
    trn1 = {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn1", "LOCAL_WORLD_SIZE": "32"}
    assert neuron_order(trn1, 64, 4) == trn1_order(64, 4, workers_per_node=32) != list(range(64))
    trn2 = {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2", "LOCAL_WORLD_SIZE": "64"}
    assert neuron_order(trn2, 64, 32) == trn2_order(64, 32, logical_nc_config=2, workers_per_node=64) != list(range(64))
    assert neuron_order({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"}, 8, 4) == list(range(8))
