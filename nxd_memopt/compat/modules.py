"""neuronx-distributed's signatures of QKV layer, RMSNorm, LoRA's options, attention kernels and rotary embedding."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.compat.layers import refuse
from nxd_memopt.modules import lora, qkv_linear, rms_norm
from nxd_memopt.ops.attention import attention_implementation, core_attention
from nxd_memopt.ops.rope import rotate_half
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.initialization import InitMethod


class GQAQKVColumnParallelLinear(qkv_linear.GQAQKVColumnParallelLinear):
    """Column-parallel QKV projection with neuronx-distributed's order and defaults of arguments."""

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        keep_master_weight: bool = False,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = True,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        # For calls by position: neuronx-distributed has keep_master_weight before
        # kv_size_multiplier, the base class has it by keyword only.
        super().__init__(
            input_size,
            output_sizes,
            bias,
            gather_output,
            dtype,
            device,
            init_method,
            sequence_parallel_enabled,
            kv_size_multiplier,
            reduce_dtype,
            keep_master_weight=keep_master_weight,
            fuse_qkv=fuse_qkv,
        )


class RMSNorm(rms_norm.RMSNorm):
    """RMSNorm with neuronx-distributed's arguments and its default ``eps``.

    Args:
        normalized_shape: H, or ``(H,)``.
        eps: added to the mean square.
        sequence_parallel_enabled: see ``nxd_memopt.modules.rms_norm.RMSNorm``.
        elementwise_affine: True: the norm has a weight.

    Raises:
        ValueError: ``normalized_shape`` has several dimensions, or ``elementwise_affine`` is False.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        sequence_parallel_enabled: bool = False,
        *,
        elementwise_affine: bool = True,
        **options: Any,
    ) -> None:
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if len(shape) != 1:
            raise ValueError(f"normalized_shape {shape} must have one dimension: only the last one is normalized")
        if not elementwise_affine:
            raise ValueError("elementwise_affine False is not supported: the norm has a weight")
        super().__init__(shape[0], eps, sequence_parallel_enabled, **options)


@dataclass(frozen=True)
class LoraConfig(lora.LoraConfig):
    """``modules.lora.LoraConfig`` with neuronx-distributed's options of checkpoints.

    ``save_checkpoint`` writes base model and adapters, as with ``save_lora_base``; ``save_adapters`` writes the
    adapters alone. Options of the names of files have no effect; a warning says so of those that are set.

    Raises:
        ValueError: ``modules_to_save``, ``load_lora_from_ckpt`` or ``merge_lora`` is set.
    """

    modules_to_save: Sequence[str] | None = None
    lora_verbose: bool = False
    load_lora_from_ckpt: bool = False
    lora_load_tag: str | None = None
    lora_save_dir: str | None = "lora_adapter"
    merge_lora: bool = False
    save_lora_base: bool = False
    save_lora_config_adapter: bool = False
    merge_sharded_lora: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(modules_to_save=self.modules_to_save, load_lora_from_ckpt=self.load_lora_from_ckpt)
        refuse(merge_lora=self.merge_lora)
        if self.save_lora_config_adapter or self.lora_save_dir not in (None, "lora_adapter"):
            warnings.warn(
                f"lora_save_dir {self.lora_save_dir!r} and save_lora_config_adapter {self.save_lora_config_adapter} "
                "have no effect: save_checkpoint writes model and adapters, and "
                "nxd_memopt.checkpoint.huggingface.adapters.save_adapters a directory for PEFT",
                stacklevel=3,
            )


def nki_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lnc: int = 1,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: Tensor | None = None,
    hardware_type: object = None,
    transpose_nki_inputs: bool = True,
) -> Tensor:
    """Return causal attention, computed with the device's fastest implementation for these inputs.

    Args:
        q: queries, ``[B, h, d, S]``, or ``[B, h, S, d]`` without ``transpose_nki_inputs``.
        k: keys, shaped as ``q`` with g heads; g divides h.
        v: values, shaped as ``k``.
        lnc: ignored; the backend knows its physical cores per logical core.
        dropout_p: probability of dropping an attention weight.
        softmax_scale: factor of the scores; default ``d ** -0.5``.
        causal: must be True.
        mixed_precision: ignored; the softmax is always in fp32.
        seed: must be None; dropout uses the device's generator.
        hardware_type: ignored; the backend knows it.
        transpose_nki_inputs: whether S is the last dimension of the inputs.

    Returns:
        ``[B, h, S, d]``.

    Raises:
        ValueError: ``causal`` is False, or ``seed`` is set.
    """
    # Ignored options select how a kernel computes the same result. Options that change the result
    # are refused.
    del lnc, mixed_precision, hardware_type
    refuse(non_causal_attention=not causal, seed=seed is not None)
    if transpose_nki_inputs:
        q = q.transpose(-1, -2)
        k = k.transpose(-1, -2)
        v = v.transpose(-1, -2)
    if softmax_scale is not None:
        # core_attention multiplies the scores with d ** -0.5, so q gets the remaining factor.
        q = q * (softmax_scale * q.size(-1) ** 0.5)
    # The fastest implementation for these inputs; its reason is not needed.
    name, _ = attention_implementation(q.shape, k.size(1), dtype=q.dtype, dropout_p=dropout_p)
    return core_attention(q, k, v, implementation=name, dropout_p=dropout_p)


def nki_ring_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_id: int,
    src_tgt_pairs: Sequence[Sequence[int]],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    """Return causal attention of ``[B, h, S, d]`` tensors, for a ring of one rank.

    Raises:
        ValueError: context parallelism is on: ring attention over several ranks is not supported.
    """
    # The ring's ranks and its pairs of sender and receiver have no meaning for a ring of one rank.
    del rank_id, src_tgt_pairs
    size = parallel_state.get_context_model_parallel_size()
    if size > 1:
        raise ValueError(f"ring attention over context_parallel_size {size} is not offered: use sequence parallelism")
    return nki_flash_attn_func(
        q, k, v, 1, dropout_p, softmax_scale, causal, mixed_precision, seed, transpose_nki_inputs=False
    )


def apply_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    flash_attn: bool,
    transpose_nki_inputs: bool = True,
) -> tuple[Tensor, Tensor]:
    """Apply rotary position embedding to all dimensions of queries and keys.

    Args:
        q: ``[B, h, S, d]``, or ``[B, h, d, S]`` with ``flash_attn`` and ``transpose_nki_inputs``.
        k: shaped as ``q``, with g heads.
        cos: ``[B, S, d]``, or ``[positions, d]`` with ``position_ids``.
        sin: shaped as ``cos``.
        position_ids: rows of ``cos`` and ``sin``, ``[B, S]``, or None.
        flash_attn: whether the attention kernel's layout is used.
        transpose_nki_inputs: whether this layout has S as the last dimension.

    Returns:
        Rotated queries and keys, shaped as ``q`` and ``k``.
    """
    if position_ids is not None:
        cos = cos[position_ids]
        sin = sin[position_ids]
    # [B, 1, S, d]: the same angles for all heads.
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    if not (flash_attn and transpose_nki_inputs):
        return _rotate(q, cos, sin), _rotate(k, cos, sin)
    # The kernel's layout has d before S. The transposed views cost nothing; the results are views
    # too, so their memory has d last.
    q = _rotate(q.transpose(-1, -2), cos, sin).transpose(-1, -2)
    k = _rotate(k.transpose(-1, -2), cos, sin).transpose(-1, -2)
    return q, k


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` rotated by the angles of ``cos`` and ``sin``, ``[B, h, S, d]``."""
    return x * cos + rotate_half(x) * sin
