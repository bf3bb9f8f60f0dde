"""Options of mixture-of-experts layers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

from nxd_memopt.options import NEW_RUN, Resume, check_options, option

LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "hf_aux_loss", "sinkhorn"]


@dataclass(frozen=True)
class MoEConfig:
    """Options of mixture-of-experts layers. Names and defaults follow Megatron and NeMo.

    Args:
        num_moe_experts: E, experts of a layer.
        moe_router_topk: k, experts of a token.
        moe_router_load_balancing_type: ``"aux_loss"`` balances the tokens of each micro-batch of a
            data-parallel rank (arXiv:2101.03961), ``"seq_aux_loss"`` of each sequence,
            ``"global_aux_loss"`` of all data-parallel ranks; ``"hf_aux_loss"`` is the loss of
            transformers' models, over all layers together; ``"sinkhorn"`` assigns tokens evenly
            without a loss; ``"none"`` does neither.
        moe_aux_loss_coeff: factor of the balancing loss; 0 computes none.
        moe_z_loss_coeff: factor of the mean squared log-sum-exp of the router's logits
            (arXiv:2202.08906), or None.
        moe_input_jitter_eps: in training, multiply the router's input by numbers from
            ``[1 - eps, 1 + eps]``; the experts' input is unchanged. None for none.
        moe_token_dispatcher_type: how tokens reach the experts of other ranks: ``"allgather"`` or
            ``"alltoall"``.
        moe_per_layer_logging: report the losses of each layer in addition to their sums.
        moe_expert_capacity_factor: each expert takes at most ``ceil(tokens * k / E * factor)``
            tokens of a micro-batch; None drops no token.
        moe_pad_expert_input_to_capacity: give each expert exactly that many rows, with zeros where
            it has fewer tokens: shapes do not depend on the routing.
        moe_expert_block_size: give the experts' matmuls blocks of so many rows, each of one expert, as many as the
            tokens fill at most: no token is dropped, and shapes do not depend on the routing. None for exact
            numbers of rows.
        moe_token_drop_policy: which tokens an expert above its capacity keeps: those of the highest
            weight, ``"probs"``, or the first of the micro-batch, ``"position"``.
        moe_layer_freq: ``n`` makes every n-th layer a MoE layer, beginning with the first; a list
            has 1 for each MoE layer and 0 for each dense one.
        moe_router_score_function: ``"softmax"`` or ``"sigmoid"`` (whose weights sum to 1).
        moe_router_pre_softmax: softmax over all experts before the top-k; default over the k chosen
            ones, whose weights then sum to 1.
        moe_router_dtype: dtype of the router's matmul and scores, ``"fp32"`` or ``"fp64"``; None
            multiplies in the dtype of the activations. Scores are fp32 at least.
        moe_router_bias_update_rate: above 0: choose experts by score plus a bias that balances the load without a
            loss (arXiv:2408.15664); this is the step of the bias, per optimizer step. Needs the sigmoid score
            function.
        moe_shared_expert_intermediate_size: width of an MLP that all tokens pass in addition, all
            shared experts together, or None.
        moe_shared_expert_gate: multiply the output of that MLP by a sigmoid of the token, as Qwen2-MoE.
        moe_ffn_hidden_size: width of an expert; None takes the width of the dense MLP.
    """

    # The shape of the weights, which a checkpoint cannot change. Other options change the results, but for
    # where they are computed and what is reported.
    num_moe_experts: int = option(resume=Resume.REFUSED, remedy=NEW_RUN, minimum=1)
    moe_router_topk: int = option(2, resume=Resume.REFUSED, remedy=NEW_RUN, minimum=1)
    moe_router_load_balancing_type: LoadBalancing = option("aux_loss", resume=Resume.WHEN_ASKED)
    moe_aux_loss_coeff: float = option(0.0, resume=Resume.WHEN_ASKED, minimum=0)
    moe_z_loss_coeff: float | None = option(None, resume=Resume.WHEN_ASKED, minimum=0)
    moe_input_jitter_eps: float | None = option(None, resume=Resume.WHEN_ASKED, minimum=0)
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = option("allgather", resume=Resume.REPORTED)
    moe_per_layer_logging: bool = option(False, resume=Resume.REPORTED)
    moe_expert_capacity_factor: float | None = option(None, resume=Resume.WHEN_ASKED, above=0)
    moe_pad_expert_input_to_capacity: bool = option(False, resume=Resume.WHEN_ASKED)
    moe_expert_block_size: int | None = option(None, resume=Resume.WHEN_ASKED, minimum=1)
    moe_token_drop_policy: Literal["probs", "position"] = option("probs", resume=Resume.WHEN_ASKED)
    moe_layer_freq: int | tuple[int, ...] = option(1, resume=Resume.REFUSED, remedy=NEW_RUN, minimum=1)
    moe_router_score_function: Literal["softmax", "sigmoid"] = option("softmax", resume=Resume.WHEN_ASKED)
    moe_router_pre_softmax: bool = option(False, resume=Resume.WHEN_ASKED)
    moe_router_dtype: Literal["fp32", "fp64"] | None = option(None, resume=Resume.WHEN_ASKED)
    moe_router_bias_update_rate: float = option(0.0, resume=Resume.WHEN_ASKED, minimum=0)
    moe_shared_expert_intermediate_size: int | None = option(None, resume=Resume.REFUSED, remedy=NEW_RUN, minimum=1)
    moe_shared_expert_gate: bool = option(False, resume=Resume.REFUSED, remedy=NEW_RUN)
    moe_ffn_hidden_size: int | None = option(None, resume=Resume.REFUSED, remedy=NEW_RUN, minimum=1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.moe_router_topk > self.num_moe_experts:
            raise ValueError(
                f"moe_router_topk {self.moe_router_topk} exceeds num_moe_experts {self.num_moe_experts}: "
                "a token takes each expert at most once; lower it"
            )
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            raise ValueError(
                "moe_shared_expert_gate=True needs moe_shared_expert_intermediate_size, got None: set it, or leave the "
                "gate out"
            )
        self._check_losses()
        self._check_router()
        self._check_capacity()
        self._check_layer_freq()
        self._warn_of_untrained_routers()

    def is_moe_layer(self, num_layers: int) -> tuple[bool, ...]:
        """Return for each of ``num_layers`` decoder layers whether it is a MoE layer.

        Raises:
            ValueError: ``moe_layer_freq`` is a list of another length.
        """
        frequency = self.moe_layer_freq
        if isinstance(frequency, int):
            return tuple(index % frequency == 0 for index in range(num_layers))
        if len(frequency) != num_layers:
            raise ValueError(
                f"moe_layer_freq lists {len(frequency)} layers and the model has {num_layers}: "
                "give one number for each layer"
            )
        return tuple(number == 1 for number in frequency)

    @property
    def has_expert_bias(self) -> bool:
        """Whether experts are chosen by score plus a bias that balances the load."""
        return self.moe_router_bias_update_rate > 0

    @property
    def has_aux_loss(self) -> bool:
        """Whether a load-balancing loss is computed."""
        return self.moe_aux_loss_coeff > 0

    @property
    def has_router_loss(self) -> bool:
        """Whether a loss of the routers is computed, for balance or of the logits' size."""
        return self.has_aux_loss or bool(self.moe_z_loss_coeff)

    def _check_losses(self) -> None:
        eps = self.moe_input_jitter_eps
        if eps is not None and eps >= 1:
            raise ValueError(f"moe_input_jitter_eps {eps} must be below 1: the input would change its sign")
        kind = self.moe_router_load_balancing_type
        if kind in ("none", "sinkhorn") and self.has_aux_loss:
            raise ValueError(
                f"moe_aux_loss_coeff {self.moe_aux_loss_coeff} needs a balancing loss, and "
                f"moe_router_load_balancing_type is {kind!r}: use 'aux_loss', or leave the coefficient out"
            )

    def _check_router(self) -> None:
        is_softmax = self.moe_router_score_function == "softmax"
        is_sinkhorn = self.moe_router_load_balancing_type == "sinkhorn"
        if self.moe_router_pre_softmax and not is_softmax:
            raise ValueError("moe_router_pre_softmax=True needs moe_router_score_function 'softmax', got 'sigmoid'")
        if self.has_expert_bias and is_softmax:
            raise ValueError(
                f"moe_router_bias_update_rate {self.moe_router_bias_update_rate} needs moe_router_score_function "
                "'sigmoid', got 'softmax': set it, or balance the load by moe_router_load_balancing_type 'aux_loss'"
            )
        # Sinkhorn chooses the experts from the logits, and weighs them by a fixed rule.
        if is_sinkhorn and (not is_softmax or self.moe_router_pre_softmax):
            raise ValueError(
                "moe_router_load_balancing_type 'sinkhorn' has weights of its own: leave "
                "moe_router_score_function and moe_router_pre_softmax out"
            )
        if self.moe_router_load_balancing_type == "hf_aux_loss" and not is_softmax:
            raise ValueError(
                "moe_router_load_balancing_type 'hf_aux_loss' needs moe_router_score_function 'softmax', got "
                "'sigmoid': use 'seq_aux_loss', or leave the score function out"
            )

    def _warn_of_untrained_routers(self) -> None:
        weighs_one = self.moe_router_topk == 1 and self.moe_router_score_function == "softmax"
        is_sinkhorn = self.moe_router_load_balancing_type == "sinkhorn"
        if weighs_one and not (self.moe_router_pre_softmax or is_sinkhorn or self.has_router_loss):
            warnings.warn(
                "the routers are not trained: a softmax over the one expert of a token is 1, whatever the scores "
                "(moe_router_topk 1), and no loss of the routers is set: set moe_aux_loss_coeff or moe_z_loss_coeff",
                stacklevel=3,
            )

    def _check_capacity(self) -> None:
        factor = self.moe_expert_capacity_factor
        if factor is None and self.moe_pad_expert_input_to_capacity:
            raise ValueError(
                "moe_pad_expert_input_to_capacity=True needs moe_expert_capacity_factor, got None: set it, or "
                "leave padding out"
            )
        if factor is not None and self.moe_expert_block_size is not None:
            raise ValueError(
                f"moe_expert_block_size {self.moe_expert_block_size} drops no token, and moe_expert_capacity_factor is "
                f"{factor!r}: leave one out"
            )
        if factor is None and self.moe_token_drop_policy != MoEConfig.moe_token_drop_policy:
            raise ValueError(
                f"moe_token_drop_policy {self.moe_token_drop_policy!r} chooses which tokens are dropped, and "
                "moe_expert_capacity_factor is None, which drops none: set the factor, or leave the policy out"
            )

    def _check_layer_freq(self) -> None:
        frequency = self.moe_layer_freq
        if isinstance(frequency, int):
            return
        if any(number not in (0, 1) for number in frequency) or 1 not in frequency:
            raise ValueError(f"moe_layer_freq must have 0 for dense layers and 1 for MoE layers, got {list(frequency)}")
