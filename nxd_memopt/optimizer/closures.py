"""Runs the closure of an optimizer's step, which computes the loss and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what ``closure`` returns, with gradients enabled inside a step that disables them; None without it."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
