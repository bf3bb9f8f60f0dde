"""The parameters of each architecture: name, shape, and how tensor parallelism shards them.

Models, checkpoints, certificates and the planner read them from the table in ``architectures/layers.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nxd_memopt.architectures.config_options import option
from nxd_memopt.architectures.layers import EXPERT_SHARDINGS, LAYERS, SHARDED_DIMENSIONS, Layer
from nxd_memopt.architectures.model_spec import ModelSpec, model_spec, rope_options
from nxd_memopt.config import HIDDEN_ACTS, ROPE_TYPES, require_divisible
from nxd_memopt.options import require_one_of


class ExpertShape(tuple[int, ...]):
    """Shape of a parameter of experts on one rank: D/EP data-parallel ranks have the same one, not D."""

    __slots__ = ()


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model of certain sizes.

    Attributes:
        name: Hugging Face's name.
        shape: full shape.
        sharding: sharding of its layer.
        sharded_dimension: dimension that is split over the tensor-parallel ranks, or None.
        is_sequence_partial: under sequence parallelism the gradient is a partial sum over the
            rank's tokens: norms and the biases of row-parallel layers.
    """

    name: str
    shape: tuple[int, ...]
    sharding: str
    sharded_dimension: int | None
    is_sequence_partial: bool

    @property
    def is_head_partial(self) -> bool:
        """Whether the gradient is a partial sum over the rank's heads, with and without sequence parallelism."""
        return self.sharding == "head_norm"

    @property
    def is_expert(self) -> bool:
        """Whether expert-parallel ranks have different experts of it, along dimension 0."""
        return self.sharding in EXPERT_SHARDINGS

    def local_shape(
        self, tensor_model_parallel_size: int, kv_replicas: int = 1, expert_model_parallel_size: int = 1
    ) -> tuple[int, ...]:
        """Return the shape of this rank's shard.

        Args:
            tensor_model_parallel_size: T.
            kv_replicas: number of ranks that share a KV head.
            expert_model_parallel_size: EP.
        """
        if self.sharded_dimension is None:
            return self.shape
        # With T greater than the number g of KV heads, r = T / g ranks store the same KV head
        # each, so a K or V weight is split T / r = g ways and not T ways.
        shards = tensor_model_parallel_size
        if self.sharding == "kv_column":
            shards //= kv_replicas
        shape = list(self.shape)
        # Rounded up: vocabularies are padded. All other dimensions are divisible, see
        # require_shardable.
        shape[self.sharded_dimension] = -(-shape[self.sharded_dimension] // shards)
        if self.is_expert:
            shape[0] //= expert_model_parallel_size
            return ExpertShape(shape)
        return tuple(shape)


def shardings(model_type: str) -> dict[str, str]:
    """Return the sharding of each layer by the last part of its name; without the routed experts.

    ``modules.moe.Experts`` describes its parameters itself. Some of their names are names of
    dense layers too.
    """
    return {layer.last_name: layer.sharding for layer in LAYERS[model_type] if layer.sharding not in EXPERT_SHARDINGS}


def parameters(spec: ModelSpec) -> Iterator[Parameter]:
    """Yield the parameters of a model, in the order of ``LAYERS``; a tied head is left out."""
    letters = {
        "H": spec.hidden_size,
        "F": spec.intermediate_size,
        "V": spec.vocab_size,
        "h": spec.num_heads,
        "g": spec.num_kv_heads,
        "d": spec.head_dim,
    }
    if spec.experts is not None:
        experts = spec.experts
        letters |= {"E": experts.num_experts, "M": experts.width, "W": experts.shared_width or 0}
    # Three groups in the order of the table: before, inside and after the decoder layers.
    inside = [layer for layer in spec.layers if "{}" in layer.name]
    start = spec.layers.index(inside[0])
    for layer in spec.layers[:start]:
        yield from _layer_parameters(layer, layer.name, letters)
    for i, is_moe in enumerate(spec.moe_layers):
        absent = "moe"
        if is_moe:
            absent = "dense"
        for layer in inside:
            if layer.only_in != absent:
                yield from _layer_parameters(layer, layer.name.format(i), letters)
    for layer in spec.layers[start + len(inside) :]:
        yield from _layer_parameters(layer, layer.name, letters)


def _layer_parameters(layer: Layer, name: str, letters: Mapping[str, int]) -> Iterator[Parameter]:
    """Yield the weight of a layer and, if it has one, its bias."""
    shape = tuple(_value(dimension, letters) for dimension in layer.weight)
    sharded_dimension = SHARDED_DIMENSIONS[layer.sharding]
    # The replicated layers are the norms. Under sequence parallelism each rank applies them to its
    # own tokens only, so that the gradient on a rank is a partial sum over these tokens.
    # The experts are one tensor each, a parameter of the module that holds all of them.
    weight_name = f"{name}.weight"
    if layer.sharding in EXPERT_SHARDINGS:
        weight_name = name
    yield Parameter(
        weight_name,
        shape,
        layer.sharding,
        sharded_dimension,
        is_sequence_partial=layer.sharding in ("replicated", "head_norm"),
    )
    if not layer.bias:
        return
    # The bias has the output features: sharded with the rows of the weight, or replicated. A
    # replicated one (norm, row-parallel layer) is added to the rank's tokens only.
    is_sharded = sharded_dimension == 0
    bias_dimension = None
    if is_sharded:
        bias_dimension = 0
    yield Parameter(
        f"{name}.bias",
        shape[:1],
        layer.sharding,
        bias_dimension,
        is_sequence_partial=not is_sharded,
    )


def _value(dimension: str, letters: Mapping[str, int]) -> int:
    """Return the value of a product such as ``3*h*d``."""
    # Letters stand for sizes and digits for themselves: 3*h*d is the height of a fused query, key and value weight.
    value = 1
    for factor in dimension.split("*"):
        if factor.isdigit():
            value *= int(factor)
        else:
            value *= letters[factor]
    return value


def require_supported_values(config: Any, remedy: str) -> None:
    """Raise ``ValueError`` for a value that models refuse when they are built, or would not follow.

    Args:
        config: Hugging Face's config, as an object or as the content of a ``config.json``.
        remedy: where to change a value, for the message.
    """
    quantization = option(config, "quantization_config")
    if quantization:
        raise ValueError(
            f"the model's config.json has a quantization_config, {quantization}: quantized weights are not trained; "
            "take the checkpoint that they were made from, or remove the entry if the weights are not quantized"
        )
    require_one_of("rope_type", rope_options(config)["rope_type"], ROPE_TYPES)
    spec = model_spec(config)
    require_one_of("hidden_act", spec.hidden_act, HIDDEN_ACTS)
    for name, value in (("attention_dropout", spec.attention_dropout), ("hidden_dropout", spec.hidden_dropout)):
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}: set it in {remedy}")
    # RoPE rotates pairs of dimensions.
    if spec.head_dim % 2:
        raise ValueError(f"head_dim {spec.head_dim} is odd: set an even one, other heads or another size in {remedy}")
    # transformers' default ids (bos 1, eos 2) are no choice of the user: with a smaller vocabulary
    # they mean nothing, and the tokenizer's ids replace them.
    padding = spec.pad_token_id
    if padding is not None and (not isinstance(padding, int) or not 0 <= padding < spec.vocab_size):
        raise ValueError(f"pad_token_id {padding!r} is outside [0, vocab_size {spec.vocab_size}): set it in {remedy}")


def require_shardable(spec: ModelSpec, tensor_model_parallel_size: int) -> None:
    """Raise ``ValueError`` unless T divides heads and MLP widths, and KV heads fit T."""
    size = tensor_model_parallel_size
    size_name = "tensor_model_parallel_size"
    # The vocabulary is not checked: it is padded to a multiple of T.
    require_divisible("num_attention_heads", spec.num_heads, size_name, size)
    groups = spec.num_kv_heads
    # A rank has complete KV heads, or a copy of one that T/g ranks share.
    if groups % size and size % groups:
        raise ValueError(
            f"{size_name} {size} neither divides num_key_value_heads {groups} nor is a multiple of it: use a "
            f"{size_name} that divides {groups} or is a multiple of it"
        )
    if not all(spec.moe_layers):
        require_divisible("intermediate_size", spec.intermediate_size, size_name, size)
    if spec.experts is not None and spec.has_experts:
        # Qwen's MoE models have an option for it, the others the one of dense MLPs.
        is_own = spec.experts.width != spec.intermediate_size
        name = "moe_intermediate_size" if is_own else "intermediate_size"
        require_divisible(name, spec.experts.width, size_name, size)
        shared_width = spec.experts.shared_width or 0
        require_divisible("moe_shared_expert_intermediate_size", shared_width, size_name, size)
