"""Replaces the MLPs of a dense model by experts that are copies of them (sparse upcycling, arXiv:2212.05055).

LLaMA becomes a Mixtral, or with a gated shared expert a Qwen2-MoE; GPT-NeoX a model that this library alone has.

The weights of the chosen experts of a token add up to 1, and a shared expert starts with a zero down projection, so
the first forward computes what the dense model does, whatever the router chooses.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nxd_memopt.architectures.layers import GPT_NEOX_MOE
from nxd_memopt.architectures.model_spec import model_spec, num_kv_heads
from nxd_memopt.architectures.parameters import parameters
from nxd_memopt.checkpoint.files import Sources, open_weights
from nxd_memopt.checkpoint.huggingface.experts import NAMES, StackedExperts, stack_experts, stack_named_experts
from nxd_memopt.checkpoint.huggingface.gguf import weights_directory
from nxd_memopt.checkpoint.huggingface.importing import load_sources
from nxd_memopt.checkpoint.names import with_backbone_prefix
from nxd_memopt.modules.moe.hf_options import with_shared_expert
from nxd_memopt.parallel_layers.coordination import raise_together

if TYPE_CHECKING:
    from transformers import LlamaConfig, MixtralConfig, PretrainedConfig

    from nxd_memopt.modules.moe.gpt_neox_config import GPTNeoXMoEConfig

# Options of LLaMA that Mixtral has under the same name, with the same meaning.
_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_dropout",
    "tie_word_embeddings",
    "rope_parameters",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
)


# GPT-NeoX's linear layers of an MLP, which have biases.
_NEOX_PARTS = ("dense_h_to_4h", "dense_4h_to_h")
_EXPERTS = re.compile(r"\.experts\.")


def upcycled_config(
    config: PretrainedConfig,
    num_experts: int,
    top_k: int,
    *,
    shared_width: int | None = None,
    shared_gate: bool = False,
) -> PretrainedConfig:
    """Return the config of the model whose experts are MLPs of the dense model with ``config``.

    Args:
        config: config of the dense model.
        num_experts: E, experts of each layer.
        top_k: k, experts of a token.
        shared_width: width of a shared expert, or None for none.
        shared_gate: scale its output by a sigmoid of the token.

    Raises:
        ValueError: the model is neither LLaMA nor GPT-NeoX, or a LLaMA with biases, which Mixtral does not have.
    """
    routed = _routed_config(config, num_experts, top_k)
    if shared_width is None:
        return routed
    return with_shared_expert(routed, shared_width, gate=shared_gate)


def _routed_config(config: PretrainedConfig, num_experts: int, top_k: int) -> MixtralConfig | GPTNeoXMoEConfig:
    """Return the config without a shared expert; errors as ``upcycled_config``."""
    from transformers import MixtralConfig

    from nxd_memopt.modules.moe.gpt_neox_config import GPTNeoXMoEConfig

    if config.model_type == "gpt_neox":
        values = config.to_dict()
        for name in ("model_type", "transformers_version"):
            values.pop(name, None)
        return GPTNeoXMoEConfig(**values, num_local_experts=num_experts, num_experts_per_tok=top_k)
    if config.model_type != "llama":
        raise ValueError(
            f"num_moe_experts {num_experts} replaces the MLPs of llama and gpt_neox models by experts, and model_type "
            f"is {config.model_type!r}: leave it out, or take a LLaMA or GPT-NeoX"
        )
    llama: LlamaConfig = config  # pyright: ignore[reportAssignmentType]
    biases = [name for name in ("attention_bias", "mlp_bias") if getattr(llama, name)]
    if biases:
        raise ValueError(
            f"num_moe_experts {num_experts} makes a Mixtral, which has no biases, and the model has {biases}: leave "
            "it out, or take a model without biases"
        )
    shared = {name: getattr(llama, name) for name in _SHARED}
    return MixtralConfig(
        **shared, num_key_value_heads=num_kv_heads(llama), num_local_experts=num_experts, num_experts_per_tok=top_k
    )


def load_upcycled(model: nn.Module, directory: str | Path, *, seed: int, resize_embedding: bool = False) -> None:
    """Load a model with experts from the Hugging Face directory of one without them. Every rank calls.

    Each rank reads its slices of the MLPs for each of its experts. The routers are drawn from the
    normal distribution with the config's ``initializer_range``, equal for every T and EP. The shared expert is
    drawn in the same way, with a down projection of zeros. If the directory has experts, only the shared
    expert is added.

    Args:
        model: a model with ``upcycled_config`` of the dense model's config, or ``with_shared_expert``.
        directory: the model without experts, or without a shared one.
        seed: seed of the weights that are drawn.
        resize_embedding: as for ``load_pretrained``.

    Raises:
        ValueError: on every rank, as ``load_pretrained``.
    """
    with (
        weights_directory(Path(directory)) as location,
        raise_together(f"loading {directory}"),
        open_weights(location) as sources,
    ):
        sources = with_backbone_prefix(model, sources)
        if any(_EXPERTS.search(name) for name in sources):
            upcycled = _stacked(model, sources)
        else:
            upcycled = _upcycled(model, sources, seed)
        upcycled |= _shared_experts(model, seed)
        load_sources(model, upcycled, Path(directory), resize_embedding=resize_embedding)


def _stacked(model: nn.Module, sources: Sources) -> Sources:
    """Return ``sources``, a model with experts, stacked and under the names of ``model``."""
    # A Mixtral with a gated shared expert is a Qwen2-MoE: its experts have Mixtral's names in the files.
    is_mixtral = any(f".{NAMES['mixtral'].block}." in name for name in sources)
    return stack_named_experts(NAMES["mixtral"], sources) if is_mixtral else stack_experts(model, sources)


def _shared_experts(model: nn.Module, seed: int) -> Sources:
    """Return the shared experts of ``model`` by name: drawn, with zeros for down projection and biases."""
    config: Any = model.config
    shared: Sources = {}
    for parameter in parameters(model_spec(config)):
        if ".mlp.shared_expert" not in parameter.name:
            continue
        is_zero = parameter.sharding == "row" or len(parameter.shape) == 1
        std = 0.0 if is_zero else config.initializer_range
        # A seed for each tensor: what a rank draws does not depend on what it has drawn before.
        shared[parameter.name] = DrawnTensor(parameter.shape, std, seed=seed + 1 + len(shared))
    return shared


class DrawnTensor:
    """A lazy fp32 tensor of normally distributed numbers; reading a part draws all of them.

    The numbers stay in memory until another tensor is drawn: a tensor is read in several parts, one after another.

    Args:
        shape: full shape.
        std: standard deviation; 0 for zeros.
        seed: seed of the numbers.
    """

    def __init__(self, shape: tuple[int, ...], std: float, *, seed: int) -> None:
        self._shape = shape
        self._std = std
        self._seed = seed

    def get_shape(self) -> list[int]:
        """Return the full shape."""
        return list(self._shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part of the numbers."""
        # A copy: what the caller changes must not change the next part, and a view would keep all of them alive.
        return _drawn(self._shape, self._std, self._seed)[index].clone()


# One tensor: host memory does not grow with the number of layers.
@lru_cache(maxsize=1)
def _drawn(shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    """Return fp32 numbers of the normal distribution, or zeros."""
    full = torch.zeros(shape)
    if std:
        full.normal_(0, std, generator=torch.Generator().manual_seed(seed))
    return full


def _upcycled(model: nn.Module, sources: Sources, seed: int) -> Sources:
    """Return ``sources`` of a dense model with the names and shapes of ``model``."""
    config: Any = model.config
    spec = model_spec(config)
    assert spec.experts is not None, "experts were added to the config"
    experts = spec.experts.num_experts
    is_neox = config.model_type == GPT_NEOX_MOE
    backbone = "gpt_neox" if is_neox else "model"
    experts_of_layer = _neox_experts if is_neox else _mixtral_experts
    generator = torch.Generator().manual_seed(seed)
    # Tensors of an MLP that are not copied stay, and are reported as names that the model lacks.
    copied = _NEOX_TENSORS if is_neox else _LLAMA_TENSORS
    upcycled = {name: source for name, source in sources.items() if name.rpartition(".mlp.")[2] not in copied}
    for layer in range(config.num_hidden_layers):
        prefix = f"{backbone}.layers.{layer}.mlp"
        router = torch.empty(experts, config.hidden_size)
        upcycled[f"{prefix}.gate.weight"] = router.normal_(0, config.initializer_range, generator=generator)
        upcycled |= experts_of_layer(prefix, sources, experts)
    return upcycled


_LLAMA_TENSORS = tuple(f"{part}_proj.weight" for part in ("gate", "up", "down"))
_NEOX_TENSORS = tuple(f"{part}.{kind}" for part in _NEOX_PARTS for kind in ("weight", "bias"))


def _mixtral_experts(prefix: str, sources: Sources, experts: int) -> Sources:
    """Return the experts of a layer as copies of LLaMA's MLP."""
    # A missing tensor is found as a missing name of the model.
    parts = {part: sources.get(f"{prefix}.{part}_proj.weight") for part in ("gate", "up", "down")}
    copies: Sources = {}
    for name, own in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        found = [part for part in (parts[each] for each in own) if part is not None]
        if len(found) == len(own):
            copies[f"{prefix}.experts.{name}"] = StackedExperts(f"{prefix}.{name}", [found] * experts)
    return copies


def _neox_experts(prefix: str, sources: Sources, experts: int) -> Sources:
    """Return the experts of a layer as copies of GPT-NeoX's MLP, with its biases."""
    copies: Sources = {}
    for name in _NEOX_PARTS:
        weight = sources.get(f"{prefix}.{name}.weight")
        bias = sources.get(f"{prefix}.{name}.bias")
        if weight is not None:
            copies[f"{prefix}.experts.{name}"] = StackedExperts(f"{prefix}.{name}", [[weight]] * experts)
        if bias is not None:
            copies[f"{prefix}.experts.{name}_bias"] = bias[...].expand(experts, -1)
    return copies
