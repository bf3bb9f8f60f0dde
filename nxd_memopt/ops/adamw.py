"""AdamW's update in plain operations whose changing numbers are tensors: every step runs the same compiled kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class StepNumbers(NamedTuple):
    """Numbers of an update that change from step to step, as tensors of ``number_tensor``.

    Their dtype is the dtype of the arithmetic.

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


def number_tensor(number: float | Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``number`` on the device of ``param`` as an operand of it: ``[1]``, and 0-dim if ``param`` is."""
    # torch_xla writes the value of a 0-dim tensor that is 0 or 1 into the graph. The correction
    # sqrt(1 - 0.95 ** step) is 1 in fp32 from step 325 on, so that the update would be compiled again.
    shape = (1,) * min(param.dim(), 1)
    return torch.as_tensor(number, dtype=dtype).reshape(shape).to(param.device)


def step_numbers(
    step: int,
    param: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> StepNumbers:
    """Return the numbers of update ``step`` on the device and in the arithmetic dtype of ``param``.

    They are computed on the host in float64. A power of a device tensor would be another kernel,
    and its fp32 result would be wrong in the last digits, because ``1 - beta2 ** step`` is near 0
    in the first steps.

    Args:
        step: number of the update, counted from 1.
        param: parameter that is updated.
        lr: learning rate.
        betas: decay of the first and second moment.
        weight_decay: decoupled weight decay.
    """

    def on_device(number: float) -> Tensor:
        return number_tensor(number, param, arithmetic_dtype(param))

    decay = None
    if weight_decay:
        decay = on_device(1 - lr * weight_decay)
    return StepNumbers(
        decay=decay,
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
    """Update ``param``, ``mean`` and ``square`` in place, as ``torch.optim.AdamW`` does.

    ``betas`` and ``eps`` are constant over a run, so kernels may contain them as constants. Tensors
    narrower than fp32 are updated in fp32 and rounded when they are stored. In bf16,
    ``1 - lr * weight_decay`` itself would have 8 bits, and 0.9999 would round to 1.

    Args:
        param: of any shape and floating-point dtype.
        grad: gradient, of ``param``'s shape; not modified.
        mean: first moment, of ``param``'s shape.
        square: second moment, of ``param``'s shape.
        numbers: from ``step_numbers`` for this parameter's device and dtype.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment, after the bias correction.
    """
    wide = arithmetic_dtype(param)
    # Tensors in the arithmetic dtype are updated in place; .to() copies only narrower ones, which
    # are written back at the end.
    new_param = param.to(wide)
    new_mean = mean.to(wide)
    new_square = square.to(wide)
    wide_grad = grad.to(wide)
    if numbers.decay is not None:
        new_param.mul_(numbers.decay)
    # m = beta1 * m + (1 - beta1) * g and v = beta2 * v + (1 - beta2) * g^2. The rates are numbers
    # and not tensors: they are the same in each step, so kernels that contain them are reused.
    new_mean.lerp_(wide_grad, 1 - betas[0])
    new_square.mul_(betas[1]).addcmul_(wide_grad, wide_grad, value=1 - betas[1])
    # Same order of operations as torch's addcdiv_, which takes only a number as its factor: the
    # results are bitwise equal to torch.optim.AdamW.
    denominator = (new_square.sqrt() / numbers.root).add_(eps)
    new_param.add_((new_mean * numbers.negative_step_size).div_(denominator))
    # Tensors of the arithmetic dtype were updated in place: ``.to`` returned the tensor itself.
    for tensor, updated in ((param, new_param), (mean, new_mean), (square, new_square)):
        if updated is not tensor:
            tensor.copy_(updated)
