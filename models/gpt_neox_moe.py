"""GPT-NeoX whose MLPs are mixtures of experts with GPT-NeoX's biases and activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.memory import apply_memory
from nxd_memopt.models.gpt_neox import GPTNeoXAttention, GPTNeoXMLP
from nxd_memopt.modules.attention import AttentionMask, RopeTables
from nxd_memopt.modules.dropout import ParallelDropout
from nxd_memopt.modules.factory import LayerFactory
from nxd_memopt.modules.moe import MoELayer, empty_rows
from nxd_memopt.modules.moe.biased_experts import BiasedExperts
from nxd_memopt.modules.moe.causal_lm import LayerState, MoECausalLM
from nxd_memopt.modules.moe.gpt_neox_config import GPTNeoXMoEConfig
from nxd_memopt.modules.stages import WHOLE_MODEL, StageBuilder, StageInput
from nxd_memopt.moe_config import MoEConfig


class GPTNeoXMoELayer(nn.Module):
    """Decoder layer with a parallel or a sequential residual; hidden states ``[B, S, H]`` or ``[s, B, H]``."""

    def __init__(self, config: GPTNeoXMoEConfig, factory: LayerFactory, memory: MemoryConfig, moe: MoEConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.use_parallel_residual = config.use_parallel_residual
        self.input_layernorm = factory.layer_norm(hidden, config.layer_norm_eps)
        self.post_attention_layernorm = factory.layer_norm(hidden, config.layer_norm_eps)
        self.attention = GPTNeoXAttention(config, factory, memory)
        shared = None
        if moe.moe_shared_expert_intermediate_size is not None:
            shared = GPTNeoXMLP(config, factory, moe.moe_shared_expert_intermediate_size)
        self.mlp = MoELayer(
            hidden,
            config.intermediate_size,
            config.hidden_act,
            moe,
            factory=factory,
            expert_class=BiasedExperts,
            shared_expert=shared,
        )
        sharded = factory.parallel.sequence_parallel_enabled
        self.post_attention_dropout = ParallelDropout(config.hidden_dropout, sharded=sharded)
        self.post_mlp_dropout = ParallelDropout(config.hidden_dropout, sharded=sharded)

    def forward(
        self, state: LayerState, rope: RopeTables, mask: AttentionMask, token_mask: Tensor | None
    ) -> LayerState:
        hidden, rows = state
        attended = self.post_attention_dropout(self.attention(self.input_layernorm(hidden), rope, mask))
        # Parallel: x + attention(norm_1(x)) + experts(norm_2(x)). Sequential: one block after the other.
        residual = hidden if self.use_parallel_residual else attended + hidden
        output, rows = self.mlp(self.post_attention_layernorm(residual), rows, token_mask)
        output = self.post_mlp_dropout(output) + residual
        if self.use_parallel_residual:
            output = output + attended
        return output, rows


class GPTNeoXMoEModel(nn.Module):
    """Embedding, dropout, decoder layers and final norm."""

    def __init__(self, config: GPTNeoXMoEConfig, builder: StageBuilder, memory: MemoryConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.embed_in = builder.embedding("embed_in", None)
        sharded = builder.factory.parallel.sequence_parallel_enabled
        self.emb_dropout = ParallelDropout(config.hidden_dropout, sharded=sharded)
        self.layers = builder.layers(lambda factory, number: GPTNeoXMoELayer(config, factory, memory, moe))
        self.final_layer_norm = builder.final_norm(
            lambda factory: factory.layer_norm(config.hidden_size, config.layer_norm_eps)
        )

    def forward(
        self,
        input_ids: Tensor,
        rope: RopeTables,
        mask: AttentionMask,
        token_mask: Tensor | None,
        stage: StageInput = WHOLE_MODEL,
    ) -> LayerState:
        hidden = stage.hidden
        if hidden is None:
            hidden = self.emb_dropout(self.embed_in(input_ids))  # [B, S, H] or [s, B, H]
        state = (hidden, empty_rows(self.moe.num_moe_experts, hidden.device))
        for layer in self.layers.of_chunk(stage.chunk):
            state = layer(state, rope, mask, token_mask)
        hidden, rows = state
        return (self.final_layer_norm(hidden) if self.layers.is_last(stage.chunk) else hidden), rows


class GPTNeoXMoEForCausalLM(MoECausalLM):
    """GPT-NeoX with experts and a language-model head; arguments and errors as in ``MixtralForCausalLM``."""

    attention_name = "attention"

    def __init__(
        self,
        config: GPTNeoXMoEConfig,
        *,
        parallel: ParallelConfig | None = None,
        memory: MemoryConfig | None = None,
        moe: MoEConfig | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(config, parallel=parallel, memory=memory, moe=moe)
        builder = self.builder(dtype, device)
        self.gpt_neox = GPTNeoXMoEModel(config, builder, self.memory, self.moe)
        self.add_head(builder)
        apply_memory(self, self.memory)

    @property
    def backbone(self) -> Any:
        return self.gpt_neox

    def embedding_weight(self) -> nn.Parameter:
        return self.gpt_neox.embed_in.weight
