"""Decides whether the Triton kernels support a call (otherwise the plain ops run), and their block sizes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed, without importing it."""
    return find_spec("triton") is not None


def lazy_kernels(name: str) -> Callable[[], Any]:
    """Return a function that returns the kernels' module ``name`` here, imported only then: Triton may be missing."""
    return functools.partial(importlib.import_module, f"{__package__}.{name}")


def unavailable_reason(device: torch.device) -> str | None:
    """Return why no kernel can run for tensors on ``device``, or None if kernels can run."""
    if device.type != "cuda":
        return f"the kernels are for NVIDIA GPUs, the device is {device.type}"
    if not has_triton():
        return "Triton is not installed"
    return None


def power_of_2(size: int) -> int:
    """Return the least power of 2 that is at least ``size``, as Triton's blocks require."""
    return 1 << (size - 1).bit_length()


def can_use_triton(*tensors: Tensor) -> bool:
    """Return whether the Triton kernels can run on ``tensors``.

    All tensors must be on one NVIDIA GPU, of one supported dtype, and not empty. Inside
    torch.compile the answer is False, since the compiler fuses operations itself.
    """
    # Runs on the host before every operator: the test that fails everywhere but on CUDA comes
    # first. Empty tensors are left to PyTorch, because launches divide by numbers of rows and
    # columns.
    first = tensors[0]
    if not first.is_cuda or first.dtype not in _DTYPES:
        return False
    if torch.compiler.is_compiling() or not has_triton():
        return False
    return all(tensor.dtype == first.dtype and tensor.device == first.device and tensor.numel() for tensor in tensors)
