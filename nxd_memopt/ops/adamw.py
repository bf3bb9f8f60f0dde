"""AdamW's update in plain operations whose changing numbers are tensors: every step runs the same compiled kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class StepNumbers(NamedTuple):
    """The numbers of an update that change from step to step, each 0-dim, in the dtype of the arithmetic.

    Args:
        decay: ``1 - lr * weight_decay``; ``None`` without weight decay.
        negative_step_size: ``-lr / (1 - beta1 ** step)``.
        root: ``sqrt(1 - beta2 ** step)``.
    """

    decay: Tensor | None
    negative_step_size: Tensor
    root: Tensor


def arithmetic_dtype(param: Tensor) -> torch.dtype:
    """Return fp32 for narrower parameters, and the parameter's own dtype otherwise."""
    return torch.promote_types(param.dtype, torch.float32)


def step_numbers(
    step: int, param: Tensor, *, lr: float, betas: tuple[float, float], weight_decay: float
) -> StepNumbers:
    """Return the numbers of update ``step``, counted from 1, on the device and in the arithmetic of ``param``.

    They are computed on the host, in float64: a power of a device tensor would be a kernel of its own, and its fp32
    result wrong in the last digits, as ``1 - beta2 ** step`` is near 0 in the first steps.
    """

    def on_device(number: float) -> Tensor:
        return torch.tensor(number, dtype=arithmetic_dtype(param)).to(param.device)

    return StepNumbers(
        decay=on_device(1 - lr * weight_decay) if weight_decay else None,
        negative_step_size=on_device(-lr / (1 - betas[0] ** step)),
        root=on_device(math.sqrt(1 - betas[1] ** step)),
    )


def adamw_update(
    param: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    numbers: StepNumbers,
    *,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update ``param``, ``mean`` and ``square`` in place as ``torch.optim.AdamW`` does.

    ``betas`` and ``eps`` are the run's constants, so kernels may contain them. Tensors narrower than fp32 are updated
    in fp32 and rounded when they are stored: ``1 - lr * weight_decay`` itself would have 8 bits in bf16, where 0.9999
    is 1.

    Args:
        param: of any shape and floating-point dtype.
        grad: of ``param``'s shape; read.
        mean: first moment, of ``param``'s shape.
        square: second moment, of ``param``'s shape.
        numbers: from ``step_numbers`` for this parameter's device and dtype.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment, after the bias correction.
    """
    wide = arithmetic_dtype(param)
    new_param, new_mean, new_square, wide_grad = (tensor.to(wide) for tensor in (param, mean, square, grad))
    if numbers.decay is not None:
        new_param.mul_(numbers.decay)
    new_mean.lerp_(wide_grad, 1 - betas[0])
    new_square.mul_(betas[1]).addcmul_(wide_grad, wide_grad, value=1 - betas[1])
    # the order of torch's addcdiv_, whose factor can only be a number: the results are equal to the last bit
    denominator = (new_square.sqrt() / numbers.root).add_(eps)
    new_param.add_((new_mean * numbers.negative_step_size).div_(denominator))
    for tensor, updated in ((param, new_param), (mean, new_mean), (square, new_square)):
        if updated is not tensor:
            tensor.copy_(updated)
