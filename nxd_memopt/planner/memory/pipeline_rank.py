"""What one rank of a pipeline has: the layers of its chunks, and the micro-batches that exist at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import ge

from nxd_memopt.architectures.stages import RankStages
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.sizes.rank_model import ModelPart, RankModel
from nxd_memopt.planner.techniques.pipeline_schedule import InFlight, in_flight
from nxd_memopt.planner.techniques.recomputation import require_layers


@dataclass(frozen=True)
class Chunk:
    """One stage of a rank.

    Args:
        model: its layers.
        memory: techniques of its layers.
        others: what the rank has of other micro-batches while this chunk computes (``in_flight``).
    """

    model: RankModel
    memory: MemoryConfig
    others: tuple[InFlight, ...]


@dataclass(frozen=True)
class PipelineRank:
    """The stages of one rank of a pipeline.

    Args:
        rank: position in the pipeline.
        model: the layers of all chunks.
        chunks: each of them.
    """

    rank: int
    model: RankModel
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(
        cls, stages: RankStages, memory: MemoryConfig, micro_batches: int, model_of: Callable[[ModelPart], RankModel]
    ) -> PipelineRank:
        """Return what a rank has.

        Args:
            stages: its layers.
            memory: techniques, which the training program applies to the layers of the rank.
            micro_batches: M.
            model_of: returns the share of a part of the layers.

        Raises:
            ValueError: recompute does not fit the layers of the rank, or crosses its chunks.
        """
        require_layers(memory, len(stages.layers), len(stages.chunks))
        all_others = in_flight(stages.num_ranks, len(stages.chunks), micro_batches, stages.rank)
        chunks: list[Chunk] = []
        start = 0
        for index, layers in enumerate(stages.chunks):
            part = ModelPart(tuple(layers), stages.is_first(index), stages.is_last(index))
            positions = range(start, start + len(layers))
            chunks.append(
                Chunk(model_of(part), _techniques_of(memory, positions, len(stages.layers)), all_others[index])
            )
            start = positions.stop
        whole = ModelPart(tuple(stages.layers), stages.has_embedding, stages.has_head)
        return cls(stages.rank, model_of(whole), tuple(chunks))


def fullest_ranks(stages: Sequence[RankStages]) -> list[int]:
    """Return the ranks of a pipeline of which one has the highest peak.

    The first rank has the embedding and the most micro-batches in flight, the last one the head. From rank to rank
    fewer are in flight, so that a rank between them has more only where no rank before it has as many layers in each
    chunk. The sum over the chunks is not enough: of the first ones more micro-batches are in flight.
    """
    found = [0]
    depths: list[list[int]] = []
    for each in stages[1:-1]:
        own = [len(chunk) for chunk in each.chunks]
        if not any(all(map(ge, before, own)) for before in depths):
            depths.append(own)
            found.append(each.rank)
    return [*found, len(stages) - 1]


def _techniques_of(memory: MemoryConfig, positions: range, num_layers: int) -> MemoryConfig:
    """Return the techniques of the layers at ``positions`` of a rank's ``num_layers``."""
    if len(positions) == num_layers:
        return memory
    keeping = memory.layers_keeping_attention(num_layers)
    number = memory.recompute_num_layers
    if number is not None and memory.recompute_method == "block":
        number = min(max(number - positions.start, 0), len(positions))
        if number == 0:
            return replace(
                memory,
                recompute_granularity=None,
                recompute_method=None,
                recompute_num_layers=None,
                recompute_modules=None,
                recompute_keep_core_attn=False,
            )
        memory = replace(memory, recompute_num_layers=number)
    # Those that keep attention's results are the last ones that are recomputed, of the rank and so of a chunk.
    if memory.recompute_keep_core_attn not in (False, "all"):
        kept = len(range(max(keeping.start, positions.start), min(keeping.stop, positions.stop)))
        memory = replace(memory, recompute_keep_core_attn=kept or False)
    return memory
