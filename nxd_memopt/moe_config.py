"""Options of mixture-of-experts layers."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal, cast

from nxd_memopt.config import require_one_of, require_positive_integer

MOE_LOAD_BALANCING_TYPES = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "hf_aux_loss", "sinkhorn")
MOE_DISPATCHERS = ("allgather", "alltoall")
MOE_DROP_POLICIES = ("probs", "position")
MOE_SCORE_FUNCTIONS = ("softmax", "sigmoid")
MOE_ROUTER_DTYPES = (None, "fp32", "fp64")

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
        moe_token_dropping: None follows ``moe_expert_capacity_factor``; True or False must agree
            with it.
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
        moe_layer_recompute: recompute the MoE layer, router included, in backward.
        moe_layer_freq: ``n`` makes every n-th layer a MoE layer, beginning with the first; a list
            has 1 for each MoE layer and 0 for each dense one.
        moe_router_score_function: ``"softmax"`` or ``"sigmoid"`` (whose weights sum to 1).
        moe_router_pre_softmax: softmax over all experts before the top-k; default over the k chosen
            ones, whose weights then sum to 1.
        moe_router_dtype: dtype of the router's matmul and scores, ``"fp32"`` or ``"fp64"``; None
            multiplies in the dtype of the activations. Scores are fp32 at least.
        moe_router_enable_expert_bias: choose experts by score plus a bias that balances the load
            without a loss (arXiv:2408.15664). Needs the sigmoid score function.
        moe_router_bias_update_rate: step of that bias, per optimizer step.
        moe_shared_expert_intermediate_size: width of an MLP that all tokens pass in addition, all
            shared experts together, or None.
        moe_shared_expert_gate: multiply the output of that MLP by a sigmoid of the token, as Qwen2-MoE.
        moe_ffn_hidden_size: width of an expert; None takes the width of the dense MLP.
    """

    num_moe_experts: int
    moe_router_topk: int = 2
    moe_router_load_balancing_type: LoadBalancing = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_input_jitter_eps: float | None = None
    moe_token_dropping: bool | None = None
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"
    moe_per_layer_logging: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_expert_block_size: int | None = None
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    moe_layer_recompute: bool = False
    moe_layer_freq: int | tuple[int, ...] = 1
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_ffn_hidden_size: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        require_one_of("moe_token_dispatcher_type", self.moe_token_dispatcher_type, MOE_DISPATCHERS)
        require_one_of("moe_token_drop_policy", self.moe_token_drop_policy, MOE_DROP_POLICIES)
        require_one_of("moe_router_score_function", self.moe_router_score_function, MOE_SCORE_FUNCTIONS)
        require_one_of("moe_router_dtype", self.moe_router_dtype, MOE_ROUTER_DTYPES)
        kind = self.moe_router_load_balancing_type
        require_one_of("moe_router_load_balancing_type", kind, MOE_LOAD_BALANCING_TYPES)
        if self.moe_router_topk > self.num_moe_experts:
            raise ValueError(
                f"moe_router_topk {self.moe_router_topk} exceeds num_moe_experts {self.num_moe_experts}: "
                "a token takes each expert at most once; lower it"
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
    def has_aux_loss(self) -> bool:
        """Whether a load-balancing loss is computed."""
        return self.moe_aux_loss_coeff > 0

    @property
    def has_router_loss(self) -> bool:
        """Whether a loss of the routers is computed, for balance or of the logits' size."""
        return self.has_aux_loss or bool(self.moe_z_loss_coeff)

    def _check_types(self) -> None:
        require_positive_integer("num_moe_experts", self.num_moe_experts)
        require_positive_integer("moe_router_topk", self.moe_router_topk)
        for name in ("moe_shared_expert_intermediate_size", "moe_ffn_hidden_size", "moe_expert_block_size"):
            if getattr(self, name) is not None:
                require_positive_integer(name, getattr(self, name))
        for name in _MOE_SWITCHES:
            value = getattr(self, name)
            if type(value) is not bool and not (value is None and name == "moe_token_dropping"):
                raise ValueError(f"{name} must be true or false, got {value!r}")
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            raise ValueError(
                "moe_shared_expert_gate=True needs moe_shared_expert_intermediate_size, got None: set it, or leave the "
                "gate out"
            )

    def _check_losses(self) -> None:
        _require_at_least_0("moe_aux_loss_coeff", self.moe_aux_loss_coeff)
        _require_at_least_0("moe_router_bias_update_rate", self.moe_router_bias_update_rate)
        if self.moe_z_loss_coeff is not None:
            _require_at_least_0("moe_z_loss_coeff", self.moe_z_loss_coeff)
        eps = self.moe_input_jitter_eps
        if eps is not None:
            _require_at_least_0("moe_input_jitter_eps", eps)
            if eps >= 1:
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
        if self.moe_router_enable_expert_bias and is_softmax:
            raise ValueError(
                "moe_router_enable_expert_bias=True needs moe_router_score_function 'sigmoid', got 'softmax': "
                "set it, or balance the load by moe_router_load_balancing_type 'aux_loss'"
            )
        rate = self.moe_router_bias_update_rate
        if rate != MoEConfig.moe_router_bias_update_rate and not self.moe_router_enable_expert_bias:
            raise ValueError(
                f"moe_router_bias_update_rate {rate} is the step of a bias, and moe_router_enable_expert_bias is "
                "False: set it, or leave the rate out"
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
        if factor is None:
            if self.moe_pad_expert_input_to_capacity:
                raise ValueError(
                    "moe_pad_expert_input_to_capacity=True needs moe_expert_capacity_factor, got None: set it, or "
                    "leave padding out"
                )
        elif type(factor) not in (int, float) or not 0 < factor < math.inf:
            raise ValueError(
                f"moe_expert_capacity_factor must be a number above 0, got {factor!r}: leave it out to drop no token"
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
        dropping = self.moe_token_dropping
        if dropping is not None and dropping != (factor is not None):
            raise ValueError(
                f"moe_token_dropping {dropping} contradicts moe_expert_capacity_factor {factor!r}: set the factor, "
                "or None for no dropping, and leave the switch out"
            )

    def _check_layer_freq(self) -> None:
        frequency = self.moe_layer_freq
        if type(frequency) is int:
            require_positive_integer("moe_layer_freq", frequency)
            return
        if not isinstance(frequency, (list, tuple)) or any(number not in (0, 1) for number in frequency):
            raise ValueError(f"moe_layer_freq must be an integer or a list of 0 and 1, got {frequency!r}")
        if 1 not in frequency:
            raise ValueError(f"moe_layer_freq {list(frequency)} has no MoE layer: use a dense model")
        object.__setattr__(self, "moe_layer_freq", tuple(int(number) for number in frequency))


_MOE_SWITCHES = (
    "moe_token_dropping",
    "moe_per_layer_logging",
    "moe_pad_expert_input_to_capacity",
    "moe_layer_recompute",
    "moe_router_pre_softmax",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_gate",
)


def _require_at_least_0(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is a finite number of at least 0."""
    if type(value) not in (int, float) or not 0 <= cast(float, value) < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}: 0 switches it off")
