"""Adds low-rank adapters to a model, and merges them into its weights for an export."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from nxd_memopt.architectures.layers import fused_name
from nxd_memopt.lora_config import LoraConfig, default_targets, is_target
from nxd_memopt.modules.lora.layers import AdaptedLinear, adapt
from nxd_memopt.modules.staged_model import whole_without_adapters
from nxd_memopt.parallel_layers.data_shards import is_data_sharded, local_rows
from nxd_memopt.parallel_layers.fusion import Fusions
from nxd_memopt.parallel_layers.initialization import numbers_of_meta_weights
from nxd_memopt.parallel_layers.layers import SharedInput

FACTORS = ("lora_A", "lora_B")


def get_lora_model(model: nn.Module, lora_config: LoraConfig | None) -> nn.Module:
    """Return ``model`` with adapters, which are added in place; None adds none. A name of neuronx-distributed."""
    if lora_config is not None:
        add_adapters(model, lora_config)
    return model


def add_adapters(model: nn.Module, config: LoraConfig) -> list[str]:
    """Add adapters to the layers that ``config.target_modules`` names, and freeze all other parameters.

    Call it after the weights are loaded, before ``apply_memory``, ``shard_model`` and the optimizer.
    All tensor-parallel ranks call it at the same time: they draw the same initial values.

    Returns:
        The names of the layers with adapters. Like ``config.target_modules`` these are Hugging Face's and PEFT's:
        of fused layers, which are separate here, ``qkv_proj`` and not ``q_proj``.

    Raises:
        ValueError: a name is of no layer, or of one that cannot have an adapter; the model has
            adapters; its parameters are sharded over data-parallel ranks; or a memory technique
            computes layers without calling them.
    """
    # On stages of a pipeline the factors of all layers are drawn, as in the full model.
    whole = whole_without_adapters(model)
    targets = config.target_modules or default_targets(model_type_of(model))
    own, named = dict(model.named_modules()), dict(whole.named_modules())
    parts: dict[str, list[str]] = {}
    for name in named:
        parts.setdefault(fused_name(model_type_of(model), name), []).append(name)
    chosen = [name for name in parts if is_target(name, targets)]
    _require_targets(targets, {name: named[each[0]] for name, each in parts.items()})
    if adapted_layers(model):
        raise ValueError("the model has adapters already: build it again to add others")
    if any(is_data_sharded(parameter) for parameter in model.parameters()):
        raise ValueError("add_adapters needs parameters that are not sharded over data-parallel ranks: call it before")
    require_called_layers(model, "without their adapters")
    # The adapters, created below, are then the only parameters with gradients and optimizer states.
    model.requires_grad_(False)
    # Fused paths that would bypass an adapter turn off; ``model.fusions`` says which.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in chosen:
            # An adapter of a fused layer: its parts have the rows of B that are theirs, and one A.
            is_here = parts[name][0] in own
            with nullcontext() if is_here or next(model.parameters()).is_meta else numbers_of_meta_weights():
                first, *others = (adapt(part, (own if is_here else named)[part], config) for part in parts[name])
            for other in others:
                other.lora_A = first.lora_A
    # One all-gather of the input of query, key and value remains, whichever of them have adapters, and the other
    # fused paths of their modules.
    for module in model.modules():
        if isinstance(module, SharedInput):
            module.share_input()
    if hasattr(model, "fusions"):
        cast(Any, model).fusions = Fusions(model)
    cast(Any, model).lora_config = config
    return chosen


def whole_model(model: nn.Module) -> nn.Module:
    """Return the complete model on the meta device, with the same adapters, of a rank's stages of a pipeline.

    It has the names, shapes and shard attributes of all parameters. A complete model is returned as it is.
    """
    whole = whole_without_adapters(model)
    config: LoraConfig | None = getattr(model, "lora_config", None)
    if whole is not model and config is not None:
        add_adapters(whole, config)
    return whole


def model_type_of(model: nn.Module) -> str:
    """Return Hugging Face's ``model_type`` of a model with a config."""
    return str(getattr(getattr(model, "config", None), "model_type", None))


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the layers with adapters by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is of an adapter."""
    return any(part in FACTORS for part in name.split("."))


@contextmanager
def merged_adapters(model: nn.Module) -> Iterator[None]:
    """Add the adapters to the weights inside the block; afterwards the weights are bitwise as before.

    All ranks call. The host needs memory for this rank's weights of the layers with adapters.

    Raises:
        ValueError: a weight is stored in float8, which the sum would be rounded to.
    """
    if any(layer.weight_scale is not None for layer in adapted_layers(model).values()):
        raise ValueError("adapters are not merged into weights in float8: merge them with nxd-memopt convert")
    originals = {}
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            weight = local_rows(layer.weight)
            originals[weight] = weight.detach().to("cpu", copy=True)
            # The sum is rounded on the host, as a conversion of a checkpoint does.
            weight.copy_((originals[weight].double() + layer.delta()).to(weight.dtype))
        try:
            yield
        finally:
            for weight, original in originals.items():
                weight.copy_(original)


def _require_targets(targets: Sequence[str], named: dict[str, nn.Module]) -> None:
    """Raise ``ValueError`` for a target without a layer."""
    for target in targets:
        if not any(is_target(name, [target]) for name in named):
            known = sorted({name.rpartition(".")[2] for name, module in named.items() if hasattr(module, "weight")})
            raise ValueError(f"target_modules names {target!r}, and no layer has this name: choose of {known}")
        if is_target("lm_head", [target]):
            raise ValueError("target_modules names lm_head, whose loss does not call it: leave it out")


def require_called_layers(model: nn.Module, how: str) -> None:
    """Raise ``ValueError`` for memory techniques that read weights instead of calling layers; ``how`` they compute."""
    memory = getattr(model, "memory", None)
    for name in ("mlp_tile_tokens", "attention_head_groups"):
        if getattr(memory, name, None) is not None:
            raise ValueError(f"{name} computes layers {how}: leave one of them out")
