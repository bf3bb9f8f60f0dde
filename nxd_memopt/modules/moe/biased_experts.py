"""Experts of GPT-NeoX: MLPs with biases and without a gate, the weights of all experts of a rank in one tensor."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.config import require_divisible
from nxd_memopt.modules.moe.assignment import Assignment, add_rows, take_rows
from nxd_memopt.modules.moe.expert_weights import expert_weight
from nxd_memopt.ops.activation import activation
from nxd_memopt.ops.autograd import cast_if_autocast_enabled
from nxd_memopt.ops.block_linear import block_linear
from nxd_memopt.ops.grouped_linear import grouped_linear
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.initialization import InitMethod
from nxd_memopt.parallel_layers.utils import ShardedModule


class BiasedExperts(ShardedModule):
    """E MLPs ``dense_4h_to_h_e(act(dense_h_to_4h_e(x)))`` with biases, in the layout of ``Experts``.

    ``dense_h_to_4h`` is ``[E, F, H]`` with a bias ``[E, F]``, ``dense_4h_to_h`` ``[E, H, F]`` with a bias
    ``[E, H]``. Tensor-parallel ranks shard F and, of the second bias, H: each rank adds its H/T
    elements, so that the sum of the partial sums has every element once, and no rank has another
    rank's part of a gradient. There is no communication in this module.

    The arguments are those of ``Experts``.

    Raises:
        ValueError: EP does not divide E, or T does not divide F or H.
    """

    has_biases = True

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        *,
        init_method: InitMethod,
        use_cpu_initialization: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        tensor_size = parallel_state.get_tensor_model_parallel_size()
        expert_size = parallel_state.get_expert_model_parallel_size()
        self.act = activation(hidden_act)
        self.num_experts = num_experts
        require_divisible("num_moe_experts", num_experts, "expert_model_parallel_size", expert_size)
        require_divisible("moe_ffn_hidden_size", intermediate_size, "tensor_model_parallel_size", tensor_size)
        require_divisible("hidden_size", hidden_size, "tensor_model_parallel_size", tensor_size)
        options: dict[str, Any] = {"on_cpu": use_cpu_initialization, "dtype": dtype, "device": device}
        weight = partial(expert_weight, init_method=init_method, **options)
        bias = partial(expert_weight, init_method=nn.init.zeros_, **options)
        self.dense_h_to_4h = weight((num_experts, intermediate_size, hidden_size), 0, 1)
        self.dense_h_to_4h_bias = bias((num_experts, intermediate_size), 0, 1)
        self.dense_4h_to_h = weight((num_experts, hidden_size, intermediate_size), 1, 1)
        self.dense_4h_to_h_bias = bias((num_experts, hidden_size), 0, 1)
        for parameter in (self.dense_h_to_4h_bias, self.dense_4h_to_h_bias):
            cast(Any, parameter).is_bias = True

    def routed(self, x: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
        """Return this rank's partial sum of each token's weighted outputs; arguments as in ``Experts.routed``."""
        (x,) = cast("tuple[Tensor]", cast_if_autocast_enabled(x))
        assignment = assignment.without_rest()
        outputs = self(take_rows(x, assignment, weights.size(1)), assignment.counts, assignment.block_experts)
        return add_rows(outputs, weights, assignment, x.size(0), masks_padding=True)

    def forward(self, rows: Tensor, counts: Tensor | None, block_experts: Tensor | None = None) -> Tensor:
        """Return this rank's partial sum of the outputs, ``[R, H]``; arguments as in ``Experts.forward``.

        Rows of padding, which are zeros, have outputs other than zero: ``add_rows`` leaves them out.
        """
        linear = partial(grouped_linear, counts=counts)
        if block_experts is not None:
            linear = partial(block_linear, block_experts=block_experts)
        expert_of_row = _expert_of_row(rows, self.dense_h_to_4h.size(0), counts, block_experts)
        dtype = rows.dtype
        expanded = linear(rows, self.dense_h_to_4h.to(dtype))  # [R, F/T]
        expanded = expanded + _bias_of_rows(self.dense_h_to_4h_bias.to(dtype), expert_of_row)
        outputs = linear(self.act(expanded), self.dense_4h_to_h.to(dtype))
        return outputs + _bias_of_rows(_in_own_columns(self.dense_4h_to_h_bias).to(dtype), expert_of_row)


def _expert_of_row(rows: Tensor, num_experts: int, counts: Tensor | None, block_experts: Tensor | None) -> Tensor:
    """Return the index of the expert of each row, ``[R]``, without reading counts on the host."""
    if block_experts is not None:
        return block_experts.repeat_interleave(rows.size(0) // block_experts.numel())
    numbers = torch.arange(num_experts, device=rows.device)
    if counts is None:
        return numbers.repeat_interleave(rows.size(0) // num_experts)
    return numbers.repeat_interleave(counts, output_size=rows.size(0))


def _bias_of_rows(bias: Tensor, expert_of_row: Tensor) -> Tensor:
    """Return ``bias[expert]`` of each row, ``[R, columns]``."""
    # A matmul with one 1 in each row: backward adds up the rows of an expert in one matmul, in fp32.
    # That of indexing would add them one by one in the dtype of the bias.
    is_expert = expert_of_row.unsqueeze(1) == torch.arange(bias.size(0), device=bias.device)
    return is_expert.to(bias.dtype) @ bias


def _in_own_columns(shard: Tensor) -> Tensor:
    """Return ``[E, H]`` with the shard ``[E, H/T]`` in this rank's columns and zeros in all other ones."""
    group = parallel_state.get_tensor_model_parallel_group()
    size = backend.group_size(group)
    if size == 1:
        return shard
    # A comparison with the rank, not an index: one graph for all ranks.
    is_own = torch.arange(size, device=shard.device) == backend.group_rank_in_graph(group)
    return torch.where(is_own.view(1, size, 1), shard.unsqueeze(1), 0).flatten(1)
