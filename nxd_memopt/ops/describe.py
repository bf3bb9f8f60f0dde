"""Describes for ``nxd-memopt doctor`` which attention and fused operations run, and why."""

from __future__ import annotations

import torch

from nxd_memopt.backends import backend
from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.ops.attention import COMMON_SHAPE, refusal
from nxd_memopt.ops.cuda.support import unavailable_reason

_TRITON = {
    "RMSNorm, residual + RMSNorm": (
        "one pass over memory in forward and one in backward, which also adds the gradient of the residual"
    ),
    "SwiGLU, GeGLU": (
        "one pass in forward and one in backward, "
        "which recomputes the activation and overwrites gate and up with their gradients"
    ),
    "GeLU": "one pass in forward and one in backward; erf is approximated by a polynomial",
    "RoPE (full, partial)": (
        "one pass, in place in the output of the projection where possible; "
        "the gradients of query, key and value are written as one tensor"
    ),
    "residual + bias": "one pass; PyTorch takes two",
    "two affine parts of one LayerNorm": (
        "for GPT-NeoX's parallel residual: one pass in forward and one in backward for both"
    ),
    "gradients of biases of column-parallel layers and residuals": (
        "partial sums over ranges of rows, then the sum of the partial sums"
    ),
    "cross entropy": "two passes over the logits; the second one overwrites them with their gradient",
    "experts in bf16 and fp16, since Hopper": (
        "matmuls that gather the rows of tokens themselves; backward recomputes the activation "
        "and overwrites gate and up with their gradients"
    ),
    "AdamW": "one pass over parameters, gradients and moments",
}
"""Operations with Triton kernels, and what their kernels do."""
_TORCH = {
    "LayerNorm": "PyTorch's own kernel takes one pass in forward and one in backward",
    "bias": "added inside the matmul",
}


def describe_fused() -> list[str]:
    """Return one line of text per fused operation."""
    reason = unavailable_reason(backend.device)
    lines = []
    for name, description in _TRITON.items():
        if reason is None:
            lines.append(f"{name}: Triton ({description})")
        else:
            lines.append(f"{name}: plain PyTorch ({reason})")
    lines += [f"{name}: PyTorch ({description})" for name, description in _TORCH.items()]
    return lines


def describe_attention() -> str:
    """Return the device's usable implementations, best first, and why the others cannot run."""
    call = AttentionCall(COMMON_SHAPE, 1, masked=False, dropout_p=0.0, dtype=torch.bfloat16)
    reasons = {name: refusal(name, call) for name in backend.attention_implementations}
    usable = [name for name, reason in reasons.items() if not reason]
    missing = [f"no {name}: {reason}" for name, reason in reasons.items() if reason]
    return "; ".join([" > ".join(usable), *missing])
