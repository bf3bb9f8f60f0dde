"""The ``moe`` section: options of mixture-of-experts layers that complete or replace options of the model's config."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import TYPE_CHECKING, Any

from nxd_memopt.architectures.experts import options_of, require_option_of
from nxd_memopt.architectures.model_spec import moe_layers
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.options import check_options, field_types

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Options of a layer that follow from the model's config.json alone.
_OF_THE_MODEL = ("moe_layer_freq", "moe_router_pre_softmax", "moe_ffn_hidden_size", "moe_shared_expert_gate")


def _optional_fields() -> list[tuple[str, Any, Any]]:
    """Return the options of ``MoEConfig``, each of which may be None, its default."""
    types = field_types(MoEConfig)
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(MoEConfig):
        if field.name not in _OF_THE_MODEL:
            optional = dataclasses.field(default=None, metadata=field.metadata)
            fields.append((field.name, types[field.name] | None, optional))
    return fields


def _descriptions() -> str:
    """Return ``MoEConfig``'s texts of the options, as a part of a docstring."""
    _, _, arguments = inspect.cleandoc(MoEConfig.__doc__ or "").partition("Args:\n")
    # An option's text begins with its name, indented once.
    texts = re.split(r"^    (?=\w+: )", arguments, flags=re.MULTILINE)
    kept = [f"    {text}" for text in texts if text and text.partition(":")[0] not in _OF_THE_MODEL]
    return f"Args:\n{''.join(kept)}"


def _check(options: Any) -> None:
    check_options(options, "moe")


# __init__ calls a __post_init__ that exists when it is made: one of a subclass would not be called.
_Fields: Any = dataclasses.make_dataclass(
    "_Fields", _optional_fields(), frozen=True, namespace={"__post_init__": _check}
)


class MoEOptions(_Fields):
    """Options of mixture-of-experts layers, with Megatron's and NeMo's names.

    Every default, ``None``, follows the model's ``config.json``: its number of experts, its choices per token and,
    with ``output_router_logits``, transformers' balancing loss. Options without a counterpart there have Megatron's
    default. On a dense LLaMA or GPT-NeoX, ``num_moe_experts`` replaces every MLP by experts that are copies of it.
    Models with ``sinkhorn``, ``sigmoid``, a bias of the routers, or a shared expert that transformers' model does not
    have, are trained without export.
    """

    def given(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


MoEOptions.__doc__ = f"{inspect.cleandoc(MoEOptions.__doc__ or '')}\n\n{_descriptions()}"


def resolve_options(options: MoEOptions, hf_config: PretrainedConfig) -> MoEConfig | None:
    """Return the options of a model's MoE layers; None for a dense model.

    Args:
        options: the ``moe`` section.
        hf_config: the model's configuration, with experts if the section adds them.

    Raises:
        ValueError: options contradict each other or the model, or the model has no experts.
    """
    # Imports torch, which the command line does without.
    from nxd_memopt.modules.moe.hf_options import resolve_moe

    given = options.given()
    if not has_experts(hf_config):
        if given:
            name, value = next(iter(given.items()))
            raise ValueError(
                f"moe.{name} {value!r} needs a model with experts, and model_type is {hf_config.model_type}: leave it "
                "out, or set moe.num_moe_experts to replace the MLPs of a LLaMA or GPT-NeoX by experts"
            )
        return None
    return resolve_moe(completed_options(options, hf_config), hf_config)


def completed_options(options: MoEOptions, config: Any) -> MoEConfig:
    """Return the options of a model with experts: given options, and its config's for the others.

    Args:
        options: the ``moe`` section.
        config: Hugging Face's config, as an object or as a complete mapping.

    Raises:
        ValueError: options contradict each other or the config.
    """
    given = options.given()
    # A given type or coefficient is Megatron's, whose other default is then Megatron's too: the
    # coefficient of transformers' loss means another strength in Megatron's.
    losses = {name: getattr(MoEConfig, name) for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff")}
    if losses.keys() & given.keys():
        given = {**losses, **given}
    for name in ("num_moe_experts", "moe_router_topk", "moe_router_pre_softmax"):
        if name in given:
            require_option_of(config, name, given[name])
    return options_of(config, **given)


def has_experts(hf_config: PretrainedConfig) -> bool:
    """Return whether a decoder layer of the model is a mixture of experts."""
    return any(moe_layers(hf_config))
