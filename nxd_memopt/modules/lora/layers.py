"""Column- and row-parallel linear layers with low-rank adapters."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.modules.dropout import ParallelDropout
from nxd_memopt.modules.plain_layers import add_bias
from nxd_memopt.parallel_layers.data_shards import gather_rows, local_rows, model_dtype
from nxd_memopt.parallel_layers.functional.adapted_column import LowRankFactors
from nxd_memopt.parallel_layers.functional.adapted_row import adapted_row_parallel
from nxd_memopt.parallel_layers.fusion import FusedPath, FusibleModule
from nxd_memopt.parallel_layers.initialization import InitMethod, default_weight_init, initialize_sharded_
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear, column_parallel_linears
from nxd_memopt.parallel_layers.utils import ShardedModule, set_tensor_model_parallel_attributes


def scaled_product(up: Tensor, down: Tensor, scale: float) -> Tensor:
    """Return ``scale * up @ down``, float64, on the host.

    The order of a matmul's sums depends on the device and on the shape of a shard. In float64 the difference is
    far below a bit of the sum with the weight, so a merge on any device and at any T gives equal bits.
    """
    return scale * (up.cpu().double() @ down.cpu().double())


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


class Adapted:
    """What both layers with an adapter have: dropout, scale, and the adapter as an update of the weight.

    Without dropout the adapter is computed inside the layer's matmuls (``fused_adapter``). Dropped
    inputs differ from the layer's, so that the factors are then called as layers.
    """

    weight: nn.Parameter
    lora_A: Any  # noqa: N815
    lora_B: Any  # noqa: N815
    lora_dropout: ParallelDropout
    scale: float
    fused_adapter: FusedPath

    def fuse_adapter(self) -> None:
        """Let the layer compute the adapter with its matmuls. Call after the factors are set."""
        unavailable = None
        if self.lora_dropout.p:
            unavailable = f"lora_dropout is {self.lora_dropout.p:g}"
        owner = cast(FusibleModule, self)
        self.fused_adapter = FusedPath(
            owner,
            "adapter with its layer",
            {name: type(module) for name, module in owner.named_children()},
            cost="the adapter's output is added in passes of its own",
            unavailable=unavailable,
        )

    def _factors(self) -> LowRankFactors | None:
        """Return the adapter, or None if its factors must be called.

        Each class defines ``factors`` itself: ``bypassed_layer`` refuses classes that inherit it.
        """
        if not self.fused_adapter.is_active:
            return None
        return LowRankFactors(self.lora_A.weight, self.lora_B.weight, self.scale)

    def _added(self, input: Tensor, output: Tensor) -> Tensor:
        """Return ``output`` with the output of the factors, called as layers, added."""
        return output + self.scale * self.lora_B(self.lora_A(self.lora_dropout(input)))

    def delta(self) -> Tensor:
        """Return this rank's part of ``scale * B A``, float64, on the host. All data-parallel ranks call."""
        # Both factors are of this tensor-parallel rank's rows or columns. Of rows that are sharded over
        # data-parallel ranks (zero3), a rank has the same rows of B as of the weight; A is gathered.
        down = gather_rows(self.lora_A.weight).detach()
        up = local_rows(self.lora_B.weight).detach().to(model_dtype(self.lora_B.weight))
        return scaled_product(up, down, self.scale)


class LoraColumnParallelLinear(Adapted, ColumnParallelLinear):
    """Column-parallel layer ``Y_i = X W_i^t + scale * (X A^t) B_i^t``.

    A is replicated and B is sharded like W. Under sequence parallelism A is applied to the sequence
    shard, and the r columns of its output are gathered instead of X; their gradient is
    reduce-scattered. Otherwise that gradient is all-reduced. Created by ``adapt``.
    """

    @property
    def factors(self) -> LowRankFactors | None:
        """The adapter, if it is computed with the layer."""
        return self._factors()

    def forward(self, input: Tensor) -> Tensor:
        (output,) = column_parallel_linears(input, [self])
        return self.adapted(input, output)

    def adapted(self, input: Tensor, output: Tensor) -> Tensor:
        """Return ``output`` with the adapter's output added, unless it is computed with the layer."""
        return output if self.fused_adapter.is_active else self._added(input, output)


class LoraRowParallelLinear(Adapted, RowParallelLinear):
    """Row-parallel layer ``Y = reduce(X_i W_i^t) + scale * reduce(X_i A_i^t) B^t``.

    A is sharded like W and B is replicated: the r columns of A's output are reduced as Y is. Created
    by ``adapt``.
    """

    @property
    def factors(self) -> LowRankFactors | None:
        """The adapter, if it is computed with the layer."""
        return self._factors()

    def forward(self, input: Tensor) -> Tensor:
        factors = self.factors
        if factors is None:
            return self._added(input, cast(Tensor, super().forward(input)))
        self.require_divisible_sequence(input.shape)
        output = adapted_row_parallel(input, self.weight, factors, self.activation_sharding())
        return add_bias(output, self)


AdaptedLinear = LoraColumnParallelLinear | LoraRowParallelLinear


def adapt(name: str, layer: nn.Module, config: LoraConfig) -> AdaptedLinear:
    """Add an adapter to a linear layer of a model, in place; its parameters keep their names.

    Args:
        name: the layer's name in the model, for messages.
        layer: column- or row-parallel layer.
        config: rank, scale, dropout and initial values.

    Raises:
        ValueError: not a parallel linear layer, or one with options that adapters do not follow.
    """
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
    options = _shared_options(layer)
    replicated = ReplicatedLinear(layer.input_size, config.lora_rank, init_method=_init_method(config), **options)
    sharded = ColumnParallelLinear(
        config.lora_rank,
        layer.output_size,
        bias=False,
        gather_output=False,
        init_method=nn.init.zeros_,
        pad=layer.output_size_per_partition * (layer._group_size() // layer.replicas) != layer.output_size,
        tensor_model_parallel_group=layer.tensor_parallel_group if layer.replicas == 1 else None,
        replicas=layer.replicas,
        **options,
        **_sharding_options(layer),
    )
    # Equal masks on replicated inputs: the ranks' contributions belong to one input.
    is_sharded = layer.sequence_parallel_enabled
    return _adapted(LoraColumnParallelLinear, layer, replicated, sharded, config, is_sharded=is_sharded)


def _adapt_row(name: str, layer: RowParallelLinear, config: LoraConfig) -> LoraRowParallelLinear:
    if not layer.input_is_parallel or not layer.reduce_output or layer.skip_bias_add:
        raise ValueError(
            f"{name} has input_is_parallel=False, reduce_output=False or skip_bias_add, which adapters do not support: "
            "leave it out"
        )
    options = _shared_options(layer)
    sharded = RowParallelLinear(
        layer.full_input_size,
        config.lora_rank,
        bias=False,
        input_is_parallel=True,
        init_method=_init_method(config),
        pad=layer.input_size != layer.full_input_size,
        tensor_model_parallel_group=layer.tensor_parallel_group,
        **options,
        **_sharding_options(layer),
    )
    replicated = ReplicatedLinear(config.lora_rank, layer.output_size, init_method=nn.init.zeros_, **options)
    # Ranks have different features of the input.
    is_sharded = backend.group_size(layer.tensor_parallel_group) > 1
    return _adapted(LoraRowParallelLinear, layer, sharded, replicated, config, is_sharded=is_sharded)


def _shared_options(layer: ColumnParallelLinear | RowParallelLinear) -> dict[str, Any]:
    """Return the options of both factors."""
    return {
        # a weight that is stored in float8 has another dtype than the layer
        "dtype": layer.weight.dtype if layer.weight_scale is None else layer.dtype,
        "device": layer.weight.device,
        "sequence_parallel_enabled": layer.sequence_parallel_enabled,
    }


def _sharding_options(layer: ColumnParallelLinear | RowParallelLinear) -> dict[str, Any]:
    """Return the options of the factor that is sharded like ``layer``."""
    names = ("stride", "sequence_dimension", "reduce_dtype", "rank_stride")
    return {name: getattr(layer, name) for name in names}


def _adapted(
    cls: Any, layer: nn.Module, first: nn.Module, second: nn.Module, config: LoraConfig, *, is_sharded: bool
) -> Any:
    """Make ``layer`` one of class ``cls`` with the factors A and B."""
    # The class is replaced, not the module: names, shard attributes and packed storages stay, and
    # fused paths that would bypass the adapter see another class. Those that compute it are built again.
    layer.__class__ = cls
    layer.lora_A = first
    layer.lora_B = second
    layer.lora_dropout = ParallelDropout(config.lora_dropout, sharded=is_sharded)
    layer.scale = config.scale  # pyright: ignore[reportArgumentType]
    cast(Adapted, layer).fuse_adapter()
    return layer


def _init_method(config: LoraConfig) -> InitMethod:
    """Return PEFT's initialization of A."""
    if config.init_lora_weights == "gaussian":
        return lambda weight: nn.init.normal_(weight, std=1 / config.lora_rank)
    return default_weight_init
