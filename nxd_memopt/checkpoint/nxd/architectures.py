"""Lists the parameters of neuronx-distributed's LLaMA and GPT-NeoX samples, and the Hugging Face tensors in each."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from nxd_memopt.checkpoint.nxd.parts import Kind, Layout, Part, Rule
from nxd_memopt.config import require_divisible

QKVForm = Literal["separate", "stacked", "linear", "fused"]
"""Form of query, key and value in the samples.

- ``separate``: ``q_proj``, ``k_proj``, ``v_proj``. Also stands for GPT-NeoX, which has a single
  form.
- ``stacked``: ``qkv_proj.weight`` (``fuse_qkv`` without ``qkv_linear``; as many KV heads as query
  heads).
- ``linear``: ``qkv_proj.weight_q`` ... (``qkv_linear``).
- ``fused``: ``qkv_proj.weight_qkv`` (both).
"""


def build_rules(config: Mapping[str, Any], layout: Layout, form: QKVForm) -> list[Rule]:
    """Return the rules of all parameters, in the order of the sample's state dict.

    Args:
        config: content of a Hugging Face ``config.json``.
        layout: layout of the shards.
        form: form of query, key and value.

    Raises:
        ValueError: the model type is neither ``llama`` nor ``gpt_neox``, or sizes do not fit the
            layout.
    """
    builders: dict[str, Callable[..., list[Rule]]] = {"llama": _llama, "gpt_neox": _gpt_neox}
    model_type = config.get("model_type")
    if model_type not in builders:
        raise ValueError(f"config.json has model_type {model_type!r}: only {sorted(builders)} can be converted")
    require_sizes(config)
    if model_type != "gpt_neox" and layout.query_key_value_stride != 1:
        raise ValueError(
            f"query_key_value_stride is GPT-NeoX's, config.json has model_type {model_type!r}: leave it out"
        )
    if model_type == "gpt_neox" and (layout.kv_replicas > 1 or form != "separate"):
        raise ValueError("GPT-NeoX has one query_key_value and no KV replicas: leave the options of LLaMA's out")
    rules = builders[model_type](config, layout, form)
    # Check all divisibilities before any file is read or written.
    for rule in rules:
        for part in rule.parts:
            part.local_length(layout)
    return rules


def require_sizes(config: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``config`` lacks a size that the rules need."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    wrong = [name for name in names if type(config.get(name)) is not int or config[name] < 1]
    if wrong:
        raise ValueError(
            f"config.json has no positive integer {', '.join(wrong)}: pass the model's complete config.json"
        )


def find_form(names: Collection[str]) -> QKVForm:
    """Return the form of query, key and value in a state dict with ``names``."""
    suffixes: dict[str, QKVForm] = {
        ".qkv_proj.weight_qkv": "fused",
        ".qkv_proj.weight_q": "linear",
        ".qkv_proj.weight": "stacked",
    }
    for suffix, form in suffixes.items():
        if any(name.endswith(suffix) for name in names):
            return form
    return "separate"


def layer_index(name: str) -> int | None:
    """Return the index of the decoder layer of ``name``, or None if it is outside the layers."""
    match = re.search(r"\.layers\.(\d+)\.", name)
    if match is None:
        return None
    return int(match[1])


def is_first_stage(name: str) -> bool:
    """Return whether a parameter outside the layers belongs to the first pipeline stage; else it
    belongs to the last.
    """
    return "embed_tokens" in name or "embed_in" in name


def kv_heads(config: Mapping[str, Any]) -> int:
    """Return g, the number of KV heads."""
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def _llama(config: Mapping[str, Any], layout: Layout, form: QKVForm) -> list[Rule]:
    """Return the rules of LLaMA: embedding [V, H], layers, norm [H], output head [V, H]."""
    hidden = config["hidden_size"]
    width = config["intermediate_size"]
    vocab = config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError("attention_bias or mlp_bias is true: neuronx-distributed's LLaMA sample has no biases")
    _require_kv_layout(config, layout, form)
    # Rows of the full projections: q [heads * head_dim, H], k and v [g * head_dim, H].
    query = config["num_attention_heads"] * head_dim
    kv = kv_heads(config) * head_dim
    rules = [_rule("model.embed_tokens.weight", "column", (vocab, hidden))]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        rules += _llama_attention(f"{layer}.self_attn", form, (query, kv, hidden))
        gate = Part(f"{layer}.mlp.gate_proj.weight", "column", (width, hidden))
        up = Part(f"{layer}.mlp.up_proj.weight", "column", (width, hidden))
        rules += [
            Rule(f"{layer}.mlp.gate_up_proj.weight", (gate, up)),
            _rule(f"{layer}.mlp.down_proj.weight", "row", (hidden, width)),
            _rule(f"{layer}.input_layernorm.weight", "replicated", (hidden,)),
            _rule(f"{layer}.post_attention_layernorm.weight", "replicated", (hidden,)),
        ]
    return [
        *rules,
        _rule("model.norm.weight", "replicated", (hidden,)),
        _rule("lm_head.weight", "column", (vocab, hidden)),
    ]


def _llama_attention(prefix: str, form: QKVForm, sizes: tuple[int, int, int]) -> list[Rule]:
    """Return the rules of one attention module; ``sizes`` are the rows of q, the rows of k (and
    v), and H.
    """
    query_size, kv_size, hidden = sizes
    query = Part(f"{prefix}.q_proj.weight", "query", (query_size, hidden))
    key = Part(f"{prefix}.k_proj.weight", "kv", (kv_size, hidden))
    value = Part(f"{prefix}.v_proj.weight", "kv", (kv_size, hidden))
    output = _rule(f"{prefix}.o_proj.weight", "query_row", (hidden, query_size))
    # Stacked and fused: one parameter with three parts, [q, k, v] along dimension 0 in each
    # rank's shard. Linear and separate: three parameters, which differ only in their names.
    if form == "stacked":
        return [Rule(f"{prefix}.qkv_proj.weight", (query, key, value)), output]
    if form == "fused":
        return [Rule(f"{prefix}.qkv_proj.weight_qkv", (query, key, value)), output]
    if form == "linear":
        return [
            Rule(f"{prefix}.qkv_proj.weight_q", (query,)),
            Rule(f"{prefix}.qkv_proj.weight_k", (key,)),
            Rule(f"{prefix}.qkv_proj.weight_v", (value,)),
            output,
        ]
    return [*(Rule(part.name, (part,)) for part in (query, key, value)), output]


def _require_kv_layout(config: Mapping[str, Any], layout: Layout, form: QKVForm) -> None:
    """Raise ``ValueError`` if the heads cannot be sharded over the layout's ranks."""
    heads = config["num_attention_heads"]
    groups = kv_heads(config)
    replicas = layout.kv_replicas
    require_divisible("num_attention_heads", heads, "tensor_model_parallel_size", layout.size)
    if replicas > 1 and form not in ("linear", "fused"):
        raise ValueError(
            f"kv_size_multiplier {replicas} needs GQAQKVColumnParallelLinear (weights named "
            f"qkv_proj.weight_k or weight_qkv): the {form} form has no KV replicas"
        )
    if form == "stacked" and groups != heads:
        raise ValueError(
            f"num_key_value_heads {groups} differs from num_attention_heads {heads}: qkv_proj.weight without "
            "GQAQKVColumnParallelLinear holds as many KV heads as query heads"
        )
    # With several KV heads per replicated shard, a rank's query heads would not be a contiguous
    # slice; without replicas, ranks would hold parts of heads.
    is_divided = groups * replicas == layout.size if replicas > 1 else groups % layout.size == 0
    if not is_divided:
        raise ValueError(
            f"num_key_value_heads {groups} with kv_size_multiplier {replicas} is not divisible by "
            f"tensor_model_parallel_size {layout.size}: use kv_size_multiplier {max(layout.size // groups, 1)}"
        )


def _gpt_neox(config: Mapping[str, Any], layout: Layout, form: QKVForm) -> list[Rule]:
    """Return the rules of GPT-NeoX, which has a bias in every linear layer and norm of its
    decoder layers.
    """
    del form  # GPT-NeoX has a single form
    require_divisible("num_attention_heads", config["num_attention_heads"], "tensor_model_parallel_size", layout.size)
    hidden = config["hidden_size"]
    width = config["intermediate_size"]
    vocab = config["vocab_size"]
    rules = [_rule("gpt_neox.embed_in.weight", "column", (vocab, hidden))]
    for i in range(config["num_hidden_layers"]):
        layer = f"gpt_neox.layers.{i}"
        # Rows [h, 3, d] in Hugging Face's order; with stride 3 the sample shards each third of
        # the rows.
        qkv = f"{layer}.attention.query_key_value"
        stride = layout.query_key_value_stride
        rules += [
            *_layer_norm(f"{layer}.input_layernorm", hidden),
            *_layer_norm(f"{layer}.post_attention_layernorm", hidden),
            Rule(f"{qkv}.weight", (Part(f"{qkv}.weight", "column", (3 * hidden, hidden)),), stride),
            Rule(f"{qkv}.bias", (Part(f"{qkv}.bias", "column", (3 * hidden,)),), stride),
            _rule(f"{layer}.attention.dense.weight", "row", (hidden, hidden)),
            _rule(f"{layer}.attention.dense.bias", "replicated", (hidden,)),
            _rule(f"{layer}.mlp.dense_h_to_4h.weight", "column", (width, hidden)),
            _rule(f"{layer}.mlp.dense_h_to_4h.bias", "column", (width,)),
            _rule(f"{layer}.mlp.dense_4h_to_h.weight", "row", (hidden, width)),
            _rule(f"{layer}.mlp.dense_4h_to_h.bias", "replicated", (hidden,)),
        ]
    return [
        *rules,
        *_layer_norm("gpt_neox.final_layer_norm", hidden),
        _rule("embed_out.weight", "column", (vocab, hidden)),
    ]


def _layer_norm(name: str, hidden: int) -> list[Rule]:
    """Return the rules of a LayerNorm: weight [H] and bias [H]."""
    return [_rule(f"{name}.{part}", "replicated", (hidden,)) for part in ("weight", "bias")]


def _rule(name: str, kind: Kind, shape: tuple[int, ...]) -> Rule:
    """Return the rule of a parameter that equals one Hugging Face tensor of the same name."""
    return Rule(name, (Part(name, kind, shape),))
