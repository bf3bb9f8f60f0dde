"""The parameters of each architecture: name, shape, and how tensor parallelism shards them.

Models, checkpoints, certificates and the planner read them from the table in ``architectures/layers.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nxd_memopt.architectures.config_options import GPT_NEOX_TYPES, MODELS_WITH_EXPERTS, option, raw_option, reads
from nxd_memopt.architectures.layers import EXPERT_SHARDINGS, LAYERS, QWEN2_MOE, SHARDED_DIMENSIONS, Layer
from nxd_memopt.config import HIDDEN_ACTS, ROPE_TYPES, require_divisible, require_one_of

_QWEN_WINDOW_LAYERS = 28  # transformers' default of max_window_layers


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

    ``modules.moe.Experts`` describes its parameters itself. Some of their names are those of dense
    layers too.
    """
    layers = [layer for layer in LAYERS[model_type] if layer.sharding not in EXPERT_SHARDINGS]
    return {layer.name.rsplit(".", 1)[-1]: layer.sharding for layer in layers}


def biases(config: Any) -> dict[str, bool]:
    """Return whether each layer has a bias, by the last part of its name."""
    layers = LAYERS[option(config, "model_type")]
    return {layer.name.rsplit(".", 1)[-1]: _has_bias(layer, config) for layer in layers}


def attention_windows(config: Any) -> tuple[int | None, ...]:
    """Return for each decoder layer how many keys a query sees, its own included; None for all.

    Args:
        config: Hugging Face's config, as an object or as the content of a ``config.json``.

    Raises:
        ValueError: the window is below 1, or ``layer_types`` is of another number of layers, has another type,
            or names windows that are turned off.
    """
    depth = option(config, "num_hidden_layers")
    window = option(config, "sliding_window")
    # Qwen's configs store a window that use_sliding_window turns off.
    if reads(config, "use_sliding_window") and not option(config, "use_sliding_window"):
        window = None
    if window is not None and window < 1:
        raise ValueError(f"sliding_window {window} must be at least 1: leave it out for attention to all tokens")
    kinds = option(config, "layer_types")
    if kinds is None:
        return tuple(window if has_window else None for has_window in _windowed_layers(config, depth))
    # A model would be built with as many layers as there are types.
    if len(kinds) != depth:
        raise ValueError(
            f"layer_types names {len(kinds)} layers and num_hidden_layers is {depth}: give each layer a type, or leave "
            "layer_types out"
        )
    for kind in kinds:
        require_one_of("layer_types", kind, ("full_attention", "sliding_attention"))
    if window is None and "sliding_attention" in kinds:
        raise ValueError(
            f"layer_types names sliding_attention, and there is no window (sliding_window "
            f"{option(config, 'sliding_window')}, use_sliding_window {option(config, 'use_sliding_window')}): set "
            "both, or leave layer_types out"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _windowed_layers(config: Any, depth: int) -> list[bool]:
    """Return which layers have the window of a config without ``layer_types``, if it has one."""
    if not reads(config, "layer_types"):
        return [True] * depth
    limit = option(config, "max_window_layers")
    if limit is None:
        limit = _QWEN_WINDOW_LAYERS
    if option(config, "model_type") == QWEN2_MOE:
        # Every second layer has a window, up to a limit, as in transformers' Qwen2MoeConfig.
        return [i % 2 == 0 and i < limit for i in range(depth)]
    # The first layers of Qwen2 and Qwen3 have no window.
    return [i >= limit for i in range(depth)]


def sizes(config: Any) -> dict[str, int]:
    """Return the value of each letter.

    Args:
        config: Hugging Face's config, as an object or as the content of a ``config.json``.
    """
    heads = option(config, "num_attention_heads")
    letters = {
        "H": option(config, "hidden_size"),
        "F": option(config, "intermediate_size"),
        "V": option(config, "vocab_size"),
        "h": heads,
        "g": num_kv_heads(config),
        "d": option(config, "head_dim") or option(config, "hidden_size") // heads,
    }
    if option(config, "model_type") in MODELS_WITH_EXPERTS:
        letters["E"] = _num_experts(config)
        letters["M"] = option(config, "moe_intermediate_size") or letters["F"]
        letters["W"] = shared_expert_width(config) or 0
    return letters


def _num_experts(config: Any) -> int:
    """Return E, whose two names are one option except in Qwen2-MoE; of two values, take the one transformers takes."""
    names = ["num_local_experts", "num_experts"]
    if option(config, "model_type") == "mixtral":
        names.reverse()
    first, second = (option(config, name) for name in names)
    return first or second


def shared_expert_width(config: Any) -> int | None:
    """Return W, the width of the shared expert of each layer with experts; None if there is none.

    Args:
        config: Hugging Face's config, as an object or as the content of a ``config.json``.
    """
    # ``hf_options.with_shared_expert`` sets both options. transformers' Mixtral and Qwen3-MoE have no shared expert,
    # whatever width a config.json has.
    if option(config, "model_type") != QWEN2_MOE and option(config, "shared_expert_gate") is None:
        return None
    return option(config, "shared_expert_intermediate_size") or None


def has_shared_expert_gate(config: Any) -> bool:
    """Return whether a sigmoid of the token scales the output of the shared expert, as always in Qwen2-MoE."""
    if shared_expert_width(config) is None:
        return False
    return option(config, "model_type") == QWEN2_MOE or bool(option(config, "shared_expert_gate"))


def moe_layers(config: Any) -> tuple[bool, ...]:
    """Return for each decoder layer whether it is a mixture of experts, by Hugging Face's options.

    Args:
        config: Hugging Face's config, as an object or as the content of a ``config.json``.
    """
    count = option(config, "num_hidden_layers")
    if not reads(config, "mlp_only_layers"):
        return (option(config, "model_type") in MODELS_WITH_EXPERTS,) * count
    dense = option(config, "mlp_only_layers") or ()
    step = option(config, "decoder_sparse_step") or 1
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(count))


def num_kv_heads(config: Any) -> int:
    """Return g: Megatron's ``num_query_groups`` if set, else ``num_key_value_heads``, else h.

    Raises:
        ValueError: g does not divide the number of query heads.
    """
    heads = option(config, "num_attention_heads")
    name = "num_query_groups" if option(config, "num_query_groups") else "num_key_value_heads"
    groups = option(config, name) or heads
    require_divisible("num_attention_heads", heads, name, groups)
    return groups


def rotary_dim(config: Any) -> int:
    """Return how many dimensions of each head RoPE rotates; the others do not depend on the position.

    Raises:
        ValueError: ``partial_rotary_factor`` of a model that rotates all.
    """
    head_dim = sizes(config)["d"]
    # transformers 5 has the fraction in rope_parameters, a published config.json as rotary_pct.
    rope = rope_options(config)
    fraction = rope.get("partial_rotary_factor", option(config, "rotary_pct"))
    if option(config, "model_type") in GPT_NEOX_TYPES:
        return int(head_dim * (1.0 if fraction is None else fraction))
    # transformers ignores the fraction of the default type only, and has no model that runs with it.
    kind = rope["rope_type"]
    if kind != "default" and fraction not in (None, 1.0):
        raise ValueError(
            f"partial_rotary_factor {fraction} with rope_type {kind!r}: {option(config, 'model_type')} rotates all "
            "dimensions of a head; leave it out"
        )
    return head_dim


def rope_options(config: Any) -> dict[str, Any]:
    """Return the options of RoPE with their ``rope_type``, as transformers' RoPE modules read them.

    Raises:
        ValueError: the options are no mapping.
    """
    # Published files call them rope_scaling, and their rope_type sometimes type.
    rope = option(config, "rope_scaling") or option(config, "rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters {rope!r} are no mapping: give rope_type and its values")
    found = {**rope, "rope_type": rope.get("rope_type") or rope.get("type") or "default"}
    # Phi-3's files have the length before scaling at their top level; transformers prefers that one.
    length = option(config, "original_max_position_embeddings")
    if length is not None and found["rope_type"] in ("llama3", "longrope", "yarn"):
        found["original_max_position_embeddings"] = length
    return found


def parameters(config: Any) -> Iterator[Parameter]:
    """Yield the parameters of a model, in the order of ``LAYERS``; a tied head is left out.

    Args:
        config: Hugging Face's config, as an object or as the content of a ``config.json``.

    Raises:
        ValueError: the model type is not supported.
    """
    model_type = option(config, "model_type")
    require_one_of("model_type", model_type, tuple(LAYERS))
    letters = sizes(config)
    is_tied = bool(option(config, "tie_word_embeddings"))
    present: set[str | None] = {None}
    if shared_expert_width(config) is not None:
        present.add("shared_expert")
    if has_shared_expert_gate(config):
        present.add("shared_expert_gate")
    layers = [
        layer
        for layer in LAYERS[model_type]
        if layer.only_with in present and not (is_tied and layer.name == "lm_head")
    ]
    # Three groups in the order of the table: before, inside and after the decoder layers.
    inside = [layer for layer in layers if "{}" in layer.name]
    start = layers.index(inside[0])
    for layer in layers[:start]:
        yield from _layer_parameters(layer, layer.name, letters, config)
    for i, is_moe in enumerate(moe_layers(config)):
        absent = "dense" if is_moe else "moe"
        for layer in inside:
            if layer.only_in != absent:
                yield from _layer_parameters(layer, layer.name.format(i), letters, config)
    for layer in layers[start + len(inside) :]:
        yield from _layer_parameters(layer, layer.name, letters, config)


def _layer_parameters(
    layer: Layer,
    name: str,
    letters: Mapping[str, int],
    config: Any,
) -> Iterator[Parameter]:
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
    if not _has_bias(layer, config):
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


def _has_bias(layer: Layer, config: Any) -> bool:
    """Return whether the layer has a bias, as the table or the config option that it names says."""
    if isinstance(layer.bias, str):
        return bool(option(config, layer.bias))
    return layer.bias


def _value(dimension: str, letters: Mapping[str, int]) -> int:
    """Return the value of a product such as ``3*h*d``."""
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
    require_one_of("hidden_act", option(config, "hidden_act"), HIDDEN_ACTS)
    require_one_of("rope_type", rope_options(config)["rope_type"], ROPE_TYPES)
    for name in ("attention_dropout", "hidden_dropout"):
        value = option(config, name) or 0.0
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}: set it in {remedy}")
    head_dim = sizes(config)["d"]
    # RoPE rotates pairs of dimensions.
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd: set an even one, other heads or another size in {remedy}")
    # transformers' default ids (bos 1, eos 2) are no choice of the user: with a smaller vocabulary
    # they mean nothing, and the tokenizer's ids replace them.
    padding, vocabulary = option(config, "pad_token_id"), option(config, "vocab_size")
    if padding is not None and (not isinstance(padding, int) or not 0 <= padding < vocabulary):
        raise ValueError(f"pad_token_id {padding!r} is outside [0, vocab_size {vocabulary}): set it in {remedy}")


def require_shardable(config: Any, tensor_model_parallel_size: int) -> None:
    """Raise ``ValueError`` unless T divides heads and MLP widths, and the heads fit T and the model type."""
    letters = sizes(config)
    size_name = "tensor_model_parallel_size"
    # The vocabulary is not checked: it is padded to a multiple of T.
    require_divisible("num_attention_heads", letters["h"], size_name, tensor_model_parallel_size)
    groups = letters["g"]
    # A rank has complete KV heads, or a copy of one that T/g ranks share.
    if groups % tensor_model_parallel_size and tensor_model_parallel_size % groups:
        raise ValueError(
            f"{size_name} {tensor_model_parallel_size} neither divides num_key_value_heads {groups} nor is a multiple "
            f"of it: use a {size_name} that divides {groups} or is a multiple of it"
        )
    is_moe = moe_layers(config)
    if not all(is_moe):
        require_divisible("intermediate_size", letters["F"], size_name, tensor_model_parallel_size)
    if any(is_moe):
        width = "moe_intermediate_size" if option(config, "moe_intermediate_size") else "intermediate_size"
        require_divisible(width, letters["M"], size_name, tensor_model_parallel_size)
        name = "moe_shared_expert_intermediate_size"
        require_divisible(name, letters["W"], size_name, tensor_model_parallel_size)
    if option(config, "model_type") in GPT_NEOX_TYPES:
        require_divisible("hidden_size", letters["H"], "num_attention_heads", letters["h"])
        head_dim = raw_option(config, "head_dim")
        # transformers would take the frequencies of RoPE from it, and the size of heads not.
        if head_dim not in (None, letters["d"]):
            raise ValueError(
                f"head_dim {head_dim} differs from hidden_size / num_attention_heads {letters['d']}, GPT-NeoX's size "
                "of heads: leave head_dim out"
            )
        if letters["g"] != letters["h"]:
            raise ValueError(
                f"num_query_groups {letters['g']} differs from num_attention_heads "
                f"{letters['h']}: query_key_value has "
                "one KV head for each query head; leave num_query_groups out"
            )
