"""The order in which the sequences of several sources are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nxd_memopt.training.data.packing import Tokens

PERIOD = 10_000
"""Sequences after which the order of the sources repeats: shares that are multiples of 0.01 % are exact."""


class Blend:
    """The source of each training sequence, as a function of its position alone.

    Each position goes to the source with the largest deficit, so that of any n consecutive
    sequences a source has n times its share, with an error of less than the number of sources. A resumed run needs no
    state of it, with any number of ranks.

    Args:
        weights: positive weights by source; one source has everything.

    Raises:
        ValueError: a weight is too small a part of their sum.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.names = list(weights)
        total = sum(weights.values())
        self.shares = [weight / total for weight in weights.values()]
        self._order = _order(self.shares)
        chosen = self._order[:, None] == np.arange(len(self.shares))
        # Row i: how many of the first i positions go to each source.
        self._before = np.concatenate([np.zeros((1, len(self.shares)), np.int64), chosen.cumsum(axis=0)])
        for name, share, count in zip(self.names, self.shares, self._before[-1], strict=True):
            if not count:
                raise ValueError(
                    f"data.mixture: the weight of {name!r} is {share:.2g} of their sum, and the smallest share is "
                    f"{1 / PERIOD:g}: raise it, or leave the source out"
                )

    def counts(self, sequences: int) -> list[int]:
        """Return how many of the first ``sequences`` sequences are of each source."""
        periods, rest = divmod(sequences, PERIOD)
        return (periods * self._before[-1] + self._before[rest]).tolist()

    def sources(self, positions: range) -> Tokens:
        """Return the number of the source of each position, int32."""
        return self._order[np.arange(positions.start, positions.stop) % PERIOD]


def _order(shares: Sequence[float]) -> Tokens:
    """Return the sources of ``PERIOD`` positions."""
    order = np.zeros(PERIOD, np.int32)
    if len(shares) == 1:
        return order
    # Smooth weighted round robin: at each position every source gains its share, and the one that lacks most pays 1.
    deficit = np.zeros(len(shares))
    for position in range(PERIOD):
        deficit += shares
        source = int(deficit.argmax())
        deficit[source] -= 1
        order[position] = source
    return order
