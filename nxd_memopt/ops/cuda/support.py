"""Decides whether the Triton kernels support a call (otherwise the plain ops run), and their block sizes."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def unavailable_reason(device: torch.device) -> str | None:
    """Why no kernel can run for tensors on ``device``; ``None``: they can."""
    if device.type != "cuda":
        return f"the kernels are for NVIDIA GPUs, the device is {device.type}"
    return None if has_triton() else "Triton is not installed"


def power_of_2(size: int) -> int:
    """The least that is not below ``size``: Triton's blocks have such lengths."""
    return 1 << (size - 1).bit_length()


def can_use_triton(*tensors: Tensor) -> bool:
    """All on one NVIDIA GPU, of one dtype that the kernels take, not inside torch.compile, which fuses by itself."""
    first = tensors[0]
    if not first.is_cuda or first.dtype not in _DTYPES or torch.compiler.is_compiling() or not has_triton():
        return False
    return all(tensor.dtype == first.dtype and tensor.device == first.device and tensor.numel() for tensor in tensors)
