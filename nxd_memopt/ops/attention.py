"""Core attention on local heads: its implementations, and which of them runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nxd_memopt.backends import backend
from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.config import ATTENTION_BACKENDS
from nxd_memopt.ops import tiled_attention as tiled
from nxd_memopt.ops.autograd import cast_if_autocast_enabled, without_autocast
from nxd_memopt.ops.cuda import attention as cuda
from nxd_memopt.ops.math_attention import math_attention, window_mask
from nxd_memopt.ops.neuron import attention as nki
from nxd_memopt.ops.packed import PackedDocuments, attention_by_document, flash_attention
from nxd_memopt.options import require_one_of

# Limits of this library's implementations; the backend knows the limits of PyTorch's kernels.
_REFUSALS: dict[str, Callable[[AttentionCall], str | None]] = {
    "flash4": cuda.refusal,
    "tiled": tiled.refusal,
    "nki": nki.refusal,
}
_WINDOWED = ("tiled", "math", "sdpa")  # implementations of attention windows, sdpa by a mask of S x S
_UNAVAILABLE = {"flash4": cuda.unavailable_reason, "nki": nki.unavailable_reason}
_SDPA_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
COMMON_SHAPE = (1, 1, 2048, 64)
"""Query shape that every implementation supports: only the device and dropout can rule one out."""


def attention_implementation(
    query_shape: Sequence[int],
    kv_heads: int,
    *,
    dtype: torch.dtype,
    masked: bool = False,
    packed: bool = False,
    dropout_p: float = 0.0,
    attention_backend: str = "auto",
    window: int | None = None,
) -> tuple[str, str]:
    """Return the name of the implementation that runs for one call, and the reason.

    ``"auto"`` takes the first of the device's ``attention_implementations`` that can run the call.

    Args:
        query_shape: ``[B, h, S, d]``.
        kv_heads: g, the number of KV heads.
        dtype: of query, key and value.
        masked: there is a mask in addition to causality.
        packed: rows contain several documents.
        dropout_p: probability of dropping an attention weight.
        attention_backend: one of ``config.ATTENTION_BACKENDS``.
        window: see ``AttentionCall``.

    Raises:
        ValueError: the named implementation cannot run the call. It is never replaced by another
            one.
    """
    call = AttentionCall(tuple(query_shape), kv_heads, masked, dropout_p, dtype, packed, window)
    if attention_backend != "auto":
        # A misspelt name is an error of its own; the check is left out for the usual "auto".
        require_one_of("attention_backend", attention_backend, ATTENTION_BACKENDS)
        reason = refusal(attention_backend, call)
        if reason is not None:
            raise ValueError(f"attention_backend {attention_backend!r} cannot be met: {reason}; or use 'auto'")
        return attention_backend, f"attention_backend={attention_backend}"
    # The backend lists its implementations best first: take the first that can run. The refusals
    # of the better ones explain the choice.
    refusals: list[str] = []
    for name in backend.attention_implementations:
        reason = refusal(name, call)
        if name == "sdpa" and window is not None:
            reason = f"it would take the window of {window} as a mask of S x S"
        if reason is None:
            return name, "; ".join([*refusals, f"{name} can run"])
        refusals.append(f"no {name}: {reason}")
    raise AssertionError(f"backend {backend.name} must end its attention_implementations with math, which runs always")


def select_attention(
    attention_backend: str,
    dropout_p: float = 0.0,
    *,
    head_dim: int = COMMON_SHAPE[-1],
    window: int | None = None,
) -> str:
    """Return the implementation that a model can count on at build time, for suitable lengths.

    Warn if ``"auto"`` is left with ``"math"``, which materialises S x S weights, for example
    because of dropout.

    Args:
        attention_backend: one of ``config.ATTENTION_BACKENDS``.
        dropout_p: probability of dropping an attention weight.
        head_dim: d.
        window: see ``AttentionCall``.

    Raises:
        ValueError: the name is unknown, or the machine, the dropout or the head size rules it out.
    """
    # Lengths, masks and the number of heads are known only at the call. The common shape leaves
    # dropout, head size and machine as the reasons to refuse an implementation.
    name, reason = attention_implementation(
        (*COMMON_SHAPE[:-1], head_dim),
        1,
        dtype=torch.bfloat16,
        dropout_p=dropout_p,
        attention_backend=attention_backend,
        window=window,
    )
    # No warning on a device whose best implementation is math: its user cannot change that.
    has_fused = backend.attention_implementations[0] != "math"
    if attention_backend == "auto" and name == "math" and has_fused:
        warnings.warn(
            f"attention materialises S x S weights ({reason}): "
            "set the model's attention_dropout to 0, or recompute core_attn",
            stacklevel=3,
        )
    return name


def refusal(name: str, call: AttentionCall) -> str | None:
    """Return why this machine or the implementation cannot run ``call``, or None if it can.

    Optional packages are imported last, only if nothing else rules the implementation out.
    """
    if name not in backend.attention_implementations:
        return f"backend {backend.name} has {list(backend.attention_implementations)} on this device"
    reason = _implementation_refusal(name, call) or backend.attention_refusal(name, call)
    if reason is None and name in _UNAVAILABLE:
        return _UNAVAILABLE[name]()
    return reason


def _implementation_refusal(name: str, call: AttentionCall) -> str | None:
    """Return why the implementation cannot run ``call`` on any machine, or None if it can."""
    if call.window is not None and name not in _WINDOWED:
        return f"{name} has no attention window, got {call.window}"
    if name not in _REFUSALS:
        return None
    return _REFUSALS[name](call)


def core_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    implementation: str,
    mask: Tensor | PackedDocuments | None = None,
    dropout_p: float = 0.0,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return causal attention, ``softmax(scale Q K^t) V``.

    Query head i reads KV head ``i // (h/g)``.

    Args:
        query: ``[B, h, S, d]``.
        key: ``[B, g, S, d]``, g divides h.
        value: ``[B, g, S, d]``.
        implementation: result of ``attention_implementation``; ``"math"`` materialises
            ``[B, h, S, S]``.
        mask: boolean ``[B, 1, S, S]``, True where a query may attend, with causality included; or
            documents with attention within each one; ``None`` for causality alone.
        dropout_p: probability of dropping an attention weight.
        window: a query sees at most this many keys, its own included; None for all before it.
        scale: factor of the scores; None for ``1 / sqrt(d)``.

    Returns:
        ``[B, h, S, d]``.
    """
    call = AttentionCall(
        tuple(query.shape),
        key.size(1),
        isinstance(mask, Tensor),
        dropout_p,
        attention_dtype(query),
        isinstance(mask, PackedDocuments),
        window,
    )
    reason = _implementation_refusal(implementation, call)
    # attention_implementation() has checked this; a direct call with another shape fails here
    assert reason is None, reason
    documents = None
    if isinstance(mask, PackedDocuments):
        documents, mask = mask, None
    if implementation == "math":
        mask = _with_window(mask, window, query)
        if documents is not None:  # math attention materialises [B, 1, S, S]
            mask = documents.mask() & window_mask(query.size(2), window, query.device)
        return math_attention(query, key, value, mask, dropout_p, scale)
    if implementation == "sdpa" and documents is not None:
        # SDPA has no argument for document boundaries, and a mask would turn its flash kernels off
        options = {"dropout_p": dropout_p, "implementation": implementation, "window": window, "scale": scale}
        attend = partial(_sdpa, mask=None, **options)
        return attention_by_document(query, key, value, documents, attend)
    # Autocast casts the inputs of PyTorch's SDPA. The implementations below are custom Functions,
    # whose inputs are cast here.
    if implementation == "sdpa" or (implementation in _SDPA_KERNELS and documents is None):
        return _sdpa(query, key, value, mask, dropout_p, implementation, window, scale)
    query, key, value = cast("tuple[Tensor, Tensor, Tensor]", cast_if_autocast_enabled(query, key, value))
    with without_autocast(query):
        if implementation == "tiled":
            seen = mask if documents is None else documents.ids
            return tiled.tiled_attention(query, key, value, seen, window=window, scale=scale)
        if implementation == "flash4":
            return cuda.flash4_attention(query, key, value, documents, scale)
        if implementation == "flash":
            assert documents is not None
            return flash_attention(query, key, value, documents, scale)
        assert implementation == "nki" and documents is None, implementation
        return nki.nki_attention(query, key, value, scale)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    implementation: str,
    window: int | None,
    scale: float | None,
) -> Tensor:
    mask = _with_window(mask, window, query)
    # Kernels without grouped heads get copies of the KV heads, h/g times the bytes of K and V.
    # enable_gqa leaves the repetition for h/g query heads to the other kernels.
    repeats = query.size(1) // key.size(1)
    if repeats > 1 and implementation in backend.equal_heads_implementations:
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    gqa = query.size(1) != key.size(1)
    kernel = _SDPA_KERNELS.get(implementation)
    # A mask includes causality, and SDPA takes either a mask or is_causal.
    with nullcontext() if kernel is None else sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=gqa,
        )


def _with_window(mask: Tensor | None, window: int | None, query: Tensor) -> Tensor | None:
    """Return ``mask`` with the window, ``[S, S]`` or ``[B, 1, S, S]``; None for causality alone."""
    if window is None or query.size(2) <= window:
        return mask
    allowed = window_mask(query.size(2), window, query.device)
    return allowed if mask is None else mask & allowed


def attention_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype of query, key and value in fused kernels: autocast's, if it is enabled and casts them."""
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type) and query.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return query.dtype
