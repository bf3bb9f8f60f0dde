"""LayerNorm whose parameters are tagged when it runs on a sequence shard."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nxd_memopt.parallel_layers.utils import ShardedModule, mark_sequence_parallel


class LayerNorm(ShardedModule, nn.LayerNorm):
    """``torch.nn.LayerNorm`` with the result in the input's dtype.

    With ``sequence_parallel_enabled`` each rank normalizes its own tokens, so weight and bias
    gradients are partial sums. Both parameters are tagged for
    ``grads.allreduce_sequence_parallel_gradients``.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        mark_sequence_parallel(self, sequence_parallel_enabled)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(input.dtype)  # autocast returns fp32
