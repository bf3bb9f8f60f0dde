"""Keeps the results of fused attention kernels in regions that are otherwise recomputed.

Uses PyTorch's selective activation checkpointing. The policy names the kernels' operators. Their
outputs (the context and the log-sum-exps) are saved in forward and returned when the region runs
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
    """Return ``MUST_SAVE`` for fused attention operators and ``PREFER_RECOMPUTE`` for all other
    operators.
    """
    del ctx, args, kwargs
    return CheckpointPolicy.MUST_SAVE if operator in _OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


keeping_contexts: Callable[[], ContextPair] = functools.partial(create_selective_checkpoint_contexts, _policy)  # pyright: ignore
"""Return a context that saves (forward pass) and a context that returns the saved results
(recomputation).
"""


def both_contexts(first: Callable[[], ContextPair], second: Callable[[], ContextPair]) -> ContextPair:
    """Return the context pair of ``first`` with the context pair of ``second`` nested inside."""
    # A retained graph recomputes its regions again: each entry builds new nested contexts.
    (first_forward, first_again), (second_forward, second_again) = first(), second()
    forward = functools.partial(_nested, first_forward, second_forward)
    again = functools.partial(_nested, first_again, second_again)
    return ReusableContext(forward), ReusableContext(again)


@contextmanager
def _nested(*contexts: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
