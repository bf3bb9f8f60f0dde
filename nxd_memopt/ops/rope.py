"""Rotary position embedding: frequencies, tables and their application."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.config import ROPE_TYPES, require_one_of
from nxd_memopt.ops.cuda import rope as cuda
from nxd_memopt.ops.cuda.support import can_use_triton


def rope_frequencies(rotary_dim: int, rope_parameters: Mapping[str, Any]) -> Tensor:
    """Return the inverse frequencies ``[rotary_dim / 2]``, fp32 on the CPU (arXiv:2104.09864).

    Args:
        rotary_dim: number of dimensions of a head that are rotated.
        rope_parameters: a Hugging Face config's ``rope_type`` (``default``, ``linear``,
            ``llama3``), ``rope_theta`` and the values of the type.

    Raises:
        ValueError: the rope_type is unknown; the message has the known types.
    """
    kind = rope_parameters.get("rope_type", "default")
    require_one_of("rope_type", kind, ROPE_TYPES)
    # theta^(-2i / rotary_dim) for i in [0, rotary_dim / 2). Always on the CPU in fp32: powers that
    # a device computes may differ in the last bits, and positions multiply the difference.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").float() / rotary_dim
    frequencies = 1.0 / (rope_parameters["rope_theta"] ** exponents)
    if kind == "linear":
        return frequencies / rope_parameters["factor"]
    if kind == "llama3":
        return _scale_llama3(frequencies, rope_parameters)
    return frequencies


def _scale_llama3(frequencies: Tensor, rope_parameters: Mapping[str, Any]) -> Tensor:
    """Scale the frequencies as Llama 3.1 does (arXiv:2407.21783).

    Long waves are slowed by ``factor``, short waves are kept, and the waves between the two limits
    are blended.
    """
    factor = rope_parameters["factor"]
    low = rope_parameters["low_freq_factor"]
    high = rope_parameters["high_freq_factor"]
    context = rope_parameters["original_max_position_embeddings"]
    # blend is 0 at the long wavelength context / low, and 1 at the short wavelength context / high
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    slowed = torch.where(wavelengths > context / low, frequencies / factor, frequencies)
    between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(between, blended, slowed)


def rope_tables(
    frequencies: Tensor,
    position_ids: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine ``[B, S, rotary_dim]``, computed in fp32 and rounded to ``dtype``.

    Args:
        frequencies: ``[rotary_dim / 2]``, from ``rope_frequencies``.
        position_ids: ``[B, S]``.
        dtype: of the tables.
    """
    # fp32, because bf16 has 8 bits: it would round position 257 to 256
    angles = position_ids.unsqueeze(-1).float() * frequencies.to(position_ids.device)
    # Hugging Face's half-split convention: dimensions i and i + rotary_dim / 2 rotate by one angle.
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    """Return ``(-x_2, x_1)`` for the halves ``(x_1, x_2)`` of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``rotary_dim`` dimensions of each head, and pass the others through.

    Args:
        x: queries or keys ``[B, heads, S, d]``.
        cos: ``[B, S, rotary_dim]``.
        sin: ``[B, S, rotary_dim]``.

    Returns:
        ``[B, heads, S, d]``.
    """
    # the kernel's backward has no gradients of the tables
    if can_use_triton(x, cos, sin) and not cos.requires_grad:
        return cuda.apply_rope(x, cos, sin)
    # [B, 1, S, rotary_dim] broadcasts over heads
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    rotary_dim = cos.size(-1)
    rotated = x[..., :rotary_dim]
    passed = x[..., rotary_dim:]
    rotated = rotated * cos + rotate_half(rotated) * sin
    if passed.size(-1) == 0:
        return rotated
    return torch.cat((rotated, passed), dim=-1)


def apply_rope_qkv(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, *, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate query and key, and pass value through.

    If the three are chunks of one projection's output, their gradients are adjacent in memory in
    the same way. With the Triton kernels the
    results do not keep that output alive, because value is copied; with ``in_place`` the results
    are chunks of it. Without them ``value`` itself is returned.

    Args:
        query: ``[B, h, S, d]``.
        key: ``[B, g, S, d]``.
        value: ``[B, g, S, d]``.
        cos: ``[B, S, rotary_dim]`` or ``[1, S, rotary_dim]``.
        sin: shape of ``cos``.
        in_place: no other code reads the projection's output or the gradients of the results, so
            the kernels may rotate both in place and copy nothing.

    Returns:
        Shapes of query, key and value.
    """
    if can_use_triton(query, key, value, cos, sin) and not cos.requires_grad:
        return cuda.apply_rope_qkv(query, key, value, cos, sin, in_place=in_place)
    return apply_rope(query, cos, sin), apply_rope(key, cos, sin), value
