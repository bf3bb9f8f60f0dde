"""Sizes of the tensors of one micro-batch on one rank, read from a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from nxd_memopt.architectures.adapters import Adapters, adapters_of
from nxd_memopt.architectures.config_options import GPT_NEOX_TYPES
from nxd_memopt.architectures.experts import FP32_BYTES as FP32_BYTES
from nxd_memopt.architectures.experts import MoESizes, moe_sizes
from nxd_memopt.architectures.model_spec import ModelSpec
from nxd_memopt.architectures.parameters import require_shardable
from nxd_memopt.config import ParallelConfig, require_divisible
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.planner.sizes.fp8_layers import ALIGNMENT, Fp8Layers, experts_in_bf16, experts_pay

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class RankSizes:
    """Sizes that determine the activations of one rank.

    Args:
        model_type: Hugging Face's ``model_type``; ``"llama"`` for all that are computed like LLaMA.
        num_layers: number of decoder layers.
        sequence_length: S.
        micro_batch_size: B.
        shards: ranks over which the residual stream is split: T under sequence parallelism, else 1.
        tensor_model_parallel_size: T.
        hidden: H.
        heads: query heads of this rank.
        kv_heads: KV heads of this rank.
        head_dim: d.
        rotary_dim: dimensions of a head that RoPE rotates.
        width: F/T.
        vocab: rows of the head on this rank, V/T rounded up.
        element_bytes: bytes of an activation.
        is_fp16: activations are fp16, whose loss is computed again in backward.
        hidden_act: activation of the MLP.
        tied: the head shares the weight of the embedding.
        pads: the embedding has a padding token, whose row gets no gradient.
        parallel_residual: GPT-NeoX's attention and MLP have the same input.
        moe: the experts that all layers have instead of an MLP; None for dense models.
        attention_dropout: weights of attention are dropped.
        hidden_dropout: the embedding's and, in GPT-NeoX, the branches' outputs are dropped.
        windows: for each layer the keys that a query sees, if they are fewer than S, else None;
            empty if no layer has a window.
        reduces_in_fp32: partial sums of activations' gradients are cast to fp32 before they are sent.
        adapters: low-rank adapters, which are trained instead of the weights; None trains the weights.
        scales_blocks: outputs of attention and MLP are multiplied by a constant (Granite).
        has_embedding: the rank embeds the tokens; False after the first stage of a pipeline.
        has_head: the rank has final norm, head and loss; False before the last stage of a pipeline.
        fp8: layers whose matmuls have float8 operands; None: none.
    """

    model_type: str
    num_layers: int
    sequence_length: int
    micro_batch_size: int
    shards: int
    tensor_model_parallel_size: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    width: int
    vocab: int
    element_bytes: int
    is_fp16: bool
    hidden_act: str
    tied: bool
    pads: bool
    parallel_residual: bool
    moe: MoESizes | None = None
    attention_dropout: bool = False
    hidden_dropout: bool = False
    windows: tuple[int | None, ...] = ()
    reduces_in_fp32: bool = False
    adapters: Adapters | None = None
    scales_blocks: bool = False
    has_embedding: bool = True
    has_head: bool = True
    fp8: Fp8Layers | None = None

    def window(self, index: int) -> int | None:
        """Return the attention window of layer ``index``, or None if its queries see all keys before them."""
        if not self.windows:
            return None
        return self.windows[index]

    @property
    def are_layers_alike(self) -> bool:
        """Whether dense layers keep the same: no windows or float8 in some of them, or adapters after layer 0."""
        return not self.windows and self.adapters is None and (self.fp8 is None or all(self.fp8.layers))

    # Cached: a search asks for them millions of times.
    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch, S * B."""
        return self.sequence_length * self.micro_batch_size

    @cached_property
    def linear_elements(self) -> dict[str, int]:
        """Elements of the linear layers' weights on this rank, of those that are computed together; without experts."""
        return self.weight_elements(self.width if self.moe is None else self.moe.shared_width)

    def weight_elements(self, width: int) -> dict[str, int]:
        """Return ``linear_elements`` of a layer whose MLP has ``width`` columns on this rank."""
        return {
            "qkv": (self.query + 2 * self.kv) * self.hidden,
            "attention output": self.query * self.hidden,
            "mlp in": self.mlp_inputs * width * self.hidden,
            "mlp out": width * self.hidden,
        }

    def fp8_linears(self, index: int) -> frozenset[str]:
        """Return which of ``linear_elements`` round their operands to float8 in layer ``index``."""
        if self.fp8 is None or not self.fp8.layers[index]:
            return frozenset()
        least = self.fp8.least_products
        return frozenset(name for name, count in self.linear_elements.items() if count and self.tokens * count >= least)

    def fp8_experts(self, index: int) -> bool:
        """Return whether the experts that the router of layer ``index`` chooses round their operands to float8."""
        moe = self.moe
        if moe is None or self.fp8 is None or not self.fp8.layers[index]:
            return False
        shape = (moe.local_experts, self.hidden, moe.width)
        if experts_in_bf16(moe.options, shape, has_biases=moe.has_biases) is not None:
            return False
        return self.fp8.least_products == 0 or experts_pay(self.tokens * moe.top_k, *shape)

    @property
    def is_gated(self) -> bool:
        """Whether RMSNorms and gated MLPs follow each other, as in all architectures but GPT-NeoX's."""
        return self.model_type not in GPT_NEOX_TYPES

    @property
    def mlp_inputs(self) -> int:
        """First projections of the MLP: gate and up, or one."""
        return 1 + int(self.is_gated)

    @cached_property
    def gathered_element_bytes(self) -> int:
        """Bytes of an element of the activations that decoder layers gather: 1 if all their linear layers round."""
        linears = self.linear_elements.keys()
        if self.moe is None and all(self.fp8_linears(index) == linears for index in range(self.num_layers)):
            return 1
        return self.element_bytes

    @property
    def reduced_element_bytes(self) -> int:
        """Bytes of an element of partial sums when they are sent."""
        if self.reduces_in_fp32:
            return FP32_BYTES
        return self.element_bytes

    @property
    def mergeable(self) -> bool:
        """Whether GPT-NeoX's layers may run both branches as one block; dropout and adapters need each branch."""
        return self.parallel_residual and not self.hidden_dropout and self.adapters is None

    @cached_property
    def shard_tokens(self) -> int:
        """Tokens of this rank's part of the residual stream."""
        return self.tokens // self.shards

    @property
    def residual_bytes(self) -> int:
        """Bytes of this rank's part of the residual stream, ``[s, B, H]``."""
        return self.shard_tokens * self.hidden * self.element_bytes

    def column_bytes(self, columns: int) -> int:
        """Return the bytes of ``[S, B, columns]``."""
        return self.tokens * columns * self.element_bytes

    @property
    def query(self) -> int:
        """Columns of the queries of this rank."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Columns of the keys, or of the values, of this rank."""
        return self.kv_heads * self.head_dim


# As ``rank_model``.
@lru_cache(maxsize=512)
def rank_sizes(
    spec: ModelSpec,
    parallel: ParallelConfig,
    *,
    sequence_length: int,
    micro_batch_size: int,
    dtype: str,
    moe: MoEConfig | None = None,
    lora: LoraConfig | None = None,
    fp8: Fp8Layers | None = None,
) -> RankSizes:
    """Return the sizes of one rank's tensors.

    Args:
        spec: the model.
        parallel: T, EP and sequence parallelism.
        sequence_length: S.
        micro_batch_size: B.
        dtype: dtype of parameters and activations, a key of ``DTYPE_BYTES``.
        moe: options of experts; None: the options of the model's config.
        lora: options of adapters; None without adapters.
        fp8: layers whose matmuls have float8 operands; None: none.

    Raises:
        ValueError: T does not divide heads, MLP width or sequence, EP does not divide the experts, the model
            has dense layers and layers with experts, its adapters are not planned, or sizes have no float8 matmul.
    """
    size = parallel.tensor_model_parallel_size
    require_shardable(spec, size)
    if parallel.sequence_parallel_enabled:
        require_divisible("seq_length", sequence_length, "tensor_model_parallel_size", size)
    # Sequence parallelism splits the residual stream over the T ranks. Without it every rank has all tokens.
    shards = 1
    if parallel.sequence_parallel_enabled:
        shards = size
    # Models that differ from LLaMA by windows, biases and factors keep the same tensors for backward.
    model_type = spec.model_type
    if not (spec.is_gpt_neox or spec.has_experts or "q_norm" in spec.biases):
        model_type = "llama"
    experts = moe_sizes(spec, parallel, moe)
    adapters = None
    if lora is not None:
        adapters = adapters_of(spec, lora)
    sizes = RankSizes(
        model_type=model_type,
        num_layers=spec.num_layers,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        shards=shards,
        tensor_model_parallel_size=size,
        hidden=spec.hidden_size,
        heads=spec.num_heads // size,
        # With T above g each rank has one KV head, a replica.
        kv_heads=max(1, spec.num_kv_heads // size),
        head_dim=spec.head_dim,
        # Dimensions are rotated in pairs: of an odd number there is one more.
        rotary_dim=spec.rotary_dim + spec.rotary_dim % 2,
        width=spec.intermediate_size // size,
        vocab=-(-spec.vocab_size // size),
        element_bytes=DTYPE_BYTES[dtype],
        is_fp16=dtype == "float16",
        hidden_act=spec.hidden_act,
        tied=spec.is_tied,
        pads=not spec.is_gpt_neox and spec.pad_token_id is not None,
        parallel_residual=spec.has_parallel_residual,
        moe=experts,
        attention_dropout=spec.attention_dropout > 0,
        hidden_dropout=spec.hidden_dropout > 0,
        windows=_windows(spec, sequence_length),
        reduces_in_fp32=parallel.reduce_dtype == "float32",
        adapters=adapters,
        scales_blocks=spec.residual_multiplier is not None,
        fp8=fp8,
    )
    if any(sizes.fp8_linears(index) for index in range(sizes.num_layers)):
        require_fp8_sizes(spec, size)
    return sizes


def _windows(spec: ModelSpec, sequence_length: int) -> tuple[int | None, ...]:
    """Return ``RankSizes.windows``."""
    # A sequence that fits its window runs like one without, so that its layers need not be told apart.
    if any(each is not None and each < sequence_length for each in spec.windows):
        return tuple(each if each is not None and each < sequence_length else None for each in spec.windows)
    return ()


def require_fp8_sizes(spec: ModelSpec, tensor_model_parallel_size: int) -> None:
    """Raise ``ValueError`` if the linear layers of a rank have sizes that no float8 matmul has."""
    size = tensor_model_parallel_size
    heads, kv_heads = spec.num_heads // size, max(1, spec.num_kv_heads // size)
    width = spec.intermediate_size
    # Experts of other sizes stay in bf16; the shared one is made of linear layers.
    if spec.experts is not None:
        width = spec.experts.shared_width or 0
    found = (spec.hidden_size, heads * spec.head_dim, kv_heads * spec.head_dim, width // size)
    if any(each % ALIGNMENT for each in found):
        raise ValueError(
            f"fp8 needs sizes that are multiples of {ALIGNMENT}; hidden size, queries, keys and MLP of a rank are "
            f"{list(found)}: train in bf16, or with another tensor_model_parallel_size than {size}"
        )
