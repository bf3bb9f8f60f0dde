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
from nxd_memopt.parallel_layers.layers import column_parallel
from nxd_memopt.parallel_layers.rank_order import columns_in_full_order
from nxd_memopt.parallel_layers.utils import (
    ShardBlock,
    ShardedModule,
    padded_size,
    set_tensor_model_parallel_attributes,
)


def kv_size_multiplier(num_key_value_heads: int, tensor_model_parallel_size: int) -> int:
    """Return the number of ranks that share a KV head: 1 if T divides g, else T/g.

    Raises:
        ValueError: neither of T and g divides the other.
    """
    heads = num_key_value_heads
    size = tensor_model_parallel_size
    # T <= g: each rank has g/T complete KV heads. T > g: a head is not split, because all query
    # heads of its group need all of its d columns; T/g ranks hold it instead.
    if heads % size == 0:
        return 1
    remedy = f"use a tensor_model_parallel_size that divides {heads} or is a multiple of it"
    if size > heads:
        return require_divisible("tensor_model_parallel_size", size, "num_key_value_heads", heads, remedy)
    return require_divisible("num_key_value_heads", heads, "tensor_model_parallel_size", size, remedy)


class GQAQKVColumnParallelLinear(ShardedModule):
    """Query, key and value projections with one all-gather of the input and one reduction of dX.

    The weights ``weight_q``, ``weight_k``, ``weight_v`` (and ``bias_*``) are sharded along their
    outputs. With ``fuse_qkv`` there is one ``weight_qkv``, and its rows on each rank are that
    rank's query, key and value rows.

    With ``kv_size_multiplier`` m above 1, m ranks hold the same KV shard, and its gradients are
    summed over them. These are m consecutive ranks, or on trn1 ranks that are T/m apart: see
    ``rank_stride`` in ``parallel_layers.rank_order``. A rank's query rows belong to the heads that
    attend to its KV shard. Build the row-parallel output projection with the same ``rank_stride``,
    so that its columns have the same order (otherwise ``output_projection`` sets it).

    Args:
        input_size: H.
        output_sizes: ``[query size h*d, key size g*d]``; the value size equals the key size.
        bias: add biases.
        gather_output: return all columns on every rank, each KV column once.
        dtype: dtype of the parameters.
        device: device of the parameters.
        init_method: initializes each full weight in place.
        sequence_parallel_enabled: the input is ``[s, B, H]``.
        kv_size_multiplier: number of ranks per KV shard; T/g if T exceeds g.
        reduce_dtype: dtype of the reduction of dX.
        keep_master_weight: keep the full initial weights as ``master_weight_q`` ..., or
            ``master_weight_qkv``.
        fuse_qkv: one parameter instead of three, with the same values.

    Returns (forward):
        ``(q, k, v)``, each ``[..., size per rank]``, with the full sequence.
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
        self.input_size = input_size
        self.gather_output = gather_output
        self.kv_size_multiplier = kv_size_multiplier
        self.init_method = init_method
        self.keep_master_weight = keep_master_weight
        self.fuse_qkv = fuse_qkv
        size = parallel_state.get_tensor_model_parallel_size()
        require_divisible("tensor_model_parallel_size", size, "kv_size_multiplier", kv_size_multiplier)
        self.query_size = output_sizes[0]
        self.rank_stride = parallel_state.kv_rank_stride(kv_size_multiplier)
        # Local rows of each parameter: one block per projection, or all three in weight_qkv.
        # Query rows are on one rank each; key and value rows are on m ranks.
        query = _block(output_sizes[0], size, 1)
        kv = _block(output_sizes[1], size, kv_size_multiplier)
        self.blocks: dict[str, tuple[ShardBlock, ...]] = {"q": (query,), "k": (kv,), "v": (kv,)}
        if fuse_qkv:
            self.blocks = {"qkv": (query, kv, kv)}
        self._create_parameters(bias, dtype, device)
        self.replica_group = parallel_state.replica_group(kv_size_multiplier, self.rank_stride)
        # Only key and value gradients are summed over the ranks with the same KV heads.
        self.activation_sharding = ColumnActivationSharding(
            mappings.resolve_group(None),
            0 if sequence_parallel_enabled else None,
            reduce_dtype,
            (None, self.replica_group, self.replica_group),
        )
        self.initialize_weight_biases()

    def _create_parameters(self, bias: bool, dtype: torch.dtype, device: torch.device | str | None) -> None:
        """Create the parameters of ``self.blocks``, uninitialized, with their shard attributes."""
        for name, blocks in self.blocks.items():
            rows = sum(block.rows for block in blocks)
            weight = nn.Parameter(torch.empty(rows, self.input_size, dtype=dtype, device=device))
            self.register_parameter(f"weight_{name}", weight)
            bias_param = None
            if bias:
                bias_param = nn.Parameter(torch.empty(rows, dtype=dtype, device=device))
            self.register_parameter(f"bias_{name}", bias_param)
            for param in self._parameters_of(name):
                _describe(param, blocks, self.rank_stride)

    def _parameters_of(self, name: str) -> list[nn.Parameter]:
        candidates = (getattr(self, f"weight_{name}"), getattr(self, f"bias_{name}"))
        return [param for param in candidates if param is not None]

    def initialize_weight_biases(self) -> None:
        """Initialize on the CPU; all tensor-parallel ranks call it in the same order of layers."""
        init_method = self.init_method or default_weight_init
        full: dict[str, list[Tensor | None]] = {name: [] for name in self.blocks}
        # Weight, then bias, of query, key and value in turn: with or without ``fuse_qkv`` the
        # draws have the same order, and therefore the same values.
        for name, weight, bias in self._views():
            master = initialize_sharded_(weight, init_method, keep_full=self.keep_master_weight)
            full[name].append(master)
            if bias is not None:
                initialize_sharded_(bias, default_bias_init(self.input_size))
        for name, weights in full.items():
            masters = [weight for weight in weights if weight is not None]
            master_weight = torch.cat(masters) if masters else None
            setattr(self, f"master_weight_{name}", master_weight)

    def _views(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield views of the rows of query, key and value, each with its own shard attributes."""
        for name, blocks in self.blocks.items():
            rows = [block.rows for block in blocks]
            # Weight and bias have the same rows. The views have the parameter's memory, and
            # attributes of their own, as if query, key and value were separate parameters.
            split = [split_sizes(param.detach(), rows) for param in self._parameters_of(name)]
            for block, *views in zip(blocks, *split, strict=True):
                for view in views:
                    _describe(view, (block,), self.rank_stride)
                weight = views[0]
                bias = views[1] if len(views) > 1 else None
                yield name, weight, bias

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.fuse_qkv:
            query, key, value = self._project_fused(input)
        else:
            query, key, value = self._project(input)
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
        """Project with ``weight_qkv``: one weight, or three slices with replicated KV heads.

        With replicas the gradients of key and value are summed over ranks, the gradient of query is not.
        """
        rows = [block.rows for block in self.blocks["qkv"]]
        weight = self.weight_qkv
        bias = self.bias_qkv
        if self.replica_group is None:
            activation_sharding = replace(self.activation_sharding, replica_groups=(None,))
            (output,) = column_parallel(input, [(weight, bias)], activation_sharding)
            return split_sizes(output, rows, dim=-1)
        # Slices, because the sum over replicas is decided per weight. They are adjacent in
        # memory, so ``packed_view`` still finds one weight for one GEMM.
        weights = split_sizes(weight, rows)
        biases: Sequence[Tensor | None] = [None] * 3
        if bias is not None:
            biases = split_sizes(bias, rows)
        parameters = list(zip(weights, biases, strict=True))
        return column_parallel(input, parameters, self.activation_sharding)

    def _gather(self, output: Tensor, replicas: int = 1) -> Tensor:
        """Gather all columns in the order of the full weight; one copy of each replica group."""
        gathered = mappings.gather_from_tensor_model_parallel_region(output, self.activation_sharding.group)
        size = parallel_state.get_tensor_model_parallel_size()
        return columns_in_full_order(gathered, size, replicas=replicas, rank_stride=self.rank_stride)


def _block(output_size: int, size: int, replicas: int) -> ShardBlock:
    """Describe the shards of one projection.

    Raises:
        ValueError: the number of distinct shards does not divide ``output_size``.
    """
    # T ranks with m replicas hold T / m distinct shards of output_size / (T / m) rows each.
    partitions = size // replicas
    remedy = f"use {padded_size(output_size, partitions)}"
    rows = require_divisible("output_size", output_size, "tensor_model_parallel_size", partitions, remedy)
    return ShardBlock(output_size, rows, replicas)


def _describe(param: Tensor, blocks: tuple[ShardBlock, ...], rank_stride: int) -> None:
    """Set the shard attributes of ``param``, which consists of ``blocks`` along dim 0."""
    full_shape = (sum(block.full_rows for block in blocks), *param.shape[1:])
    # A fused parameter has replicas per block, so the parameter itself has none: T partitions.
    replicas = blocks[0].replicas if len(blocks) == 1 else 1
    set_tensor_model_parallel_attributes(
        param, True, 0, full_shape=full_shape, replicas=replicas, rank_stride=rank_stride
    )
    if len(blocks) > 1:
        param.blocks = blocks  # pyright: ignore[reportAttributeAccessIssue]
