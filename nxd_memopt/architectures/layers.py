"""The layers of each architecture: name, shape in letters, and how tensor parallelism shards them.

Models, certificates and the planner read it through ``architectures/parameters.py``. Letters: H hidden size, F MLP
width, V vocabulary, h query heads, g KV heads (query groups), d head size, E experts, M width of an expert, W width
of all shared experts together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GPT_NEOX_MOE = "gpt_neox_moe"
"""``model_type`` of GPT-NeoX with experts, which has no files of Hugging Face."""
QWEN2_MOE = "qwen2_moe"

SHARDED_DIMENSIONS: dict[str, int | None] = {
    "vocab": 0,
    "column": 0,
    "query_column": 0,
    "kv_column": 0,
    "row": 1,
    "query_row": 1,
    "expert_column": 1,
    "expert_row": 2,
    "expert_bias": 1,
    "replicated": None,
    "head_norm": None,
}
"""Sharded dimension of a weight, by kind of sharding.

- ``vocab``: rows of an embedding table or head, padded to a multiple of T.
- ``column``: output rows. ``query_column``: output rows of query heads. ``kv_column``: output rows
  of KV heads, replicated if T exceeds their number.
- ``row``: input columns. ``query_row``: input columns that come from query heads.
- ``expert_column``: output rows of each expert's gate and up, of a tensor ``[E, 2 M, H]``.
  ``expert_row``: input columns of each expert, of ``[E, H, M]``. ``expert_bias``: elements of each
  expert's bias, of ``[E, M]`` or ``[E, H]``. Expert-parallel ranks have consecutive experts.
- ``replicated``: no sharding. ``head_norm``: no sharding either; each rank applies the weight to its own heads.

A rank has the query heads that its KV heads serve, see ``parallel_layers.rank_order``.
"""


@dataclass(frozen=True)
class Layer:
    """A linear layer, norm or embedding.

    Attributes:
        name: Hugging Face's name, with ``{}`` for the index of the decoder layer.
        weight: dimensions of the weight in letters, such as ``("g*d", "H")``.
        sharding: key of ``SHARDED_DIMENSIONS``.
        bias: whether there is a bias, or the config option that says so.
        only_in: decoder layers that have it, ``"dense"`` or ``"moe"`` ones; None for all.
        only_with: ``"shared_expert"`` or ``"shared_expert_gate"``, a part that not all models with experts
            have; None for all models.
    """

    name: str
    weight: tuple[str, ...]
    sharding: str
    bias: bool | str = False
    only_in: str | None = None
    only_with: str | None = None

    @property
    def last_name(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


EXPERT_SHARDINGS = ("expert_column", "expert_row", "expert_bias")


def _shared_expert(layers: tuple[Layer, ...], backbone: str, *, only_in: str | None) -> tuple[Layer, ...]:
    """Return the layers of the shared expert, and its gate: one number for each token."""
    parts = [replace(layer, only_in=only_in, only_with="shared_expert") for layer in layers]
    name = f"{backbone}.layers.{{}}.mlp.shared_expert_gate"
    return (*parts, Layer(name, ("1", "H"), "replicated", only_in=only_in, only_with="shared_expert_gate"))


_EXPERTS = (
    Layer("model.layers.{}.mlp.gate", ("E", "H"), "replicated", only_in="moe"),
    Layer("model.layers.{}.mlp.experts.gate_up_proj", ("E", "2*M", "H"), "expert_column", only_in="moe"),
    Layer("model.layers.{}.mlp.experts.down_proj", ("E", "H", "M"), "expert_row", only_in="moe"),
    *_shared_expert(
        (
            Layer("model.layers.{}.mlp.shared_expert.gate_proj", ("W", "H"), "column"),
            Layer("model.layers.{}.mlp.shared_expert.up_proj", ("W", "H"), "column"),
            Layer("model.layers.{}.mlp.shared_expert.down_proj", ("H", "W"), "row"),
        ),
        "model",
        only_in="moe",
    ),
)

# Every layer of GPT-NeoX with experts has them.
_NEOX_EXPERTS = (
    Layer("gpt_neox.layers.{}.mlp.gate", ("E", "H"), "replicated"),
    Layer("gpt_neox.layers.{}.mlp.experts.dense_h_to_4h", ("E", "M", "H"), "expert_column"),
    Layer("gpt_neox.layers.{}.mlp.experts.dense_h_to_4h_bias", ("E", "M"), "expert_bias"),
    Layer("gpt_neox.layers.{}.mlp.experts.dense_4h_to_h", ("E", "H", "M"), "expert_row"),
    Layer("gpt_neox.layers.{}.mlp.experts.dense_4h_to_h_bias", ("E", "H"), "expert_bias"),
    *_shared_expert(
        (
            Layer("gpt_neox.layers.{}.mlp.shared_expert.dense_h_to_4h", ("W", "H"), "column", bias=True),
            Layer("gpt_neox.layers.{}.mlp.shared_expert.dense_4h_to_h", ("H", "W"), "row", bias=True),
        ),
        "gpt_neox",
        only_in=None,
    ),
)

# One weight for all heads: each rank's gradient is the sum over its own heads.
_HEAD_NORMS = (
    Layer("model.layers.{}.self_attn.q_norm", ("d",), "head_norm"),
    Layer("model.layers.{}.self_attn.k_norm", ("d",), "head_norm"),
)


def _llama_layers(
    *,
    attention_bias: bool | str = False,
    output_bias: bool | str = False,
    mlp_bias: bool | str = False,
    head_norms: tuple[Layer, ...] = (),
    experts: tuple[Layer, ...] = (),
    has_dense_layers: bool = True,
) -> tuple[Layer, ...]:
    """Return the layers of LLaMA and of the models that differ from it by biases and norms of heads.

    Args:
        attention_bias: ``Layer.bias`` of the query, key and value projections.
        output_bias: of the output projection.
        mlp_bias: of the MLP.
        head_norms: norms of query and key.
        experts: of the decoder layers that have experts instead of an MLP.
        has_dense_layers: there are decoder layers with an MLP.
    """
    only_in = "dense" if experts else None
    mlp = (
        Layer("model.layers.{}.mlp.gate_proj", ("F", "H"), "column", mlp_bias, only_in),
        Layer("model.layers.{}.mlp.up_proj", ("F", "H"), "column", mlp_bias, only_in),
        Layer("model.layers.{}.mlp.down_proj", ("H", "F"), "row", mlp_bias, only_in),
    )
    return (
        Layer("model.embed_tokens", ("V", "H"), "vocab"),
        Layer("model.layers.{}.self_attn.q_proj", ("h*d", "H"), "query_column", bias=attention_bias),
        Layer("model.layers.{}.self_attn.k_proj", ("g*d", "H"), "kv_column", bias=attention_bias),
        Layer("model.layers.{}.self_attn.v_proj", ("g*d", "H"), "kv_column", bias=attention_bias),
        Layer("model.layers.{}.self_attn.o_proj", ("H", "h*d"), "query_row", bias=output_bias),
        *head_norms,
        *experts,
        *(mlp if has_dense_layers else ()),
        Layer("model.layers.{}.input_layernorm", ("H",), "replicated"),
        Layer("model.layers.{}.post_attention_layernorm", ("H",), "replicated"),
        Layer("model.norm", ("H",), "replicated"),
        Layer("lm_head", ("V", "H"), "vocab"),
    )


def _gpt_neox_layers(mlp: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return the layers of GPT-NeoX with ``mlp`` in its decoder layers."""
    return (
        Layer("gpt_neox.embed_in", ("V", "H"), "vocab"),
        Layer("gpt_neox.layers.{}.input_layernorm", ("H",), "replicated", bias=True),
        Layer("gpt_neox.layers.{}.post_attention_layernorm", ("H",), "replicated", bias=True),
        # Rows are [q, k, v] of head 0, then of head 1: a contiguous shard has complete heads.
        Layer("gpt_neox.layers.{}.attention.query_key_value", ("3*h*d", "H"), "column", bias="attention_bias"),
        Layer("gpt_neox.layers.{}.attention.dense", ("H", "h*d"), "row", bias="attention_bias"),
        *mlp,
        Layer("gpt_neox.final_layer_norm", ("H",), "replicated", bias=True),
        Layer("lm_head", ("V", "H"), "vocab"),
    )


LAYERS: dict[str, tuple[Layer, ...]] = {
    "llama": _llama_layers(attention_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": _llama_layers(),
    "granite": _llama_layers(attention_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "phi3": _llama_layers(),
    "qwen2": _llama_layers(attention_bias=True),
    "qwen3": _llama_layers(attention_bias="attention_bias", output_bias="attention_bias", head_norms=_HEAD_NORMS),
    "gpt_neox": _gpt_neox_layers(
        (
            Layer("gpt_neox.layers.{}.mlp.dense_h_to_4h", ("F", "H"), "column", bias=True),
            Layer("gpt_neox.layers.{}.mlp.dense_4h_to_h", ("H", "F"), "row", bias=True),
        )
    ),
    "mixtral": _llama_layers(experts=_EXPERTS, has_dense_layers=False),
    QWEN2_MOE: _llama_layers(attention_bias="qkv_bias", experts=_EXPERTS),
    "qwen3_moe": _llama_layers(
        attention_bias="attention_bias", output_bias="attention_bias", head_norms=_HEAD_NORMS, experts=_EXPERTS
    ),
    GPT_NEOX_MOE: _gpt_neox_layers(_NEOX_EXPERTS),
}
"""The layers of each architecture by Hugging Face's ``model_type``, in the order of the model."""

FUSED_LAYERS: dict[str, dict[str, tuple[str, ...]]] = {
    "phi3": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
}
"""Layers that Hugging Face's files and PEFT have as one, by ``model_type``: its name -> names here, in order.

Here they are separate, so that each rank has contiguous rows of each, next to its KV heads.
"""


def fused_name(model_type: str, name: str) -> str:
    """Return Hugging Face's name of the layer ``name``, which may be a part of one of its layers."""
    prefix, dot, last = name.rpartition(".")
    for fused, parts in FUSED_LAYERS.get(model_type, {}).items():
        if last in parts:
            return f"{prefix}{dot}{fused}"
    return name
