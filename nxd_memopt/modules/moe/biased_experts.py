"""Experts of GPT-NeoX: MLPs with biases and without a gate, the weights of all experts of a rank in one tensor."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.config import require_divisible
from nxd_memopt.modules.moe.experts import Experts, WeightFactory, linear_of_rows
from nxd_memopt.ops.activation import activation
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.initialization import InitMethod


class BiasedExperts(Experts):
    """E MLPs ``dense_4h_to_h_e(act(dense_h_to_4h_e(x)))`` with biases, in the layout of ``Experts``.

    ``dense_h_to_4h`` is ``[E, F, H]`` with a bias ``[E, F]``, ``dense_4h_to_h`` ``[E, H, F]`` with a bias
    ``[E, H]``. Tensor-parallel ranks shard F and, of the second bias, H: each rank adds its H/T
    elements, so that the sum of the partial sums has every element once, and no rank has another
    rank's part of a gradient. There is no communication in this module.

    The arguments are the same as of ``Experts``.

    Raises:
        ValueError: EP does not divide E, or T does not divide F or H.
    """

    has_biases = True

    def _add_weights(self, hidden_size: int, width: int, weight: WeightFactory, init_method: InitMethod) -> None:
        tensor_size = parallel_state.get_tensor_model_parallel_size()
        require_divisible("hidden_size", hidden_size, "tensor_model_parallel_size", tensor_size)
        self.act = activation(self.hidden_act)
        num_experts = self.num_experts
        self.dense_h_to_4h = weight((num_experts, width, hidden_size), 0, 1, init_method)
        self.dense_h_to_4h_bias = weight((num_experts, width), 0, 1, nn.init.zeros_)
        self.dense_4h_to_h = weight((num_experts, hidden_size, width), 1, 1, init_method)
        self.dense_4h_to_h_bias = weight((num_experts, hidden_size), 0, 1, nn.init.zeros_)
        for parameter in (self.dense_h_to_4h_bias, self.dense_4h_to_h_bias):
            cast(Any, parameter).is_bias = True

    def _weights_for_kernels(self, x: Tensor) -> None:
        del x

    def forward(self, rows: Tensor, counts: Tensor | None, block_experts: Tensor | None = None) -> Tensor:
        """Return this rank's partial sum of the outputs, ``[R, H]``; arguments as in ``Experts.forward``.

        Rows of padding, which are zeros, have outputs other than zero: ``add_rows`` leaves them out.
        """
        linear = linear_of_rows(counts, block_experts)
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
    # The backward of indexing would add them one by one in the dtype of the bias.
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
