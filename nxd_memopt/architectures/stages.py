"""Which decoder layers each stage of a pipeline has, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod

from nxd_memopt.architectures.model_spec import ModelSpec
from nxd_memopt.architectures.parameters import parameters
from nxd_memopt.config import ParallelConfig


@dataclass(frozen=True)
class RankStages:
    """The stages of one rank of a pipeline: chunk c of rank r is stage ``c * P + r`` of ``P * V``.

    Args:
        num_ranks: P.
        rank: position of the rank in the pipeline.
        chunks: global numbers of the decoder layers of each of the V chunks.
    """

    num_ranks: int
    rank: int
    chunks: tuple[range, ...]

    @property
    def layers(self) -> list[int]:
        """Global numbers of all decoder layers of the rank, in order."""
        return [number for chunk in self.chunks for number in chunk]

    @property
    def is_whole(self) -> bool:
        """Whether the rank has the complete model."""
        return self.num_ranks == 1

    def is_first(self, chunk: int) -> bool:
        """Return whether ``chunk`` begins with the embedding."""
        return self.rank == 0 and chunk == 0

    def is_last(self, chunk: int) -> bool:
        """Return whether ``chunk`` ends with the final norm and the head."""
        return self.rank == self.num_ranks - 1 and chunk == len(self.chunks) - 1

    @property
    def has_embedding(self) -> bool:
        """Whether the rank embeds the tokens."""
        return self.is_first(0)

    @property
    def has_head(self) -> bool:
        """Whether the rank has the final norm, the head and the loss."""
        return self.is_last(len(self.chunks) - 1)


# A search asks for the same stages with every memory technique.
@lru_cache(maxsize=512)
def all_stages(spec: ModelSpec, parallel: ParallelConfig) -> tuple[RankStages, ...]:
    """Return the stages of each rank of the pipeline; all layers for the only rank of a model that is not divided.

    Raises:
        ValueError: see ``layers_of_stages``.
    """
    size = parallel.pipeline_model_parallel_size
    ends = [0, *accumulate(layers_of_stages(spec, parallel))]
    ranges = [range(start, end) for start, end in pairwise(ends)]
    return tuple(RankStages(size, rank, tuple(ranges[rank::size])) for rank in range(size))


def rank_stages(spec: ModelSpec, parallel: ParallelConfig, rank: int) -> RankStages:
    """Return the stages of ``rank``, modulo P; errors as ``all_stages``."""
    return all_stages(spec, parallel)[rank % parallel.pipeline_model_parallel_size]


def layers_of_stages(spec: ModelSpec, parallel: ParallelConfig) -> list[int]:
    """Return the number of decoder layers of each of the P * V stages, in the order of the model.

    Raises:
        ValueError: there are more stages than layers, or ``pipeline_model_parallel_layout`` has other stages or layers.
    """
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_chunks
    stages = size * chunks
    given = parallel.pipeline_model_parallel_layout
    if stages > spec.num_layers:
        product = f"pipeline_model_parallel_size {size}"
        if chunks > 1:
            product += f" x virtual_pipeline_model_parallel_size {chunks} = {stages}"
        raise ValueError(f"{product} exceeds the model's {spec.num_layers} layers: lower it")
    if given is None:
        return balanced_layers(spec, size, chunks)
    if len(given) != stages or sum(given) != spec.num_layers or min(given) < 1:
        raise ValueError(
            f"pipeline_model_parallel_layout {list(given)} has {len(given)} stages of {sum(given)} layers: list the "
            f"layers of {stages} stages, {spec.num_layers} together and at least 1 of each"
        )
    return list(given)


def balanced_layers(spec: ModelSpec, size: int, chunks: int = 1) -> list[int]:
    """Return a number of layers for each stage that makes the slowest of ``size`` ranks fast.

    With one stage a rank no other division has a faster slowest rank. With ``chunks`` stages the layers of all stages
    of a rank count, and the stages are about equally long: in each round of the schedule a rank computes one of them.

    The time of a layer and of the head is taken as the number of weights that a token is multiplied with. Attention's
    own products, which depend on the sequence, are left out, so that one model has the same stages at all lengths.
    LLaMA-3-8B's head, of 128,256 tokens, counts as 2.4 layers.
    """
    costs = _layer_costs(spec)
    head = float(spec.hidden_size * spec.vocab_size)
    if chunks == 1:
        return _with_fastest_stages(costs, head, size)
    return _with_fast_ranks(costs, head, size, chunks)


def _with_fastest_stages(costs: Sequence[float], head: float, stages: int) -> list[int]:
    # The lowest bound on a stage's cost for which as many stages are enough; it is the cost of some run of layers.
    best: list[int] = []
    low, high = 0.0, sum(costs) + head
    while not best or high - low > 0.5:
        bound = (low + high) / 2 if best else high
        counts = _fill(costs, head, stages, bound)
        if counts is None:
            low = bound
        else:
            best, high = counts, bound
    return best


def _with_fast_ranks(costs: Sequence[float], head: float, size: int, chunks: int) -> list[int]:
    stages = size * chunks
    # Begin with the layers whose sums are nearest to equal parts, at least one for each stage.
    sums = [0.0, *accumulate(costs)]
    part = (sums[-1] + head) / stages
    ends = [0]
    for stage in range(1, stages):
        possible = range(ends[-1] + 1, len(costs) - (stages - stage) + 1)
        ends.append(min(possible, key=lambda end: abs(sums[end] - stage * part)))
    ends.append(len(costs))

    def slowness(ends: Sequence[int]) -> tuple[float, float, float]:
        """Return the cost of the slowest rank, then what is least for equal ranks, and for equal stages."""
        stage_costs = [sums[end] - sums[start] for start, end in pairwise(ends)]
        stage_costs[-1] += head
        rank_costs = [sum(stage_costs[rank::size]) for rank in range(size)]
        return max(rank_costs), sum(cost**2 for cost in rank_costs), sum(cost**2 for cost in stage_costs)

    # Move the end of one stage by one layer, as long as that is better.
    while True:
        moved = [
            [*ends[:stage], ends[stage] + step, *ends[stage + 1 :]]
            for stage in range(1, stages)
            for step in (-1, 1)
            if ends[stage - 1] < ends[stage] + step < ends[stage + 1]
        ]
        best = min(moved, key=slowness, default=ends)
        if slowness(best) >= slowness(ends):
            return [end - start for start, end in pairwise(ends)]
        ends = best


def _fill(costs: Sequence[float], head: float, stages: int, bound: float) -> list[int] | None:
    """Return the layers of each stage, which costs at most ``bound``, the last one with the head; None if none fit."""
    # From the end, because the last stage has the head. Every earlier stage needs a layer.
    counts: list[int] = []
    remaining = len(costs)
    for stage in reversed(range(stages)):
        cost = head if stage == stages - 1 else 0.0
        count = 0
        while remaining - count > stage and (count == 0 or cost + costs[remaining - count - 1] <= bound):
            cost += costs[remaining - count - 1]
            count += 1
        if cost > bound:
            return None
        remaining -= count
        counts.append(count)
    return counts[::-1] if remaining == 0 else None


def _layer_costs(spec: ModelSpec) -> list[float]:
    """Return for each decoder layer the weights that a token is multiplied with."""
    costs = [0.0] * spec.num_layers
    for parameter in parameters(spec):
        _, found, rest = parameter.name.partition(".layers.")
        if not found:
            continue
        share = 1.0
        if parameter.is_expert:
            assert spec.experts is not None
            share = spec.experts.top_k / spec.experts.num_experts
        costs[int(rest.partition(".")[0])] += share * prod(parameter.shape)
    return costs
