"""Keeps the results of fused attention kernels in regions that are otherwise recomputed.

Uses PyTorch's selective activation checkpointing. The policy names the kernels' operators. Their
outputs (the attention output and the log-sum-exps) are saved in forward and returned when the region runs
again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from nxd_memopt.backends.base import ContextPair
from nxd_memopt.ops.autograd import ReusableContext
from nxd_memopt.ops.cuda.attention import FLASH4_OPERATOR

KEEPABLE_ATTENTION = ("sdpa", "flash4", "cudnn", "flash", "efficient")
"""Attention implementations that run as a single operator, which the policy can name."""

_OPERATORS = {FLASH4_OPERATOR} | {
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
    )
}


def _policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return ``MUST_SAVE`` for fused attention operators, ``PREFER_RECOMPUTE`` for all others."""
    del ctx, args, kwargs
    if operator in _OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


keeping_contexts: Callable[[], ContextPair] = functools.partial(
    create_selective_checkpoint_contexts,  # pyright: ignore
    _policy,
)
"""Return a context that saves (forward pass) and a context that returns the saved results
(recomputation).
"""


def both_contexts(
    first: Callable[[], ContextPair],
    second: Callable[[], ContextPair],
) -> ContextPair:
    """Return the context pair of ``first`` with the context pair of ``second`` nested inside."""
    first_forward, first_recompute = first()
    second_forward, second_recompute = second()
    # A retained graph recomputes its regions again: each entry builds new nested contexts.
    forward = functools.partial(_nested, first_forward, second_forward)
    recompute = functools.partial(_nested, first_recompute, second_recompute)
    return ReusableContext(forward), ReusableContext(recompute)


@contextmanager
def _nested(*contexts: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
