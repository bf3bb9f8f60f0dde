"""Slots of peer memory by plan: the backend's thresholds, and the chunks of the fused loss itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nxd_memopt.backends.cuda import backend as cuda
from nxd_memopt.config import ParallelConfig
from nxd_memopt.ops.cross_entropy import LossTerms
from nxd_memopt.parallel_layers.fused_loss.linear_cross_entropy import ChunkedLinearCrossEntropy
from nxd_memopt.parallel_layers.fused_loss.options import LossOptions
from nxd_memopt.planner.sizes.fp8_layers import Fp8Layers
from nxd_memopt.planner.sizes.rank_sizes import RankSizes
from nxd_memopt.planner.techniques import peer_slots
from nxd_memopt.planner.techniques.loss_chunks import DEFAULT_LOGITS_BYTES
from tests.planner.storages import named, share_of

MIB = 2**20


def sizes_of(tokens: int, ranks: int = 2, *, sequence_parallel: bool = True, **options: str) -> RankSizes:
    parallel = ParallelConfig(ranks, sequence_parallel_enabled=sequence_parallel, **options)
    share = share_of(named("llama-3-8b"), parallel, tokens, 1, "bfloat16")
    return share.sizes


def test_thresholds_are_those_of_the_backend():
    assert peer_slots.MIN_BYTES == cuda._PEER_MEMORY_BYTES
    assert peer_slots.MIN_BYTES_AHEAD == cuda._PEER_MEMORY_BYTES_AHEAD


@pytest.mark.parametrize(
    ("tokens", "ranks", "cuda_graph", "holds"),
    [
        (4096, 2, False, False),  # a shard of 16 MiB
        (8192, 2, False, True),  # 32 MiB
        (8192, 4, False, False),  # 16 MiB
        (4096, 2, True, True),
        (256, 4, True, False),  # half a MiB
    ],
)
def test_a_ranks_shard_decides(tokens, ranks, cuda_graph, holds):
    assert peer_slots.holds_layers(sizes_of(tokens, ranks), cuda_graph=cuda_graph) is holds


def test_slots_of_layers_of_the_loss_and_of_neither():
    def mib(sizes, **options) -> float:
        return peer_slots.slot_bytes(sizes, **{"fused_loss": True, "cuda_graph": False} | options) / MIB

    full = 8192 * 4096 * 2 / MIB
    assert mib(sizes_of(8192)) == 4 * full
    assert mib(sizes_of(8192, reduce_dtype="float32")) == 2 * full + 2 * 2 * full
    # Of 16 MiB in bf16 the layers' reductions alone are large enough in fp32.
    chunk = peer_slots.longest_loss_chunk(sizes_of(8192, 4)) * 4096 * 2 / MIB
    assert mib(sizes_of(8192, 4, reduce_dtype="float32")) == 2 * chunk + 2 * 2 * full
    chunk = peer_slots.longest_loss_chunk(sizes_of(4096)) * 4096 * 2 / MIB
    assert mib(sizes_of(4096)) == 4 * chunk
    assert mib(sizes_of(4096), fused_loss=False) == 0
    # NCCL computes all-reduces.
    assert mib(sizes_of(8192, sequence_parallel=False)) == 0


def test_the_longest_chunk_is_that_of_the_loss():
    sizes = sizes_of(4096, 1, sequence_parallel=False)
    x = torch.empty(4096, sizes.hidden, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(sizes.vocab, sizes.hidden, dtype=torch.bfloat16, device="meta")
    labels = torch.zeros(1, 4096, dtype=torch.int64, device="meta")
    options = LossOptions(
        group=None,
        sequence_parallel=False,
        ignore_index=-100,
        reduction="mean",
        logits_bytes=DEFAULT_LOGITS_BYTES,
        accumulate_dtype=None,
        reduce_dtype=None,
        terms=LossTerms(sizes.vocab),
    )
    chunks = ChunkedLinearCrossEntropy(x, weight, labels, labels, options, (False, False)).chunks
    assert peer_slots.longest_loss_chunk(sizes) == max(stop - start for start, stop in chunks)


def test_a_head_that_computes_all_logits_gathers_in_its_own_dtype() -> None:
    """Next to layers whose gathers are in float8."""
    parallel = ParallelConfig(2, sequence_parallel_enabled=True)
    for is_rounded in (True, False):
        fp8 = Fp8Layers((is_rounded,) * 32, least_products=0)
        sizes = share_of(named("llama-3-8b"), parallel, 16384, 1, "bfloat16", fp8=fp8).sizes
        full = 16384 * 4096
        assert sizes.gathered_element_bytes == 2 - is_rounded
        assert peer_slots.slot_bytes(sizes, fused_loss=False, cuda_graph=False) == 2 * full * (2 + 2)
    without_head = replace(sizes, has_head=False, fp8=Fp8Layers((True,) * 32, least_products=0))
    assert peer_slots.slot_bytes(without_head, fused_loss=False, cuda_graph=False) == 2 * full * (1 + 2)
