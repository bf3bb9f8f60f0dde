"""Triton kernels of ``ops.cuda.cross_entropy``; imported only where Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from nxd_memopt.ops.cuda.approximate_kernels import exp2

_LOG2_E = tl.constexpr(1.4426950408889634)
# Exact in bf16, and still finite times log2(e): a difference of two such numbers is not NaN.
_LOWEST = tl.constexpr(-(2.0**126))


@triton.jit
def _tanh(x):
    """Return tanh(x) = 1 - 2 / (1 + e^2x)."""
    return 1.0 - 2.0 / (1.0 + exp2(2.0 * _LOG2_E * x))


@triton.jit
def _tile(logits, rows, last, stride, token, is_token, softcap, SOFTCAP: tl.constexpr):  # noqa: N803
    """Load ``[ROWS, TOKENS]`` logits in fp32, soft-capped; ``_LOWEST`` where there is no logit."""
    mask = (rows < last)[:, None] & is_token[None, :]
    pointers = logits + rows[:, None] * stride + token[None, :]
    x = tl.load(pointers, mask=mask, other=_LOWEST).to(tl.float32)
    # soft-capping would raise _LOWEST to -softcap, which the sum of exponentials would count
    return tl.where(mask, softcap * _tanh(x / softcap), _LOWEST) if SOFTCAP else x


@triton.jit
def sums(
    logits,
    stride,
    log_sum_exp,
    logit_sum,
    vocab,
    tokens,
    softcap,
    SOFTCAP: tl.constexpr,  # noqa: N803
    WITH_SUM: tl.constexpr,  # noqa: N803
    RANGE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
):
    """Compute log-sum-exp and sum of a range of the vocabulary for ``TOKENS`` tokens per program.

    Each element of the tile has its own running maximum and sum, so that threads exchange nothing
    until the end. Four tiles at a time share one rescaling of the sum.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(1).to(tl.int64) * RANGE
    last = tl.minimum(first + RANGE, vocab)
    is_token = token < tokens
    maximum = tl.full([ROWS, TOKENS], _LOWEST, tl.float32)
    exp_sum = tl.zeros([ROWS, TOKENS], tl.float32)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    # rows at or after ``last`` load _LOWEST; the final rescaling removes them from the sum
    for start in range(first, last, 4 * ROWS):
        rows = start + tl.arange(0, ROWS)
        a = _tile(logits, rows, last, stride, token, is_token, softcap, SOFTCAP)
        b = _tile(logits, rows + ROWS, last, stride, token, is_token, softcap, SOFTCAP)
        c = _tile(logits, rows + 2 * ROWS, last, stride, token, is_token, softcap, SOFTCAP)
        d = _tile(logits, rows + 3 * ROWS, last, stride, token, is_token, softcap, SOFTCAP)
        if WITH_SUM:
            total += tl.where(a > _LOWEST, a, 0.0) + tl.where(b > _LOWEST, b, 0.0)
            total += tl.where(c > _LOWEST, c, 0.0) + tl.where(d > _LOWEST, d, 0.0)
        # exp(x - max) as exp2 of scaled arguments: one multiply-add and one instruction per logit,
        # and one rescaling of the running sum per four tiles.
        largest = tl.maximum(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), maximum)
        offset = largest * _LOG2_E
        exp_sum *= exp2(maximum * _LOG2_E - offset)
        exp_sum += exp2(a * _LOG2_E - offset) + exp2(b * _LOG2_E - offset)
        exp_sum += exp2(c * _LOG2_E - offset) + exp2(d * _LOG2_E - offset)
        maximum = largest
    # combine the ROWS partial sums of each token: [ROWS, TOKENS] -> [TOKENS]
    token_max = tl.max(maximum, 0)
    exp_sums = tl.sum(exp_sum * exp2((maximum - token_max[None, :]) * _LOG2_E), 0)
    offset = tl.program_id(1) * tokens + token
    tl.store(log_sum_exp + offset, token_max + tl.log2(exp_sums) / _LOG2_E, mask=is_token)
    if WITH_SUM:
        tl.store(logit_sum + offset, tl.sum(total, 0), mask=is_token)


@triton.jit
def token_sums(
    log_sum_exps,
    logit_sums,
    ranges,
    logits,
    stride,
    target,
    vocab,
    tokens,
    softcap,
    result,
    SOFTCAP: tl.constexpr,  # noqa: N803
    WITH_SUM: tl.constexpr,  # noqa: N803
    RANGES: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
):
    """Combine the log-sum-exps of all ranges, and read the target's logit.

    A program handles few tokens, so that many programs run at once.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < tokens
    row = tl.arange(0, RANGES)
    mask = (row < ranges)[:, None] & is_token[None, :]
    offset = row[:, None] * tokens + token[None, :]
    parts = tl.load(log_sum_exps + offset, mask=mask, other=_LOWEST)
    largest = tl.maximum(tl.max(parts, 0), _LOWEST)  # a range with padding only has -inf
    # lse = m + ln(sum of exp(lse_i - m)) over the ranges; ln = log2 / log2(e)
    exp_sum = tl.sum(tl.where(mask, exp2((parts - largest[None, :]) * _LOG2_E), 0.0), 0)
    tl.store(result + token, largest + tl.log2(exp_sum) / _LOG2_E, mask=is_token)
    # a label of another rank's part of the vocabulary counts as logit 0: the ranks' logits add up
    label = tl.load(target + token, mask=is_token, other=-1)
    is_local = (label >= 0) & (label < vocab)
    logit = tl.load(logits + label * stride + token, mask=is_local, other=0.0).to(tl.float32)
    if SOFTCAP:
        logit = softcap * _tanh(logit / softcap)
    tl.store(result + tokens + token, logit, mask=is_token)
    if WITH_SUM:
        sums = tl.load(logit_sums + offset, mask=mask, other=0.0)
        tl.store(result + 2 * tokens + token, tl.sum(sums, 0), mask=is_token)


@triton.jit
def gradient(
    logits,
    stride,
    log_sum_exp,
    softmax_scale,
    scale,
    target,
    vocab,
    valid,
    tokens,
    target_weight,
    uniform_weight,
    softcap,
    SOFTCAP: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
    SMOOTHING: tl.constexpr,  # noqa: N803
    RANGE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
):
    """Overwrite the logits with their gradient.

    Per logit x: ``p_scale * softmax - uniform_weight * weight``, times the slope of soft-capping;
    the label's element also loses ``target_weight * weight``. ``p_scale`` is scale * (1 + 2 z lse),
    ``target_weight`` is 1 - e and ``uniform_weight`` is e / V.

    The label's element is computed separately, from its logit. The logit is read before any thread
    overwrites it, and its gradient is stored after the loop; a barrier separates each of the two
    from the loop.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < tokens
    lse = tl.load(log_sum_exp + token, mask=is_token, other=0.0) * _LOG2_E
    p_scale = tl.load(softmax_scale + token, mask=is_token, other=0.0)
    weight = tl.load(scale + token, mask=is_token, other=0.0)
    label = tl.load(target + token, mask=is_token, other=-1)
    first = tl.program_id(1).to(tl.int64) * RANGE
    last = tl.minimum(first + RANGE, vocab)
    has_label = is_token & (label >= first) & (label < last)
    label_pointer = logits + label * stride + token
    label_logit = tl.load(label_pointer, mask=has_label, other=0.0).to(tl.float32)
    tl.debug_barrier()
    # p = exp(x - lse) as a power of 2, with lse * log2(e) computed once per token above. The
    # constexpr options remove the branches that a loss does not use.
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < last)[:, None] & is_token[None, :]
        pointers = logits + rows[:, None] * stride + token[None, :]
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        capped = _tanh(x / softcap) if SOFTCAP else x
        x = softcap * capped if SOFTCAP else x
        grad = exp2(x * _LOG2_E - lse[None, :]) * p_scale[None, :]
        if SMOOTHING:
            grad -= uniform_weight * weight[None, :]
        if SOFTCAP:
            grad *= 1.0 - capped * capped
        if PADDED:
            grad = tl.where((rows < valid)[:, None], grad, 0.0)
        tl.store(pointers, grad.to(logits.dtype.element_ty), mask=mask)
    tl.debug_barrier()
    # d tanh(u)/du = 1 - tanh(u)^2, as in the loop
    slope = 1.0
    if SOFTCAP:
        capped_label = _tanh(label_logit / softcap)
        label_logit = softcap * capped_label
        slope = 1.0 - capped_label * capped_label
    label_p = exp2(label_logit * _LOG2_E - lse) * p_scale
    label_grad = label_p - (target_weight + uniform_weight) * weight
    tl.store(label_pointer, (label_grad * slope).to(logits.dtype.element_ty), mask=has_label)


@triton.jit
def multiply(tensor, factor, size, BLOCK: tl.constexpr):  # noqa: N803
    """Multiply ``tensor`` by the device scalar ``factor``, unless it is 1."""
    scale = tl.load(factor)
    if scale != 1.0:
        # grid-stride loop: the number of programs does not depend on the size
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
            offset = start + tl.arange(0, BLOCK)
            mask = offset < size
            x = tl.load(tensor + offset, mask=mask, other=0.0)
            scaled = x.to(tl.float32) * scale
            tl.store(tensor + offset, scaled.to(tensor.dtype.element_ty), mask=mask)
