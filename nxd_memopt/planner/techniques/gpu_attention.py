"""Order and limits of the attention implementations of NVIDIA GPUs, for the backend and the planner."""

from __future__ import annotations

from dataclasses import dataclass

_HALF = ("bfloat16", "float16")
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class AttentionLimits:
    """Calls that an implementation supports in forward and backward.

    Args:
        dtypes: dtypes of query, key and value.
        max_head_dim: largest head size.
        head_dim_multiple: head sizes are multiples of this number.
        masks: a mask in addition to causality is supported.
        packed: rows of several documents are supported.
        dropout: attention dropout is supported.
        packed_dropout: attention dropout is supported for rows of several documents.
    """

    dtypes: tuple[str, ...] = (*_HALF, "float32", "float64")
    max_head_dim: int = _NO_LIMIT
    head_dim_multiple: int = 1
    masks: bool = False
    packed: bool = False
    dropout: bool = True
    packed_dropout: bool = False


LIMITS = {
    # The kernels accept other multiples of 8 as head size, but of the sizes that were tried 8, 16, 40
    # and 48 had wrong gradients on an H200 (4.0.0b36).
    "flash4": AttentionLimits(_HALF, 128, 32, packed=True, dropout=False),
    "cudnn": AttentionLimits(_HALF, 128, 8, dropout=False),
    "flash": AttentionLimits(_HALF, 256, 8, packed=True),
    "efficient": AttentionLimits((*_HALF, "float32"), 256, 8, masks=True),
    "tiled": AttentionLimits(masks=True, packed=True, dropout=False),
    "math": AttentionLimits(masks=True, packed=True, packed_dropout=True),
}
"""Limits by implementation, for causal attention without a window."""
PACKAGES = {"flash4": "flash-attn-4"}
"""Implementation -> the optional package with its kernels."""
COPIES_KV_GRADIENTS = ("cudnn", "flash")
"""Implementations whose backward writes dK and dV for every query head and then sums the gradients of a KV head.

Recorded on an H200 (docs/benchmarks/attention.csv): a call of LLaMA-3-8B with 8,192 tokens takes 128 MiB more
than its results, gradients and fp32 accumulators, and one of GPT-NeoX-20B, which has no grouped heads, nothing.
"""


def implementations(major: int) -> tuple[str, ...]:
    """Return the attention implementations of a GPU in order of preference.

    The order for Hopper is measured, see docs/benchmarks.

    Args:
        major: major compute capability, such as 9 for Hopper.
    """
    # PyTorch's flash and cuDNN kernels need compute capability 8.0; flash4 is for 9.0 and newer.
    if major < 8:
        fused: tuple[str, ...] = ()
    elif major == 8:
        fused = ("flash", "cudnn")
    elif major == 9:
        fused = ("flash4", "cudnn", "flash")
    else:
        fused = ("cudnn", "flash", "flash4")
    return (*fused, "efficient", "tiled", "math")


def limit_refusal(
    implementation: str,
    *,
    dtype: str,
    head_dim: int,
    masked: bool = False,
    packed: bool = False,
    dropout_p: float = 0.0,
) -> str | None:
    """Return why an implementation cannot run a call on any GPU, or None if its limits allow the call.

    Args:
        implementation: key of ``LIMITS``.
        dtype: of query, key and value, such as ``bfloat16``.
        head_dim: d.
        masked: there is a mask in addition to causality.
        packed: rows contain several documents.
        dropout_p: probability of dropping an attention weight.
    """
    limits = LIMITS[implementation]
    if dtype not in limits.dtypes:
        return f"{implementation} attention takes {list(limits.dtypes)}, got {dtype}"
    if masked and not limits.masks:
        return f"{implementation} attention takes no mask"
    if packed and not limits.packed:
        return f"{implementation} attention takes no packed documents"
    has_dropout = limits.dropout
    if packed:
        has_dropout = limits.packed_dropout
    if dropout_p > 0 and not has_dropout:
        where = ""
        # A kernel that has dropout refuses it only together with packed documents.
        if limits.dropout:
            where = " for packed documents"
        return f"{implementation} attention is used without dropout{where}, got {dropout_p}"
    if head_dim > limits.max_head_dim or head_dim % limits.head_dim_multiple:
        wanted = f"a multiple of {limits.head_dim_multiple} up to {limits.max_head_dim}"
        return f"head size {head_dim} is not what {implementation} attention takes, {wanted}"
    return None


def supported(major: int, *, dtype: str, head_dim: int, packed: bool, dropout_p: float) -> list[str]:
    """Return the implementations of a GPU whose limits allow a call, in order of preference; never an empty list.

    Args:
        major: major compute capability of the GPU; for the other arguments see ``limit_refusal``.
    """
    return [
        name
        for name in implementations(major)
        if limit_refusal(name, dtype=dtype, head_dim=head_dim, packed=packed, dropout_p=dropout_p) is None
    ]
