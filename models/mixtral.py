"""Mixtral (arXiv:2401.04088) with Hugging Face's parameter names: LLaMA's attention, mixture of experts.

Qwen2-MoE and Qwen3-MoE differ by biases, norms of query and key, shared experts and layers without experts, which
``architectures.model_spec`` tells from the config.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import MixtralConfig

from nxd_memopt.architectures.model_spec import ModelSpec
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.memory import apply_memory
from nxd_memopt.models.llama import LlamaAttention
from nxd_memopt.modules.attention import AttentionMask, RopeTables
from nxd_memopt.modules.factory import LayerFactory
from nxd_memopt.modules.mlp import GatedMLP
from nxd_memopt.modules.moe import MoELayer, empty_rows
from nxd_memopt.modules.moe.causal_lm import LayerState, MoECausalLM
from nxd_memopt.modules.moe.shared_expert import shared_gated_mlp
from nxd_memopt.modules.rms_norm import add_and_norm, residual_norm_path
from nxd_memopt.modules.stages import WHOLE_MODEL, StageBuilder, StageInput
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers.fusion import FusibleModule


class MixtralDecoderLayer(FusibleModule):
    """Pre-norm decoder layer; hidden states are ``[B, S, H]`` or ``[s, B, H]``."""

    def __init__(
        self,
        config: MixtralConfig,
        spec: ModelSpec,
        factory: LayerFactory,
        memory: MemoryConfig,
        moe: MoEConfig,
        *,
        is_moe: bool,
        window: int | None,
    ) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, spec, factory, memory, window)
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

    def __init__(
        self, config: MixtralConfig, spec: ModelSpec, builder: StageBuilder, memory: MemoryConfig, moe: MoEConfig
    ) -> None:
        super().__init__()
        self.moe = moe
        self.embed_tokens = builder.embedding("embed_tokens", config.pad_token_id)

        def make(factory: LayerFactory, number: int) -> MixtralDecoderLayer:
            is_moe, window = spec.moe_layers[number], spec.windows[number]
            return MixtralDecoderLayer(config, spec, factory, memory, moe, is_moe=is_moe, window=window)

        self.layers = builder.layers(make)
        self.norm = builder.final_norm(lambda factory: factory.rms_norm(config.hidden_size, config.rms_norm_eps))

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
            hidden = self.embed_tokens(input_ids)  # [B, S, H] or [s, B, H]
        # Each stage counts for its own layers: nothing but hidden states travels between ranks.
        state = (hidden, empty_rows(self.moe.num_moe_experts, hidden.device))
        for layer in self.layers.of_chunk(stage.chunk):
            state = layer(state, rope, mask, token_mask)
        hidden, rows = state
        return (self.norm(hidden) if self.layers.is_last(stage.chunk) else hidden), rows


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
        super().__init__(config, parallel=parallel, memory=memory, moe=moe)
        builder = self.builder(dtype, device)
        self.model = MixtralModel(config, self.spec, builder, self.memory, self.moe)
        self.add_head(builder)
        apply_memory(self, self.memory)

    @property
    def backbone(self) -> nn.Module:
        return self.model

    def embedding_weight(self) -> nn.Parameter:
        return self.model.embed_tokens.weight
