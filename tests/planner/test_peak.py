"""The moments of a step's backward, and the search for the highest one."""

from __future__ import annotations

import pytest

from nxd_memopt.architectures.configs import NAMED_CONFIGS, with_defaults
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.planner.hardware import device_named
from nxd_memopt.planner.memory import backward_peak
from nxd_memopt.planner.memory.activations import activations
from nxd_memopt.planner.memory.backward import layer_moments
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.search.candidates import settings
from nxd_memopt.planner.search.plan import evaluate
from nxd_memopt.planner.search.problem import Problem
from nxd_memopt.planner.sizes.rank_sizes import RankSizes
from tests.planner.storages import named, sizes_of


@pytest.mark.parametrize("model", ["mixtral-8x7b", "gpt-neox-20b"])
def test_layers_that_are_left_out_do_not_have_the_peak(model, monkeypatch):
    """Of Mixtral the statistics of routers grow from layer to layer."""
    asked = Problem(named(model), device_named("a100-40gb"), 8, 32768)
    tried = [each for each in settings(asked) if each.tensor_model_parallel_size in (1, 8) and not each.cuda_graph]
    found = [evaluate(asked, each).memory for each in tried]
    monkeypatch.setattr(backward_peak, "_candidate_layers", lambda sizes, *_: range(sizes.num_layers))
    assert found == [evaluate(asked, each).memory for each in tried]


@pytest.mark.parametrize(("tensor_size", "copies"), [(1, (True, True)), (2, (False, True)), (4, (False, False))])
def test_wide_experts_copy_the_rows_of_their_matmuls(tensor_size, copies):
    """Of Mixtral, 14,336 columns of an expert: a matmul with at least 8,192 of them on the rank reads a copy.

    The gradient of gate and up, twice as wide, copies a quarter of the 4,096 columns of the tokens at a time.
    """
    config = with_defaults(NAMED_CONFIGS["mixtral-8x7b"])
    parallel = ParallelConfig(tensor_size, sequence_parallel_enabled=tensor_size > 1)
    sizes = sizes_of(config, parallel, 1000, 3, "bfloat16")
    moments = {each.name: each.temporary for each in layer_moments(sizes, MemoryConfig(), Kernels(True, "flash4"))}
    rows = 3000 * 2
    found = [moments[f"MLP, {name}"]["copied rows"] for name in ("last projection", "first projections")]
    assert found == [rows * 4096 * 2 * copies[0], rows * 1024 * 2 * copies[1]]


COMPILED = Kernels(fused=False, attention="tiled", compiles_steps=True)
PLAIN = Kernels(fused=False, attention="tiled")
MIB = 1 << 20


def rank(model: str, ranks: int, length: int) -> RankSizes:
    return sizes_of(named(model), ParallelConfig(ranks, sequence_parallel_enabled=True), length, 1, "bfloat16")


def test_a_compiled_norm_keeps_its_input():
    """The graph of recipe llama2_7b grows by 64.25 MiB for each layer: both norms' inputs and results, query, key,
    value, attention's result (4 MiB each), and gate, up and activation (10.75 each)."""
    memory = MemoryConfig(recompute_granularity="selective", recompute_modules=("core_attn", "mlp_act"))
    sizes = rank("llama-2-7b", 8, 4096)
    layer = sum(activations(sizes, memory, COMPILED).layers[0].values())
    statistics = 2 * 512 * 4
    assert layer - statistics == 8 * 4 * MIB + 3 * 10.75 * MIB
    plain = sum(activations(sizes, memory, PLAIN).layers[0].values())
    assert plain - layer == 2 * 8 * MIB  # a copy in fp32 and the normalised input instead of the input


def test_the_gradients_of_merged_norms_are_products_in_fp32():
    """The graph of recipe gpt_neox_20b has two f32[2048,6144] and five f16[2048,6144] at its peak."""
    sizes = rank("gpt-neox-20b", 32, 2048)

    def temporary(kernels: Kernels) -> int:
        moment = layer_moments(sizes, MemoryConfig(recompute_granularity="full"), kernels)[-1]
        small = ("gradients of the stream", "gradient of expanded", "dQ, dK, dV", "dW")
        return sum(size for name, size in moment.temporary.items() if name not in small)

    tokens = 2048 * 6144
    stream = 64 * 6144 * 2
    assert temporary(COMPILED) == tokens * (2 * 4 + 5 * 2) + stream
    # The gradient of the normalised rows, next to the rows.
    assert temporary(PLAIN) == tokens * 4 * 2 + 2 * stream
