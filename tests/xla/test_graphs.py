"""All ranks compile one graph, and it holds the collectives of the theory, no more and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from nxd_memopt.backends.neuron import xla_inspect
from tests.golden.runs import MODELS, SIZES
from tests.xla.graphs import BATCH_SIZE, EXPERTS, SEQUENCE_LENGTH, WORLD_SIZE

pytestmark = pytest.mark.xdist_group("graphs")

LAYERS, HIDDEN = SIZES["num_hidden_layers"], SIZES["hidden_size"]
FP32 = 4
ACTIVATION = SEQUENCE_LENGTH * BATCH_SIZE * HIDDEN * FP32  # [S, B, H]
TOKENS = SEQUENCE_LENGTH * BATCH_SIZE * FP32
TAGGED = {  # elements of the parameters that see one rank's sequence shard only: one bucket of the gradient hook
    "llama": (2 * LAYERS + 1) * HIDDEN,  # norms
    "gpt_neox": (2 * LAYERS + 1) * 2 * HIDDEN + LAYERS * 2 * HIDDEN,  # norms with biases; row-parallel biases
}
KV_WEIGHT = HIDDEN // 8 * HIDDEN * FP32  # 8 query heads, 2 KV heads: each held by two ranks

# per layer, twice (attention, MLP; once for GPT-NeoX, whose branches share their communication): the forward pass
# gathers the column layer's input and scatters the row layer's output; recompute does both again; backward gathers the
# row layer's gradient and the column layer's input, and scatters the column layer's gradient. Around the layers:
# embedding (scatter; gather), head with its loss (gather, scatter).
BLOCKS = {"llama": 2, "gpt_neox": 1}
GATHERS = {name: LAYERS * blocks * (1 + 1 + 2) + 1 + 1 for name, blocks in BLOCKS.items()}
SCATTERS = {name: LAYERS * blocks * (1 + 1 + 1) + 1 + 1 for name, blocks in BLOCKS.items()}


def expected(name: str) -> Counter[str]:
    table = Counter(
        {
            f"all_gather {ACTIVATION} over 4": GATHERS[name],
            f"reduce_scatter {ACTIVATION} over 4": SCATTERS[name],
            f"all_gather {2 * TOKENS * WORLD_SIZE} over 4": 1,  # loss: each rank's log-sum-exp, the label's logit
            f"all_reduce {TAGGED[name] * FP32} over 4": 1,
        }
    )
    if name == "llama":
        table[f"all_reduce {KV_WEIGHT} over 2"] = 2 * LAYERS  # replicas of K and V
    return table


@pytest.fixture(scope="module")
def graphs(tmp_path_factory) -> dict[tuple[str, int], dict]:
    """What each rank of each model traced, and rank 0 compiled; two processes at a time."""
    return traced(tmp_path_factory.mktemp("graphs"), MODELS)


@pytest.fixture(scope="module")
def trn1_graphs(tmp_path_factory) -> dict[tuple[str, int], dict]:
    """``graphs`` of LLaMA with trn1's order of KV replicas."""
    return traced(tmp_path_factory.mktemp("trn1"), ["llama"], NEURON_PLATFORM_TARGET_OVERRIDE="trn1")


def traced(directory, names, **environment: str) -> dict[tuple[str, int], dict]:
    cases = [(name, rank) for name in names for rank in range(WORLD_SIZE)]
    for first in range(0, len(cases), 2):
        started = [(case, start(directory, *case, environment)) for case in cases[first : first + 2]]
        for case, process in started:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, f"{case}: {errors[-2000:]}"
    return {
        (name, rank): json.loads((directory / f"{name}{rank}.json").read_text(encoding="utf-8")) for name, rank in cases
    }


def start(directory, name: str, rank: int, environment: dict[str, str]) -> subprocess.Popen[str]:
    dump = xla_inspect.dump_flags(directory / f"{name}{rank}")
    env = {**os.environ, **environment, "XLA_FLAGS": f"{dump} {os.environ['XLA_FLAGS']}"}
    command = [sys.executable, "-m", "tests.xla.graphs", name, str(rank), str(directory / f"{name}{rank}.json")]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("name", MODELS)
def test_all_ranks_compile_one_graph(name, graphs):
    assert len({graphs[name, rank]["traced"]["hash"] for rank in range(WORLD_SIZE)}) == 1
    assert graphs[name, 0]["traced"]["unsupported"] == []


@pytest.mark.parametrize("name", MODELS)
def test_optimized_graph_holds_the_theorys_collectives(name, graphs):
    assert Counter(graphs[name, 0]["optimized"]["collectives"]) == expected(name)


@pytest.mark.parametrize("name", MODELS)
def test_optimization_removes_no_matmul(name, graphs):
    assert graphs[name, 0]["optimized"]["matmuls"] == graphs[name, 0]["traced"]["matmuls"] > 0


def test_trn1s_order_of_kv_replicas_has_the_same_theory(trn1_graphs, graphs):
    """One graph for all ranks, the same collectives; only their groups are others, so the graph is another."""
    (fingerprint,) = {trn1_graphs["llama", rank]["traced"]["hash"] for rank in range(WORLD_SIZE)}
    assert fingerprint != graphs["llama", 0]["traced"]["hash"]
    assert Counter(trn1_graphs["llama", 0]["optimized"]["collectives"]) == expected("llama")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_all_ranks_compile_one_graph_of_experts(name, tmp_path):
    """Tensor-parallel ranks with other columns, expert-parallel ranks with other experts and tokens."""
    graphs = traced(tmp_path, [name])
    assert len({graphs[name, rank]["traced"]["hash"] for rank in range(WORLD_SIZE)}) == 1
    assert graphs[name, 0]["traced"]["unsupported"] == []
    kinds = " ".join(graphs[name, 0]["traced"]["collectives"])
    assert ("all_to_all" in kinds) == name.endswith("alltoall")
