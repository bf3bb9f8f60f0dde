"""A norm's affine part as part of the linear layer after it: ``(x g + s) W^t + b = x (W g)^t + (W s + b)``."""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_memopt.ops.cuda import folded_norm as cuda
from nxd_memopt.ops.cuda.support import can_use_triton


def folded_bias(weight: Tensor, bias: Tensor | None, shift: Tensor) -> Tensor:
    """Return ``W s + b``, ``[n]``.

    Args:
        weight: W, ``[n, H]``.
        bias: b, ``[n]`` or None.
        shift: s, ``[H]``, bias of the norm.
    """
    return weight @ shift if bias is None else torch.addmv(bias, weight, shift)


def folded_gradients(
    grad: Tensor, bias_grad: Tensor, weight: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of W, ``[n, H]``, which may overwrite ``grad``, and of gain and shift, ``[2, H]`` in fp32.

    Args:
        grad: gradient of ``W g``, ``[n, H]``, contiguous.
        bias_grad: gradient of ``W s + b``, ``[n]``.
        weight: W, ``[n, H]``, contiguous.
        gain: g, ``[H]``, weight of the norm.
        shift: s, ``[H]``, bias of the norm.
    """
    if can_use_triton(grad, bias_grad, weight, gain, shift):
        return cuda.folded_gradients(grad, bias_grad, weight, gain, shift)
    wide = torch.promote_types(grad.dtype, torch.float32)
    of_product, of_bias, values = grad.to(wide), bias_grad.to(wide), weight.to(wide)
    weight_grad = of_product * gain.to(wide) + of_bias[:, None] * shift.to(wide)
    of_norm = torch.stack([(of_product * values).sum(0), of_bias @ values])
    return weight_grad.to(grad.dtype), of_norm
