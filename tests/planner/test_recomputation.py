"""The planned recomputation: the layers and chunks that ``apply_recompute`` makes, and the forwards that it runs."""

from __future__ import annotations

import pytest
from torch import nn

from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory.recompute import apply_recompute, is_recomputed, layer_units
from nxd_memopt.planner.techniques.recomputation import Recomputation
from tests.reference import assert_says, error_message

FULL = {"recompute_granularity": "full"}
TECHNIQUES = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": FULL,
    "block": {**FULL, "recompute_method": "block", "recompute_num_layers": 3},
    "uniform": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 3},
    "nested": {**FULL, "recompute_method": "nested"},
    "nested, last chunk shorter": {**FULL, "recompute_method": "nested", "recompute_num_layers": 4},
    "nested, chunks of one": {**FULL, "recompute_method": "nested", "recompute_num_layers": 1},
}


class Layers:
    """A model of layers without parameters."""

    def __init__(self, number: int) -> None:
        self._layers = [nn.Identity() for _ in range(number)]

    def decoder_layers(self) -> list[nn.Module]:
        return list(self._layers)

    def recompute_modules(self) -> dict[str, list[nn.Module]]:
        return {"core_attn": []}


@pytest.mark.parametrize("offloaded", [0, 3])
@pytest.mark.parametrize("technique", [name for name in TECHNIQUES if name != "selective"])
def test_layers_and_chunks_are_those_of_the_model(technique, offloaded):
    memory = MemoryConfig(**TECHNIQUES[technique], cpu_offloading_num_layers=offloaded)
    model = Layers(12)
    apply_recompute(model, memory)
    layers = model.decoder_layers()
    planned = Recomputation.of(memory, 12)
    assert [planned.is_recomputed(index) for index in range(12)] == [is_recomputed(layer) for layer in layers]
    sizes = [len(unit) for unit in layer_units(layers)]
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    assert [planned.unit(index) for index in firsts] == [
        range(first, first + size) for first, size in zip(firsts, sizes, strict=True)
    ]
    assert [planned.position(index) for index in range(12)] == [
        place for size in sizes for place in (range(size) if size > 1 else [0])
    ]


def test_checkpoints_in_host_memory_leave_no_layer_out():
    memory = MemoryConfig(
        recompute_granularity="full",
        recompute_method="nested",
        cpu_offloading_activations=True,
        cpu_offloading_num_layers=3,
    )
    planned = Recomputation.of(memory, 12)
    assert (planned.first, planned.recomputed, planned.chunk) == (0, 12, 3)


@pytest.mark.parametrize(
    ("technique", "complete", "stopped"),
    [
        ("none", 0, 0),
        ("selective", 0, 0),
        ("full", 0, 10),
        ("block", 0, 3),
        ("nested", 5, 10),  # five chunks of two layers
        ("nested, last chunk shorter", 7, 10),  # 4, 4 and 2
        ("nested, chunks of one", 0, 10),
    ],
)
def test_forwards(technique, complete, stopped):
    planned = Recomputation.of(MemoryConfig(**TECHNIQUES[technique]), 10)
    assert (planned.complete, planned.stopped, planned.forwards) == (complete, stopped, complete + stopped)
    assert sum(planned.forwards_of(index) for index in range(10)) == complete + stopped


def test_uniform_stops_in_the_last_layer_of_a_chunk():
    planned = Recomputation.of(MemoryConfig(**TECHNIQUES["uniform"]), 6)
    assert [planned.forwards_of(index) for index in range(6)] == [1] * 6
    assert (planned.complete, planned.stopped, planned.forwards) == (4, 2, 6)


def test_nested_runs_twice_where_nothing_stops_early():
    planned = Recomputation.of(MemoryConfig(**TECHNIQUES["nested"] | {"recompute_num_layers": 3}), 10)
    assert [planned.forwards_of(index, stops_early=False) for index in range(10)] == [2] * 9 + [1]


def test_refusals():
    def message(number: int, **options) -> str:
        return error_message(lambda: Recomputation.of(MemoryConfig(**options), number))

    assert_says(message(4, **FULL, cpu_offloading_num_layers=4), "is left no layer")
    assert_says(message(2, **TECHNIQUES["block"]), "recompute_num_layers 3 exceeds the 2 layers")
    assert_says(message(4, **TECHNIQUES["uniform"]), "4 layers are not divisible by recompute_num_layers 3")
