"""Tests of which layers each stage of a pipeline has."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from nxd_memopt.architectures.configs import load_model_config
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.architectures.stages import layers_of_stages, rank_stages
from nxd_memopt.config import ParallelConfig
from tests.reference_models import llama_config


def counts(layers: int, stages: int, vocabulary: int = 1, chunks: int | None = None, **options: Any) -> list[int]:
    spec = model_spec(llama_config(num_hidden_layers=layers, vocab_size=vocabulary))
    parallel = ParallelConfig(
        pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=chunks, **options
    )
    return layers_of_stages(spec, parallel)


def slowest(found: list[int], layer: float, head: float) -> float:
    return max([*(layer * count for count in found[:-1]), layer * found[-1] + head])


@pytest.mark.parametrize(("layers", "stages", "vocabulary"), [(7, 4, 1), (9, 3, 900), (12, 4, 700), (5, 5, 61)])
def test_no_other_layout_has_a_faster_slowest_stage(layers: int, stages: int, vocabulary: int) -> None:
    config = llama_config(num_hidden_layers=layers, vocab_size=vocabulary)
    # q, o: H x H; k, v: H x H/4; gate, up, down: H x F; two norms of H.
    hidden, width = config.hidden_size, config.intermediate_size
    layer = 2.5 * hidden * hidden + 3 * hidden * width + 2 * hidden
    head = hidden * vocabulary
    found = counts(layers, stages, vocabulary)
    others = [each for each in itertools.product(range(1, layers + 1), repeat=stages) if sum(each) == layers]
    best = min(slowest(list(each), layer, head) for each in others)
    assert slowest(found, layer, head) == pytest.approx(best)


def test_llama_3_8b() -> None:
    """The head of 128,256 tokens counts as 2.4 layers of 218 million weights."""
    spec = model_spec(load_model_config("llama3-8b"))
    assert layers_of_stages(spec, ParallelConfig(pipeline_model_parallel_size=2)) == [17, 15]
    assert layers_of_stages(spec, ParallelConfig(pipeline_model_parallel_size=4)) == [8, 9, 9, 6]
    chunks = ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=4)
    assert layers_of_stages(spec, chunks) == [4, 5, 4, 4, 5, 4, 4, 2]


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("vocabulary", [1, 300, 900])
def test_no_other_layout_of_chunks_has_a_faster_slowest_rank(stages: int, chunks: int, vocabulary: int) -> None:
    for layers in range(stages * chunks, 15):
        config = llama_config(num_hidden_layers=layers, vocab_size=vocabulary)
        hidden, width = config.hidden_size, config.intermediate_size
        layer = 2.5 * hidden * hidden + 3 * hidden * width + 2 * hidden
        head = float(hidden * vocabulary)
        found = counts(layers, stages, vocabulary, chunks)
        ranks = [sum(found[rank::stages]) for rank in range(stages)]
        others = (each for each in itertools.product(range(chunks, layers + 1), repeat=stages) if sum(each) == layers)
        best = min(slowest(list(each), layer, head) for each in others)
        assert slowest(ranks, layer, head) == pytest.approx(best)


def test_chunks_alternate_between_the_ranks() -> None:
    spec = model_spec(llama_config(num_hidden_layers=7))
    parallel = ParallelConfig(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout=(1, 2, 3, 1),
    )
    first, last = (rank_stages(spec, parallel, rank) for rank in range(2))
    assert first.layers == [0, 3, 4, 5]
    assert last.layers == [1, 2, 6]
    assert [first.is_first(chunk) for chunk in range(2)] == [True, False]
    assert [last.is_last(chunk) for chunk in range(2)] == [False, True]
    assert first.has_embedding and not first.has_head
    assert last.has_head and not last.has_embedding


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="pipeline_model_parallel_size 4 exceeds the model's 3 layers: lower it"):
        counts(3, 4)
    with pytest.raises(
        ValueError, match=r"size 2 x virtual_pipeline_model_parallel_size 2 = 4 exceeds the model's 3 lay"
    ):
        counts(3, 2, chunks=2)
    with pytest.raises(ValueError, match=r"layout \[3, 1\] has 2 stages of 4 layers: list the layers of 2 stages, 5"):
        counts(5, 2, pipeline_model_parallel_layout=(3, 1))
    with pytest.raises(ValueError, match="list the layers of 2 stages, 5 together and at least 1 of each"):
        counts(5, 2, pipeline_model_parallel_layout=(5, 0))
    with pytest.raises(
        ValueError, match="virtual_pipeline_model_parallel_size 2 needs pipeline_model_parallel_size above"
    ):
        ParallelConfig(virtual_pipeline_model_parallel_size=2)
