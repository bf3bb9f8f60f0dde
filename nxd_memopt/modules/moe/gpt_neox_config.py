"""The config of GPT-NeoX with experts, which transformers does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, GPTNeoXConfig, PretrainedConfig


class GPTNeoXMoEConfig(GPTNeoXConfig):
    """``GPTNeoXConfig`` with Mixtral's options of experts.

    Args:
        num_local_experts: E, experts of each layer; their width is ``intermediate_size``.
        num_experts_per_tok: k, experts of a token.
        output_router_logits: train transformers' balancing loss, if no options of the caller say otherwise.
        router_aux_loss_coef: coefficient of that loss.
        shared_expert_intermediate_size: width of an MLP that every token passes in addition; None for none.
        shared_expert_gate: scale its output by a sigmoid of the token.
    """

    model_type = "gpt_neox_moe"
    attribute_map = {"num_experts": "num_local_experts"}  # noqa: RUF012 - transformers declares it so

    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False


def config_of(values: Mapping[str, Any]) -> PretrainedConfig:
    """Return the config of ``values``, a ``config.json`` of transformers or of GPT-NeoX with experts."""
    if values["model_type"] != GPTNeoXMoEConfig.model_type:
        return AutoConfig.for_model(**values)
    return GPTNeoXMoEConfig(**{name: value for name, value in values.items() if name != "model_type"})
