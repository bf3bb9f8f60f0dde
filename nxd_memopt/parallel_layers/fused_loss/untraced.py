"""Calls a function that torch.compile must not trace; a file of its own, because it imports torch._dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="it overwrites logits by their gradient and compiles its kernels itself")
def call_untraced(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``, eagerly; a compiler ends its graph before it."""
    return function(*args)
