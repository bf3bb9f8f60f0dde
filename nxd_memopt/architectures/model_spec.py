"""The facts of a model that its layers, its shapes and its plan depend on, read once from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nxd_memopt.architectures.config_options import (
    GPT_NEOX_TYPES,
    MODELS_WITH_EXPERTS,
    MULTIPLIERS,
    option,
    raw_option,
    reads,
)
from nxd_memopt.architectures.layers import LAYERS, QWEN2_MOE, Layer
from nxd_memopt.config import require_divisible
from nxd_memopt.options import require_one_of

_QWEN_WINDOW_LAYERS = 28  # transformers' default of max_window_layers
_ROTARY_FRACTIONS = dict.fromkeys(GPT_NEOX_TYPES, "rotary_pct") | {"phi3": "partial_rotary_factor"}
"""Models that may rotate a part of each head -> the option of a config.json with the fraction."""


@dataclass(frozen=True)
class ExpertSpec:
    """The experts of a model.

    Args:
        num_experts: E.
        top_k: k, experts of a token.
        width: M, width of an expert.
        shared_width: W, width of the shared expert of each layer with experts; None without one.
        has_shared_gate: a sigmoid of the token scales the output of the shared expert.
        has_pre_softmax: the softmax is over all experts, not over the chosen ones.
        aux_loss_coeff: factor of transformers' balancing loss; 0.0 computes none.
        input_jitter: noise on the router's input; None for none.
    """

    num_experts: int
    top_k: int
    width: int
    shared_width: int | None
    has_shared_gate: bool
    has_pre_softmax: bool
    aux_loss_coeff: float
    input_jitter: float | None


@dataclass(frozen=True)
class ModelSpec:
    """The facts of a model.

    Args:
        model_type: Hugging Face's ``model_type``.
        num_layers: number of decoder layers.
        hidden_size: H.
        intermediate_size: F, width of a dense MLP.
        vocab_size: V.
        num_heads: h, query heads.
        num_kv_heads: g.
        head_dim: d.
        rotary_dim: dimensions of each head that RoPE rotates; the others do not depend on the position.
        hidden_act: activation of the MLP.
        is_tied: the head shares the weight of the embedding.
        max_positions: ``max_position_embeddings``; None if the config does not say.
        pad_token_id: the token without an embedding; None for none.
        attention_dropout: probability of dropping an attention weight.
        hidden_dropout: probability of dropping outputs of the embedding and of GPT-NeoX's branches.
        has_parallel_residual: GPT-NeoX's attention and MLP have the same input.
        windows: for each decoder layer how many keys a query sees, its own included; None for all.
        moe_layers: for each decoder layer whether it is a mixture of experts.
        experts: None for a dense model.
        layers: the layers of the model in the order of ``LAYERS``, with ``bias`` resolved to a boolean.
        embedding_multiplier: Granite's factor of the embedding; None multiplies nothing, also below.
        attention_multiplier: factor of attention scores, in the place of ``1 / sqrt(d)``.
        residual_multiplier: factor of a block's output before it is added to the residual stream.
        logits_scaling: divisor of the logits.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    hidden_act: str
    is_tied: bool
    max_positions: int | None
    pad_token_id: int | None
    attention_dropout: float
    hidden_dropout: float
    has_parallel_residual: bool
    windows: tuple[int | None, ...]
    moe_layers: tuple[bool, ...]
    experts: ExpertSpec | None
    layers: tuple[Layer, ...]
    embedding_multiplier: float | None = None
    attention_multiplier: float | None = None
    residual_multiplier: float | None = None
    logits_scaling: float | None = None

    @property
    def is_gpt_neox(self) -> bool:
        """Whether the model has GPT-NeoX's attention, norms and biases."""
        return self.model_type in GPT_NEOX_TYPES

    @property
    def has_experts(self) -> bool:
        """Whether a decoder layer is a mixture of experts."""
        return any(self.moe_layers)

    @property
    def has_windows(self) -> bool:
        """Whether a query of some layer sees a limited number of keys."""
        return any(self.windows)

    @property
    def biases(self) -> dict[str, bool]:
        """Whether each layer has a bias, by the last part of its name."""
        return {layer.last_name: bool(layer.bias) for layer in self.layers}

    def kv_replicas(self, tensor_model_parallel_size: int) -> int:
        """Return r, the ranks that share a KV head: T/g with more ranks than KV heads, else 1."""
        # GPT-NeoX has as many KV heads as query heads.
        if self.is_gpt_neox:
            return 1
        return max(1, tensor_model_parallel_size // self.num_kv_heads)

    def with_layers(self, num_layers: int) -> ModelSpec:
        """Return the model with its first ``num_layers`` layers alone."""
        return replace(
            self, num_layers=num_layers, windows=self.windows[:num_layers], moe_layers=self.moe_layers[:num_layers]
        )


def model_spec(config: Any) -> ModelSpec:
    """Return the facts of a model.

    Args:
        config: Hugging Face's config, as an object or as a complete mapping (``configs.with_defaults``).

    Raises:
        ValueError: the model type is not supported, or options contradict each other.
    """
    model_type = option(config, "model_type")
    require_one_of("model_type", model_type, tuple(LAYERS))
    # Sizes that a config leaves out follow from others: d = H / h.
    heads = option(config, "num_attention_heads")
    head_dim = option(config, "head_dim") or option(config, "hidden_size") // heads
    # Its projection has queries, keys and values of each head next to each other.
    if model_type in GPT_NEOX_TYPES:
        _require_gpt_neox_heads(config)
    experts = _experts(config) if model_type in MODELS_WITH_EXPERTS else None
    if option(config, "resid_pdrop"):
        raise ValueError(
            f"resid_pdrop {option(config, 'resid_pdrop')}: dropout of the blocks' outputs is not supported for "
            f"{model_type}: set it to 0.0"
        )
    return ModelSpec(
        model_type=model_type,
        num_layers=option(config, "num_hidden_layers"),
        hidden_size=option(config, "hidden_size"),
        intermediate_size=option(config, "intermediate_size"),
        vocab_size=option(config, "vocab_size"),
        num_heads=heads,
        num_kv_heads=num_kv_heads(config),
        head_dim=head_dim,
        rotary_dim=_rotary_dim(config, head_dim),
        hidden_act=option(config, "hidden_act"),
        is_tied=bool(option(config, "tie_word_embeddings")),
        max_positions=option(config, "max_position_embeddings"),
        pad_token_id=option(config, "pad_token_id"),
        attention_dropout=option(config, "attention_dropout") or 0.0,
        hidden_dropout=option(config, "hidden_dropout") or 0.0,
        has_parallel_residual=bool(option(config, "use_parallel_residual")),
        windows=_attention_windows(config),
        moe_layers=moe_layers(config),
        experts=experts,
        layers=_layers(config, experts),
        **_multipliers(config),
    )


def _multipliers(config: Any) -> dict[str, float | None]:
    """Return Granite's factors by name; None for other models."""
    found = {name: option(config, name) for name in MULTIPLIERS}
    for name, value in found.items():
        # Flash kernels take the largest score before they scale it, which a factor below 0 would make the smallest.
        if value is not None and value <= 0:
            raise ValueError(f"{name} {value} of the model must be above 0: correct its config.json")
    return found


def _require_gpt_neox_heads(config: Any) -> None:
    """Raise ``ValueError`` unless GPT-NeoX's heads are H / h wide, each with a KV head."""
    heads = option(config, "num_attention_heads")
    require_divisible("hidden_size", option(config, "hidden_size"), "num_attention_heads", heads)
    # transformers would take the frequencies of RoPE from head_dim, and the size of heads not.
    width = option(config, "hidden_size") // heads
    head_dim = raw_option(config, "head_dim")
    if head_dim not in (None, width):
        raise ValueError(
            f"head_dim {head_dim} differs from hidden_size / num_attention_heads {width}, GPT-NeoX's size of heads: "
            "leave head_dim out"
        )
    groups = num_kv_heads(config)
    if groups != heads:
        raise ValueError(
            f"num_query_groups {groups} differs from num_attention_heads {heads}: query_key_value has one KV head for "
            "each query head; leave num_query_groups out"
        )


def num_kv_heads(config: Any) -> int:
    """Return g: Megatron's ``num_query_groups`` if set, else ``num_key_value_heads``, else h."""
    heads = option(config, "num_attention_heads")
    name = "num_query_groups" if option(config, "num_query_groups") else "num_key_value_heads"
    groups = option(config, name) or heads
    require_divisible("num_attention_heads", heads, name, groups)
    return groups


def _rotary_dim(config: Any, head_dim: int) -> int:
    """Return how many dimensions of each head RoPE rotates."""
    # transformers 5 has the fraction in rope_parameters, a published config.json at its top level.
    rope = rope_options(config)
    name_in_files = _ROTARY_FRACTIONS.get(option(config, "model_type"))
    if name_in_files is not None:
        fraction = rope.get("partial_rotary_factor", option(config, name_in_files))
        if fraction is None:
            return head_dim
        return int(head_dim * fraction)
    fraction = rope.get("partial_rotary_factor")
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
    # Older files of Phi-3 have LongRoPE under other names.
    if option(config, "model_type") == "phi3" and found["rope_type"] in ("su", "yarn"):
        found["rope_type"] = "longrope"
    # Phi-3's files have the length before scaling at their top level; transformers prefers that one.
    length = option(config, "original_max_position_embeddings")
    if length is not None and found["rope_type"] in ("llama3", "longrope", "yarn"):
        found["original_max_position_embeddings"] = length
    return found


def require_positions(config: Any, sequence_length: int) -> None:
    """Raise ``ValueError`` if a sequence has more positions than the model was made for."""
    limit = option(config, "max_position_embeddings")
    # Frequencies of dynamic scaling are made for longer sequences.
    if limit is None or sequence_length <= limit or rope_options(config)["rope_type"] == "dynamic":
        return
    raise ValueError(
        f"data.seq_length {sequence_length} is greater than the model's max_position_embeddings {limit}: shorten "
        f"data.seq_length, or set model.config_overrides.max_position_embeddings to {sequence_length} to train longer "
        "positions"
    )


def _attention_windows(config: Any) -> tuple[int | None, ...]:
    """Return for each decoder layer how many keys a query sees, its own included; None for all."""
    depth = option(config, "num_hidden_layers")
    window = option(config, "sliding_window")
    # Qwen's configs store a window that use_sliding_window turns off.
    if reads(config, "use_sliding_window") and not option(config, "use_sliding_window"):
        window = None
    if window is not None and window < 1:
        raise ValueError(f"sliding_window {window} must be at least 1: leave it out for attention to all tokens")
    kinds = option(config, "layer_types")
    if kinds is None:
        has_window = _windowed_layers(config, depth)
    else:
        _require_layer_types(config, kinds, window)
        has_window = [kind == "sliding_attention" for kind in kinds]
    return tuple(window if each else None for each in has_window)


def _require_layer_types(config: Any, kinds: list[str], window: int | None) -> None:
    """Raise ``ValueError`` unless each layer has a type, and those with a window have a size of it."""
    depth = option(config, "num_hidden_layers")
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


def moe_layers(config: Any) -> tuple[bool, ...]:
    """Return for each decoder layer whether it is a mixture of experts, also of a config with other faults."""
    count = option(config, "num_hidden_layers")
    if not reads(config, "mlp_only_layers"):
        return (option(config, "model_type") in MODELS_WITH_EXPERTS,) * count
    # Qwen's MoE models may have dense layers between those with experts.
    dense = option(config, "mlp_only_layers") or ()
    step = option(config, "decoder_sparse_step") or 1
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(count))


def _experts(config: Any) -> ExpertSpec:
    """Return the experts of a model that can have some."""
    # Two names of one option, except in Qwen2-MoE; of two values, the one that transformers takes.
    names = ["num_local_experts", "num_experts"]
    if option(config, "model_type") == "mixtral":
        names.reverse()
    first, second = (option(config, name) for name in names)
    shared_width, has_gate = shared_expert(config)
    coeff = 0.0
    if option(config, "output_router_logits"):
        coeff = option(config, "router_aux_loss_coef") or 0.0
    return ExpertSpec(
        num_experts=first or second,
        top_k=option(config, "num_experts_per_tok"),
        width=option(config, "moe_intermediate_size") or option(config, "intermediate_size"),
        shared_width=shared_width,
        has_shared_gate=has_gate,
        # Mixtral's weights are a softmax over the chosen experts, as Qwen3's with norm_topk_prob.
        has_pre_softmax=reads(config, "norm_topk_prob") and not option(config, "norm_topk_prob"),
        aux_loss_coeff=coeff,
        input_jitter=option(config, "router_jitter_noise") or None,
    )


def shared_expert(config: Any) -> tuple[int | None, bool]:
    """Return W, or None without a shared expert, and whether its output has a gate."""
    has_own_gate = option(config, "model_type") == QWEN2_MOE
    gate = option(config, "shared_expert_gate")
    # ``hf_options.with_shared_expert`` sets both options. transformers' Mixtral and Qwen3-MoE have no shared expert,
    # whatever width a config.json has.
    if not has_own_gate and gate is None:
        return None, False
    # A width of 0 stands for no shared expert, as None does.
    width = option(config, "shared_expert_intermediate_size") or None
    return width, width is not None and (has_own_gate or bool(gate))


def _layers(config: Any, experts: ExpertSpec | None) -> tuple[Layer, ...]:
    """Return the layers that the model has, each with its bias."""
    # Not every model with experts has a shared one, nor a gate on it.
    present: set[str | None] = {None}
    if experts is not None and experts.shared_width is not None:
        present.add("shared_expert")
        if experts.has_shared_gate:
            present.add("shared_expert_gate")
    found: list[Layer] = []
    for layer in LAYERS[option(config, "model_type")]:
        is_tied_head = layer.name == "lm_head" and option(config, "tie_word_embeddings")
        if layer.only_with not in present or is_tied_head:
            continue
        bias = layer.bias
        if isinstance(bias, str):
            bias = bool(option(config, bias))
        found.append(replace(layer, bias=bias))
    return tuple(found)
