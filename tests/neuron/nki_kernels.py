"""Stands in for ``neuronxcc.nki.kernels.attention``: checks the kernels' contract, and computes.

The contract is the kernels' documented one: layouts, dtypes, launch grid, sizes and the layout of the log of sums
``[B, h, 128, S/128]``, position ``i * 128 + p`` at ``[p, i]``.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROWS = 128


@dataclass
class FlashConfig:
    seq_tile_size: int = 2048
    training: bool = True
    should_transpose_v: bool = False
    lse_dtype: str = ""


@dataclass
class Kernel:
    """``kernel[grid](...)``; ``launches`` holds the grid and the options of each call."""

    run: object
    launches: list[tuple[tuple[int, int], dict]] = field(default_factory=list)

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launches.append((grid, options))
            return self.run(grid, *args, **options)

        return launch


def _forward(
    grid,
    q,
    k,
    v,
    seed,
    logit_bias=None,
    softmax_scale=None,
    use_causal_mask=True,
    mixed_precision=True,
    dropout_p=0.0,
    config=None,
):
    batch, heads, width, length = q.shape
    kv_heads = k.size(1)
    assert grid == (batch, kv_heads), f"one program per batch and KV head, got {grid}"
    assert k.shape == (batch, kv_heads, width, length), f"k must be [b, g, d, s], got {tuple(k.shape)}"
    assert v.shape == (batch, kv_heads, length, width), f"v must be [b, g, s, d], got {tuple(v.shape)}"
    _check_common(q, [k, v], seed, length, width, use_causal_mask, mixed_precision, dropout_p)
    assert config is not None and config.training, "no log of sums without config.training"
    assert length % config.seq_tile_size == 0
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=1).float() for x in (k, v))
    scores = _scores(q.float(), keys, softmax_scale)
    output = (scores.softmax(-1) @ values).to(q.dtype)
    lse = scores.logsumexp(-1).unflatten(-1, (-1, ROWS)).transpose(-1, -2).contiguous()
    return output, lse


def _backward(
    grid,
    q,
    k,
    v,
    o,
    dy,
    lse,
    seed,
    logit_bias=None,
    use_causal_mask=False,
    mixed_precision=False,
    dropout_p=0.0,
    softmax_scale=None,
):
    batch, heads, width, length = q.shape
    assert grid == (batch, heads), f"one program per batch and head, got {grid}"
    for name, x in {"k": k, "v": v, "o": o, "dy": dy}.items():
        assert x.shape == q.shape, f"{name} must be [b, h, d, s] as q, got {tuple(x.shape)}"
    _check_common(q, [k, v, o, dy], seed, length, width, use_causal_mask, mixed_precision, dropout_p)
    assert lse.shape == (batch, heads, ROWS, length // ROWS) and lse.dtype == torch.float32
    q32, k32, v32, o32, dy32 = (x.float() for x in (q, k, v, o, dy))
    weights = (_scores(q32, k32, softmax_scale) - lse.transpose(-1, -2).flatten(-2).unsqueeze(-1)).exp()
    dweights = dy32.transpose(-1, -2) @ v32
    dscores = weights * (dweights - (dy32 * o32).sum(-2).unsqueeze(-1)) * (softmax_scale or width**-0.5)
    gradients = (k32 @ dscores.transpose(-1, -2), q32 @ dscores, dy32 @ weights)
    return tuple(x.to(q.dtype) for x in gradients)


def _check_common(q, others, seed, length, width, use_causal_mask, mixed_precision, dropout_p):
    assert q.dtype in (torch.bfloat16, torch.float32)
    assert all(x.dtype == q.dtype for x in others), "all tensors have one dtype"
    assert all(x.is_contiguous() for x in (q, *others)), "kernels read memory in the order of the layout"
    assert mixed_precision == (q.dtype == torch.bfloat16), "mixed precision would multiply fp32 in bf16"
    assert length % 2048 == 0 and width <= 128
    assert isinstance(seed, Tensor) and seed.shape == (1,) and seed.dtype == torch.int32
    assert use_causal_mask and dropout_p == 0.0


def _scores(q: Tensor, k: Tensor, softmax_scale: float | None) -> Tensor:
    """From ``[b, h, d, s]`` to ``[b, h, s, s]``."""
    scores = q.transpose(-1, -2) @ k * (softmax_scale or q.size(-2) ** -0.5)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf"))


def install(monkeypatch) -> types.ModuleType:
    """Put fresh kernels where the library imports them from."""
    name = "neuronxcc"
    for part in (".nki", ".kernels", ".attention", None):
        module = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
        name += part or ""
    module.FlashConfig = FlashConfig
    module.flash_fwd, module.flash_attn_bwd = Kernel(_forward), Kernel(_backward)
    return module
