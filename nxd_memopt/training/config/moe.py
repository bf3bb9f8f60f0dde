"""The ``moe`` section: options of mixture-of-experts layers that complete or replace options of the model's config."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nxd_memopt.architectures.experts import options_of, require_option_of
from nxd_memopt.architectures.model_spec import moe_layers
from nxd_memopt.moe_config import LoadBalancing, MoEConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class MoEOptions:
    """Options of mixture-of-experts layers, with Megatron's and NeMo's names.

    Every default, ``None``, follows the model's ``config.json``: its number of experts, its choices per token and,
    with ``output_router_logits``, transformers' balancing loss. Options without a counterpart there have Megatron's
    default. On a dense LLaMA or GPT-NeoX, ``num_moe_experts`` replaces every MLP by experts that are
    copies of it.

    Args:
        num_moe_experts: experts of a layer. A dense LLaMA becomes a Mixtral with so many experts, a GPT-NeoX a
            model without export.
        moe_router_topk: experts of a token; 2 for a dense model.
        moe_router_load_balancing_type: ``aux_loss``, ``seq_aux_loss``, ``global_aux_loss``, ``hf_aux_loss`` (that of
            transformers), ``sinkhorn`` (without export) or ``none``. If this or the coefficient is set, transformers'
            loss is not the default.
        moe_aux_loss_coeff: factor of the balancing loss; Megatron's default is 0, which computes none.
        moe_z_loss_coeff: factor of the mean squared log-sum-exp of the router's logits.
        moe_input_jitter_eps: in training, multiply the router's input by numbers from 1 - eps to 1 + eps.
        moe_token_dropping: must agree with ``moe_expert_capacity_factor``.
        moe_token_dispatcher_type: how tokens reach the experts of other ranks, ``allgather`` or ``alltoall``.
        moe_per_layer_logging: write the losses and the tokens of each expert of every layer to metrics.jsonl and
            TensorBoard, and a heat map at the end.
        moe_expert_capacity_factor: each expert takes at most ``ceil(tokens * k / E * factor)`` tokens of a
            micro-batch.
        moe_pad_expert_input_to_capacity: give each expert exactly that many rows.
        moe_expert_block_size: rows of the blocks of the static form that drops no token.
        moe_token_drop_policy: which tokens a full expert keeps: ``probs`` or ``position``.
        moe_layer_recompute: recompute the MoE layers in backward.
        moe_layer_freq: must agree with the layers of the model.
        moe_router_score_function: ``softmax``, or ``sigmoid`` without export: transformers' models here have softmax.
        moe_router_pre_softmax: must agree with the model.
        moe_router_dtype: dtype of the router's matmul, ``fp32`` or ``fp64``; default that of the activations.
        moe_router_enable_expert_bias: balance sigmoid scores by a bias, without a loss and without export.
        moe_router_bias_update_rate: step of that bias in every optimizer step.
        moe_shared_expert_intermediate_size: width of an MLP that every token passes in addition. A model that has
            none gets it, drawn at random with a zero down projection.
        moe_shared_expert_gate: multiply its output by a sigmoid of the token. A Mixtral with it is a Qwen2-MoE; other
            models with a shared expert are trained without export.
        moe_ffn_hidden_size: must agree with the width of the model's experts.
    """

    num_moe_experts: int | None = None
    moe_router_topk: int | None = None
    moe_router_load_balancing_type: LoadBalancing | None = None
    moe_aux_loss_coeff: float | None = None
    moe_z_loss_coeff: float | None = None
    moe_input_jitter_eps: float | None = None
    moe_token_dropping: bool | None = None
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] | None = None
    moe_per_layer_logging: bool | None = None
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool | None = None
    moe_expert_block_size: int | None = None
    moe_token_drop_policy: Literal["probs", "position"] | None = None
    moe_layer_recompute: bool | None = None
    moe_layer_freq: int | tuple[int, ...] | None = None
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = None
    moe_router_pre_softmax: bool | None = None
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    moe_router_enable_expert_bias: bool | None = None
    moe_router_bias_update_rate: float | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool | None = None
    moe_ffn_hidden_size: int | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if value is not None}


def resolve_options(options: MoEOptions, hf_config: PretrainedConfig) -> MoEConfig | None:
    """Return the options of a model's MoE layers; None for a dense model.

    Args:
        options: the ``moe`` section.
        hf_config: the model's configuration, that of the model with experts if the section adds them.

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
    """Return the options of a model with experts: those that are given, else those of its config.

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
