"""Describes for ``nxd-memopt doctor`` which attention and fused operations run, and why."""

from __future__ import annotations

import torch

from nxd_memopt.backends import backend
from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.ops.attention import COMMON_SHAPE, refusal
from nxd_memopt.ops.cuda.support import unavailable_reason

_TRITON = (
    "RMSNorm, residual + RMSNorm",
    "SwiGLU, GeGLU",
    "GeLU",
    "RoPE (full, partial)",
    "residual + bias",
    "two affine parts of one LayerNorm",
    "gradients of biases of column-parallel layers and residuals",
    "cross entropy",
    "experts in bf16 and fp16, since Hopper",
    "AdamW",
)
"""Operations with Triton kernels; each kernel takes one pass over memory where PyTorch takes several."""


def describe_fused() -> str:
    """Return how the operations with Triton kernels run, and their names."""
    reason = unavailable_reason(backend.device)
    implementation = "Triton"
    if reason is not None:
        implementation = f"plain PyTorch ({reason})"
    return f"{implementation}: {'; '.join(_TRITON)}"


def describe_attention() -> str:
    """Return the device's usable implementations, best first, and why the others cannot run."""
    call = AttentionCall(COMMON_SHAPE, 1, masked=False, dropout_p=0.0, dtype=torch.bfloat16)
    reasons = {name: refusal(name, call) for name in backend.attention_implementations}
    usable = [name for name, reason in reasons.items() if not reason]
    missing = [f"no {name}: {reason}" for name, reason in reasons.items() if reason]
    return "; ".join([" > ".join(usable), *missing])
