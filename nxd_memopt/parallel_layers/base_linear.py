"""Creates, describes and initialises the parameters of the parallel linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.ops.fp8 import Fp8Recipe
from nxd_memopt.parallel_layers.functional.adapted_column import LowRankFactors
from nxd_memopt.parallel_layers.initialization import (
    InitMethod,
    default_bias_init,
    default_weight_init,
    initialize_sharded_,
)
from nxd_memopt.parallel_layers.utils import ShardedModule, describe_shard, set_tensor_model_parallel_attributes


class BaseParallelLinear(ShardedModule):
    """Base of column- and row-parallel linear layers.

    Subclasses set the attributes below. ``set_weight_and_bias_config`` sets the shapes of this
    rank's shards, and ``initialize_weight_and_bias`` creates the parameters.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    full_input_size: int
    output_size: int
    use_bias: bool
    stride: int
    sequence_parallel_enabled: bool
    sequence_dimension: int
    reduce_dtype: torch.dtype | None
    dtype: torch.dtype
    device: torch.device | str | None
    init_method: InitMethod | None
    tensor_parallel_group: ProcessGroup | None
    replicas: int = 1
    rank_stride: int = 1
    keep_master_weight: bool = False
    master_weight: Tensor | None = None
    weight_shape: tuple[int, int]
    weight_partition_dim: int
    bias_shape: tuple[int] | None
    bias_partition_dim: int | None  # None: the bias is replicated
    fp8: Fp8Recipe | None = None  # set by modules.fp8.use_fp8

    @property
    def rounding(self) -> Fp8Recipe | None:
        """How the next matmul rounds; evaluation is of the model that is exported, which does not round.

        A weight that is stored in float8 is multiplied in float8 there too.
        """
        return self.fp8 if self.training or self.weight_scale is not None else None

    @property
    def weight_scale(self) -> Tensor | None:
        """Scale of a weight that is stored in float8, ``[1, 1]``, or None."""
        return getattr(self.weight, "scale", None)

    @property
    def factors(self) -> LowRankFactors | None:
        """The adapter that is computed with the layer; a subclass may have one."""
        return None

    def adapted(self, input: Tensor, output: Tensor) -> Tensor:
        """Return ``output`` with what a subclass adds to it besides ``factors``."""
        del input
        return output

    def set_weight_and_bias_config(self) -> None:
        """Set ``weight_shape``, ``bias_shape`` and the dimensions along which they are sharded."""
        raise NotImplementedError

    def initialize_weight_and_bias(self) -> None:
        """Create the parameters, set their shard attributes, and initialize them."""
        self.set_weight_and_bias_config()
        self.weight = nn.Parameter(torch.empty(self.weight_shape, dtype=self.dtype, device=self.device))
        # Full shapes are without padding: checkpoints store tensors of these shapes.
        full_shape = (self.output_size, self.full_input_size)
        self._describe(self.weight, self.weight_partition_dim, full_shape)
        self.bias = None
        if self.bias_shape is not None:
            self.bias = nn.Parameter(torch.empty(self.bias_shape, dtype=self.dtype, device=self.device))
            self._describe(self.bias, self.bias_partition_dim, (self.output_size,))
        self.initialize_weight_biases()

    def _describe(self, param: nn.Parameter, dim: int | None, full_shape: tuple[int, ...]) -> None:
        """Set the shard attributes of ``param``, sharded along ``dim`` (None: replicated)."""
        if dim is None:
            # A replicated bias is added to a sequence shard, so its gradient is a partial sum.
            set_tensor_model_parallel_attributes(param, False, -1, full_shape=full_shape)
            param.sequence_parallel_enabled = self.sequence_parallel_enabled  # pyright: ignore[reportAttributeAccessIssue]
            return
        # m replicas of each KV shard on T ranks leave T / m distinct partitions. The rank is this
        # rank's in the layer's own group, which need not be the default tensor-parallel group.
        set_tensor_model_parallel_attributes(
            param,
            True,
            dim,
            self.stride,
            self._group_size() // self.replicas,
            full_shape=full_shape,
            replicas=self.replicas,
            rank_stride=self.rank_stride,
            rank=backend.group_rank(self.tensor_parallel_group),
        )

    def initialize_weight_biases(self) -> None:
        """Initialize weight and bias; all tensor-parallel ranks call it in the same layer order.

        Every rank draws the random stream of the full parameter and keeps its slice.
        """
        # Weight before bias in every layer: the draws of one layer advance the generator that all
        # later layers draw from, so a different order gives different values on every rank.
        self.init_weight_cpu()
        if self.bias is not None:
            initialize_sharded_(self.bias, default_bias_init(self.full_input_size))

    def init_weight_cpu(self) -> None:
        """Initialize the weight on the CPU; see ``initialization.initialize_sharded_``."""
        init_method = self.init_method or default_weight_init
        self.master_weight = initialize_sharded_(self.weight, init_method, keep_full=self.keep_master_weight)

    def extra_repr(self) -> str:
        """Return the full sizes as ``nn.Linear`` shows them, and the shape of this rank's weight."""
        return (
            f"in_features={self.full_input_size}, out_features={self.output_size}, bias={self.use_bias}, "
            f"{describe_shard(self.weight, self._group_size())}, "
            f"sequence_parallel_enabled={self.sequence_parallel_enabled}"
        )

    def _sharding(self) -> dict[str, Any]:
        """Return the arguments of ``ActivationSharding``."""
        return {
            "group": self.tensor_parallel_group,
            "sequence_dimension": self.sequence_dimension if self.sequence_parallel_enabled else None,
            "reduce_dtype": self.reduce_dtype,
            "fp8": self.rounding,
            "weight_scale": self.weight_scale,
        }

    def _group_size(self) -> int:
        return backend.group_size(self.tensor_parallel_group)


def check_padding(pad: bool, stride: int) -> None:
    """Raise ValueError if ``pad`` is combined with strided blocks."""
    if pad and stride > 1:
        raise ValueError(f"pad=True needs stride 1, got {stride}: padding would move the borders of the strided blocks")


def bypassed_layer(owner: nn.Module, name: str, expected: type[nn.Module]) -> dict[str, type[nn.Module]]:
    """Return the classes of layer ``name`` and of its adapter, for a fused path that computes its ``factors``.

    Args:
        owner: module with the layer.
        name: name of the layer in ``owner``.
        expected: class of the layer without an adapter.
    """
    layer: Any = owner.get_submodule(name)
    # A class that defines ``factors`` itself: any other subclass may compute something else. None: the
    # adapter is not computed with the layer, so that the layer must be called.
    if "factors" not in vars(type(layer)) or type(layer) is expected or layer.factors is None:
        return {name: expected}
    return {name: type(layer)} | {f"{name}.{each}": type(module) for each, module in layer.named_children()}
