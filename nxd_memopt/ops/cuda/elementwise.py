"""Owns RMSNorm, gated activations and RoPE as one Triton kernel a pass; backward saves inputs only (and a row's scale).

Each reads and writes its tensors once, where plain PyTorch's operators pass fp32 copies through memory.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

GATED_KINDS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_fast": "tanh",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
"""By Hugging Face's ``hidden_act``: what the kernels call it."""
_BLOCK = 2048
_NORM_PROGRAMS = 264  # two for each of an H200's processors


def _kernels() -> Any:
    from nxd_memopt.ops.cuda import elementwise_kernels

    return elementwise_kernels


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.contiguous().view(-1, x.size(-1))
        rows, hidden = flat.shape
        y, rstd = torch.empty_like(flat), torch.empty(rows, dtype=torch.float32, device=x.device)
        _kernels().rms_norm_forward[(rows,)](flat, weight, y, rstd, hidden, eps, BLOCK=_power_of_2(hidden), num_warps=8)
        ctx.save_for_backward(x, weight, rstd)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        flat, grad = x.contiguous().view(-1, x.size(-1)), grad.contiguous()
        rows, hidden = flat.shape
        rows_each = -(-rows // _NORM_PROGRAMS)
        programs = -(-rows // rows_each)
        dx, parts = torch.empty_like(flat), torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
        _kernels().rms_norm_backward[(programs,)](
            flat, weight, rstd, grad, dx, parts, rows, hidden, rows_each, BLOCK=_power_of_2(hidden), num_warps=8
        )
        return dx.view(x.shape), parts.sum(0).to(weight.dtype), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.kind = kind
        ctx.save_for_backward(gate, up)
        y, size = torch.empty_like(gate), gate.numel()
        _kernels().gated_forward[(-(-size // _BLOCK),)](gate, up, y, size, KIND=kind, BLOCK=_BLOCK, num_warps=4)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate, dup, size = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        _kernels().gated_backward[(-(-size // _BLOCK),)](
            gate, up, grad.contiguous(), dgate, dup, size, KIND=ctx.kind, BLOCK=_BLOCK, num_warps=4
        )
        return dgate, dup, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, transposed=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, transposed=True), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, *, transposed: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, heads, tokens, head_dim = x.shape
    y, rotary_dim = torch.empty_like(x), cos.size(-1)
    rest = head_dim - rotary_dim
    _kernels().rope[(tokens, batch)](
        x,
        y,
        cos,
        sin,
        *x.stride()[:3],
        *y.stride()[:3],
        0 if cos.size(0) == 1 else cos.stride(0),
        heads,
        head_dim,
        rotary_dim // 2,
        TRANSPOSED=transposed,
        HEADS=_power_of_2(heads),
        HALF=_power_of_2(rotary_dim // 2),
        REST=_power_of_2(rest) if rest else 0,
        num_warps=4,
    )
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As ``ops.norm.rms_norm``."""
    return cast(Tensor, _RMSNorm.apply(x, weight, eps))


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """As ``ops.activation.gated_activation``; ``kind`` is a value of ``GATED_KINDS``."""
    return cast(Tensor, _Gated.apply(gate, up, kind))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As ``ops.rope.apply_rope``, rounded once."""
    return cast(Tensor, _Rope.apply(x, cos, sin))
