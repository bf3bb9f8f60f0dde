"""RMSNorms whose weight is tagged when they run on a sequence shard."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from nxd_memopt.ops.norm import add_rms_norm, head_norm, rms_norm
from nxd_memopt.parallel_layers.fusion import FusedPath, FusibleModule
from nxd_memopt.parallel_layers.utils import ShardedModule, mark_sequence_parallel


class RMSNorm(ShardedModule):
    """RMSNorm (``ops.norm.rms_norm``) with a weight; ``[..., H] -> [..., H]``.

    Args:
        normalized_shape: H.
        eps: added to the mean square.
        sequence_parallel_enabled: the input is a sequence shard; the weight is tagged for
            ``grads.allreduce_sequence_parallel_gradients``.
        device: device of the weight.
        dtype: dtype of the weight.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-6,
        sequence_parallel_enabled: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype))
        mark_sequence_parallel(self, sequence_parallel_enabled)

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)


class HeadNorm(RMSNorm):
    """RMSNorm over each head; ``[B, h, S, d] -> [B, h, S, d]``, in any order of memory."""

    def forward(self, hidden: Tensor) -> Tensor:
        return head_norm(hidden, self.weight, self.eps)


def residual_norm_path(owner: FusibleModule, name: str) -> FusedPath:
    """Return the fused path that adds to the residual stream and applies the norm ``name`` of ``owner``."""
    return FusedPath(
        owner, "residual + norm", {name: RMSNorm}, cost="the sum is a separate pass over the residual stream"
    )


def add_and_norm(
    norm: nn.Module, hidden: Tensor, added: Tensor | None = None, *, path: FusedPath
) -> tuple[Tensor, Tensor]:
    """Return ``norm(hidden + added)`` and ``hidden + added``, as one kernel on GPUs.

    In backward the gradients of both results are added in one pass.

    Args:
        norm: an ``RMSNorm``, or a module that replaces it and is called.
        hidden: ``[..., H]``, the residual stream.
        added: ``[..., H]``, the output of the previous block, or None.
        path: the path from ``residual_norm_path``; while it is off, the norm is called.
    """
    # The path is active only while the norm is an unmodified ``RMSNorm`` without hooks, so its
    # weight and eps are all that its forward would use.
    if path.is_active:
        unmodified = cast(RMSNorm, norm)
        return add_rms_norm(hidden, added, unmodified.weight, unmodified.eps)
    total = hidden
    if added is not None:
        total = hidden + added
    return norm(total), total
