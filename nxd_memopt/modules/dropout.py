"""Dropout that draws from the right random stream under tensor and sequence parallelism."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.parallel_layers.fusion import FusibleModule
from nxd_memopt.parallel_layers.random import fork_if


class ParallelDropout(FusibleModule):
    """Dropout with equal masks on replicated activations and different masks on shards.

    Args:
        p: probability of dropping an element.
        sharded: ranks hold different parts of the activation and draw from their own streams.
    """

    def __init__(self, p: float, *, sharded: bool) -> None:
        super().__init__()
        self.p = p
        self.sharded = sharded

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return hidden
        # A shard draws from this rank's own stream. On replicated activations all ranks draw the
        # same mask from the default generator, else their activations would differ from here on.
        with fork_if(self.sharded):
            return F.dropout(hidden, self.p)
