"""Compares operators on the device, forward and backward, with plain PyTorch in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.modules.moe.dispatcher import Dispatcher
from nxd_memopt.modules.moe.experts import Experts
from nxd_memopt.ops import activation, norm, residual, rope, sums
from nxd_memopt.optimizer import AdamW
from nxd_memopt.parallel_layers import loss_functions
from nxd_memopt.selftest.check import Check, CheckError

FACTORS = {torch.float32: 16, torch.bfloat16: 4}
"""Allowed error by dtype, in units of its eps, relative to the largest value of a result.

In bf16 a result has about three roundings of half an eps: inputs are exact, intermediates and the result are not. In
fp32 the sums of up to 128 terms and the device's own exponential have more. On the CPU at most half is used.
"""
_TOKENS, _HIDDEN, _WIDTH, _VOCABULARY, _EXPERTS = 64, 64, 128, 96, 4
_EPS = 1e-5
_HEADS = (2, 4, 16, 32)  # [B, h, S, d]
_NO_SWITCH = "no option replaces it: report it"
_COMPILED = "trainer.compile: layer (the compiler's kernels, GPUs and trn2), or report it"

Results = Sequence[Tensor]
Function = Callable[..., Results]


@dataclass(frozen=True)
class Operator:
    """An operator and its definition.

    Args:
        name: name of the check.
        shapes: shapes of the floating-point inputs.
        function: the library's; takes the inputs on the device and returns the results.
        reference: the same in plain PyTorch; takes float64 inputs on the CPU.
        multiplies: it has matmuls, whose inputs some devices round to bf16.
        is_differentiable: autograd computes its gradients; otherwise the results are compared alone.
        dtypes: dtypes of the inputs.
        instead: see ``Check``.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    function: Function
    reference: Function
    multiplies: bool = False
    is_differentiable: bool = True
    dtypes: tuple[torch.dtype, ...] = tuple(FACTORS)
    instead: str = _COMPILED


def compare(operator: Operator) -> str:
    """Return the error of the operator in each dtype.

    Raises:
        CheckError: an error is above its bound, or a result is not finite.
    """
    # On XLA the results of all dtypes are one graph: a compilation takes seconds.
    found: dict[torch.dtype, list[Tensor]] = {}
    wanted: dict[torch.dtype, list[Tensor]] = {}
    for dtype in operator.dtypes:
        generator = torch.Generator().manual_seed(5)
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in operator.shapes]
        exact = [tensor.double() for tensor in inputs]
        on_device = [tensor.to(backend.device) for tensor in inputs]
        wanted[dtype] = results(operator.reference, exact, dtype, is_differentiable=operator.is_differentiable)
        found[dtype] = results(operator.function, on_device, dtype, is_differentiable=operator.is_differentiable)
    backend.mark_step()
    figures: list[str] = []
    for dtype, tensors in found.items():
        errors = [error_of(ours.cpu(), theirs) for ours, theirs in zip(tensors, wanted[dtype], strict=True)]
        figures.append(judge(errors, dtype, multiplies=operator.multiplies))
    return ", ".join(figures)


def results(function: Function, inputs: list[Tensor], dtype: torch.dtype, *, is_differentiable: bool) -> list[Tensor]:
    """Return the results of ``function``, and the gradients of its inputs for gradients in ``dtype`` of the results."""
    if not is_differentiable:
        return [result.detach() for result in function(*inputs)]
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    outputs = list(function(*leaves))
    generator = torch.Generator().manual_seed(6)
    upstream: list[Tensor] = []
    for output in outputs:
        # Rounded to the dtype of the inputs, so that the device and the reference have the same one.
        drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype)
        upstream.append(drawn.to(output.dtype).to(output.device))
    return [*(output.detach() for output in outputs), *torch.autograd.grad(outputs, leaves, upstream)]


def error_of(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest wanted value; NaN if a value is not finite."""
    if found.shape != wanted.shape:
        raise CheckError(f"a result has shape {list(found.shape)}, not {list(wanted.shape)}")
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def judge(errors: list[float], dtype: torch.dtype, *, multiplies: bool) -> str:
    """Return the largest of the errors of all results and gradients, next to its bound.

    Raises:
        CheckError: it is above its bound, or not a number.
    """
    rounded = dtype
    if multiplies and backend.rounds_matmuls:
        rounded = torch.bfloat16
    bound = FACTORS[rounded] * torch.finfo(rounded).eps
    name = str(dtype).removeprefix("torch.")
    # Not ">": an error that is NaN is above no bound.
    wrong = [f"{index + 1}: {error:.1e}" for index, error in enumerate(errors) if not error <= bound]
    if wrong:
        raise CheckError(f"{name}: of {len(errors)} results and gradients no. {', '.join(wrong)}, allowed {bound:.1e}")
    return f"{name} {max(errors):.1e} of {bound:.1e}"


# Operators and their references, in the order of the table below.


def _two_norms(
    x: Tensor, weight: Tensor, bias: Tensor, weight_2: Tensor, bias_2: Tensor, *grads: Tensor
) -> list[Tensor]:
    """Return GPT-NeoX's two LayerNorms of one input, and the gradient of the input, by the hand-written backward."""
    normalised, mean, rstd = norm.normalise(x, _EPS)
    branches = norm.affine_branches(normalised, (weight, weight_2), (bias, bias_2))
    grad, affine = norm.affine_branches_gradient(normalised, grads, (weight, weight_2))
    return [*branches, norm.normalise_gradient(grad, x, mean, rstd), affine]


def _two_norms_reference(x: Tensor, *others: Tensor) -> list[Tensor]:
    *affine, grad, grad_2 = others
    leaves = [tensor.detach().requires_grad_() for tensor in (x, *affine)]
    branches = [F.layer_norm(leaves[0], (_HIDDEN,), leaves[i], leaves[i + 1], _EPS) for i in (1, 3)]
    dx, *gradients = torch.autograd.grad(branches, leaves, (grad, grad_2))
    return [*branches, dx, torch.stack(gradients).view(2, 2, _HIDDEN)]


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _rope(query: Tensor, key: Tensor) -> Results:
    positions = torch.arange(_HEADS[2]).unsqueeze(0).to(query.device)
    cos, sin = rope.RotaryEmbedding(_HEADS[3], _ROPE, 64).tables(positions, _HEADS[2], query.dtype)
    return rope.apply_rope_qkv(query, key, key, cos, sin)[:2]


def _rope_reference(query: Tensor, key: Tensor) -> Results:
    half = _HEADS[3] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(()).double(), torch.arange(_HEADS[2]).double().unsqueeze(1) * frequencies)

    def rotated(x: Tensor) -> Tensor:
        # Dimensions i and i + d/2 are the real and the imaginary part.
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    return rotated(query), rotated(key)


def _gated_backward(gate: Tensor, up: Tensor, grad: Tensor) -> Results:
    gate, up = gate.clone(), up.clone()
    return activation.gated_activation_gradient(gate, up, grad.clone(), "silu"), gate, up


def _gated_backward_reference(gate: Tensor, up: Tensor, grad: Tensor) -> Results:
    leaves = [gate.detach().requires_grad_(), up.detach().requires_grad_()]
    value = F.silu(leaves[0]) * leaves[1]
    return value, *torch.autograd.grad(value, leaves, grad)


def _labels(device: torch.device) -> Tensor:
    labels = torch.arange(_TOKENS) * 7 % _VOCABULARY
    labels[3] = -100  # ignored
    return labels.to(device)


def _fused_cross_entropy(hidden: Tensor, weight: Tensor) -> Results:
    # Four chunks of 16 tokens.
    chunk_bytes = _VOCABULARY * _TOKENS * hidden.element_size() // 4
    labels = _labels(hidden.device)
    weight = weight * _HIDDEN**-0.5
    return (loss_functions.fused_linear_cross_entropy(hidden, weight, labels, logits_bytes=chunk_bytes),)


def _choices(device: torch.device) -> Tensor:
    """Return two experts for each token, more tokens of the first experts than of the last, ``[N, 2]``."""
    first = torch.arange(_TOKENS) % 3
    return torch.stack([first, (first + 1 + torch.arange(_TOKENS) // 48) % _EXPERTS], dim=1).to(device)


def _experts(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Results:
    experts = Experts(_EXPERTS, _HIDDEN, _WIDTH, "silu", init_method=torch.nn.init.zeros_, device="meta")
    # Plain tensors in place of the parameters, whose gradients are asked for.
    for name, value in (("gate_up_proj", gate_up), ("down_proj", down)):
        delattr(experts, name)
        setattr(experts, name, value * _HIDDEN**-0.5)
    block_size = None
    # Large blocks: a compiler unrolls them.
    if backend.shapes_are_static:
        block_size = _TOKENS // 2
    dispatcher = Dispatcher(_EXPERTS, "allgather", None, False, block_size)
    return (dispatcher.run(x, weights, _choices(x.device), None, experts),)


def _experts_reference(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Results:
    total = torch.zeros_like(x)
    choices = _choices(x.device)
    for expert in range(_EXPERTS):
        gate, up = F.linear(x, gate_up[expert] * _HIDDEN**-0.5).chunk(2, dim=-1)
        output = F.linear(F.silu(gate) * up, down[expert] * _HIDDEN**-0.5)
        total = total + output * (weights * (choices == expert)).sum(1, keepdim=True)
    return (total,)


def _adamw(optimizer: type[torch.optim.Optimizer], param: Tensor, *grads: Tensor) -> list[Tensor]:
    """Return the parameter and its moments after an update for each gradient."""
    weight = torch.nn.Parameter(param.clone())
    adamw = optimizer([weight], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)  # pyright: ignore[reportCallIssue]
    for grad in grads:
        weight.grad = grad.clone()
        adamw.step()
    return [weight, adamw.state[weight]["exp_avg"], adamw.state[weight]["exp_avg_sq"]]


_ROWS, _VECTOR = (_TOKENS, _HIDDEN), (_HIDDEN,)
_MLP = (_TOKENS, _WIDTH)
OPERATORS = (
    Operator(
        "residual + RMSNorm",
        (_ROWS, _ROWS, _VECTOR),
        lambda x, added, weight: norm.add_rms_norm(x, added, weight, _EPS),
        lambda x, added, weight: (F.rms_norm(x + added, (_HIDDEN,), weight, _EPS), x + added),
    ),
    Operator(
        "two LayerNorms, their backward",
        (_ROWS, *[_VECTOR] * 4, _ROWS, _ROWS),
        _two_norms,
        _two_norms_reference,
        is_differentiable=False,
    ),
    Operator("RoPE", (_HEADS, _HEADS), _rope, _rope_reference),
    Operator(
        "SwiGLU, GELU",
        (_MLP, _MLP),
        lambda gate, up: (activation.gated_activation(gate, up, "silu"), activation.activation("gelu")(gate)),
        lambda gate, up: (F.silu(gate) * up, F.gelu(gate)),
    ),
    Operator(
        "SwiGLU, its backward in place",
        (_MLP, _MLP, _MLP),
        _gated_backward,
        _gated_backward_reference,
        is_differentiable=False,
        instead="memory.mlp_tile_tokens: null, or report it",
    ),
    Operator(
        "residual + bias",
        (_ROWS, _ROWS, _VECTOR),
        lambda x, output, bias: (residual.add_residual(x, output, bias),),
        lambda x, output, bias: (x + output + bias,),
    ),
    Operator(
        "sums of rows",
        (_ROWS,),
        lambda x: (sums.column_sums(x),),
        lambda x: (x.sum(0),),
        is_differentiable=False,
    ),
    Operator(
        "cross entropy",
        ((_TOKENS, _VOCABULARY),),
        lambda logits: (loss_functions.parallel_cross_entropy(logits, _labels(logits.device)),),
        lambda logits: (F.cross_entropy(logits, _labels(logits.device), reduction="none"),),
        instead="memory.fused_linear_cross_entropy: true",
    ),
    Operator(
        "fused head and cross entropy",
        (_ROWS, (_VOCABULARY, _HIDDEN)),
        _fused_cross_entropy,
        lambda hidden, weight: (F.cross_entropy(hidden @ (weight * _HIDDEN**-0.5).t(), _labels(hidden.device)),),
        multiplies=True,
        instead="memory.fused_linear_cross_entropy: false",
    ),
    Operator(
        "experts",
        (_ROWS, (_TOKENS, 2), (_EXPERTS, 2 * _WIDTH, _HIDDEN), (_EXPERTS, _HIDDEN, _WIDTH)),
        _experts,
        _experts_reference,
        multiplies=True,
        instead="moe.moe_pad_expert_input_to_capacity: true with moe.moe_expert_capacity_factor",
    ),
    Operator(
        "AdamW",
        (_ROWS, _ROWS, _ROWS),
        partial(_adamw, AdamW),
        partial(_adamw, torch.optim.AdamW),
        is_differentiable=False,
        dtypes=(torch.float32,),
        instead=_NO_SWITCH,
    ),
)


def checks() -> list[Check]:
    """Return a check of each operator."""
    return [Check(f"operator: {each.name}", partial(compare, each), each.instead) for each in OPERATORS]
