"""Stands in for ``flash_attn.cute.interface``: checks the kernels' contract, and computes."""

from __future__ import annotations

import sys
import types
from importlib import metadata
from itertools import pairwise

import torch
from torch import Tensor


class Kernels(types.ModuleType):
    """Plain matmuls over each document; ``calls`` are the deterministic flags of backward, or None for forward."""

    def __init__(self) -> None:
        super().__init__("flash_attn.cute.interface")
        self.calls: list[bool | None] = []

    def _flash_attn_fwd(
        self, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, return_lse=False, out=None,
    ):  # fmt: skip
        self.calls.append(None)
        assert causal and return_lse and out.shape == q.shape
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        rows, lses = _attend(*_wide(q, k, v), cu_seqlens_q, softmax_scale or q.size(-1) ** -0.5)
        out.copy_(rows)
        return out, lses, None, None, None

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, cu_seqlens_q=None, cu_seqlens_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None,
    ):  # fmt: skip
        self.calls.append(deterministic)
        assert causal and dout.shape == out.shape == q.shape
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, out, dout, dq, dk, dv)
        scale = softmax_scale or q.size(-1) ** -0.5
        grads = _differentiate(*_wide(q, k, v, out, dout, lse), cu_seqlens_q, scale)
        return tuple(place.copy_(grad) for place, grad in zip((dq, dk, dv), grads, strict=True))


def _wide(*tensors: Tensor) -> list[Tensor]:
    return [x if x.dtype == torch.float64 else x.float() for x in tensors]


def _check(q, k, v, starts, other_starts, longest, other_longest, *others):
    assert q.dtype == k.dtype == v.dtype and k.shape == v.shape
    assert all(x.stride(-1) == 1 and 0 not in x.stride() for x in (q, k, v, *others))
    assert starts is other_starts and longest == other_longest
    assert q.dim() == (4 if starts is None else 3)
    if starts is not None:
        assert starts.dtype == torch.int32 and starts.is_contiguous()
        assert longest >= int(starts.diff().max())


def _attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """``[B, S, h, d]`` and ``[B, h, S]``; with ``starts`` ``[tokens, h, d]`` and ``[h, tokens]``."""
    if starts is None:
        rows = [_attend(*row, torch.tensor([0, row[0].size(0)]), scale) for row in zip(q, k, v, strict=True)]
        return torch.stack([row for row, _ in rows]), torch.stack([lse for _, lse in rows])
    outputs, lses = [], []
    for a, b in pairwise(starts.tolist()):
        scores = _scores(q[a:b], k[a:b], scale)
        outputs.append(torch.einsum("hst,thd->shd", scores.softmax(-1), _repeated(v[a:b], q)))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(lses, dim=1)


def _differentiate(q, k, v, out, dout, lse, starts, scale) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention's backward (arXiv:2205.14135, algorithm 4) without tiles."""
    if starts is None:
        batch = zip(q, k, v, out, dout, lse, strict=True)
        rows = [_differentiate(*x, torch.tensor([0, x[0].size(0)]), scale) for x in batch]
        return tuple(torch.stack(grads) for grads in zip(*rows, strict=True))
    parts = []
    for a, b in pairwise(starts.tolist()):
        weights = (_scores(q[a:b], k[a:b], scale) - lse[:, a:b, None]).exp()
        dweights = torch.einsum("shd,thd->hst", dout[a:b], _repeated(v[a:b], q))
        dscores = weights * (dweights - (dout[a:b] * out[a:b]).sum(-1).t()[..., None]) * scale
        dq = torch.einsum("hst,thd->shd", dscores, _repeated(k[a:b], q))
        dk, dv = torch.einsum("hst,shd->thd", dscores, q[a:b]), torch.einsum("hst,shd->thd", weights, dout[a:b])
        parts.append((dq, *(x.unflatten(1, (k.size(1), -1)).sum(2) for x in (dk, dv))))
    return tuple(torch.cat(grads) for grads in zip(*parts, strict=True))


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.size(1) // x.size(1), 1)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("shd,thd->hst", q, _repeated(k, q)) * scale
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))


def install(monkeypatch) -> Kernels:
    """Put fresh kernels where the library imports them from."""
    for name in ("flash_attn", "flash_attn.cute"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    kernels = Kernels()
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    set_version(monkeypatch, "4.0.0b36")
    return kernels


def set_version(monkeypatch, version: str) -> None:
    """Of the distribution flash-attn-4, as it is installed."""
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "flash-attn-4" else real(name))
