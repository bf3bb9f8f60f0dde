"""Rotary position embedding: frequencies, tables and their application."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.config import ROPE_TYPES
from nxd_memopt.ops.cuda import rope as cuda
from nxd_memopt.ops.cuda.support import can_use_triton
from nxd_memopt.options import require_one_of


class RotaryEmbedding:
    """Frequencies and scale of a model's rotary embedding (arXiv:2104.09864), as transformers has them.

    Args:
        rotary_dim: number of dimensions of a head that are rotated.
        rope_parameters: a Hugging Face config's ``rope_type`` (one of ``config.ROPE_TYPES``), ``rope_theta`` and the
            values of the type.
        max_positions: the config's ``max_position_embeddings``, for ``dynamic``, ``yarn`` and ``longrope``.

    Raises:
        ValueError: the rope_type is unknown; the message has the known types.
    """

    def __init__(self, rotary_dim: int, rope_parameters: Mapping[str, Any], max_positions: int) -> None:
        self.kind = rope_parameters.get("rope_type", "default")
        require_one_of("rope_type", self.kind, ROPE_TYPES)
        self.rotary_dim = rotary_dim
        self.rope_parameters = rope_parameters
        self.max_positions = max_positions
        self.scale = _table_scale(self.kind, rope_parameters, max_positions)
        # Longer sequences have other frequencies; None: all have the same.
        self.longest: int | None = None
        if self.kind == "dynamic":
            self.longest = max_positions
        elif self.kind == "longrope":
            self.longest = rope_parameters["original_max_position_embeddings"]
        self._frequencies: dict[int | None, Tensor] = {
            None: rope_frequencies(rotary_dim, rope_parameters, max_positions)
        }

    def require_one_length(self, sequence_length: int, *, packed: bool, positions_given: bool = False) -> None:
        """Raise ``ValueError`` if the frequencies depend on lengths that differ from ``sequence_length``.

        transformers takes the largest position of a batch, so that a document's result would depend on the others.

        Args:
            sequence_length: S.
            packed: attention restarts at each document of a row.
            positions_given: the caller chooses the positions.
        """
        if self.longest is None:
            return
        depends = f"rope_type {self.kind!r} has other frequencies for sequences above {self.longest} tokens, and "
        if positions_given:
            raise ValueError(f"{depends}position_ids may have any length: leave position_ids out")
        if packed and sequence_length > self.longest:
            raise ValueError(
                f"{depends}documents of different lengths share rows of {sequence_length}: use rows of at most "
                f"{self.longest} tokens, or do not isolate documents (data.isolate_documents false)"
            )

    def tables(self, position_ids: Tensor, sequence_length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine ``[B, S, rotary_dim]`` of ``position_ids``, see ``rope_tables``."""
        frequencies = self.frequencies(sequence_length, position_ids.device)
        return rope_tables(frequencies, position_ids, dtype, scale=self.scale)

    def frequencies(self, sequence_length: int, device: torch.device) -> Tensor:
        """Return the inverse frequencies of sequences of this length, ``[rotary_dim / 2]``, fp32.

        On CUDA they stay on the device after the first call: a host-to-device copy in each step would
        synchronize, and CUDA graphs cannot record it. A tensor subclass, e.g. of a tracer, is not kept.
        """
        longer = None
        if self.longest is not None and sequence_length > self.longest:
            longer = sequence_length
        if longer not in self._frequencies:
            self._frequencies[longer] = rope_frequencies(
                self.rotary_dim, self.rope_parameters, self.max_positions, longer
            )
        moved = self._frequencies[longer].to(device)
        if device.type == "cuda" and type(moved) is Tensor:
            self._frequencies[longer] = moved
        return moved


def rope_frequencies(
    rotary_dim: int, rope_parameters: Mapping[str, Any], max_positions: int = 0, longer_length: int | None = None
) -> Tensor:
    """Return the inverse frequencies ``[rotary_dim / 2]``, fp32 on the CPU.

    Args:
        rotary_dim: as for ``RotaryEmbedding``.
        rope_parameters: likewise.
        max_positions: likewise.
        longer_length: length of a sequence above ``RotaryEmbedding.longest``; None for the others.
    """
    kind = rope_parameters.get("rope_type", "default")
    base: Any = rope_parameters["rope_theta"]
    # theta^(-2i / rotary_dim) for i in [0, rotary_dim / 2). Always on the CPU in fp32: powers that
    # a device computes may differ in the last bits, and positions multiply the difference.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").float() / rotary_dim
    if kind == "dynamic":
        base = _dynamic_base(base, rope_parameters["factor"], rotary_dim, max_positions, longer_length)
    powers = base**exponents
    if kind == "linear":
        return 1.0 / powers / rope_parameters["factor"]
    if kind == "llama3":
        return _scale_llama3(1.0 / powers, rope_parameters)
    if kind == "yarn":
        return _blend_yarn(powers, rotary_dim, rope_parameters, max_positions)
    if kind == "longrope":
        name = "short_factor" if longer_length is None else "long_factor"
        factors = rope_parameters[name]
        if len(factors) != len(powers):
            raise ValueError(
                f"rope_parameters {name} has {len(factors)} numbers, and RoPE rotates {rotary_dim} dimensions of each "
                f"head: give it {len(powers)}"
            )
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * powers)
    return 1.0 / powers


def _dynamic_base(base: float, factor: float, rotary_dim: int, max_positions: int, length: int | None) -> Any:
    """Return the base of NTK-aware scaling, which grows with the length of sequences above ``max_positions``."""
    # transformers computes it of the largest position, an integer tensor: in fp32.
    long: Any = max_positions if length is None else torch.tensor(length, device="cpu")
    return base * ((factor * long / max_positions) - (factor - 1)) ** (rotary_dim / (rotary_dim - 2))


def _factor(rope_parameters: Mapping[str, Any], max_positions: int) -> float:
    """Return how many times longer sequences may be than in pretraining."""
    factor = rope_parameters.get("factor")
    return max_positions / rope_parameters["original_max_position_embeddings"] if factor is None else factor


def _table_scale(kind: str, rope_parameters: Mapping[str, Any], max_positions: int) -> float:
    """Return the factor of cosine and sine, which YaRN (arXiv:2309.00071) and LongRoPE (arXiv:2402.13753) have."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    given = rope_parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = _factor(rope_parameters, max_positions)
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(rope_parameters["original_max_position_embeddings"]))
    scale, all_dimensions = rope_parameters.get("mscale"), rope_parameters.get("mscale_all_dim")
    growth = 0.1 * math.log(factor)
    if scale and all_dimensions:
        return (growth * scale + 1) / (growth * all_dimensions + 1)
    return growth + 1


def _blend_yarn(powers: Tensor, rotary_dim: int, rope_parameters: Mapping[str, Any], max_positions: int) -> Tensor:
    """Scale the frequencies as YaRN does: waves that turn often are kept, others are slowed by the factor.

    The blend is linear in the index of the dimension, between the dimensions with ``beta_fast`` and
    ``beta_slow`` turns within the length of pretraining.
    """
    context = rope_parameters["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        waves = math.log(context / (turns * 2 * math.pi))
        return rotary_dim * waves / (2 * math.log(rope_parameters["rope_theta"]))

    low = dimension(rope_parameters.get("beta_fast") or 32)
    high = dimension(rope_parameters.get("beta_slow") or 1)
    if rope_parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # transformers' width of a step
    slowed = ((torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    # In transformers' order of operations: positions multiply differences of the last bit.
    kept = 1 - slowed
    return 1.0 / (_factor(rope_parameters, max_positions) * powers) * (1 - kept) + 1.0 / powers * kept


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
    *,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine ``[B, S, rotary_dim]``, computed in fp32 and rounded to ``dtype``.

    Args:
        frequencies: ``[rotary_dim / 2]``, from ``rope_frequencies``.
        position_ids: ``[B, S]``.
        dtype: of the tables.
        scale: factor of both, before rounding.
    """
    # fp32, because bf16 has 8 bits: it would round position 257 to 256
    angles = position_ids.unsqueeze(-1).float() * frequencies.to(position_ids.device)
    # Hugging Face's half-split convention: dimensions i and i + rotary_dim / 2 rotate by one angle.
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return cos.to(dtype), sin.to(dtype)


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
