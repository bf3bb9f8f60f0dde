"""Column- and row-parallel linear layers with low-rank adapters."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.modules.dropout import ParallelDropout
from nxd_memopt.parallel_layers.data_shards import gather_rows, local_rows, model_dtype
from nxd_memopt.parallel_layers.initialization import InitMethod, default_weight_init, initialize_sharded_
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_memopt.parallel_layers.utils import ShardedModule, set_tensor_model_parallel_attributes


class ReplicatedLinear(ShardedModule):
    """Linear layer without bias whose weight is the same on all tensor-parallel ranks.

    Args:
        input_size: number of input features.
        output_size: number of output features.
        init_method: initializes the weight in place.
        sequence_parallel_enabled: the input is a sequence shard. The weight's gradient is then a
            partial sum, and is tagged for ``grads.allreduce_sequence_parallel_gradients``.
        dtype: dtype of the weight.
        device: device of the weight.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        init_method: InitMethod,
        sequence_parallel_enabled: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, False, -1, full_shape=(output_size, input_size))
        self.weight.sequence_parallel_enabled = sequence_parallel_enabled  # pyright: ignore[reportAttributeAccessIssue]
        initialize_sharded_(self.weight, init_method)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight)


class LoraColumnParallelLinear(ColumnParallelLinear):
    """Column-parallel layer ``Y_i = X W_i^t + scale * (X A^t) B_i^t``.

    A is replicated and B is sharded like W. Under sequence parallelism A is applied to the sequence
    shard, and the r columns of its output are gathered instead of X; their gradient is
    reduce-scattered. Otherwise that gradient is all-reduced. Created by ``adapt``.
    """

    lora_A: ReplicatedLinear  # noqa: N815
    lora_B: ColumnParallelLinear  # noqa: N815
    lora_dropout: ParallelDropout
    scale: float

    def forward(self, input: Tensor) -> Tensor:
        return self.adapted(input, cast(Tensor, super().forward(input)))

    def adapted(self, input: Tensor, output: Tensor) -> Tensor:
        """Return ``output`` with the adapter's output added."""
        return output + self.scale * cast(Tensor, self.lora_B(self.lora_A(self.lora_dropout(input))))

    def delta(self) -> Tensor:
        """Return this rank's rows of ``scale * B A``, fp32. All data-parallel ranks call."""
        return _delta(self)


class LoraRowParallelLinear(RowParallelLinear):
    """Row-parallel layer ``Y = reduce(X_i W_i^t) + scale * reduce(X_i A_i^t) B^t``.

    A is sharded like W and B is replicated: the r columns of A's output are reduced as Y is. Created
    by ``adapt``.
    """

    lora_A: RowParallelLinear  # noqa: N815
    lora_B: ReplicatedLinear  # noqa: N815
    lora_dropout: ParallelDropout
    scale: float

    def forward(self, input: Tensor) -> Tensor:
        output = cast(Tensor, super().forward(input))
        return output + self.scale * self.lora_B(cast(Tensor, self.lora_A(self.lora_dropout(input))))

    def delta(self) -> Tensor:
        """Return this rank's columns of ``scale * B A``, fp32. All data-parallel ranks call."""
        return _delta(self)


AdaptedLinear = LoraColumnParallelLinear | LoraRowParallelLinear


def _delta(layer: AdaptedLinear) -> Tensor:
    # Both factors are of this tensor-parallel rank's rows or columns. Of rows that are sharded over
    # data-parallel ranks (zero3), a rank has the same ones of B as of the weight; A is gathered.
    down = gather_rows(layer.lora_A.weight).detach()
    up = local_rows(layer.lora_B.weight).detach().to(model_dtype(layer.lora_B.weight))
    wide = torch.promote_types(up.dtype, torch.float32)
    return layer.scale * (up.to(wide) @ down.to(wide))


def adapt(name: str, layer: nn.Module, config: LoraConfig) -> AdaptedLinear:
    """Add an adapter to a linear layer of a model, in place; its parameters keep their names.

    Args:
        name: the layer's name in the model, for messages.
        layer: column- or row-parallel layer.
        config: rank, scale, dropout and initial values.

    Raises:
        ValueError: not a parallel linear layer, or one with options that adapters do not follow.
    """
    # The class is replaced, not the module: names, shard attributes and packed storages stay, and
    # fused paths that would bypass the adapter see another class.
    # A subclass with another forward says whether adapters may take its place.
    is_known = type(layer) in (ColumnParallelLinear, RowParallelLinear) or getattr(layer, "can_be_adapted", False)
    if is_known and isinstance(layer, ColumnParallelLinear):
        return _adapt_column(name, layer, config)
    if is_known and isinstance(layer, RowParallelLinear):
        return _adapt_row(name, layer, config)
    raise ValueError(
        f"target_modules names {name}, a {type(layer).__name__}: adapters are for ColumnParallelLinear and "
        "RowParallelLinear: leave it out"
    )


def _adapt_column(name: str, layer: ColumnParallelLinear, config: LoraConfig) -> LoraColumnParallelLinear:
    if layer.gather_output or layer.skip_bias_add:
        raise ValueError(f"{name} has gather_output or skip_bias_add, which adapters do not support: leave it out")
    adapted = cast(LoraColumnParallelLinear, _with_class(layer, LoraColumnParallelLinear, config))
    is_sequence = layer.sequence_parallel_enabled
    options: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
    adapted.lora_A = ReplicatedLinear(
        layer.input_size,
        config.lora_rank,
        init_method=_init_method(config),
        sequence_parallel_enabled=is_sequence,
        **options,
    )
    adapted.lora_B = ColumnParallelLinear(
        config.lora_rank,
        layer.output_size,
        bias=False,
        gather_output=False,
        stride=layer.stride,
        init_method=nn.init.zeros_,
        sequence_parallel_enabled=is_sequence,
        sequence_dimension=layer.sequence_dimension,
        pad=layer.output_size_per_partition * (layer._group_size() // layer.replicas) != layer.output_size,
        tensor_model_parallel_group=layer.tensor_parallel_group if layer.replicas == 1 else None,
        reduce_dtype=layer.reduce_dtype,
        replicas=layer.replicas,
        rank_stride=layer.rank_stride,
        **options,
    )
    # Equal masks on replicated inputs: the ranks' contributions belong to one input.
    adapted.lora_dropout = ParallelDropout(config.lora_dropout, sharded=is_sequence)
    return adapted


def _adapt_row(name: str, layer: RowParallelLinear, config: LoraConfig) -> LoraRowParallelLinear:
    if not layer.input_is_parallel or not layer.reduce_output or layer.skip_bias_add:
        raise ValueError(
            f"{name} has input_is_parallel=False, reduce_output=False or skip_bias_add, which adapters do not support: "
            "leave it out"
        )
    adapted = cast(LoraRowParallelLinear, _with_class(layer, LoraRowParallelLinear, config))
    options: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
    adapted.lora_A = RowParallelLinear(
        layer.full_input_size,
        config.lora_rank,
        bias=False,
        input_is_parallel=True,
        stride=layer.stride,
        init_method=_init_method(config),
        sequence_parallel_enabled=layer.sequence_parallel_enabled,
        sequence_dimension=layer.sequence_dimension,
        pad=layer.input_size != layer.full_input_size,
        tensor_model_parallel_group=layer.tensor_parallel_group,
        reduce_dtype=layer.reduce_dtype,
        rank_stride=layer.rank_stride,
        **options,
    )
    adapted.lora_B = ReplicatedLinear(
        config.lora_rank,
        layer.output_size,
        init_method=nn.init.zeros_,
        sequence_parallel_enabled=layer.sequence_parallel_enabled,
        **options,
    )
    # Ranks have different features of the input.
    adapted.lora_dropout = ParallelDropout(
        config.lora_dropout, sharded=backend.group_size(layer.tensor_parallel_group) > 1
    )
    return adapted


def _with_class(layer: nn.Module, cls: type[nn.Module], config: LoraConfig) -> Any:
    layer.__class__ = cls
    adapted = cast(Any, layer)
    adapted.scale = config.scale
    return adapted


def _init_method(config: LoraConfig) -> InitMethod:
    """Return the initialization of A, that of PEFT."""
    if config.init_lora_weights == "gaussian":
        return lambda weight: nn.init.normal_(weight, std=1 / config.lora_rank)
    return default_weight_init
