"""The experts' gated MLPs: weights of all experts of a rank in one tensor, sharded two ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.config import require_divisible
from nxd_memopt.modules.moe.assignment import Assignment, add_rows, take_rows
from nxd_memopt.modules.moe.expert_weights import expert_weight
from nxd_memopt.ops.activation import ACTIVATIONS, gated_activation
from nxd_memopt.ops.autograd import cast_if_autocast_enabled
from nxd_memopt.ops.block_linear import block_linear
from nxd_memopt.ops.cuda import experts as cuda
from nxd_memopt.ops.fp8 import Fp8Recipe
from nxd_memopt.ops.fp8_experts import fp8_routed_experts
from nxd_memopt.ops.grouped_linear import grouped_linear
from nxd_memopt.options import require_one_of
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.initialization import InitMethod
from nxd_memopt.parallel_layers.utils import ShardedModule

WeightFactory = Callable[[tuple[int, ...], int, int, InitMethod], nn.Parameter]


def linear_of_rows(counts: Tensor | None, block_experts: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the linear layer of rows that are sorted by expert, in blocks or by counts; see ``Experts.forward``."""
    if block_experts is not None:
        return partial(block_linear, block_experts=block_experts)
    return partial(grouped_linear, counts=counts)


class Experts(ShardedModule):
    """E gated MLPs ``down_e(act(gate_e(x)) * up_e(x))`` with Hugging Face's names and layout.

    ``gate_up_proj`` is ``[E, 2 F, H]``, the gate's rows before up's rows, and ``down_proj`` is
    ``[E, H, F]``. Expert-parallel ranks have consecutive experts, and tensor-parallel ranks the same
    columns of each: ``gate_up_proj`` is ``[E/EP, 2 F/T, H]`` here, and the output a partial sum over
    the tensor-parallel ranks. There is no communication in this module.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: F.
        hidden_act: one of ``ops.activation.ACTIVATIONS``.
        init_method: initializes the weight of one expert in place.
        use_cpu_initialization: draw full weights on the CPU, equal for every T and EP. False draws
            shards on the device.
        dtype: dtype of the weights.
        device: device of the weights; ``"meta"`` skips the initialization.

    Raises:
        ValueError: EP does not divide E, or T does not divide F.
    """

    has_biases = False
    fp8: Fp8Recipe | None = None  # set by modules.fp8.use_fp8

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
        self.hidden_act = hidden_act
        self.num_experts = num_experts
        require_divisible("num_moe_experts", num_experts, "expert_model_parallel_size", expert_size)
        require_divisible("moe_ffn_hidden_size", intermediate_size, "tensor_model_parallel_size", tensor_size)
        weight = partial(expert_weight, on_cpu=use_cpu_initialization, dtype=dtype, device=device)
        self._add_weights(hidden_size, intermediate_size, weight, init_method)

    def _add_weights(self, hidden_size: int, width: int, weight: WeightFactory, init_method: InitMethod) -> None:
        """Create the parameters; ``weight`` is ``expert_weight`` with all options but the method."""
        require_one_of("hidden_act", self.hidden_act, tuple(ACTIVATIONS))
        self.gate_up_proj = weight((self.num_experts, 2 * width, hidden_size), 0, 2, init_method)
        self.down_proj = weight((self.num_experts, hidden_size, width), 1, 1, init_method)

    def routed(self, x: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
        """Return this rank's partial sum of each token's weighted outputs, ``[N, H]``.

        Args:
            x: ``[N, H]``.
            weights: ``[N, k]``, weights of the choices.
            assignment: rows of this rank's experts.

        With ``fp8`` the operands of the matmuls are rounded in training, on all devices.

        On GPUs the rows are gathered and added up by the kernels, which read nothing on the host. A recording keeps
        the rest of the assignment, which the kernels skip: its activations have room for all choices.
        """
        # Under autocast all matmuls have its dtype, and so have the sums.
        (x,) = cast("tuple[Tensor]", cast_if_autocast_enabled(x))
        for_kernels = None if assignment.offsets is None else self._weights_for_kernels(x)
        if for_kernels is None or not backend.is_recording:
            assignment = assignment.without_rest()
        # No row at all: a rank whose experts no token has chosen.
        if assignment.offsets is not None and assignment.choices.numel() > 0:
            rows = (x, weights, assignment.choices, assignment.offsets)
            if self.fp8 is not None and self.training:
                both = for_kernels or self._weights(x.dtype)
                return fp8_routed_experts(*rows, *both, self.hidden_act, self.fp8)
            if for_kernels is not None:
                return cuda.routed_experts(*rows, *for_kernels, self.hidden_act)
        outputs = self(take_rows(x, assignment, weights.size(1)), assignment.counts, assignment.block_experts)
        return add_rows(outputs, weights, assignment, x.size(0), masks_padding=self.has_biases)

    def _weights_for_kernels(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return both weights if kernels of this device compute these experts, otherwise None."""
        gate_up, down = self._weights(x.dtype)
        return (gate_up, down) if cuda.can_use_kernels(x, gate_up, down, self.hidden_act) else None

    def forward(self, rows: Tensor, counts: Tensor | None, block_experts: Tensor | None = None) -> Tensor:
        """Return this rank's partial sum of the outputs of its experts, ``[R, H]``.

        Args:
            rows: ``[R, H]``, the inputs of the first expert of this rank, then of the next.
            counts: ``[E/EP]``, rows of each expert; None if all have R / (E/EP).
            block_experts: ``[blocks]``, the expert of each of equally long blocks of rows; None without blocks.
        """
        gate_up, down = self._weights(rows.dtype)
        linear = linear_of_rows(counts, block_experts)
        gate, up = linear(rows, gate_up).chunk(2, dim=-1)  # [R, F/T]
        return linear(gated_activation(gate, up, self.hidden_act), down)

    def _weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.gate_up_proj.to(dtype), self.down_proj.to(dtype)
