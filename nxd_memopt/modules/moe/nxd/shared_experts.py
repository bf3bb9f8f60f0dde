"""Shared experts with neuronx-distributed's name: a gated MLP that every token passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.modules.moe.nxd.expert_mlps import ACT2FN
from nxd_memopt.options import require_one_of
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear


class SharedExperts(nn.Module):
    """``down_proj(act(gate_proj(x)) * up_proj(x))`` of n shared experts as one MLP of n times their width.

    The output is a partial sum over the tensor-parallel ranks, and the gradient of the input is summed
    over them.

    Args:
        hidden_size: H.
        intermediate_size: width of one shared expert.
        num_shared_experts: n.
        hidden_act: one of ``ACT2FN``.
        dtype: dtype of the weights.
        tensor_model_parallel_group: ranks that share the weights.
        reduce_dtype: dtype of the sum of the input's gradient.
        fused_gate_up_projection: one weight ``gate_up_proj``, the gate's rows before up's rows.
        sequence_parallel_enabled: False; weights are sharded, also if the layer has sequence parallelism.
        transpose_weights: False; it is for inference.

    Raises:
        ValueError: an option that is for inference, or an unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_shared_experts: int,
        hidden_act: str,
        dtype: torch.dtype = torch.float32,
        tensor_model_parallel_group: ProcessGroup | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        fused_gate_up_projection: bool = False,
        sequence_parallel_enabled: bool = False,
        transpose_weights: bool = False,
    ) -> None:
        super().__init__()
        require_one_of("hidden_act", hidden_act, tuple(ACT2FN))
        if sequence_parallel_enabled or transpose_weights:
            raise ValueError(
                f"sequence_parallel_enabled {sequence_parallel_enabled} and transpose_weights {transpose_weights} of "
                "SharedExperts are for inference: leave them out"
            )
        width = intermediate_size * num_shared_experts
        options: dict[str, Any] = {
            "bias": False,
            "dtype": dtype,
            "tensor_model_parallel_group": tensor_model_parallel_group,
            "reduce_dtype": torch.promote_types(reduce_dtype, dtype),
        }
        self.act_fn = ACT2FN[hidden_act]
        self.fused_gate_up_projection = fused_gate_up_projection
        if fused_gate_up_projection:
            self.gate_up_proj = ColumnParallelLinear(hidden_size, 2 * width, gather_output=False, stride=2, **options)
        else:
            self.gate_proj = ColumnParallelLinear(hidden_size, width, gather_output=False, **options)
            self.up_proj = ColumnParallelLinear(hidden_size, width, gather_output=False, **options)
        self.down_proj = RowParallelLinear(width, hidden_size, input_is_parallel=True, reduce_output=False, **options)

    def forward(self, x: Tensor, seq_len: int | None = None) -> Tensor:
        """Return the partial sum for ``x``, ``[..., H]``, which all tensor-parallel ranks have."""
        del seq_len
        if self.fused_gate_up_projection:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(gate) * up)
