"""Mixtral (arXiv:2401.04088) with Hugging Face's parameter names: LLaMA's attention, mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import MixtralConfig

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
from nxd_memopt.modules.factory import LayerFactory, layer_factory, resolve_memory, resolve_parallel
from nxd_memopt.modules.mlp import GatedMLP
from nxd_memopt.modules.moe import MoELayer
from nxd_memopt.modules.moe.causal_lm import LayerState, MoECausalLM, first_rows, moe_memory
from nxd_memopt.modules.moe.hf_options import resolve_moe
from nxd_memopt.modules.moe.shared_expert import shared_gated_mlp
from nxd_memopt.modules.packed_weights import PackedWeights
from nxd_memopt.modules.qkv_linear import kv_size_multiplier
from nxd_memopt.modules.rms_norm import add_and_norm, residual_norm_path
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.ops.rope import apply_rope_qkv
from nxd_memopt.parallel_layers.fusion import FusibleModule
from nxd_memopt.planner.architectures import biases, moe_layers, num_kv_heads, require_shardable, sizes


class MixtralAttention(PackedWeights):
    """Grouped-query attention with RoPE.

    ``[B, S, H] -> [B, S, H]``; under sequence parallelism ``[s, B, H] -> [s, B, H]``.
    """

    shared_input_layers = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: MixtralConfig, factory: LayerFactory, memory: MemoryConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.head_dim = sizes(config)["d"]
        query_size = config.num_attention_heads * self.head_dim
        kv_size = num_kv_heads(config) * self.head_dim
        bias = biases(config)["q_proj"]
        self.q_proj = factory.column("q_proj", hidden, query_size, bias=bias)
        self.k_proj = factory.column("k_proj", hidden, kv_size, bias=bias)
        self.v_proj = factory.column("v_proj", hidden, kv_size, bias=bias)
        self.o_proj = factory.row("o_proj", query_size, hidden, bias=False)
        self.core_attn = CoreAttention(
            attention_backend=memory.attention_backend,
            head_dim=self.head_dim,
            dropout=config.attention_dropout or 0.0,
            sharded=factory.parallel.tensor_model_parallel_size > 1,
        )
        self.sequence_first = factory.parallel.sequence_parallel_enabled
        # After the layers exist: packs their weights, and then registers what a fused path
        # bypasses.
        self.share_input()
        self.in_place_rope = in_place_rope_path(self, *self.shared_input_layers)

    def forward(self, hidden: Tensor, rope: RopeTables, mask: AttentionMask) -> Tensor:
        # q, k, v: [B, S, h*d/T] or [S, B, h*d/T], from one all-gather of the input.
        query, key, value = (
            split_heads(x, self.head_dim, sequence_first=self.sequence_first) for x in self.project(hidden)
        )
        query, key, value = apply_rope_qkv(query, key, value, *rope, in_place=self.in_place_rope.is_active)
        context = self.core_attn(query, key, value, mask)  # [B, h/T, S, d]
        return self.o_proj(merge_heads(context, sequence_first=self.sequence_first))


class MixtralDecoderLayer(FusibleModule):
    """Pre-norm decoder layer; hidden states are ``[B, S, H]`` or ``[s, B, H]``."""

    def __init__(
        self, config: MixtralConfig, factory: LayerFactory, memory: MemoryConfig, moe: MoEConfig, *, is_moe: bool
    ) -> None:
        super().__init__()
        self.self_attn = MixtralAttention(config, factory, memory)
        hidden, width, act = config.hidden_size, config.intermediate_size, config.hidden_act
        self.mlp: MoELayer | GatedMLP
        if is_moe:
            shared = shared_gated_mlp(config, moe, factory)
            self.mlp = MoELayer(hidden, width, act, moe, factory=factory, shared_expert=shared)
        else:
            self.mlp = GatedMLP(hidden, width, act, bias=False, factory=factory)
        self.input_layernorm = factory.rms_norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = factory.rms_norm(config.hidden_size, config.rms_norm_eps)
        self.fused_input_norm = residual_norm_path(self, "input_layernorm")
        self.fused_post_attention_norm = residual_norm_path(self, "post_attention_layernorm")

    def forward(
        self, state: LayerState, rope: RopeTables, mask: AttentionMask, token_mask: Tensor | None
    ) -> LayerState:
        hidden, rows = state
        normed, hidden = add_and_norm(self.input_layernorm, hidden, path=self.fused_input_norm)
        # Not in a variable, which would keep attention's output until the MLP has run.
        normed, hidden = add_and_norm(
            self.post_attention_layernorm,
            hidden,
            self.self_attn(normed, rope, mask),
            path=self.fused_post_attention_norm,
        )
        if isinstance(self.mlp, MoELayer):
            output, rows = self.mlp(normed, rows, token_mask)
            return hidden + output, rows
        return hidden + self.mlp(normed), rows


class MixtralModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: MixtralConfig, factory: LayerFactory, memory: MemoryConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.embed_tokens = factory.embedding(
            "embed_tokens", config.vocab_size, config.hidden_size, config.pad_token_id
        )
        self.layers = nn.ModuleList(
            MixtralDecoderLayer(config, factory, memory, moe, is_moe=is_moe) for is_moe in moe_layers(config)
        )
        self.norm = factory.rms_norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: Tensor, rope: RopeTables, mask: AttentionMask, token_mask: Tensor | None
    ) -> LayerState:
        hidden = self.embed_tokens(input_ids)  # [B, S, H] or [s, B, H]
        state = (hidden, first_rows(self.moe, hidden))
        for layer in self.layers:
            state = layer(state, rope, mask, token_mask)
        hidden, rows = state
        return self.norm(hidden), rows


class MixtralForCausalLM(MoECausalLM):
    """Mixtral with a language-model head.

    Args:
        config: Hugging Face config.
        parallel: default T and EP of the process groups, with sequence parallelism as in
            ``config.sequence_parallel_enabled``.
        memory: default ``MemoryConfig()``.
        moe: default what ``config`` says: transformers' loss if ``output_router_logits``. Options
            that ``config`` fixes, such as the number of experts, must agree with it.
        dtype: dtype of the parameters; default torch's.
        device: device of the parameters; ``"meta"`` allocates and draws nothing.

    Raises:
        ValueError: T does not divide heads, KV heads or the experts' width, EP does not divide the
            experts, sizes differ from the process groups, or options contradict ``config``.
    """

    attention_name = "self_attn"

    def __init__(
        self,
        config: MixtralConfig,
        *,
        parallel: ParallelConfig | None = None,
        memory: MemoryConfig | None = None,
        moe: MoEConfig | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        wants_sequence = getattr(config, "sequence_parallel_enabled", False)
        parallel = resolve_parallel(parallel, sequence_parallel_enabled=wants_sequence, has_experts=True)
        memory = resolve_memory(memory, config)
        moe = resolve_moe(moe, config)
        memory = moe_memory(memory, moe)
        size = parallel.tensor_model_parallel_size
        require_shardable(config, size)
        replicas = kv_size_multiplier(num_kv_heads(config), size)
        super().__init__(config, parallel=parallel, memory=memory, moe=moe, rotary_dim=sizes(config)["d"])
        factory = layer_factory(config.model_type, config, parallel, dtype=dtype, device=device, kv_replicas=replicas)
        self.model = MixtralModel(config, factory, memory, moe)
        self.add_head(factory)
        apply_memory(self, memory)

    @property
    def backbone(self) -> nn.Module:
        return self.model

    def embedding_weight(self) -> nn.Parameter:
        return self.model.embed_tokens.weight
