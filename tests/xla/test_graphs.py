"""All ranks compile one graph, and it holds the collectives of the theory, no more and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from nxd_memopt.backends.neuron import xla_inspect
from nxd_memopt.selftest.golden import SIZES
from tests.reference_models import DENSE
from tests.xla.graphs import BATCH_SIZE, EXPERTS, SEQUENCE_LENGTH, WORLD_SIZE

pytestmark = pytest.mark.xdist_group("graphs")

# The first and the last rank: they differ in every group, and each rank is a process of its own.
RANKS = (0, WORLD_SIZE - 1)
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
    """What the first and the last rank of each model traced, and rank 0 compiled; two processes at a time."""
    return traced(tmp_path_factory.mktemp("graphs"), DENSE)


def traced(directory, names, **environment: str) -> dict[tuple[str, int], dict]:
    found = {}
    for name in names:
        started = {rank: start(directory, name, rank, environment) for rank in RANKS}
        for rank, process in started.items():
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, f"{name} on rank {rank}: {errors[-2000:]}"
            found[name, rank] = json.loads((directory / f"{name}{rank}.json").read_text(encoding="utf-8"))
    return found


def start(directory, name: str, rank: int, environment: dict[str, str]) -> subprocess.Popen[str]:
    dump = xla_inspect.dump_flags(directory / f"{name}{rank}")
    env = {**os.environ, **environment, "XLA_FLAGS": f"{dump} {os.environ['XLA_FLAGS']}"}
    command = [sys.executable, "-m", "tests.xla.graphs", name, str(rank), str(directory / f"{name}{rank}.json")]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("name", DENSE)
def test_all_ranks_compile_one_graph(name, graphs):
    traced, optimized = graphs[name, 0]["traced"], graphs[name, 0]["optimized"]
    assert {graphs[name, rank]["traced"]["hash"] for rank in RANKS} == {traced["hash"]}
    assert traced["unsupported"] == []
    assert Counter(optimized["collectives"]) == expected(name)
    assert optimized["matmuls"] == traced["matmuls"] > 0


@pytest.mark.slow
def test_trn1s_order_of_kv_replicas_has_the_same_theory(tmp_path, graphs):
    """One graph for all ranks, the same collectives; only their groups are others, so the graph is another."""
    trn1_graphs = traced(tmp_path, ["llama"], NEURON_PLATFORM_TARGET_OVERRIDE="trn1")
    (fingerprint,) = {trn1_graphs["llama", rank]["traced"]["hash"] for rank in RANKS}
    assert fingerprint != graphs["llama", 0]["traced"]["hash"]
    assert Counter(trn1_graphs["llama", 0]["optimized"]["collectives"]) == expected("llama")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_all_ranks_compile_one_graph_of_experts(name, tmp_path):
    """Tensor-parallel ranks with other columns, expert-parallel ranks with other experts and tokens."""
    graphs = traced(tmp_path, [name])
    assert len({graphs[name, rank]["traced"]["hash"] for rank in RANKS}) == 1
    assert graphs[name, 0]["traced"]["unsupported"] == []
    kinds = " ".join(graphs[name, 0]["traced"]["collectives"])
    assert ("all_to_all" in kinds) == name.endswith("alltoall")
