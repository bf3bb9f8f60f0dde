"""Builds a model's layers from its sharding table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.config import ParallelConfig
from nxd_memopt.modules.rms_norm import RMSNorm
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.layer_norm import LayerNorm
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_memopt.parallel_layers.random import fork_if
from nxd_memopt.parallel_layers.utils import move_model_to_device, shard_ranges

SHARDINGS = ("vocab", "column", "query_column", "kv_column", "row", "query_row", "replicated")
"""Values of a sharding table: rows of a vocabulary table or head (padded to T), output rows, output rows of query
heads, output rows of KV heads (replicated when T exceeds them), input columns, input columns that come from query
heads, no sharding. A rank's query heads are those of its KV heads: see ``parallel_layers.rank_order``."""
_HEADS = ("query_column", "kv_column", "query_row")


@dataclass(frozen=True)
class LayerFactory:
    """Builds a model's layers as its table shards them.

    Args:
        sharding: module name (last part) to one of ``SHARDINGS``.
        parallel: the model's.
        initializer_range: standard deviation of weights; biases start at zero (Hugging Face's scheme).
        dtype: of parameters.
        device: of parameters; ``None`` is torch's default device.
        kv_replicas: how many ranks share a KV head.
    """

    sharding: Mapping[str, str]
    parallel: ParallelConfig
    initializer_range: float
    dtype: torch.dtype
    device: torch.device | str | None
    kv_replicas: int = 1

    def column(self, name: str, input_size: int, output_size: int, *, bias: bool) -> ColumnParallelLinear:
        kind = self.sharding[name]
        assert kind.endswith("column") or kind == "vocab", f"the sharding table calls {name} {kind}"
        layer = self._column(input_size, output_size, bias=bias, kind=kind)
        self._draw(layer)
        return layer

    def row(self, name: str, input_size: int, output_size: int, *, bias: bool) -> RowParallelLinear:
        kind = self.sharding[name]
        assert kind in ("row", "query_row"), f"the sharding table calls {name} {kind}"
        layer = self._row(input_size, output_size, bias=bias, kind=kind)
        self._draw(layer)
        return layer

    def _draw(self, layer: ColumnParallelLinear | RowParallelLinear) -> None:
        self._draw_on_device(layer)
        if layer.bias is not None and not layer.bias.is_meta:
            nn.init.zeros_(layer.bias)

    def _init_weight(self, weight: torch.Tensor) -> object:
        return nn.init.normal_(weight, std=self.initializer_range)

    @property
    def _layer_device(self) -> torch.device | str | None:
        return self.device if self.parallel.use_cpu_initialization else "meta"

    def _draw_on_device(self, layer: ColumnParallelLinear | RowParallelLinear | ParallelEmbedding) -> None:
        """Without ``use_cpu_initialization``: allocate the layer and draw this rank's weight from its own stream."""
        device = torch.get_default_device() if self.device is None else torch.device(self.device)
        if self.parallel.use_cpu_initialization or device.type == "meta":
            return
        move_model_to_device(layer, device)
        with torch.no_grad(), fork_if(self.parallel.tensor_model_parallel_size > 1):
            self._init_weight(layer.weight)
        replica_group = getattr(layer, "replica_group", None)
        if replica_group is not None:  # ranks that hold the same KV heads start alike
            with backend.outside_step():
                gathered = backend.all_gather(layer.weight.data, replica_group)
                layer.weight.data = gathered[: layer.weight.size(0)].clone()
        description: Any = layer.weight
        if description.partition_dim == 0:
            _zero_rows(layer.weight, description.full_shape[0], layer.weight.size(0) * description.num_partitions)

    @property
    def _reduce_dtype(self) -> torch.dtype | None:
        return torch.float32 if self.parallel.reduce_dtype == "float32" else None

    def _column(self, input_size: int, output_size: int, *, bias: bool, kind: str) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            input_size,
            output_size,
            bias,
            gather_output=False,
            dtype=self.dtype,
            device=self._layer_device,
            init_method=self._init_weight,
            sequence_parallel_enabled=self.parallel.sequence_parallel_enabled,
            pad=kind == "vocab",
            reduce_dtype=self._reduce_dtype,
            replicas=self.kv_replicas if kind == "kv_column" else 1,
            rank_stride=self._rank_stride(kind),
        )

    def _rank_stride(self, kind: str) -> int:
        return parallel_state.kv_rank_stride(self.kv_replicas) if kind in _HEADS else 1

    def _row(self, input_size: int, output_size: int, *, bias: bool, kind: str) -> RowParallelLinear:
        return RowParallelLinear(
            input_size,
            output_size,
            bias,
            input_is_parallel=True,
            dtype=self.dtype,
            device=self._layer_device,
            init_method=self._init_weight,
            sequence_parallel_enabled=self.parallel.sequence_parallel_enabled,
            reduce_dtype=self._reduce_dtype,
            rank_stride=self._rank_stride(kind),
        )

    def embedding(
        self, name: str, num_embeddings: int, embedding_dim: int, padding_idx: int | None
    ) -> ParallelEmbedding:
        assert self.sharding[name] == "vocab", f"the sharding table calls {name} {self.sharding[name]}"
        layer = ParallelEmbedding(
            num_embeddings,
            embedding_dim,
            padding_idx,
            init_method=self._init_weight,
            device=self._layer_device,
            dtype=self.dtype,
            pad=True,
            sequence_parallel_enabled=self.parallel.sequence_parallel_enabled,
        )
        self._draw_on_device(layer)
        if padding_idx is not None:
            _zero_rows(layer.weight, padding_idx, padding_idx + 1)
        return layer

    def rms_norm(self, size: int, eps: float) -> RMSNorm:
        sharded = self.parallel.sequence_parallel_enabled
        return RMSNorm(size, eps, sharded, device=self.device, dtype=self.dtype)

    def layer_norm(self, size: int, eps: float) -> LayerNorm:
        sharded = self.parallel.sequence_parallel_enabled
        return LayerNorm(size, eps, device=self.device, dtype=self.dtype, sequence_parallel_enabled=sharded)


def _zero_rows(param: nn.Parameter, start: int, stop: int) -> None:
    """Zero the rows ``start`` to ``stop`` of the full parameter, where this rank holds them."""
    if param.is_meta:
        return
    ((first, last),) = shard_ranges(param)
    low, high = max(start, first), min(stop, last)
    if low < high:
        param.detach()[low - first : high - first].zero_()


def resolve_parallel(parallel: ParallelConfig | None, *, sequence_parallel_enabled: bool) -> ParallelConfig:
    """Check ``parallel`` against the process groups; ``None`` takes T from them.

    Args:
        parallel: the caller's choice.
        sequence_parallel_enabled: for ``None``: what the model's config asks for; off at T=1.

    Raises:
        ValueError: the groups were made for another tensor-parallel size.
    """
    size = parallel_state.get_tensor_model_parallel_size()
    if parallel is None:
        return ParallelConfig(size, sequence_parallel_enabled=sequence_parallel_enabled and size > 1)
    if parallel.tensor_model_parallel_size != size:
        raise ValueError(
            f"tensor_model_parallel_size {parallel.tensor_model_parallel_size} of the model differs from {size} of the "
            "process groups: call parallel_state.initialize_model_parallel(tensor_model_parallel_size="
            f"{parallel.tensor_model_parallel_size}) first"
        )
    return parallel
