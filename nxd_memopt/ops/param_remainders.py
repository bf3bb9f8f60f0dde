"""Splits an fp32 master weight into the bf16 weight that it rounds to and a 16-bit remainder, and joins them."""

from __future__ import annotations

import torch
from torch import Tensor

REMAINDER = "param_remainder"
"""Name of the remainder among the states of an optimizer."""


def remainder_of(master: Tensor, weight: Tensor) -> Tensor:
    """Return what ``master`` has beyond ``weight``, int16 of the same shape.

    The bits of a floating-point number are in the order of its absolute value, so the bits of the
    master minus those of the weight, followed by 16 zeros, are between -2^15 and 2^15. A master
    halfway between two bf16 numbers that rounds down has 2^15, which int16 lacks: it loses its last
    bit, a change of at most 2^-23 of its value, of a subnormal one by the least subnormal number.

    Args:
        master: fp32.
        weight: ``master`` rounded to the nearest bf16 number.
    """
    difference = master.view(torch.int32) - _high_bits(weight)
    return difference.clamp(-(2**15), 2**15 - 1).to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 master of which ``weight`` (bf16) and ``remainder`` (int16) are the parts."""
    return (_high_bits(weight) + remainder.to(torch.int32)).view(torch.float32)


def _high_bits(weight: Tensor) -> Tensor:
    """Return the bits of ``weight`` as an fp32 number, int32."""
    return weight.to(torch.float32).view(torch.int32)
