"""NKI flash attention for the XLA path: AWS's kernels in this library's layout, and when they can run."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from nxd_memopt._optional import why_missing
from nxd_memopt.backends import backend
from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.ops.autograd import first_derivative_only

_KERNELS = "neuronxcc.nki.kernels.attention"
_DTYPES = (torch.bfloat16, torch.float32)
_SEQUENCE_MULTIPLE = 2048
_MAX_HEAD_DIM = 128


def unavailable_reason() -> str | None:
    """Return why the kernels cannot be imported, or None if they can."""
    return why_missing(_KERNELS, flash_fwd=(), flash_attn_bwd=(), FlashConfig=())


def refusal(call: AttentionCall) -> str | None:
    """Return why ``nki_attention`` cannot run ``call``, or None if it can."""
    if call.dtype not in _DTYPES:
        return f"the NKI kernel takes {[str(dtype) for dtype in _DTYPES]}, got {call.dtype}"
    return call.unsuited(
        "the NKI kernel",
        sequence_multiple=_SEQUENCE_MULTIPLE,
        max_head_dim=_MAX_HEAD_DIM,
    )


def nki_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Return causal ``softmax(scale Q K^t) V``.

    Saves query, key, value, output and one number per query.

    Args:
        query: ``[B, h, S, d]``, bf16 or fp32, S a multiple of 2048, d at most 128.
        key: ``[B, g, S, d]``, g divides h.
        value: ``[B, g, S, d]``.
        scale: factor of the scores; None for ``1 / sqrt(d)``.

    Returns:
        ``[B, h, S, d]``.
    """
    if scale is None:
        scale = query.size(-1) ** -0.5
    output: Any = _NkiAttention.apply(query, key, value, scale)
    return output


class _NkiAttention(torch.autograd.Function):
    """Forward: ``flash_fwd``, one program per KV head.

    Backward: ``flash_attn_bwd``, one per query head.

    The kernels take ``[B, h, d, S]``, except for the value in forward. Backward transposes again
    instead of saving the transposed copies.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        kernels = importlib.import_module(_KERNELS)
        output, log_sum_exp = kernels.flash_fwd[query.size(0), key.size(1)](
            _head_dim_first(query),
            _head_dim_first(key),
            value.contiguous(),
            _seed(query),
            use_causal_mask=True,
            # training: return the log-sum-exps too
            config=kernels.FlashConfig(training=True),
            **_precision_and_scale(query, scale),
        )  # [B, h, S, d], [B, h, 128, S/128]
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.scale = scale
        return output

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # Without the barrier the compiler saves forward's transposed copies for backward.
        saved = backend.optimization_barrier([*ctx.saved_tensors, grad_output])
        query, key, value, output, log_sum_exp, grad_output = saved
        # flash_attn_bwd has no grouped heads: repeat K and V, and sum their gradients afterwards
        repeats = query.size(1) // key.size(1)
        repeated = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        operands = (query, *repeated, output, grad_output.to(output.dtype))
        # contiguous [B, h, d, S] copies
        transposed = [_head_dim_first(tensor) for tensor in operands]
        kernels = importlib.import_module(_KERNELS)
        dquery, dkey, dvalue = kernels.flash_attn_bwd[query.size(0), query.size(1)](
            *transposed,
            log_sum_exp,
            _seed(query),
            use_causal_mask=True,
            **_precision_and_scale(query, ctx.scale),
        )  # [B, h, d, S] each
        dkey = _sum_over_repeats(dkey, repeats)
        dvalue = _sum_over_repeats(dvalue, repeats)
        return *(grad.transpose(-1, -2) for grad in (dquery, dkey, dvalue)), None


def _head_dim_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous()


def _seed(query: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=query.device)  # of dropout, which is disabled


def _precision_and_scale(query: Tensor, scale: float) -> dict[str, Any]:
    """Return the kernel options for precision and softmax scale.

    With ``mixed_precision`` the kernels multiply in bf16: correct for bf16, a silent loss of
    precision for fp32.
    """
    return {
        "mixed_precision": query.dtype == torch.bfloat16,
        "softmax_scale": scale,
    }


def _sum_over_repeats(grad: Tensor, repeats: int) -> Tensor:
    """Sum over the query heads of each KV head in fp32, ``[B, h, d, S] -> [B, g, d, S]``."""
    if repeats == 1:
        return grad
    return grad.unflatten(1, (-1, repeats)).sum(2, dtype=torch.float32).to(grad.dtype)
