"""FlashAttention-4 (the CuTe kernels of the package flash-attn-4) as one operator in this library's layout."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from nxd_memopt._optional import why_missing
from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.ops.autograd import first_derivative_only
from nxd_memopt.ops.packed import PackedDocuments
from nxd_memopt.ops.parts import Layout
from nxd_memopt.planner.techniques.gpu_attention import LIMITS, PACKAGES

_LIMITS = LIMITS["flash4"]
_DTYPES = tuple(getattr(torch, name) for name in _LIMITS.dtypes)
_DISTRIBUTION = PACKAGES["flash4"]
# Earlier betas lack features, which does not show in their signatures.
_TESTED = "4.0.0b36"
_KERNELS = "flash_attn.cute.interface"
# Private functions of a beta: the operator needs the log-sum-exps, a separate backward, and output
# buffers that it passes in. Their parameters are checked before the first call.
_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_PARAMETERS = {
    "_flash_attn_fwd": ("q", "k", "v", "softmax_scale", "causal", "out", "return_lse", *_PACKED),
    "_flash_attn_bwd": (
        *("q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal", "deterministic", "dq", "dk", "dv"),
        *_PACKED,
    ),
}


def unavailable_reason() -> str | None:
    """Return why the kernels cannot be called, or None if they can.

    The first call imports them, which takes seconds.
    """
    reason = why_missing(_KERNELS, at_least=(_DISTRIBUTION, _TESTED), **_PARAMETERS)
    if reason is None:
        return None
    return f"{reason}; {_DISTRIBUTION}=={_TESTED} is known to work, on CUDA 13 with [cu13]"


# Otherwise dynamo traces the import. torch.compiler.assume_constant_result sets this attribute too, but imports
# torch._dynamo, which takes seconds in every process.
unavailable_reason._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def refusal(call: AttentionCall) -> str | None:
    """Return why ``flash4_attention`` cannot run ``call``, or None if it can."""
    if call.dtype not in _DTYPES:
        return f"flash4 takes {[str(dtype) for dtype in _DTYPES]}, got {call.dtype}"
    return call.unsuited(
        "flash4",
        max_head_dim=_LIMITS.max_head_dim,
        head_dim_multiple=_LIMITS.head_dim_multiple,
        packs=_LIMITS.packed,
    )


def flash4_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: PackedDocuments | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return causal ``softmax(scale Q K^t) V``, within each document.

    Saves its inputs, output and one number per query. A kernel is compiled at its first call, which
    takes seconds. Backward differs from run to run in the last bits, unless
    ``torch.use_deterministic_algorithms`` is set.

    Args:
        query: ``[B, h, S, d]``, bf16 or fp16, d a multiple of 32 up to 128.
        key: ``[B, g, S, d]``, g divides h.
        value: ``[B, g, S, d]``.
        documents: of the batch; ``None``: each row is one document.
        scale: factor of the scores; None for ``1 / sqrt(d)``.

    Returns:
        ``[B, h, S, d]``.
    """
    # [B, S, heads, d], the kernels' layout: a view, because they take any stride but the last one
    columns = [_readable(x).transpose(1, 2) for x in (query, key, value)]
    if documents is None:
        output, _ = flash4(*columns, None, query.size(2), scale)
    else:
        # The kernels for variable lengths take one row of B * S tokens. S bounds the longest
        # document, whose length the host does not know without waiting for the device.
        flat = [x.flatten(0, 1) for x in columns]
        output, _ = flash4(*flat, documents.boundaries, query.size(2), scale)
        output = output.unflatten(0, (query.size(0), -1))
    return output.transpose(1, 2)


def _readable(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy if the kernels cannot read its layout.

    The kernels need adjacent elements in a head, and no expanded dimension (stride 0), as in the
    gradient of ``sum``.
    """
    if x.stride(-1) == 1 and 0 not in x.stride():
        return x
    return x.contiguous()


@torch.library.custom_op("nxd_memopt::flash4", mutates_args=())
def flash4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor | None,
    longest: int,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exps in fp32.

    A custom operator, so that recompute can keep its output and a compiler does not trace into it.

    Args:
        query: ``[B, S, h, d]``; packed ``[B * S, h, d]``.
        key: ``[B, S, g, d]``; packed ``[B * S, g, d]``.
        value: shape of key.
        boundaries: ``PackedDocuments.boundaries``; ``None``: not packed.
        longest: upper bound of the documents' lengths; read only if packed.
        scale: factor of the scores; None for ``1 / sqrt(d)``.

    Returns:
        Output in the shape of query, and ``[B, h, S]``; packed ``[h, B * S]``.
    """
    # with query's memory order, which suits the model's next layer
    output = torch.empty_like(query)
    _, log_sum_exp, *_ = _kernels()._flash_attn_fwd(
        q=query,
        k=key,
        v=value,
        softmax_scale=scale,
        causal=True,
        out=output,
        return_lse=True,
        **_packed_options(boundaries, longest),
    )
    return output, log_sum_exp


@flash4.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor | None,
    longest: int,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    del key, value, boundaries, longest, scale
    # log-sum-exps: [B, S, h, d] -> [B, h, S]; packed [B * S, h, d] -> [h, B * S]
    sizes = [*query.shape[:-3], query.size(-2), query.size(-3)]
    return torch.empty_like(query), query.new_empty(sizes, dtype=torch.float32)


# An operator of its own, so that dispatch modes and a compiler see one call with known writes. The
# caller allocates the gradients, and so decides their layout.
@torch.library.custom_op("nxd_memopt::flash4_backward", mutates_args=("dquery", "dkey", "dvalue"))
def _flash4_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    boundaries: Tensor | None,
    longest: int,
    scale: float | None,
    dquery: Tensor,
    dkey: Tensor,
    dvalue: Tensor,
) -> None:
    _kernels()._flash_attn_bwd(
        q=query,
        k=key,
        v=value,
        out=output,
        dout=grad_output,
        lse=log_sum_exp,
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        dq=dquery,
        dk=dkey,
        dv=dvalue,
        **_packed_options(boundaries, longest),
    )


def _kernels() -> Any:
    return importlib.import_module(_KERNELS)


def _packed_options(boundaries: Tensor | None, longest: int) -> dict[str, Any]:
    """Return the kernels' arguments for variable lengths; queries and keys have the same ones."""
    if boundaries is None:
        return {}
    return dict(zip(_PACKED, (boundaries, boundaries, longest, longest), strict=True))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, boundaries, ctx.longest, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the gradient of the log-sum-exps
    ctx.save_for_backward(query, key, value, *output, boundaries)


@first_derivative_only
def _backward(ctx: Any, grad_output: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        # one per input of flash4
        return (None,) * 6
    *saved, boundaries = ctx.saved_tensors
    # If query, key and value are chunks of one projection's output, so are their gradients: the
    # projection's backward reads all three as one tensor, without a copy.
    grads = Layout.of(*saved[:3]).empty(saved[0])
    _flash4_backward(_readable(grad_output), *saved, boundaries, ctx.longest, ctx.scale, *grads)
    return *grads, None, None, None


flash4.register_autograd(_backward, setup_context=_save_for_backward)
FLASH4_OPERATOR = torch.ops.nxd_memopt.flash4.default
"""Operator that dispatch modes see for ``flash4``."""
