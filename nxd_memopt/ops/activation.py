"""Activation functions of the MLP on local tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.ops.cuda import elementwise as cuda
from nxd_memopt.ops.cuda.support import can_use_triton
from nxd_memopt.options import require_one_of


def _fused(name: str, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the activation ``name`` of ``x`` from the Triton kernel, or else from ``plain``."""
    if can_use_triton(x):
        return cuda.activation(x, cuda.KINDS[name])
    return plain(x)


_TANH_GELU = partial(F.gelu, approximate="tanh")
_QUICK_GELU_SLOPE = 1.702


def _quick_gelu(x: Tensor) -> Tensor:
    """Return ``x * sigmoid(1.702 x)``, which as a SiLU saves one tensor for backward instead of three."""
    return F.silu(_QUICK_GELU_SLOPE * x) / _QUICK_GELU_SLOPE


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(_fused, "gelu", F.gelu),
    "gelu_fast": partial(_fused, "gelu_fast", _TANH_GELU),
    "gelu_new": partial(_fused, "gelu_new", _TANH_GELU),
    "gelu_python": partial(_fused, "gelu_python", F.gelu),
    "gelu_pytorch_tanh": partial(_fused, "gelu_pytorch_tanh", _TANH_GELU),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}
"""Activation functions by their names in Hugging Face's ``hidden_act``."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation function called ``name``.

    Raises:
        ValueError: the name is unknown; the message has the nearest known name.
    """
    require_one_of("hidden_act", name, tuple(ACTIVATIONS))
    return ACTIVATIONS[name]


# (dy, x) -> dy * act'(x), by the same names
_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_fast": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "gelu_new": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "gelu_python": torch.ops.aten.gelu_backward,
    "gelu_pytorch_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "quick_gelu": lambda grad, x: torch.ops.aten.silu_backward(grad, _QUICK_GELU_SLOPE * x),
    "relu": lambda grad, x: torch.ops.aten.threshold_backward(grad, x, 0),
    "silu": torch.ops.aten.silu_backward,
    "swish": torch.ops.aten.silu_backward,
}


def gated_activation(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Return ``act(gate) * up``, elementwise.

    The result is SwiGLU for ``"silu"`` and GeGLU for the GELUs (arXiv:2002.05202).

    Args:
        gate: ``[..., F]``.
        up: ``[..., F]``.
        name: one of ``ACTIVATIONS``.

    Returns:
        ``[..., F]``.
    """
    if name in cuda.KINDS and gate.shape == up.shape and can_use_triton(gate, up):
        return cuda.gated_activation(gate, up, cuda.KINDS[name])
    return ACTIVATIONS[name](gate) * up


def gated_activation_gradient(gate: Tensor, up: Tensor, grad: Tensor, name: str) -> Tensor:
    """Overwrite ``gate`` and ``up`` with their gradients, and return ``act(gate) * up``.

    Args:
        gate: ``[rows, F]``, overwritten.
        up: ``[rows, F]``, overwritten.
        grad: ``[rows, F]``, gradient of the result; may be overwritten.
        name: one of ``ACTIVATIONS``.

    Returns:
        ``[rows, F]``, which may be the memory of ``grad``.
    """
    if name in cuda.KINDS and can_use_triton(gate, up, grad):
        return cuda.gated_activation_gradient(gate, up, grad, cuda.KINDS[name])
    # dgate = grad * up * act'(gate) and dup = grad * act(gate). dgate needs up and dup needs
    # act(gate), so the value and act(gate) are computed before either input is overwritten, and
    # gate, whose gradient reads up, is overwritten first.
    activated = ACTIVATIONS[name](gate)
    value = activated * up
    gate.copy_(_GRADIENTS[name](grad * up, gate))
    up.copy_(grad * activated)
    return value


def activation_gradient(x: Tensor, grad: Tensor, name: str) -> Tensor:
    """Overwrite ``x`` with its gradient ``grad * act'(x)``, and return ``act(x)``.

    Args:
        x: ``[rows, F]``, overwritten.
        grad: ``[rows, F]``, gradient of the result.
        name: one of ``ACTIVATIONS``.
    """
    activated = ACTIVATIONS[name](x)
    x.copy_(_GRADIENTS[name](grad, x))
    return activated
