"""GPT-NeoX changed as the guide's blocks change it: from transformers' classes, with two layers of each kind replaced.

``tests/guide/test_guide.py`` also runs this file with neuronx-distributed's names, through the alias.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXAttention,
    GPTNeoXLayer,
    GPTNeoXMLP,
    GPTNeoXRotaryEmbedding,
    apply_rotary_pos_emb,
)

from nxd_memopt import memory
from nxd_memopt.parallel_layers import layer_norm
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_memopt.parallel_layers.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)

init_method = functools.partial(nn.init.normal_, mean=0.0, std=0.02)


# Block 1: the tensor-parallel block


class GPTNeoXAttentionNxD(GPTNeoXAttention):
    attn_calls = 0

    def __init__(self, config, layer_idx=None) -> None:
        super().__init__(config, layer_idx)
        self.query_key_value = ColumnParallelLinear(
            config.hidden_size,
            3 * config.hidden_size,
            stride=3,
            gather_output=False,
            init_method=init_method,
            sequence_parallel_enabled=self.config.sequence_parallel_enabled,
        )
        self.dense = RowParallelLinear(
            config.hidden_size,
            config.hidden_size,
            input_is_parallel=True,
            init_method=init_method,
            sequence_parallel_enabled=self.config.sequence_parallel_enabled,
        )

    # Blocks 6 and 8: transposes around the attention, and its recomputation
    def forward(self, hidden_states: Tensor, attention_mask=None, head_mask=None, position_embeddings=None, **_):
        config = self.config
        qkv = self.query_key_value(hidden_states)  # [S, B, 3 h/T]
        if config.sequence_parallel_enabled:
            qkv = qkv.transpose(0, 1)
        # with stride=3 a rank holds its heads' queries, then keys, then values
        parts = qkv.chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)

        if config.selective_activation_checkpointing_is_enabled:
            attn_output = memory.checkpoint(self._attn, query, key, value, attention_mask, head_mask)
        else:
            attn_output = self._attn(query, key, value, attention_mask, head_mask)

        attn_output = attn_output.transpose(1, 2).flatten(2)  # [B, S, h/T]
        if config.sequence_parallel_enabled:
            attn_output = attn_output.transpose(0, 1)
        attn_output = self.dense(attn_output)
        return attn_output, None

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, head_mask=None) -> Tensor:
        type(self).attn_calls += 1
        scores = query @ key.transpose(-1, -2) * self.scaling + attention_mask
        weights = torch.softmax(scores, dim=-1)
        return (weights if head_mask is None else weights * head_mask) @ value


class GPTNeoXMLPNxD(GPTNeoXMLP):
    def __init__(self, config) -> None:
        super().__init__(config)
        options = {"init_method": init_method, "sequence_parallel_enabled": config.sequence_parallel_enabled}
        hidden, width = config.hidden_size, config.intermediate_size
        self.dense_h_to_4h = ColumnParallelLinear(hidden, width, gather_output=False, **options)
        self.dense_4h_to_h = RowParallelLinear(width, hidden, input_is_parallel=True, **options)


# Block 2: the block that is not tensor-parallel


class GPTNeoXLayerNxD(GPTNeoXLayer):
    def __init__(self, config, layer_idx) -> None:
        super().__init__(config, layer_idx)
        self.attention, self.mlp = GPTNeoXAttentionNxD(config, layer_idx), GPTNeoXMLPNxD(config)
        self.input_layernorm = layer_norm.LayerNorm(
            config.hidden_size,
            eps=config.layer_norm_eps,
            sequence_parallel_enabled=config.sequence_parallel_enabled,
        )
        self.post_attention_layernorm = layer_norm.LayerNorm(
            config.hidden_size,
            eps=config.layer_norm_eps,
            sequence_parallel_enabled=config.sequence_parallel_enabled,
        )


class GPTNeoXNxD(nn.Module):
    """Embedding, layers, norm and head; the parameters have transformers' names."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(GPTNeoXLayerNxD(config, i) for i in range(config.num_hidden_layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        # Block 3: a layer of another package is marked parameter by parameter
        for param in self.final_layer_norm.parameters():
            setattr(param, "sequence_parallel_enabled", config.sequence_parallel_enabled)  # noqa: B010
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary_emb = GPTNeoXRotaryEmbedding(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits ``[B, S, V]``, the same on every tensor-parallel rank."""
        length = input_ids.size(1)
        positions = torch.arange(length, device=input_ids.device).unsqueeze(0)
        mask = torch.full((length, length), torch.finfo(torch.float32).min, device=input_ids.device).triu(1)
        hidden_states = self.embed_in(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, positions)
        hidden_states = self._layers(hidden_states, mask, position_embeddings).last_hidden_state
        return self.embed_out(hidden_states)

    def _layers(self, hidden_states: Tensor, attention_mask: Tensor, position_embeddings) -> BaseModelOutputWithPast:
        presents = all_hidden_states = all_attentions = None
        # Block 5: before the layers
        if self.config.sequence_parallel_enabled:
            hidden_states = hidden_states.transpose(0, 1).contiguous()
            hidden_states = scatter_to_sequence_parallel_region(hidden_states)

        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings)
        hidden_states = self.final_layer_norm(hidden_states)

        # Block 7: after the layers
        if self.config.sequence_parallel_enabled:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, to_model_parallel=False)
            hidden_states = hidden_states.transpose(0, 1).contiguous()

        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            past_key_values=presents,
            hidden_states=all_hidden_states,
            attentions=all_attentions,
        )


# Block 4: before the optimizer's step


def allreduce_sequence_parallel_gradients(optimizer) -> None:
    """The guide's hook: it ignores what the mapping returns, and passes another tensor object than ``p.grad``."""
    from nxd_memopt.parallel_layers.mappings import reduce_from_tensor_model_parallel_region

    grads = []
    for param_group in optimizer.__getstate__()["param_groups"]:
        for group, params in param_group.items():
            if group == "params":
                for p in params:
                    if isinstance(p, torch.Tensor) and p.grad is not None:
                        sequence_parallel_param = getattr(p, "sequence_parallel_enabled", False)
                        if sequence_parallel_param:
                            grads.append(p.grad.data)
    for grad in grads:
        reduce_from_tensor_model_parallel_region(grad)
