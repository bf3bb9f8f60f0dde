"""Owns the joint query, key and value projection with replicated KV heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nxd_memopt.config import require_divisible
from nxd_memopt.parallel_layers import mappings, parallel_state
from nxd_memopt.parallel_layers.initialization import InitMethod
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, column_parallel
from nxd_memopt.parallel_layers.utils import ShardedModule


def kv_size_multiplier(num_key_value_heads: int, tensor_model_parallel_size: int) -> int:
    """How many ranks share each KV head: 1 while T divides g, else T/g.

    Raises:
        ValueError: when neither of the two divides the other.
    """
    heads, size = num_key_value_heads, tensor_model_parallel_size
    if heads % size == 0:
        return 1
    remedy = f"use a tensor_model_parallel_size that divides {heads} or is a multiple of it"
    if size > heads:
        return require_divisible("tensor_model_parallel_size", size, "num_key_value_heads", heads, remedy)
    return require_divisible("num_key_value_heads", heads, "tensor_model_parallel_size", size, remedy)


class GQAQKVColumnParallelLinear(ShardedModule):
    """Query, key and value projections of one input with one gather, and one reduction of its gradient.

    Weights ``weight_q``, ``weight_k``, ``weight_v`` (and ``bias_*``), each sharded along its outputs. With
    ``kv_size_multiplier`` m above 1, m adjacent ranks hold the same KV shard, and its gradients are summed over them.

    Args:
        input_size: H.
        output_sizes: ``[query size h*d, key size g*d]``; value is as wide as key.
        bias: add biases.
        gather_output: return all columns on every rank, each KV column once.
        dtype: of the parameters.
        device: of the parameters.
        init_method: fills each full weight in place.
        sequence_parallel_enabled: the input is ``[s, B, H]``.
        kv_size_multiplier: ranks per KV shard; T/g when T exceeds g.
        reduce_dtype: of the input gradient's reduction.

    Returns (forward):
        ``(q, k, v)``, each ``[..., size per rank]``; sequence whole.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        kv_size_multiplier: int = 1,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        query_size, kv_size = output_sizes
        size = parallel_state.get_tensor_model_parallel_size()
        require_divisible("tensor_model_parallel_size", size, "kv_size_multiplier", kv_size_multiplier)
        self.gather_output, self.kv_size_multiplier = gather_output, kv_size_multiplier
        sizes = {"q": (query_size, 1), "k": (kv_size, kv_size_multiplier), "v": (kv_size, kv_size_multiplier)}
        for name, (output_size, replicas) in sizes.items():
            layer = ColumnParallelLinear(
                input_size,
                output_size,
                bias,
                gather_output=gather_output,
                dtype=dtype,
                device=device,
                init_method=init_method,
                sequence_parallel_enabled=sequence_parallel_enabled,
                reduce_dtype=reduce_dtype,
                replicas=replicas,
            )
            self.register_parameter(f"weight_{name}", layer.weight)
            self.register_parameter(f"bias_{name}", layer.bias)
            self.communication = layer.communication(None, layer.replica_group, layer.replica_group)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parameters = [(getattr(self, f"weight_{n}"), getattr(self, f"bias_{n}")) for n in "qkv"]
        query, key, value = column_parallel(input, parameters, self.communication)
        if not self.gather_output:
            return query, key, value
        return (
            self._gather(query),
            self._gather(key, self.kv_size_multiplier),
            self._gather(value, self.kv_size_multiplier),
        )

    def _gather(self, output: Tensor, replicas: int = 1) -> Tensor:
        """All ranks' columns; of each group of replicas the first."""
        gathered = mappings.gather_from_tensor_model_parallel_region(output, self.communication.group)
        return gathered.unflatten(-1, (-1, replicas, output.size(-1)))[..., 0, :].flatten(-2)
