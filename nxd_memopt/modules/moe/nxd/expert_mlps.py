"""Experts with neuronx-distributed's names, and its layout of weights, ``[E, in, out]``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nxd_memopt.config import require_divisible
from nxd_memopt.modules.moe.assignment import Assignment, add_rows, take_rows
from nxd_memopt.modules.moe.capacity import queue_positions
from nxd_memopt.modules.moe.dispatcher import Dispatcher
from nxd_memopt.modules.moe.expert_weights import expert_weight
from nxd_memopt.ops.grouped_linear import grouped_linear
from nxd_memopt.options import require_one_of
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.initialization import InitMethod
from nxd_memopt.parallel_layers.utils import ShardedModule

ACT2FN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "sigmoid": F.sigmoid,
    "silu": F.silu,
    "tanh": F.tanh,
}
"""Activation functions by their names in ``hidden_act``."""


class GLUType(Enum):
    """Gated activations: ``act(a g) (u + b)``, and for SWIGLU ``g act(a g) (u + b)``."""

    GLU = "glu"
    SWIGLU = "swiglu"


@dataclass
class RoutedExpertsMLPOpsConfig:
    """Sizes and options of experts. Options are read in every forward pass.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: F, width of an expert.
        top_k: k.
        hidden_act: one of ``ACT2FN``.
        glu_mlp: experts have a gate.
        glu_type: how the gate acts.
        hidden_act_scaling_factor: a, factor of the gate in the activation.
        hidden_act_bias: b, added to up.
        hidden_size_actual, intermediate_size_actual: must be None, as the two options after them: sizes without
            the padding of kernels for inference.
        gate_clamp_upper_limit: largest value of the gate, or None.
        gate_clamp_lower_limit: smallest value of the gate, or None.
        up_clamp_upper_limit: largest value of up, or None.
        up_clamp_lower_limit: smallest value of up, or None.
        normalize_top_k_affinities: divide the affinities of a token's choices that are not dropped by
            their sum.
        input_layer_init_method: initializes the first weight of an expert, ``[H, F]`` or ``[H, 2 F]``.
        output_layer_init_method: initializes the second weight of an expert, ``[F, H]``.
        capacity_factor: in training each expert takes ``ceil(T * k / E * factor)`` of the T tokens, the
            first ones. None, 0, a negative number and E / k or more take all.
        enable_spmd_rank: without effect; no graph depends on the rank.
        use_index_calc_kernel: without effect.
        is_prefill: without effect.
        expert_distribution: must be None.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    hidden_act: str
    glu_mlp: bool
    bias: bool = False
    glu_type: GLUType = GLUType.GLU
    hidden_act_scaling_factor: float = 1.0
    hidden_act_bias: float = 0.0
    hidden_size_actual: int | None = None
    intermediate_size_actual: int | None = None
    is_hidden_dim_shuffled: bool | None = None
    is_intermediate_dim_shuffled: bool | None = None
    use_index_calc_kernel: bool = True
    gate_clamp_upper_limit: float | None = None
    gate_clamp_lower_limit: float | None = None
    up_clamp_upper_limit: float | None = None
    up_clamp_lower_limit: float | None = None
    normalize_top_k_affinities: bool = False
    early_expert_affinity_modulation: bool = False
    input_layer_init_method: InitMethod | None = None
    output_layer_init_method: InitMethod | None = None
    capacity_factor: float | None = None
    enable_spmd_rank: bool = False
    is_prefill: bool | None = None
    expert_distribution: Any = None

    def __post_init__(self) -> None:
        require_one_of("hidden_act", self.hidden_act, tuple(ACT2FN))
        if self.capacity_factor is not None and math.isnan(self.capacity_factor):
            raise ValueError("capacity_factor must be a number, got nan: None drops no token")
        if not 0 < self.top_k <= self.num_experts:
            raise ValueError(
                f"Invalid top_k={self.top_k} for num_experts={self.num_experts}: choose 1 to {self.num_experts}"
            )
        if self.top_k == 1 and self.normalize_top_k_affinities:
            raise ValueError(
                "normalize_top_k_affinities=True makes the affinity of one choice, top_k=1, 1: leave it out"
            )
        for name in (
            "bias",
            "early_expert_affinity_modulation",
            "hidden_size_actual",
            "intermediate_size_actual",
            "is_hidden_dim_shuffled",
            "is_intermediate_dim_shuffled",
            "expert_distribution",
        ):
            if getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)} is not supported for experts: leave it out")

    def capacity(self, tokens: int) -> int | None:
        """Return how many of ``tokens`` an expert takes in training; None for all."""
        factor = self.capacity_factor
        if factor is None or factor <= 0 or factor >= self.num_experts / self.top_k:
            return None
        # Rounded as in neuronx-distributed: ``expert_capacity`` divides before it multiplies.
        return min(math.ceil(tokens * self.top_k * factor / self.num_experts), tokens)

    def activate(self, projected: Tensor) -> Tensor:
        """Return the activation ``[..., F]`` of the first layer's output, ``[..., 2 F]`` or ``[..., F]``."""
        act = ACT2FN[self.hidden_act]
        if not self.glu_mlp:
            return act(projected)
        gate, up = projected.chunk(2, dim=-1)
        gate = _clamped(gate, self.gate_clamp_lower_limit, self.gate_clamp_upper_limit)
        up = _clamped(up, self.up_clamp_lower_limit, self.up_clamp_upper_limit) + self.hidden_act_bias
        activated = act(gate * self.hidden_act_scaling_factor) * up
        if GLUType(self.glu_type) is GLUType.SWIGLU:
            activated = activated * gate
        return activated


def _clamped(x: Tensor, lower: float | None, upper: float | None) -> Tensor:
    if lower is None and upper is None:
        return x
    return x.clamp(lower, upper)


class ExpertFusedLinear(ShardedModule):
    """Weight ``[E/EP, in, out]`` of one linear layer of all experts; its bias is None."""

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        dim: int,
        stride: int,
        init_method: InitMethod,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        shape = (num_experts, input_size, output_size)
        self.weight = expert_weight(shape, dim, stride, init_method, on_cpu=True, dtype=dtype, device=device)
        self.register_parameter("bias", None)

    def forward(self, rows: Tensor, counts: Tensor | None) -> Tensor:
        """Return ``rows_e weight[e]``, see ``ops.grouped_linear.grouped_linear``."""
        return grouped_linear(rows, self.weight.to(rows.dtype).transpose(1, 2), counts)


class Experts(nn.Module):
    """``down_proj(activation(gate_up_proj(x)))`` of this rank's experts, or ``up_proj`` without a gate.

    The output is a partial sum over the tensor-parallel ranks.
    """

    has_biases = False

    def __init__(
        self, config: RoutedExpertsMLPOpsConfig, *, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.config = config
        layer = partial(ExpertFusedLinear, config.num_experts, dtype=dtype, device=device)
        first = config.input_layer_init_method or nn.init.kaiming_uniform_
        second = config.output_layer_init_method or nn.init.kaiming_uniform_
        hidden, width = config.hidden_size, config.intermediate_size
        if config.glu_mlp:
            self.gate_up_proj = layer(hidden, 2 * width, dim=1, stride=2, init_method=first)
        else:
            self.up_proj = layer(hidden, width, dim=1, stride=1, init_method=first)
        self.down_proj = layer(width, hidden, dim=0, stride=1, init_method=second)

    def forward(self, hidden_states: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return the outputs of ``hidden_states``.

        Args:
            hidden_states: ``[E/EP, C, H]``, C rows of each expert; with ``counts`` ``[R, H]``, sorted by
                expert.
            counts: ``[E/EP]``, rows of each expert.
        """
        rows = hidden_states
        if counts is None:
            rows = hidden_states.flatten(0, -2)
        first = self.gate_up_proj if self.config.glu_mlp else self.up_proj
        return self.down_proj(self.config.activate(first(rows, counts)), counts).view(hidden_states.shape)

    def routed(self, x: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
        """Return each token's sum of weighted outputs, see ``modules.moe.Experts.routed``."""
        assignment = assignment.without_rest()
        outputs = self(take_rows(x, assignment, weights.size(1)), assignment.counts)
        return add_rows(outputs, weights, assignment, x.size(0))


class ExpertMLPsV2(nn.Module):
    """Routed experts ``mlp_op``, and which tokens they take.

    Under expert parallelism the ranks have different tokens and different experts, and exchange
    tokens by all-to-all. All tokens that a rank passes are counted for the capacity.

    Args:
        routed_experts_mlp_config: sizes and options.
        blockwise_matmul_config: without effect: neuronx-distributed's choice of kernels.
        return_bias: False.
        dtype: dtype of the weights.
        device: device of the weights.

    Raises:
        ValueError: EP does not divide E, or T does not divide F.
    """

    def __init__(
        self,
        routed_experts_mlp_config: RoutedExpertsMLPOpsConfig,
        blockwise_matmul_config: object = None,
        return_bias: bool = False,
        dtype: torch.dtype = torch.float32,
        sequence_parallel_enabled: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        del blockwise_matmul_config
        super().__init__()
        if return_bias:
            raise NotImplementedError("Returning bias is currently unsupported for MoE: leave return_bias out")
        config = routed_experts_mlp_config
        tensor_size = parallel_state.get_tensor_model_parallel_size()
        expert_size = parallel_state.get_expert_model_parallel_size()
        require_divisible("num_experts", config.num_experts, "expert_model_parallel_size", expert_size)
        require_divisible("intermediate_size", config.intermediate_size, "tensor_model_parallel_size", tensor_size)
        self.routed_experts_mlp_config = config
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.return_bias = return_bias
        self.mlp_op = Experts(config, dtype=dtype, device=device)

    def forward(
        self, hidden_states: Tensor, expert_affinities: Tensor, expert_index: Tensor, seq_len: int | None = None
    ) -> Tensor:
        """Return this rank's partial sum over the tensor-parallel ranks, ``[T, H]``.

        Args:
            hidden_states: ``[T, H]``.
            expert_affinities: ``[T, E]``.
            expert_index: ``[T, k]``, the chosen experts.
            seq_len: without effect.
        """
        del seq_len
        config = self.routed_experts_mlp_config
        # Affinities of all E experts come in, as in neuronx-distributed; the k chosen ones weigh the outputs.
        weights = expert_affinities.gather(1, expert_index)
        capacity = config.capacity(hidden_states.size(0)) if self.training else None
        positions = None
        if capacity is not None:
            positions = queue_positions(weights, expert_index, config.num_experts, "position", capacity)
            # Dropped before the sum is taken: the affinities of the other choices then add up to 1.
            weights = weights * (positions < capacity)
        if config.normalize_top_k_affinities:
            weights = F.normalize(weights, p=1.0, dim=1)
        dispatcher = Dispatcher(config.num_experts, "alltoall", capacity, False)
        return dispatcher.run(hidden_states, weights, expert_index, positions, self.mlp_op)


_KERNEL_OPTIONS = (
    "always_augment_inputs_for_blockwise_matmul",
    "block_sharding_strategy",
    "blockwise_nki_autograd_cls",
    "enable_spmd_rank",
    "is_prefill",
    "logical_nc_config",
    "optimized_block_to_token_mapping",
    "parallelize_token_to_block_mapping",
    "skip_dma_token",
    "skip_dma_weight",
    "use_block_parallel",
    "use_index_calc_kernel",
    "use_shard_on_block_dynamic_while",
    "use_shard_on_intermediate_dynamic_while",
    "use_torch_block_wise",
)


class ExpertMLPs(ExpertMLPsV2):
    """``ExpertMLPsV2`` with the options of ``RoutedExpertsMLPOpsConfig`` as arguments.

    ``block_size`` and the names of ``_KERNEL_OPTIONS`` choose between neuronx-distributed's kernels.
    They are accepted and have no effect: no result depends on them.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        glu_mlp: bool,
        capacity_factor: float | None,
        sequence_parallel_enabled: bool = False,
        block_size: int | None = None,
        normalize_top_k_affinities: bool = False,
        bias: bool = False,
        *,
        return_bias: bool = False,
        init_method: InitMethod = nn.init.kaiming_uniform_,
        output_layer_init_method: InitMethod = nn.init.kaiming_uniform_,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        del block_size
        for name in _KERNEL_OPTIONS:
            options.pop(name, None)
        config = RoutedExpertsMLPOpsConfig(
            num_experts,
            hidden_size,
            intermediate_size,
            top_k,
            hidden_act,
            glu_mlp,
            bias=bias,
            normalize_top_k_affinities=normalize_top_k_affinities,
            input_layer_init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            capacity_factor=capacity_factor,
            **options,
        )
        super().__init__(
            config,
            return_bias=return_bias,
            dtype=dtype,
            sequence_parallel_enabled=sequence_parallel_enabled,
            device=device,
        )
