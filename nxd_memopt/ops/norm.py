"""Owns RMSNorm on local tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_memopt.ops.cuda import elementwise as cuda
from nxd_memopt.ops.cuda.support import serves


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv:1910.07467), LLaMA's rounding.

    Args:
        x: ``[..., H]``; normalised in fp32 (fp64 for fp64), rounded to x's dtype before the weight is applied.
        weight: ``[H]``.
        eps: added to the mean square.
    """
    if serves(x, weight):
        return cuda.rms_norm(x, weight, eps)
    wide = x if x.dtype == torch.float64 else x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)
