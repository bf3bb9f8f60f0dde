"""Messages between neighboring stages of a pipeline as all-gathers over pairs of ranks, in the order of both ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nxd_memopt.backends.base import Message


class Transfer(NamedTuple):
    """One message of an exchange.

    Args:
        index: position among the sends or the receives.
        is_sent: whether this rank sends it.
        low: position in the pipeline of the first of the two ranks, which are ``low`` and ``low + 1``.
    """

    index: int
    is_sent: bool
    low: int


def ordered_transfers(sends: Sequence[Message], receives: Sequence[Message], rank: int) -> list[Transfer]:
    """Return the messages in the order in which both of their ranks run them, activations before gradients.

    An all-gather waits for both ranks. With activations first no two ranks wait for each other, for every number of
    stages and micro-batches of the schedule 1F1B (tests/backends/test_stage_links.py tries them).

    Args:
        sends: tensors, and positions in the pipeline of the ranks that receive them.
        receives: tensors, and positions of the ranks that send them.
        rank: position of this rank.
    """
    keyed: list[tuple[bool, Transfer]] = []
    for is_sent, messages in ((True, sends), (False, receives)):
        for index, (_, peer) in enumerate(messages):
            assert abs(peer - rank) == 1, "stages exchange with their neighbors only"
            is_gradient = (peer < rank) == is_sent
            keyed.append((is_gradient, Transfer(index, is_sent, min(peer, rank))))
    return [transfer for _, transfer in sorted(keyed, key=lambda each: each[0])]


def pairs_of_link(pipelines: Sequence[Sequence[int]], low: int) -> list[list[int]]:
    """Return the pairs of ranks that exchange over links of the same parity as that from ``low`` to ``low + 1``.

    All groups of an all-gather have one size: ranks without such a link are paired with each other, and do not call.

    Args:
        pipelines: global ranks of each pipeline of the world.
        low: position of the link's first rank.

    Raises:
        ValueError: an odd number of ranks has no link.
    """
    pairs: list[list[int]] = []
    single: list[int] = []
    for ranks in pipelines:
        linked = range(low % 2, len(ranks) - 1, 2)
        pairs += [[ranks[i], ranks[i + 1]] for i in linked]
        single += [
            rank for position, rank in enumerate(ranks) if position not in {i + j for i in linked for j in (0, 1)}
        ]
    if len(single) % 2:
        raise ValueError(
            f"{len(pipelines)} pipelines of {len(pipelines[0])} stages leave a rank without a pair: use an even "
            "pipeline_model_parallel_size, or an even number of ranks"
        )
    return pairs + [single[i : i + 2] for i in range(0, len(single), 2)]
