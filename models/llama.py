"""LLaMA 1 to 3 and its family with Hugging Face's parameter names: grouped-query attention, RoPE, RMSNorm, SwiGLU.

Mistral, Qwen2, Qwen3, Granite and Phi-3 differ by biases, norms of query and key, attention windows, constant factors
and the rotated part of a head, which ``architectures.model_spec`` tells from the config.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, MixtralConfig

from nxd_memopt.architectures.model_spec import ModelSpec
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.memory import apply_memory
from nxd_memopt.modules.attention import (
    AttentionMask,
    CoreAttention,
    RopeTables,
    in_place_rope_path,
    merge_heads,
    split_heads,
)
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.modules.factory import LayerFactory
from nxd_memopt.modules.head_groups import AttentionLayers
from nxd_memopt.modules.mlp import GatedMLP
from nxd_memopt.modules.packed_weights import PackedWeights
from nxd_memopt.modules.rms_norm import add_and_norm, residual_norm_path
from nxd_memopt.modules.stages import WHOLE_MODEL, StageBuilder, StageInput
from nxd_memopt.ops.residual import scaled
from nxd_memopt.ops.rope import apply_rope, apply_rope_qkv
from nxd_memopt.parallel_layers.fusion import FusibleModule


class LlamaAttention(PackedWeights):
    """Grouped-query attention with RoPE.

    ``[B, S, H] -> [B, S, H]``; under sequence parallelism ``[s, B, H] -> [s, B, H]``.
    A query sees ``window`` keys, its own included, or all before it.
    """

    shared_input_layers = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        config: LlamaConfig | MixtralConfig,
        spec: ModelSpec,
        factory: LayerFactory,
        memory: MemoryConfig,
        window: int | None,
    ) -> None:
        super().__init__()
        # Some configs set head_dim: h * d may then differ from H.
        hidden = config.hidden_size
        self.head_dim = spec.head_dim
        query_size = spec.num_heads * spec.head_dim
        kv_size = spec.num_kv_heads * spec.head_dim
        bias = spec.biases
        self.q_proj = factory.column("q_proj", hidden, query_size, bias=bias["q_proj"])
        self.k_proj = factory.column("k_proj", hidden, kv_size, bias=bias["k_proj"])
        self.v_proj = factory.column("v_proj", hidden, kv_size, bias=bias["v_proj"])
        self.o_proj = factory.row("o_proj", query_size, hidden, bias=bias["o_proj"])
        # Qwen3 normalizes each head of query and key.
        self.q_norm = self.k_norm = None
        if "q_norm" in bias:
            self.q_norm = factory.head_norm(self.head_dim, config.rms_norm_eps)
            self.k_norm = factory.head_norm(self.head_dim, config.rms_norm_eps)
        self.core_attn = CoreAttention(
            attention_backend=memory.attention_backend,
            head_dim=self.head_dim,
            dropout=spec.attention_dropout,
            sharded=factory.parallel.tensor_model_parallel_size > 1,
            window=window,
            scale=spec.attention_multiplier,
        )
        self.sequence_first = factory.parallel.sequence_parallel_enabled
        # After the layers exist: packs their weights, and then registers what a fused path
        # bypasses.
        self.share_input()

    def share_input(self) -> None:
        super().share_input()
        self.in_place_rope = in_place_rope_path(self, *self.shared_input_layers)

    def forward(self, hidden: Tensor, rope: RopeTables, mask: AttentionMask) -> Tensor:
        # One all-gather of the input.
        return self.o_proj(self.context(self.project(hidden), rope, mask))

    def context(self, columns: tuple[Tensor, ...], rope: RopeTables, mask: AttentionMask) -> Tensor:
        """Compute the input of ``o_proj``, ``[B, S, h*d/T]`` or ``[S, B, h*d/T]``.

        Args:
            columns: queries ``[B, S, h*d/T]`` (or sequence first), keys and values.
            rope: cosine and sine tables.
            mask: mask in addition to causality.
        """
        query, key, value = (split_heads(x, self.head_dim, sequence_first=self.sequence_first) for x in columns)
        if self.q_norm is not None and self.k_norm is not None:
            query = apply_rope(self.q_norm(query), *rope)
            key = apply_rope(self.k_norm(key), *rope)
        else:
            query, key, value = apply_rope_qkv(query, key, value, *rope, in_place=self.in_place_rope.is_active)
        # [B, h/T, S, d] -> [B, S, h*d/T]
        return merge_heads(self.core_attn(query, key, value, mask), sequence_first=self.sequence_first)

    def layers(self) -> AttentionLayers:
        """Return the submodules, for attention by groups of heads."""
        return AttentionLayers((self.q_proj, self.k_proj, self.v_proj), self.head_dim, self.o_proj, self.context)


class LlamaDecoderLayer(FusibleModule):
    """Pre-norm decoder layer; ``[B, S, H]`` or ``[s, B, H]`` in and out."""

    def __init__(
        self, config: LlamaConfig, spec: ModelSpec, factory: LayerFactory, memory: MemoryConfig, window: int | None
    ) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, spec, factory, memory, window)
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=spec.biases["gate_proj"],
            factory=factory,
        )
        self.input_layernorm = factory.rms_norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = factory.rms_norm(config.hidden_size, config.rms_norm_eps)
        self.residual_multiplier = spec.residual_multiplier
        self.fused_input_norm = residual_norm_path(self, "input_layernorm")
        self.fused_post_attention_norm = residual_norm_path(self, "post_attention_layernorm")

    def forward(self, hidden: Tensor, rope: RopeTables, mask: AttentionMask) -> Tensor:
        # add_and_norm adds the previous block's output and normalizes the sum: one pass over the
        # residual stream on GPUs. The last sum, of the MLP's output, has no norm in this layer.
        normed, hidden = add_and_norm(self.input_layernorm, hidden, path=self.fused_input_norm)
        # Not in a variable, which would keep attention's output until the MLP has run.
        normed, hidden = add_and_norm(
            self.post_attention_layernorm,
            hidden,
            scaled(self.self_attn(normed, rope, mask), self.residual_multiplier),
            path=self.fused_post_attention_norm,
        )
        return hidden + scaled(self.mlp(normed), self.residual_multiplier)


class LlamaModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: LlamaConfig, spec: ModelSpec, builder: StageBuilder, memory: MemoryConfig) -> None:
        super().__init__()
        self.embedding_multiplier = spec.embedding_multiplier
        self.embed_tokens = builder.embedding("embed_tokens", config.pad_token_id)

        def make(factory: LayerFactory, number: int) -> LlamaDecoderLayer:
            return LlamaDecoderLayer(config, spec, factory, memory, spec.windows[number])

        self.layers = builder.layers(make)
        self.norm = builder.final_norm(lambda factory: factory.rms_norm(config.hidden_size, config.rms_norm_eps))

    def forward(
        self, input_ids: Tensor, rope: RopeTables, mask: AttentionMask, stage: StageInput = WHOLE_MODEL
    ) -> Tensor:
        hidden = stage.hidden
        if hidden is None:
            hidden = scaled(self.embed_tokens(input_ids), self.embedding_multiplier)  # [B, S, H] or [s, B, H]
        for layer in self.layers.of_chunk(stage.chunk):
            hidden = layer(hidden, rope, mask)
        return self.norm(hidden) if self.layers.is_last(stage.chunk) else hidden


class LlamaForCausalLM(ParallelCausalLM):
    """LLaMA with a language-model head.

    Args:
        config: Hugging Face config; Megatron's ``num_query_groups`` is supported too.
        parallel: default T of the process groups, with sequence parallelism as in
            ``config.sequence_parallel_enabled``.
        memory: default ``MemoryConfig()``; NxD's
            ``config.selective_activation_checkpointing_is_enabled`` is supported.
        dtype: dtype of the parameters; default torch's.
        device: device of the parameters; ``"meta"`` allocates and draws nothing.

    Raises:
        ValueError: T does not divide heads, KV heads or MLP width, or T differs from the process
            groups.
    """

    attention_name = "self_attn"

    def __init__(
        self,
        config: LlamaConfig,
        *,
        parallel: ParallelConfig | None = None,
        memory: MemoryConfig | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(config, parallel=parallel, memory=memory)
        builder = self.builder(dtype, device)
        self.model = LlamaModel(config, self.spec, builder, self.memory)
        self.add_head(builder)
        apply_memory(self, self.memory)

    @property
    def backbone(self) -> nn.Module:
        return self.model

    def embedding_weight(self) -> nn.Parameter:
        return self.model.embed_tokens.weight
