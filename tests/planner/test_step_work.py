"""The work of a step: bytes of collectives against those that a step issues, and one count of recomputed layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from nxd_memopt.architectures.configs import with_defaults
from nxd_memopt.certify import worker
from nxd_memopt.certify.report.judge import _shape
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.planner.sizes.rank_sizes import RankSizes
from nxd_memopt.planner.timing.collectives import Collective, _gradient_hook, expected_collectives, sent_bytes
from nxd_memopt.planner.timing.step_work import (
    attention_flops,
    elementwise_bytes,
    expert_parallel_bytes,
    expert_passes,
    matmul_flops,
    recomputed_layers,
    tensor_parallel_bytes,
)
from tests.certify_steps import FULL, GPT_NEOX, LLAMA, SIZES, parallel, request
from tests.planner.storages import named, sizes_of
from tests.reference import assert_says, error_message

SELECTIVE = {"recompute_granularity": "selective"}
TECHNIQUES = {
    "none": {},
    "full": FULL,
    "block": {**FULL, "recompute_method": "block", "recompute_num_layers": 1},
    "uniform": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 3},
    "nested": {**FULL, "recompute_method": "nested", "recompute_num_layers": 3},
    "nested, last chunk shorter": {**FULL, "recompute_method": "nested", "recompute_num_layers": 4},
    "attn and norm": {**SELECTIVE, "recompute_modules": ["attn", "norm"]},
    "attn and mlp of two layers": {
        **SELECTIVE,
        "recompute_modules": ["attn", "mlp"],
        "recompute_method": "block",
        "recompute_num_layers": 2,
    },
    "tiles": {"mlp_tile_tokens": 16},
    "full, tiles": {**FULL, "mlp_tile_tokens": 16},
    "one group of heads": {"attention_head_groups": 1},
    "nested, groups": {
        **FULL,
        "recompute_method": "nested",
        "recompute_num_layers": 3,
        "attention_head_groups": 2,
    },
}
# One of each kind of recomputation, and both divisions of a layer.
FAST = ("none", "uniform", "attn and mlp of two layers", "full, tiles", "nested, groups")
ALL_LAYERS = {"recompute_method": None, "recompute_num_layers": None}
EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}


def tensor_parallel_case(config: dict, memory: dict, *, sequence: bool, dtype: str = "float32", **options):
    """Return the bytes that a step of six layers sends over four ranks, and those that are planned."""
    changes = {"overrides": EIGHT_HEADS, "sequence_length": 32, "dtype": dtype}
    asked = request("cpu", config, memory, parallel=parallel(4, sequence=sequence, **options), **changes)
    plain = request("cpu", config, {}, parallel=parallel(4, sequence=sequence, **options), **changes)
    sent = Counter(worker.measure_variant(asked, 6).collectives)
    # The sums of the gradients of norms, once a step.
    sent.subtract(_gradient_hook(_shape(plain, 6)))
    sizes = sizes_of(
        with_defaults({**SIZES, **config, **EIGHT_HEADS, "num_hidden_layers": 6}), asked.parallel, 32, 1, dtype
    )
    return sent_bytes(sent), tensor_parallel_bytes(sizes, asked.memory)


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["sequence", "tensor"])
@pytest.mark.parametrize(
    "technique", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in TECHNIQUES]
)
@pytest.mark.parametrize("config", [LLAMA, pytest.param(GPT_NEOX, marks=pytest.mark.slow)], ids=["llama", "gpt_neox"])
def test_tensor_parallel_bytes_are_those_of_the_step(config, technique, sequence):
    measured, planned = tensor_parallel_case(config, TECHNIQUES[technique], sequence=sequence)
    assert planned == measured


@pytest.mark.parametrize("technique", ["none", "nested"])
def test_reductions_in_fp32_send_twice_the_bytes(technique):
    options = {"sequence": True, "dtype": "bfloat16"}
    measured, planned = tensor_parallel_case(LLAMA, TECHNIQUES[technique], reduce_dtype="float32", **options)
    assert planned == measured
    assert planned > 1.2 * tensor_parallel_case(LLAMA, TECHNIQUES[technique], **options)[1]


def named_sizes(model: str, layers: int, *, expert_ranks: int = 1, size: int = 8) -> RankSizes:
    return sizes_of(
        named(model, num_hidden_layers=layers),
        ParallelConfig(size, sequence_parallel_enabled=size > 1, expert_model_parallel_size=expert_ranks),
        4096,
        1,
        "bfloat16",
    )


WORK = [matmul_flops, attention_flops, elementwise_bytes, tensor_parallel_bytes, recomputed_layers]


def added(work: Callable[..., float], sizes: RankSizes, technique: dict) -> float:
    return work(sizes, MemoryConfig(**technique)) - work(sizes, MemoryConfig())


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
@pytest.mark.parametrize("model", ["llama-3-8b", "gpt-neox-20b"])
@pytest.mark.parametrize("technique", ["full", "block", "uniform", "nested"])
def test_layers_in_host_memory_are_not_recomputed(technique, model, work):
    """What is recomputed of 32 layers of which 20 are in host memory is that of 12 layers."""
    offloaded = TECHNIQUES[technique] | {"cpu_offloading_num_layers": 20}
    found = added(work, named_sizes(model, 32), offloaded)
    assert found == pytest.approx(added(work, named_sizes(model, 12), TECHNIQUES[technique]))
    assert found > 0


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
@pytest.mark.parametrize(
    "technique", [FULL, TECHNIQUES["attn and mlp of two layers"] | ALL_LAYERS], ids=["full", "selective"]
)
def test_a_block_of_one_layer_adds_the_work_of_one_layer(work, technique):
    sizes = named_sizes("llama-3-8b", 32)
    one = technique | {"recompute_method": "block", "recompute_num_layers": 1}
    assert added(work, sizes, technique) == pytest.approx(32 * added(work, sizes, one))


@pytest.mark.parametrize("work", [expert_parallel_bytes, expert_passes], ids=lambda work: work.__name__)
def test_recomputed_experts_exchange_again(work):
    sizes = named_sizes("mixtral-8x7b", 12, expert_ranks=4, size=1)
    block = added(work, sizes, TECHNIQUES["block"])
    assert block > 0
    assert added(work, sizes, FULL) == pytest.approx(12 * block)
    # Eight layers of chunks of three run once more, to the end.
    assert added(work, sizes, TECHNIQUES["nested"]) >= 1.6 * added(work, sizes, FULL)
    in_host_memory = FULL | {"cpu_offloading_num_layers": 5}
    assert added(work, sizes, in_host_memory) == pytest.approx(7 * block)


def test_tiles_recompute_their_first_projections_in_every_layer():
    """A recomputed layer that stops early stops before its tiles, a layer before it in its chunk does not."""
    sizes = named_sizes("llama-3-8b", 12)
    tiles = {"mlp_tile_tokens": 1024}
    first = added(matmul_flops, sizes, tiles)
    assert added(matmul_flops, sizes, FULL | tiles) == pytest.approx(added(matmul_flops, sizes, FULL))
    block = TECHNIQUES["block"]
    expected = added(matmul_flops, sizes, block) + 11 / 12 * first
    assert added(matmul_flops, sizes, block | tiles) == pytest.approx(expected)


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "tensor"])
@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", [LLAMA, pytest.param(GPT_NEOX, marks=pytest.mark.slow)], ids=["llama", "gpt_neox"])
def test_nested_recompute_equals_the_step(config, number, sequence):
    """Five layers: the last chunk of two or three layers is shorter."""
    memory = {**FULL, "recompute_method": "nested", "recompute_num_layers": number}
    asked = request("cpu", config, memory, parallel=parallel(4, sequence=sequence), sequence_length=32)
    measured = worker.measure_variant(asked, 5).collectives
    assert measured == expected_collectives(_shape(asked, 5), asked.memory, stops_early=True)


def test_nested_recompute_on_xla_is_refused():
    asked = request("cpu", LLAMA, {**FULL, "recompute_method": "nested"}, parallel=parallel(4, sequence=True))
    message = error_message(lambda: expected_collectives(_shape(asked, 4), asked.memory, stops_early=False), ValueError)
    assert_says(message, "nested", "uniform")


def test_sent_bytes_are_those_of_rings():
    of_each = {"all_gather": 75.0, "reduce_scatter": 75.0, "all_to_all": 75.0, "all_reduce": 150.0}
    for kind, expected in of_each.items():
        assert sent_bytes(Counter({Collective(kind, 100, 4): 1})) == expected
        assert sent_bytes(Counter({Collective(kind, 100, 4): 3})) == 3 * expected
        assert sent_bytes(Counter({Collective(kind, 100, 1): 1})) == 0
