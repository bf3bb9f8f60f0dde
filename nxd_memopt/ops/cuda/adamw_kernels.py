"""Owns the Triton source of ``ops.cuda.adamw``; imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _address(addresses, index, like, ALIGNED: tl.constexpr):  # noqa: N803
    address = tl.load(addresses + index).to(like.dtype)
    return tl.multiple_of(address, 16) if ALIGNED else address


@triton.jit
def adamw(
    addresses,
    tensor_of,
    chunk_of,
    corrections,
    param_like,
    grad_like,
    mean_like,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    ALIGNED: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One chunk of one tensor a program; ``*_like`` carry nothing but the types of the addresses."""
    tensor = tl.load(tensor_of + tl.program_id(0)).to(tl.int64)
    size = tl.load(addresses + tensor * 5 + 4)
    size = tl.multiple_of(size, 16) if ALIGNED else size
    param = _address(addresses, tensor * 5, param_like, ALIGNED)
    grad = _address(addresses, tensor * 5 + 1, grad_like, ALIGNED)
    mean = _address(addresses, tensor * 5 + 2, mean_like, ALIGNED)
    square = _address(addresses, tensor * 5 + 3, mean_like, ALIGNED)
    step_size = lr / tl.load(corrections + tensor * 2)
    root_of_correction = tl.load(corrections + tensor * 2 + 1)
    first = tl.load(chunk_of + tl.program_id(0)).to(tl.int64) * CHUNK
    for block in range(CHUNK // BLOCK):
        place = first + block * BLOCK + tl.arange(0, BLOCK)
        mask = place < size
        g = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(mean + place, mask=mask, other=0.0).to(tl.float32)
        m += (g - m) * (1.0 - beta1)
        v = beta2 * tl.load(square + place, mask=mask, other=0.0).to(tl.float32) + (1.0 - beta2) * g * g
        p = tl.load(param + place, mask=mask, other=0.0).to(tl.float32) * (1.0 - lr * weight_decay)
        p -= step_size * m / (tl.sqrt(v) / root_of_correction + eps)
        tl.store(param + place, p.to(param_like.dtype.element_ty), mask=mask)
        tl.store(mean + place, m.to(mean_like.dtype.element_ty), mask=mask)
        tl.store(square + place, v.to(mean_like.dtype.element_ty), mask=mask)
