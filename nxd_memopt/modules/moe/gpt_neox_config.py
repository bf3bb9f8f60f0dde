"""The config of GPT-NeoX with experts, which transformers does not have."""

from __future__ import annotations

from transformers import GPTNeoXConfig


class GPTNeoXMoEConfig(GPTNeoXConfig):
    """``GPTNeoXConfig`` with Mixtral's options of experts.

    Args:
        num_local_experts: E, experts of each layer; their width is ``intermediate_size``.
        num_experts_per_tok: k, experts of a token.
        output_router_logits: train transformers' balancing loss, if no options of the caller say otherwise.
        router_aux_loss_coef: coefficient of that loss.
    """

    model_type = "gpt_neox_moe"
    attribute_map = {"num_experts": "num_local_experts"}  # noqa: RUF012 - transformers declares it so

    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
