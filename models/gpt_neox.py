"""GPT-NeoX (arXiv:2204.06745) with Hugging Face's names: parallel residual, partial RoPE, LayerNorm, biases."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig

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
from nxd_memopt.modules.dropout import ParallelDropout
from nxd_memopt.modules.factory import LayerFactory
from nxd_memopt.modules.head_groups import AttentionLayers
from nxd_memopt.modules.mlp import Activation
from nxd_memopt.modules.parallel_residual import normalised_column_parallel_linears, row_parallel_linears
from nxd_memopt.modules.stages import WHOLE_MODEL, StageBuilder, StageInput
from nxd_memopt.modules.tiled_mlp import MLPLayers
from nxd_memopt.ops.parts import split_sizes
from nxd_memopt.ops.rope import apply_rope_qkv
from nxd_memopt.parallel_layers.functional.fp8_linear import Source
from nxd_memopt.parallel_layers.fusion import FusedPath, FusibleModule
from nxd_memopt.parallel_layers.layer_norm import LayerNorm
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_memopt.parallel_layers.wrapping import is_only_wrapped


class GPTNeoXAttention(FusibleModule):
    """Attention with a fused QKV projection and partial RoPE.

    ``[B, S, H] -> [B, S, H]``; under sequence parallelism ``[s, B, H] -> [s, B, H]``. The rows of
    ``query_key_value`` are ``[q, k, v]`` of head 0, then of head 1, and so on, so a contiguous
    shard has complete heads.
    """

    def __init__(self, config: GPTNeoXConfig, factory: LayerFactory, memory: MemoryConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        bias = config.attention_bias
        self.head_dim = hidden // config.num_attention_heads
        # Rows are sharded in T consecutive chunks. With [q, k, v] per head in the rows, a chunk
        # is the complete heads of one rank; [q; k; v] of all heads would need stride 3.
        self.query_key_value = factory.column("query_key_value", hidden, 3 * hidden, bias=bias)
        self.dense = factory.row("dense", hidden, hidden, bias=bias)
        self.core_attn = CoreAttention(
            attention_backend=memory.attention_backend,
            head_dim=self.head_dim,
            dropout=config.attention_dropout,
            sharded=factory.parallel.tensor_model_parallel_size > 1,
        )
        self.sequence_first = factory.parallel.sequence_parallel_enabled
        self.in_place_rope = in_place_rope_path(self, "query_key_value")

    def forward(self, hidden: Tensor, rope: RopeTables, mask: AttentionMask) -> Tensor:
        return self.dense(self.context(self.query_key_value(hidden), rope, mask))

    def context(self, qkv: Tensor, rope: RopeTables, mask: AttentionMask) -> Tensor:
        """Compute the input of ``dense``: ``[B, S, 3H/T] -> [B, S, H/T]``, or sequence first.

        Args:
            qkv: output of ``query_key_value``.
            rope: cosine and sine tables.
            mask: mask in addition to causality.
        """
        # [q, k, v] of one head are adjacent: split into heads first, then each head into three.
        # All are views of the projection's output, in which RoPE may rotate q and k in place.
        heads = split_heads(qkv, 3 * self.head_dim, sequence_first=self.sequence_first)
        query, key, value = split_sizes(heads, [self.head_dim] * 3, dim=-1)  # [B, h/T, S, d] each
        query, key, value = apply_rope_qkv(query, key, value, *rope, in_place=self.in_place_rope.is_active)
        return merge_heads(self.core_attn(query, key, value, mask), sequence_first=self.sequence_first)

    def layers(self) -> AttentionLayers:
        """Return the submodules, for attention by groups of heads."""

        def context(columns: tuple[Tensor, ...], rope: RopeTables, mask: AttentionMask) -> Tensor:
            return self.context(columns[0], rope, mask)

        return AttentionLayers((self.query_key_value,), 3 * self.head_dim, self.dense, context)


class GPTNeoXMLP(FusibleModule):
    """MLP ``dense_4h_to_h(act(dense_h_to_4h(x)))``; shapes as in ``GPTNeoXAttention``.

    ``width`` defaults to the config's ``intermediate_size``.
    """

    def __init__(self, config: GPTNeoXConfig, factory: LayerFactory, width: int | None = None) -> None:
        super().__init__()
        hidden = config.hidden_size
        width = config.intermediate_size if width is None else width
        self.dense_h_to_4h = factory.column("dense_h_to_4h", hidden, width, bias=True)
        self.dense_4h_to_h = factory.row("dense_4h_to_h", width, hidden, bias=True)
        self.act = Activation(config.hidden_act)

    def layers(self) -> MLPLayers:
        """Return the submodules, for tiles of tokens."""
        return MLPLayers((self.dense_h_to_4h,), self.act, self.dense_4h_to_h, self.act.hidden_act)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(hidden)))


class GPTNeoXLayer(FusibleModule):
    """Decoder layer with a parallel or a sequential residual; ``[B, S, H]`` or ``[s, B, H]``."""

    def __init__(self, config: GPTNeoXConfig, factory: LayerFactory, memory: MemoryConfig) -> None:
        super().__init__()
        self.use_parallel_residual = config.use_parallel_residual
        self.input_layernorm = factory.layer_norm(config.hidden_size, config.layer_norm_eps)
        self.post_attention_layernorm = factory.layer_norm(config.hidden_size, config.layer_norm_eps)
        self.attention = GPTNeoXAttention(config, factory, memory)
        self.mlp = GPTNeoXMLP(config, factory)
        sharded = factory.parallel.sequence_parallel_enabled
        self.post_attention_dropout = ParallelDropout(config.hidden_dropout, sharded=sharded)
        self.post_mlp_dropout = ParallelDropout(config.hidden_dropout, sharded=sharded)
        # Dropout of each branch needs both branches' outputs; in evaluation there is no dropout.
        unavailable = None
        if not config.use_parallel_residual:
            unavailable = "use_parallel_residual is False"
        self.merged_branches = FusedPath(
            self,
            "attention and MLP in parallel",
            {
                "input_layernorm": LayerNorm,
                "post_attention_layernorm": LayerNorm,
                "attention": GPTNeoXAttention,
                "attention.query_key_value": ColumnParallelLinear,
                "attention.dense": RowParallelLinear,
                "mlp": GPTNeoXMLP,
                "mlp.dense_h_to_4h": ColumnParallelLinear,
                "mlp.dense_4h_to_h": RowParallelLinear,
                "post_attention_dropout": ParallelDropout,
                "post_mlp_dropout": ParallelDropout,
            },
            cost="the layer has two all-gathers and two reductions instead of one each",
            unavailable=unavailable,
            accepts_forward=_is_recomputed_norm,
        )

    def forward(self, hidden: Tensor, rope: RopeTables, mask: AttentionMask) -> Tensor:
        has_dropout = self.training and self.post_attention_dropout.p > 0
        if self.merged_branches.is_active and not has_dropout:
            return self._branches(hidden, rope, mask)
        # Parallel: x + attention(norm_1(x)) + mlp(norm_2(x)). Sequential: pre-norm, one block
        # after the other.
        attended = self.post_attention_dropout(self.attention(self.input_layernorm(hidden), rope, mask))
        if self.use_parallel_residual:
            expanded = self.post_mlp_dropout(self.mlp(self.post_attention_layernorm(hidden)))
            return expanded + attended + hidden
        attended = attended + hidden
        return self.post_mlp_dropout(self.mlp(self.post_attention_layernorm(attended))) + attended

    def _branches(self, hidden: Tensor, rope: RopeTables, mask: AttentionMask) -> Tensor:
        """Return ``hidden`` + attention + MLP without calling the modules' ``forward``."""
        # Both projections have the same input except for the norms' affine parts: one all-gather
        # of the normalized rows. Both outputs are terms of one sum: one reduction.
        attention = self.attention
        mlp = self.mlp
        qkv, expanded = normalised_column_parallel_linears(
            hidden,
            (self.input_layernorm, attention.query_key_value),
            (self.post_attention_layernorm, mlp.dense_h_to_4h),
        )
        context = attention.context(qkv, rope, mask)
        # One reduction for the partial sums of attention and MLP, added to the residual.
        inputs = (context, mlp.act(expanded))
        layers = (attention.dense, mlp.dense_4h_to_h)
        # Attention keeps its output, and the activation its input, but ReLU its output.
        source = None if mlp.act.hidden_act == "relu" else Source(mlp.act, expanded)
        return row_parallel_linears(inputs, layers, residual=hidden, sources=(None, source))


def _is_recomputed_norm(module: nn.Module) -> bool:
    """Return whether ``module`` is a norm under recompute, which the merged branches recompute anyway."""
    return isinstance(module, LayerNorm) and is_only_wrapped(module, "recompute", "traced_recompute")


class GPTNeoXModel(nn.Module):
    """Embedding, dropout, decoder layers and final norm."""

    def __init__(self, config: GPTNeoXConfig, builder: StageBuilder, memory: MemoryConfig) -> None:
        super().__init__()
        self.embed_in = builder.embedding("embed_in", None)
        sharded = builder.factory.parallel.sequence_parallel_enabled
        self.emb_dropout = ParallelDropout(config.hidden_dropout, sharded=sharded)
        self.layers = builder.layers(lambda factory, number: GPTNeoXLayer(config, factory, memory))
        self.final_layer_norm = builder.final_norm(
            lambda factory: factory.layer_norm(config.hidden_size, config.layer_norm_eps)
        )

    def forward(
        self, input_ids: Tensor, rope: RopeTables, mask: AttentionMask, stage: StageInput = WHOLE_MODEL
    ) -> Tensor:
        hidden = stage.hidden
        if hidden is None:
            hidden = self.emb_dropout(self.embed_in(input_ids))  # [B, S, H] or [s, B, H]
        for layer in self.layers.of_chunk(stage.chunk):
            hidden = layer(hidden, rope, mask)
        return self.final_layer_norm(hidden) if self.layers.is_last(stage.chunk) else hidden


class GPTNeoXForCausalLM(ParallelCausalLM):
    """GPT-NeoX with a language-model head; arguments and errors as in ``LlamaForCausalLM``."""

    attention_name = "attention"

    def __init__(
        self,
        config: GPTNeoXConfig,
        *,
        parallel: ParallelConfig | None = None,
        memory: MemoryConfig | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(config, parallel=parallel, memory=memory)
        builder = self.builder(dtype, device)
        self.gpt_neox = GPTNeoXModel(config, builder, self.memory)
        self.add_head(builder)
        apply_memory(self, self.memory)

    @property
    def backbone(self) -> nn.Module:
        return self.gpt_neox

    def embedding_weight(self) -> nn.Parameter:
        return self.gpt_neox.embed_in.weight
