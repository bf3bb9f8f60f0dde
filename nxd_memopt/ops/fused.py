"""Lists the fused operations for ``nxd-memopt doctor``: what runs for each on this device, and why."""

from __future__ import annotations

from nxd_memopt.backends import backend
from nxd_memopt.ops.cuda.support import unavailable_reason

_TRITON = {
    "RMSNorm, residual + RMSNorm": "one pass over memory each way; the residual's gradient is added in the norm's pass",
    "SwiGLU, GeGLU": "one pass; backward makes the activation anew and puts gradients in gate's and up's places",
    "GeLU": "one pass each way; a polynomial in erf's place",
    "RoPE (full, partial)": "one pass; one projection's parts turn in place, and get their gradients as one",
    "residual + bias": "one pass, where PyTorch makes two",
    "two affine parts of one LayerNorm": "GPT-NeoX's parallel branches: one pass each way for both",
    "gradients of biases of column-parallel layers and residuals": "sums of ranges of rows first, then of those",
    "cross entropy": "two passes over the logits, the second one in place",
    "AdamW": "one pass over parameters, gradients and moments",
}
_TORCH = {
    "LayerNorm": "PyTorch's own kernel is one pass each way",
    "bias": "added inside the matmul",
}


def describe_fused() -> list[str]:
    """Return one line of text per fused operation."""
    reason = unavailable_reason(backend.device)
    chosen = "Triton" if reason is None else "plain PyTorch"
    lines = [f"{name}: {chosen} ({why if reason is None else reason})" for name, why in _TRITON.items()]
    return [*lines, *(f"{name}: PyTorch ({why})" for name, why in _TORCH.items())]
