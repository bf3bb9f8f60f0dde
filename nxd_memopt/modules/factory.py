"""Resolves a model's configs, and builds its layers from its sharding table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.modules.rms_norm import HeadNorm, RMSNorm
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.layer_norm import LayerNorm
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_memopt.parallel_layers.random import fork_if
from nxd_memopt.parallel_layers.utils import move_model_to_device, shard_ranges

_HEADS = ("query_column", "kv_column", "query_row")


@dataclass(frozen=True)
class LayerFactory:
    """Builder of a model's layers according to its sharding table.

    Args:
        sharding: maps a module name (last part) to a key of ``architectures.SHARDED_DIMENSIONS``.
        parallel: parallel config of the model.
        initializer_range: standard deviation of weights; biases are zero (Hugging Face's scheme).
        dtype: dtype of the parameters.
        device: device of the parameters, or None for torch's default device.
        kv_replicas: number of ranks that share a KV head.
    """

    sharding: Mapping[str, str]
    parallel: ParallelConfig
    initializer_range: float
    dtype: torch.dtype
    device: torch.device | str | None
    kv_replicas: int = 1

    def column(self, name: str, input_size: int, output_size: int, *, bias: bool) -> ColumnParallelLinear:
        """Build the column-parallel layer ``name`` of the sharding table."""
        kind = self.sharding[name]
        assert kind.endswith("column") or kind == "vocab", f"the sharding table calls {name} {kind}"
        layer = ColumnParallelLinear(
            input_size,
            output_size,
            bias,
            gather_output=False,
            pad=kind == "vocab",
            replicas=self.kv_replicas if kind == "kv_column" else 1,
            **self._linear_options(kind),
        )
        self._draw(layer)
        return layer

    def row(self, name: str, input_size: int, output_size: int, *, bias: bool) -> RowParallelLinear:
        """Build the row-parallel layer ``name`` of the sharding table."""
        kind = self.sharding[name]
        assert kind in ("row", "query_row"), f"the sharding table calls {name} {kind}"
        layer = RowParallelLinear(input_size, output_size, bias, input_is_parallel=True, **self._linear_options(kind))
        self._draw(layer)
        return layer

    def _draw(self, layer: ColumnParallelLinear | RowParallelLinear) -> None:
        # The layers' own bias initialization, torch's uniform one, is replaced by zeros.
        self._draw_on_device(layer)
        if layer.bias is not None and not layer.bias.is_meta:
            nn.init.zeros_(layer.bias)

    def init_weight(self, weight: torch.Tensor) -> object:
        """Draw ``weight`` from the normal distribution of ``initializer_range``, in place."""
        return nn.init.normal_(weight, std=self.initializer_range)

    @property
    def draws_full_weights(self) -> bool:
        """Whether every rank draws the numbers of full weights, from one stream."""
        device = torch.get_default_device() if self.device is None else torch.device(self.device)
        return self.parallel.use_cpu_initialization and device.type != "meta"

    @property
    def _layer_device(self) -> torch.device | str | None:
        # Without CPU initialization the layer is built on meta, then allocated and drawn once.
        if not self.parallel.use_cpu_initialization:
            return "meta"
        return self.device

    def _draw_on_device(self, layer: ColumnParallelLinear | RowParallelLinear | ParallelEmbedding) -> None:
        """Allocate the layer and draw this rank's weight from its own random stream.

        No-op with ``use_cpu_initialization``, where the layer has its slice of the full weight, and
        for meta parameters.
        """
        device = torch.get_default_device() if self.device is None else torch.device(self.device)
        if self.parallel.use_cpu_initialization or device.type == "meta":
            return
        move_model_to_device(layer, device)
        # Shards differ between ranks: draw from this rank's own stream. The values depend on T,
        # unlike the values of CPU initialization, but no rank draws more than its shard.
        with torch.no_grad(), fork_if(self.parallel.tensor_model_parallel_size > 1):
            self.init_weight(layer.weight)
        replica_group = getattr(layer, "replica_group", None)
        # Ranks with the same KV heads must start with equal weights: the group's first rank
        # decides. An all-gather of m weights, once, when the layer is built.
        if replica_group is not None:
            with backend.outside_step():
                gathered = backend.all_gather(layer.weight.data, replica_group)
                layer.weight.data = gathered[: layer.weight.size(0)].clone()
        # Padding rows of a vocabulary shard must be zero: checkpoints do not store them, so a
        # resumed model has zeros there.
        description: Any = layer.weight
        if description.partition_dim == 0:
            padded_rows = layer.weight.size(0) * description.num_partitions
            _zero_rows(layer.weight, description.full_shape[0], padded_rows)

    def _linear_options(self, kind: str) -> dict[str, Any]:
        """Return the options that column- and row-parallel layers share."""
        # Query, key, value and output projections must agree on the order of heads.
        rank_stride = 1
        if kind in _HEADS:
            rank_stride = parallel_state.kv_rank_stride(self.kv_replicas)
        return {
            "dtype": self.dtype,
            "device": self._layer_device,
            "init_method": self.init_weight,
            "sequence_parallel_enabled": self.parallel.sequence_parallel_enabled,
            # None reduces in the dtype of the tensors.
            "reduce_dtype": torch.float32 if self.parallel.reduce_dtype == "float32" else None,
            "rank_stride": rank_stride,
        }

    def embedding(
        self, name: str, num_embeddings: int, embedding_dim: int, padding_idx: int | None
    ) -> ParallelEmbedding:
        """Build the vocabulary-parallel embedding ``name`` of the sharding table."""
        assert self.sharding[name] == "vocab", f"the sharding table calls {name} {self.sharding[name]}"
        layer = ParallelEmbedding(
            num_embeddings,
            embedding_dim,
            padding_idx,
            init_method=self.init_weight,
            device=self._layer_device,
            dtype=self.dtype,
            pad=True,
            sequence_parallel_enabled=self.parallel.sequence_parallel_enabled,
        )
        self._draw_on_device(layer)
        # As in Hugging Face's models: the row of the padding token is zero, on the rank that has
        # it.
        if padding_idx is not None:
            _zero_rows(layer.weight, padding_idx, padding_idx + 1)
        return layer

    def rms_norm(self, size: int, eps: float) -> RMSNorm:
        """Build an RMSNorm with replicated weight, tagged under sequence parallelism."""
        sharded = self.parallel.sequence_parallel_enabled
        return RMSNorm(size, eps, sharded, device=self.device, dtype=self.dtype)

    def head_norm(self, size: int, eps: float) -> HeadNorm:
        """Build an RMSNorm over each head of a query or key projection.

        Every rank has other heads, so the gradient of the weight is a partial sum over the
        tensor-parallel ranks, with and without sequence parallelism.
        """
        return HeadNorm(size, eps, self.parallel.tensor_model_parallel_size > 1, device=self.device, dtype=self.dtype)

    def layer_norm(self, size: int, eps: float) -> LayerNorm:
        """Build a LayerNorm with replicated parameters, tagged under sequence parallelism."""
        sharded = self.parallel.sequence_parallel_enabled
        return LayerNorm(size, eps, device=self.device, dtype=self.dtype, sequence_parallel_enabled=sharded)


def _zero_rows(param: nn.Parameter, start: int, stop: int) -> None:
    """Zero the rows ``[start, stop)`` of the full parameter that this rank holds."""
    if param.is_meta:
        return
    # One range per rank: layers of the factory have stride 1.
    ((first, last),) = shard_ranges(param)
    low = max(start, first)
    high = min(stop, last)
    if low < high:
        param.detach()[low - first : high - first].zero_()


def resolve_parallel(
    parallel: ParallelConfig | None, *, sequence_parallel_enabled: bool, has_experts: bool = False
) -> ParallelConfig:
    """Return ``parallel`` after a check against the process groups, or for None their config.

    Args:
        parallel: config of the caller.
        sequence_parallel_enabled: for None the setting of the model's config; off if T = 1.
        has_experts: the model has mixture-of-experts layers.

    Raises:
        ValueError: the process groups have another tensor- or expert-parallel size, or a dense model
            is to have expert-parallel ranks.
    """
    sizes: dict[str, Any] = {"tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_size()}
    # A dense model has the same weights on all ranks that would share experts.
    sizes["expert_model_parallel_size"] = parallel_state.get_expert_model_parallel_size() if has_experts else 1
    if parallel is None:
        is_sharded = sizes["tensor_model_parallel_size"] > 1
        return ParallelConfig(**sizes, sequence_parallel_enabled=sequence_parallel_enabled and is_sharded)
    if not has_experts and parallel.expert_model_parallel_size > 1:
        raise ValueError(
            f"expert_model_parallel_size {parallel.expert_model_parallel_size} of the model: a dense model has no "
            "experts to share; leave it out"
        )
    # A model of the full stack of layers may be on a rank of a pipeline: another library may divide it.
    if parallel.pipeline_model_parallel_size > 1:
        sizes["pipeline_model_parallel_size"] = parallel_state.get_pipeline_model_parallel_size()
    for name, size in sizes.items():
        given = getattr(parallel, name)
        if given != size:
            raise ValueError(
                f"{name} {given} of the model differs from {size} of the process groups: call "
                f"parallel_state.initialize_model_parallel({name}={given}) first"
            )
    return parallel


def resolve_memory(memory: MemoryConfig | None, config: Any) -> MemoryConfig:
    """Return ``memory``, or for None the config from ``config``.

    NxD's ``selective_activation_checkpointing_is_enabled`` in a model config is supported.
    """
    if memory is not None:
        return memory
    enabled = bool(getattr(config, "selective_activation_checkpointing_is_enabled", False))
    return MemoryConfig(recompute_granularity="selective" if enabled else None)
