"""Triton implementation of ``ops.cross_entropy``: one pass for the sums, one in place for the gradient.

Both passes are bound by memory: 2 and 4 bytes per logit in bf16.

A program covers 128 tokens and a range of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nxd_memopt.ops.cuda.support import lazy_kernels, power_of_2

_kernels = lazy_kernels("cross_entropy_kernels")

_TOKENS = 128  # per tile
_FEW_TOKENS = 16  # 64 bytes of fp32
# vocabulary rows per tile
_SUM_ROWS = 16
_GRADIENT_ROWS = 32
# vocabulary rows per program
_SUM_RANGE = 1024
_GRADIENT_RANGE = 256
_MULTIPLY_BLOCK = 4096
_MULTIPLY_PROGRAMS = 2048


def _clamped(valid: int | Tensor | None, vocab: int) -> int:
    """Return ``valid`` limited to ``[0, vocab]``."""
    assert not isinstance(valid, Tensor), "on CUDA a rank knows itself as an int"
    if valid is None:
        return vocab
    return min(max(valid, 0), vocab)


def local_sums(
    logits: Tensor,
    local_target: Tensor,
    terms: Any,
    valid: int | Tensor | None,
) -> Tensor:
    """Implement ``ops.cross_entropy.local_sums`` in fp32, with two kernel launches."""
    kernels = _kernels()
    vocab, tokens = logits.shape
    ranges = -(-vocab // _SUM_RANGE)
    with_sum = terms.label_smoothing > 0
    # First launch: log-sum-exp (and sum) of each range of 1,024 vocabulary rows. Second launch:
    # combine the ranges, and read the target's logit. One program for all rows of its tokens would
    # leave most multiprocessors idle: a chunk has few tokens and a large vocabulary.
    partial = torch.empty((1 + with_sum, ranges, tokens), dtype=torch.float32, device=logits.device)
    # without smoothing partial[-1] is the log-sum-exps, and the kernels do not use it as sums
    # softcap is read only with SOFTCAP; a kernel argument must be a number in any case
    softcap: dict[str, Any] = {
        "softcap": terms.softcap or 1.0,
        "SOFTCAP": terms.softcap is not None,
    }
    kernels.sums[(-(-tokens // _TOKENS), ranges)](
        logits,
        logits.stride(0),
        partial,
        partial[-1],
        _clamped(valid, vocab),
        tokens,
        **softcap,
        WITH_SUM=with_sum,
        RANGE=_SUM_RANGE,
        ROWS=_SUM_ROWS,
        TOKENS=_TOKENS,
        num_warps=4,
    )
    result = torch.empty((2 + with_sum, tokens), dtype=torch.float32, device=logits.device)
    kernels.token_sums[(-(-tokens // _FEW_TOKENS),)](
        partial,
        partial[-1],
        ranges,
        logits,
        logits.stride(0),
        local_target.contiguous(),
        vocab,
        tokens,
        **softcap,
        result=result,
        WITH_SUM=with_sum,
        RANGES=max(16, power_of_2(ranges)),
        TOKENS=_FEW_TOKENS,
        num_warps=4,
    )
    return result


def logits_gradient(
    logits: Tensor,
    log_sum_exp: Tensor,
    softmax_scale: Tensor,
    scale: Tensor,
    local_target: Tensor,
    terms: Any,
    valid: int | Tensor | None,
) -> Tensor:
    """Implement ``ops.cross_entropy.logits_gradient`` in place, with one kernel launch."""
    kernels = _kernels()
    vocab, tokens = logits.shape
    # Grid: blocks of tokens x ranges of the vocabulary. Tokens are contiguous; rows may have any
    # stride, as in a slice of a larger buffer.
    kernels.gradient[(-(-tokens // _TOKENS), -(-vocab // _GRADIENT_RANGE))](
        logits,
        logits.stride(0),
        log_sum_exp.contiguous(),
        softmax_scale.contiguous(),
        scale.contiguous(),
        local_target.contiguous(),
        vocab,
        _clamped(valid, vocab),
        tokens,
        1 - terms.label_smoothing,
        terms.label_smoothing / terms.vocab_size,
        terms.softcap or 1.0,
        SOFTCAP=terms.softcap is not None,
        PADDED=valid is not None,
        SMOOTHING=terms.label_smoothing > 0,
        RANGE=_GRADIENT_RANGE,
        ROWS=_GRADIENT_ROWS,
        TOKENS=_TOKENS,
        num_warps=4,
    )
    return logits


def multiply_(tensor: Tensor, factor: Tensor) -> Tensor:
    """Multiply ``tensor`` in place by the 0-dim ``factor``.

    If the factor is 1, the kernel neither reads nor writes the tensor. The host does not wait for
    the factor.
    """
    kernels = _kernels()
    # A bounded number of programs, each with a loop: with factor 1 each of them reads one number.
    programs = min(-(-tensor.numel() // _MULTIPLY_BLOCK), _MULTIPLY_PROGRAMS)
    options = {"BLOCK": _MULTIPLY_BLOCK, "num_warps": 4}
    kernels.multiply[(programs,)](tensor, factor.float(), tensor.numel(), **options)
    return tensor
