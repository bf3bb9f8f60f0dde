"""The fused query, key and value projection with replicated KV heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from nxd_memopt.config import require_divisible
from nxd_memopt.ops.parts import split_sizes
from nxd_memopt.parallel_layers import mappings, parallel_state
from nxd_memopt.parallel_layers.functional.linear import ColumnActivationSharding
from nxd_memopt.parallel_layers.initialization import (
    InitMethod,
    default_bias_init,
    default_weight_init,
    initialize_sharded_,
)
from nxd_memopt.parallel_layers.layers import column_parallel, columns_in_full_order
from nxd_memopt.parallel_layers.utils import (
    ShardBlock,
    ShardedModule,
    padded_size,
    set_tensor_model_parallel_attributes,
)


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

    Weights ``weight_q``, ``weight_k``, ``weight_v`` (and ``bias_*``), each sharded along its outputs; with ``fuse_qkv``
    one ``weight_qkv`` whose rows on each rank are that rank's query, key and value rows.

    With ``kv_size_multiplier`` m above 1, m ranks hold the same KV shard, and its gradients are summed over them: m
    consecutive ranks, or on trn1 ranks T/m apart, ``rank_stride`` (``parallel_layers.rank_order``). A rank's query rows
    are those of the heads that attend to its KV shard, so a row-parallel output projection of the local heads has its
    columns in the same order: build it with the same ``rank_stride`` (``output_projection`` finds it otherwise).

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
        keep_master_weight: keep the full initial weights as ``master_weight_q`` ..., or ``master_weight_qkv``.
        fuse_qkv: one parameter instead of three; the same numbers.

    Returns (forward):
        ``(q, k, v)``, each ``[..., size per rank]``; sequence whole.
    """

    weight_qkv: nn.Parameter
    bias_qkv: nn.Parameter | None

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
        *,
        keep_master_weight: bool = False,
        fuse_qkv: bool = False,
    ) -> None:
        super().__init__()
        if gather_output and sequence_parallel_enabled:
            raise ValueError("gather_output=True contradicts sequence_parallel_enabled=True: pass gather_output=False")
        self.input_size, self.gather_output, self.kv_size_multiplier = input_size, gather_output, kv_size_multiplier
        self.init_method, self.keep_master_weight, self.fuse_qkv = init_method, keep_master_weight, fuse_qkv
        size = parallel_state.get_tensor_model_parallel_size()
        require_divisible("tensor_model_parallel_size", size, "kv_size_multiplier", kv_size_multiplier)
        self.query_size, self.rank_stride = output_sizes[0], parallel_state.kv_rank_stride(kv_size_multiplier)
        query, kv = _block(output_sizes[0], size, 1), _block(output_sizes[1], size, kv_size_multiplier)
        self.blocks = {"qkv": (query, kv, kv)} if fuse_qkv else {"q": (query,), "k": (kv,), "v": (kv,)}
        for name, blocks in self.blocks.items():
            rows = sum(block.rows for block in blocks)
            weight = nn.Parameter(torch.empty(rows, input_size, dtype=dtype, device=device))
            self.register_parameter(f"weight_{name}", weight)
            self.register_parameter(
                f"bias_{name}", nn.Parameter(torch.empty(rows, dtype=dtype, device=device)) if bias else None
            )
            for param in self._parameters_of(name):
                _describe(param, blocks, self.rank_stride)
        self.replica_group = parallel_state.replica_group(kv_size_multiplier, self.rank_stride)
        self.activation_sharding = ColumnActivationSharding(
            mappings.resolve_group(None),
            0 if sequence_parallel_enabled else None,
            reduce_dtype,
            (None, self.replica_group, self.replica_group),
        )
        self.initialize_weight_biases()

    def _parameters_of(self, name: str) -> list[nn.Parameter]:
        candidates = (getattr(self, f"weight_{name}"), getattr(self, f"bias_{name}"))
        return [param for param in candidates if param is not None]

    def initialize_weight_biases(self) -> None:
        """Draw the parameters anew, on the CPU; every tensor-parallel rank calls it, in the same order of layers."""
        init_method = self.init_method or default_weight_init
        full: dict[str, list[Tensor | None]] = {name: [] for name in self.blocks}
        for name, part, bias in self._parts():  # weight, then bias, of query, key and value in turn
            full[name].append(initialize_sharded_(part, init_method, keep_full=self.keep_master_weight))
            if bias is not None:
                initialize_sharded_(bias, default_bias_init(self.input_size))
        for name, weights in full.items():
            kept = [weight for weight in weights if weight is not None]
            setattr(self, f"master_weight_{name}", torch.cat(kept) if kept else None)

    def _parts(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Views of query's, key's and value's own rows, each described as the shard that it is."""
        for name, blocks in self.blocks.items():
            rows = [block.rows for block in blocks]
            split = [split_sizes(param.detach(), rows) for param in self._parameters_of(name)]
            for block, *views in zip(blocks, *split, strict=True):
                for view in views:
                    _describe(view, (block,), self.rank_stride)
                yield name, views[0], views[1] if len(views) > 1 else None

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self._project_fused(input) if self.fuse_qkv else self._project(input)
        if not self.gather_output:
            return query, key, value
        return (
            self._gather(query),
            self._gather(key, self.kv_size_multiplier),
            self._gather(value, self.kv_size_multiplier),
        )

    def _project(self, input: Tensor) -> tuple[Tensor, ...]:
        parameters = [(getattr(self, f"weight_{n}"), getattr(self, f"bias_{n}")) for n in "qkv"]
        return column_parallel(input, parameters, self.activation_sharding)

    def _project_fused(self, input: Tensor) -> tuple[Tensor, ...]:
        """One matmul; three where the gradients of key and value are summed over their replicas."""
        rows = [block.rows for block in self.blocks["qkv"]]
        weight, bias = self.weight_qkv, self.bias_qkv
        if self.replica_group is None:
            activation_sharding = replace(self.activation_sharding, replica_groups=(None,))
            (output,) = column_parallel(input, [(weight, bias)], activation_sharding)
            return split_sizes(output, rows, dim=-1)
        biases: Sequence[Tensor | None] = [None] * 3 if bias is None else split_sizes(bias, rows)
        parts: list[tuple[Tensor, Tensor | None]] = list(zip(split_sizes(weight, rows), biases, strict=True))
        return column_parallel(input, parts, self.activation_sharding)

    def _gather(self, output: Tensor, replicas: int = 1) -> Tensor:
        """All ranks' columns in the full weight's order; of each group of replicas the first."""
        gathered = mappings.gather_from_tensor_model_parallel_region(output, self.activation_sharding.group)
        size = parallel_state.get_tensor_model_parallel_size()
        return columns_in_full_order(gathered, size, replicas=replicas, rank_stride=self.rank_stride)


def _block(output_size: int, size: int, replicas: int) -> ShardBlock:
    partitions = size // replicas
    remedy = f"use {padded_size(output_size, partitions)}"
    rows = require_divisible("output_size", output_size, "tensor_model_parallel_size", partitions, remedy)
    return ShardBlock(output_size, rows, replicas)


def _describe(param: Tensor, blocks: tuple[ShardBlock, ...], rank_stride: int) -> None:
    full_shape = (sum(block.full_rows for block in blocks), *param.shape[1:])
    replicas = blocks[0].replicas if len(blocks) == 1 else 1
    set_tensor_model_parallel_attributes(
        param, True, 0, full_shape=full_shape, replicas=replicas, rank_stride=rank_stride
    )
    if len(blocks) > 1:
        param.blocks = blocks  # pyright: ignore[reportAttributeAccessIssue]
