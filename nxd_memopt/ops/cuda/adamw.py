"""AdamW's update of many tensors in one Triton kernel, which reads and writes each tensor once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nxd_memopt.ops.cuda.support import lazy_kernels

_kernels = lazy_kernels("adamw_kernels")

_BLOCK = 1024
# Elements per program. LLaMA-3-8B's parameters at T=4 take 6.74 ms, with 64 blocks per program
# 7.03 ms (H200).
_CHUNK = 4 * _BLOCK
_ALIGNMENT_BYTES = 16


class Update(NamedTuple):
    """One parameter's update. The parameter, its gradient, moments and output have one shape and are contiguous.

    Both moments have one dtype. ``factor`` and ``output`` are for ``adamw_of_one``.

    Args:
        param: updated in place; for ``adamw_of_one`` it may be the int16 remainders of fp32
            parameters (``ops.param_remainders``) whose rounded values are in ``output``, bf16.
        grad: not modified.
        mean: first moment, updated in place.
        square: second moment, updated in place.
        step: number of updates including this one.
        factor: multiplies the gradient in fp32, 0-dim fp32; None is 1.
        output: receives the updated parameter, rounded to its dtype.
    """

    param: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor
    step: int
    factor: Tensor | None = None
    output: Tensor | None = None


def adamw(
    updates: Sequence[Update],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Run ``torch.optim.AdamW``'s step for ``updates``, with one kernel launch per kind of tensors.

    The arithmetic is in fp32 for tensors of any dtype; results are rounded when they are stored.

    Args:
        updates: parameters to update; tensors of equal device, dtypes and alignment share a launch.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment, after the bias correction.
        weight_decay: decoupled weight decay.
    """
    numbers = _numbers(lr, beta1, beta2, eps, weight_decay)
    # Pointer types are compile-time constants of the kernel: one launch per combination of dtypes.
    kinds: dict[tuple[Any, ...], list[Update]] = {}
    for update in updates:
        kinds.setdefault(_kind(update), []).append(update)
    for (*_, is_aligned), same_kind in kinds.items():
        corrections = [_corrections(update, beta1, beta2) for update in same_kind]
        with torch.cuda.device_of(same_kind[0].param):
            # one tensor needs no table on the device, and so no copy from the host
            if len(same_kind) == 1:
                _launch_one(same_kind[0], corrections[0], numbers)
            else:
                _launch(same_kind, corrections, numbers, is_aligned=is_aligned)


def adamw_of_one(
    update: Update,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Run ``adamw`` for one parameter, with the update's ``factor`` and ``output``, in one kernel.

    The results equal those of a multiplication of the fp32 gradient, ``adamw``, and a copy bit by
    bit.
    """
    with torch.cuda.device_of(update.param):
        _launch_one(update, _corrections(update, beta1, beta2), _numbers(lr, beta1, beta2, eps, weight_decay))


def _numbers(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> tuple[float, ...]:
    # 1 - beta in float64 on the host: from fp32's 0.999 it would be off by 1e-5
    return lr, 1 - beta1, beta2, 1 - beta2, eps, weight_decay


def _kind(update: Update) -> tuple[Any, ...]:
    """Return what tensors of one launch have in common: device, dtypes and alignment."""
    tensors = update[:4]
    addresses = [tensor.data_ptr() for tensor in tensors]
    # with 16-byte addresses and sizes divisible by 16 Triton uses vector loads and stores
    is_aligned = not any(number % _ALIGNMENT_BYTES for number in (*addresses, update.param.numel()))
    return update.param.device, *(tensor.dtype for tensor in tensors), is_aligned


def _corrections(update: Update, beta1: float, beta2: float) -> list[float]:
    """Return the bias corrections: of the first moment, and the root of the second moment's."""
    return [1 - beta1**update.step, math.sqrt(1 - beta2**update.step)]


def _launch_one(update: Update, corrections: Sequence[float], numbers: Sequence[float]) -> None:
    """Update one parameter without a copy to the device.

    Such a copy would wait for the copies of offloaded activations back to the device.
    """
    size = update.param.numel()
    grid = (max(1, -(-size // _CHUNK)),)
    options = {"CHUNK": _CHUNK, "BLOCK": _BLOCK, "num_warps": 4}
    tensors = (*update[:4], update.factor, update.output)
    _kernels().adamw_of_one[grid](*tensors, size, *corrections, *numbers, **options)


def _launch(
    updates: Sequence[Update],
    corrections: list[list[float]],
    numbers: Sequence[float],
    *,
    is_aligned: bool,
) -> None:
    first = updates[0]
    # The grid has one program per chunk of all tensors. The prefix sums of the chunk counts are
    # the numbers of each tensor's first chunk.
    chunks = [-(-update.param.numel() // _CHUNK) for update in updates]
    first_chunks = itertools.accumulate(chunks[:-1], initial=0)
    # One row per tensor: four addresses, the size, the number of its first chunk. A program finds
    # its tensor by binary search over the first chunks.
    rows = []
    for update, first_chunk in zip(updates, first_chunks, strict=True):
        addresses = [tensor.data_ptr() for tensor in update[:4]]
        rows.append([*addresses, update.param.numel(), first_chunk])
    _kernels().adamw[(sum(chunks),)](
        _on_device(rows, torch.int64, first.param.device),
        _on_device(corrections, torch.float32, first.param.device),
        len(updates),
        first.param,
        first.grad,
        first.mean,
        *numbers,
        ALIGNED=is_aligned,
        CHUNK=_CHUNK,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def _on_device(values: list[list[Any]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy from pinned memory, so that the host does not wait for the device."""
    host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)
