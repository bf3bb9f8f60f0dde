"""Column- and row-parallel linear layers with sequence parallelism; also exports the parallel embedding.

Names and arguments follow neuronx-distributed. T is the tensor-parallel size and ``s = S/T``.
Activations are ``[B, S, H]``. Under sequence parallelism they are ``[s, B, H]``, or ``[B, s, H]``
with ``sequence_dimension=1``. Sources: arXiv:1909.08053, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.config import require_divisible
from nxd_memopt.ops.autograd import cast_if_autocast_enabled, save_inputs_first
from nxd_memopt.parallel_layers import mappings, parallel_state
from nxd_memopt.parallel_layers.base_linear import BaseParallelLinear, check_padding
from nxd_memopt.parallel_layers.embedding import ParallelEmbedding
from nxd_memopt.parallel_layers.functional.adapted_column import adapted_column_parallel
from nxd_memopt.parallel_layers.functional.fp8_linear import Fp8ColumnParallel, Source, fp8_row_parallel
from nxd_memopt.parallel_layers.functional.linear import (
    ActivationSharding,
    ColumnActivationSharding,
    ColumnParallel,
    RowParallel,
)
from nxd_memopt.parallel_layers.fusion import FusedPath, FusibleModule
from nxd_memopt.parallel_layers.initialization import InitMethod
from nxd_memopt.parallel_layers.rank_order import columns_in_full_order, swap_blocks
from nxd_memopt.parallel_layers.utils import check_sequence_dimension, partition_size

__all__ = ["BaseParallelLinear", "ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "SharedInput"]


class ColumnParallelLinear(BaseParallelLinear):
    """Linear layer ``Y = X A^t + b`` with ``A = [A_1; ...; A_T]`` split along its output rows.

    Rank i computes ``Y_i = X A_i^t + b_i``. Communication in forward / backward: none / all-reduce
    of dX; with sequence parallelism all-gather of X / reduce-scatter of dX along
    ``sequence_dimension``. The output is ``[..., output_size/T]``, or ``[..., output_size]`` with
    ``gather_output``.

    Args:
        input_size: H, number of input features.
        output_size: number of output features over all ranks.
        bias: add a bias, sharded like the output.
        gather_output: all-gather the output columns on every rank.
        dtype: dtype of the parameters.
        device: device of the parameters; ``"meta"`` skips the initialization.
        stride: number of separately sharded blocks along the output, 3 for ``[q; k; v]``.
        init_method: initializes the full weight in place; default that of ``torch.nn.Linear``.
        sequence_parallel_enabled: the input is a shard along the sequence.
        sequence_dimension: dimension of the input that is the sequence, 0 (default) or 1.
        keep_master_weight: keep the full initial weight as ``master_weight``.
        skip_bias_add: return ``(output, bias)`` and leave the addition to the caller.
        pad: allow an ``output_size`` that T does not divide. Zero rows are appended, and
            ``gather_output`` removes the padded columns.
        pad_alignment_size_per_rank: with ``pad``, make the rows per rank a multiple of this.
        keep_padded_output: with ``gather_output``, return the padded columns too.
        tensor_model_parallel_group: process group; default the tensor-parallel group.
        reduce_dtype: dtype of the reduction of dX; default the dtype of dX.
        replicas: number of ranks that hold each shard; weight gradients are summed over them.
        rank_stride: distance between ranks with consecutive shard positions, see ``rank_order``.
            Query, key, value and output projection must use the same value:
            ``parallel_state.kv_rank_stride``.

    Raises:
        ValueError: T does not divide ``output_size`` and ``pad`` is False, or ``gather_output`` is
            used with sequence parallelism.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        pad_alignment_size_per_rank: int = 1,
        keep_padded_output: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
        *,
        replicas: int = 1,
        rank_stride: int = 1,
    ) -> None:
        super().__init__()
        if gather_output and sequence_parallel_enabled:
            raise ValueError("gather_output=True contradicts sequence_parallel_enabled=True: pass gather_output=False")
        if replicas > 1 and tensor_model_parallel_group is not None:
            raise ValueError(f"replicas={replicas} needs the default tensor-parallel group: leave the group out")
        check_padding(pad, stride)
        self.input_size = self.full_input_size = input_size
        self.output_size = output_size
        self.use_bias = bias
        self.dtype, self.device = dtype, device
        self.stride = stride
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = check_sequence_dimension(sequence_dimension)
        self.keep_padded_output = keep_padded_output
        self.keep_master_weight = keep_master_weight
        self.reduce_dtype = reduce_dtype
        self.init_method = init_method
        self.tensor_parallel_group = mappings.resolve_group(tensor_model_parallel_group)
        size = self._group_size()
        require_divisible("tensor_model_parallel_size", size, "rank_stride", rank_stride)
        self.replicas, self.rank_stride = replicas, rank_stride
        self.replica_group = parallel_state.replica_group(replicas, rank_stride)
        # Replicated shards: T / replicas distinct shards.
        self.output_size_per_partition = partition_size(
            "output_size", output_size, size // replicas, pad=pad, stride=stride, alignment=pad_alignment_size_per_rank
        )
        self.initialize_weight_and_bias()

    def set_weight_and_bias_config(self) -> None:
        # One bias element per output row: sharded with the rows.
        self.weight_shape = (self.output_size_per_partition, self.input_size)
        self.weight_partition_dim = 0
        self.bias_shape = (self.output_size_per_partition,) if self.use_bias else None
        self.bias_partition_dim = 0

    def activation_sharding(self, *replica_groups: ProcessGroup | None) -> ColumnActivationSharding:
        """Return the sharding of the input, for weights replicated over ``replica_groups``."""
        return ColumnActivationSharding(**self._sharding(), replica_groups=replica_groups)

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        # With skip_bias_add the caller adds the local bias, e.g. fused with an activation.
        bias = None if self.skip_bias_add else self.bias
        (output,) = column_parallel(input, [(self.weight, bias)], self.activation_sharding(self.replica_group))
        if self.gather_output:
            output = self._gathered(output)
        if not self.skip_bias_add:
            return output
        # The caller adds the bias to the gathered output, so it needs the columns of all ranks.
        skipped_bias: Tensor | None = self.bias
        if self.gather_output and skipped_bias is not None:
            skipped_bias = self._gathered(skipped_bias)
        return output, skipped_bias

    def _gathered(self, columns: Tensor) -> Tensor:
        """Gather the columns ``[..., n]`` of all ranks, in the order of the full weight's rows.

        Returns ``[..., output_size]``, with ``keep_padded_output`` also the padded columns.
        """
        # Columns in rank order -> full order: first undo the order of ranks and drop replicas,
        # then the interleaving of strided blocks.
        gathered = mappings.gather_from_tensor_model_parallel_region(columns, self.tensor_parallel_group)
        size = self._group_size()
        shards = columns_in_full_order(gathered, size, replicas=self.replicas, rank_stride=self.rank_stride)
        full = swap_blocks(shards, size // self.replicas, self.stride)
        # padded columns are last
        return full if self.keep_padded_output else full[..., : self.output_size]


def column_parallel_linears(input: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """Apply several column-parallel layers to one input with one all-gather and one reduction, with their ``factors``.

    The first layer defines the process group and the layout of the input.

    Args:
        input: ``[..., H]``; under sequence parallelism this rank's sequence shard.
        layers: layers with the same ``input_size``, group and sequence settings.

    Returns:
        The local output of each layer, ``[..., output_size/T]``, with the full sequence.
    """
    parameters = [(layer.weight, layer.bias) for layer in layers]
    comm = layers[0].activation_sharding(*(layer.replica_group for layer in layers))
    factors = [layer.factors for layer in layers]
    if any(factors):
        return adapted_column_parallel(input, parameters, factors, comm)
    return column_parallel(input, parameters, comm)


class SharedInput(FusibleModule):
    """Base of a module with column-parallel layers that have one input, computed together.

    A subclass names the layers in ``shared_input_layers``, builds them, and then calls
    ``share_input``.
    """

    shared_input_layers: tuple[str, ...] = ()
    shared_input: FusedPath

    def share_input(self) -> None:
        """Let ``project`` compute all layers at once. Call after the layers are built."""
        self.shared_input = FusedPath(
            self,
            f"projection of {', '.join(self.shared_input_layers)}",
            {name: _linear_class(self.get_submodule(name)) for name in self.shared_input_layers},
            cost="each layer has its own all-gather and matmul",
        )

    def project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the output ``[..., output_size/T]`` of each layer, with one all-gather of ``hidden``."""
        layers = [cast(ColumnParallelLinear, getattr(self, name)) for name in self.shared_input_layers]
        # A hook or a replaced forward on one of the layers turns the path off; then every layer
        # is called, at the cost of an all-gather each.
        if self.shared_input.is_active:
            outputs = column_parallel_linears(hidden, layers)
            return tuple(layer.adapted(hidden, output) for layer, output in zip(layers, outputs, strict=True))
        return tuple(layer(hidden) for layer in layers)


def _linear_class(layer: nn.Module) -> type[nn.Module]:
    """Return the class of a layer that ``SharedInput`` may compute without a call of its forward."""
    # A class that defines ``adapted`` itself: any other subclass may compute something else.
    return type(layer) if "adapted" in vars(type(layer)) else ColumnParallelLinear


def column_parallel(
    input: Tensor, parameters: Sequence[tuple[Tensor, Tensor | None]], comm: ColumnActivationSharding
) -> tuple[Tensor, ...]:
    """Return ``X W_i^t + b_i`` for each ``(W_i, b_i)``; see ``column_parallel_linears``.

    Args:
        input: ``[..., H]``.
        parameters: this rank's weights ``[n_i, H]`` and biases ``[n_i]`` (or None).
        comm: sharding of the input.
    """
    # Vectors become one row: GEMMs with out= and collectives need rows.
    if input.dim() == 1:
        outputs = column_parallel(input.unsqueeze(0), parameters, comm)
        return tuple(output.squeeze(0) for output in outputs)
    # An autograd Function takes tensors as separate arguments: W_1, b_1, W_2, b_2, ...
    tensors = [tensor for pair in parameters for tensor in pair]
    x, *tensors = cast_if_autocast_enabled(input, *tensors)
    function = ColumnParallel if comm.fp8 is None else Fp8ColumnParallel
    return cast("tuple[Tensor, ...]", function.apply(x, comm, *tensors))


class RowParallelLinear(BaseParallelLinear):
    """Linear layer ``Y = X A^t + b`` with ``A = [A_1, ..., A_T]`` split along its input columns.

    Rank i computes the partial sum ``X_i A_i^t``. Communication in forward / backward: all-reduce
    of Y / none; with sequence parallelism reduce-scatter of Y / all-gather of dY along
    ``sequence_dimension``. The bias is replicated and added once, after the reduction.

    Args:
        input_size: number of input features over all ranks.
        output_size: H, number of output features.
        bias: add a bias. Under sequence parallelism the bias is tagged for
            ``grads.allreduce_sequence_parallel_gradients``.
        input_is_parallel: the input is already ``[..., input_size/T]``; if False it is split here.
        stride: number of separately sharded blocks along the input.
        sequence_parallel_enabled: return a sequence shard; needs ``input_is_parallel``.
        skip_bias_add: return ``(output, bias)``.
        pad: allow an ``input_size`` that T does not divide.
        reduce_output: False returns this rank's partial sum; needs ``bias=False`` or
            ``skip_bias_add``.
        reduce_dtype: dtype of the reduction; default the dtype of the output.
        rank_stride: as in ``ColumnParallelLinear``; use the value of the query projection whose
            heads are the input.

    The remaining arguments are the same as in ``ColumnParallelLinear``.

    Raises:
        ValueError: T does not divide ``input_size`` and ``pad`` is False, or sequence parallelism
            is used with ``input_is_parallel=False``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group: ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
        *,
        rank_stride: int = 1,
    ) -> None:
        super().__init__()
        check_padding(pad, stride)
        if sequence_parallel_enabled and not input_is_parallel:
            raise ValueError("sequence_parallel_enabled=True needs input_is_parallel=True, got False: pass both")
        if bias and not reduce_output and not skip_bias_add:
            raise ValueError("reduce_output=False needs bias=False, got True: a partial sum would add it on every rank")
        self.full_input_size = input_size
        self.output_size = output_size
        self.use_bias = bias
        self.dtype, self.device = dtype, device
        self.stride = stride
        self.input_is_parallel = input_is_parallel
        self.reduce_output = reduce_output
        self.skip_bias_add = skip_bias_add
        self.keep_master_weight = keep_master_weight
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = check_sequence_dimension(sequence_dimension)
        self.reduce_dtype = reduce_dtype
        self.init_method = init_method
        self.tensor_parallel_group = mappings.resolve_group(tensor_model_parallel_group)
        size = self._group_size()
        self.rank_stride = rank_stride
        require_divisible("tensor_model_parallel_size", size, "rank_stride", rank_stride)
        # Padded inputs are zero, as are the weight's padded columns: they add nothing to the sum.
        self.input_size_per_partition = partition_size("input_size", input_size, size, pad=pad, stride=stride)
        self.input_size = self.input_size_per_partition * size
        self.initialize_weight_and_bias()

    def set_weight_and_bias_config(self) -> None:
        # The bias belongs to the full output: replicated, so it has no sharded dimension.
        self.weight_shape = (self.output_size, self.input_size_per_partition)
        self.weight_partition_dim = 1
        self.bias_shape = (self.output_size,) if self.use_bias else None
        self.bias_partition_dim = None

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        local = self._local_input(input)
        if self.reduce_output:
            output = row_parallel([(local, self.weight)], self)
        else:
            output = F.linear(local, self.weight)
        # The bias is replicated: added before the reduction it would count T times.
        if self.skip_bias_add:
            return output, self.bias
        if self.bias is None:
            return output
        return output + self.bias.to(output.dtype)

    def _local_input(self, input: Tensor) -> Tensor:
        if not self.input_is_parallel:
            # Full order -> rank order, the inverse of ``columns_in_full_order``: [stride, T]
            # blocks become [T, stride], then shard positions are mapped to ranks.
            padding = self.input_size - self.full_input_size
            if padding:
                input = F.pad(input, (0, padding))
            input = swap_blocks(input, self.stride, self._group_size())
            input = swap_blocks(input, self.rank_stride, self._group_size() // self.rank_stride)
            input = mappings.scatter_to_tensor_model_parallel_region(input, self.tensor_parallel_group)
        return input

    def activation_sharding(self) -> ActivationSharding:
        """Return the sharding of the output."""
        return ActivationSharding(**self._sharding())

    def require_divisible_sequence(self, partial_shape: torch.Size) -> None:
        """Raise ValueError if T does not divide the sequence length to be scattered."""
        if self.sequence_parallel_enabled:
            size = backend.group_size(self.tensor_parallel_group)
            mappings.require_equal_shards(partial_shape[self.sequence_dimension], size)


def row_parallel(pairs: Sequence[tuple[Tensor, Tensor]], layer: RowParallelLinear, *sources: Source | None) -> Tensor:
    """Return ``sum_i X_i W_i^t`` reduced over the ranks as in ``layer``, without the bias.

    Args:
        pairs: inputs ``[..., n_i/T]`` with their weights ``[H, n_i/T]``.
        layer: layer that defines group, sequence dimension and dtype of the reduction.
        sources: of all inputs: what backward computes them from in float8, or None; default none.
    """
    if pairs[0][0].dim() == 1:
        return row_parallel([(x.unsqueeze(0), weight) for x, weight in pairs], layer).squeeze(0)
    # An autograd Function takes tensors as separate arguments: X_1, W_1, X_2, W_2, ...
    tensors = [tensor for pair in pairs for tensor in pair]
    tensors = cast("list[Tensor]", cast_if_autocast_enabled(*tensors))
    layer.require_divisible_sequence(tensors[0].shape)
    comm = layer.activation_sharding()
    # The casts are done above; autocast must not change dtypes inside the Function.
    with torch.autocast(tensors[0].device.type, enabled=False):
        if comm.fp8 is not None:
            return fp8_row_parallel(comm, tensors, sources)
        # Inputs are saved before the Function runs, so that a recompute that ends here skips the
        # GEMM and its reduction (``ops.autograd``). Only dW_i reads X_i.
        is_read = [flag for weight in tensors[1::2] for flag in (weight.requires_grad, True)]
        handle, saved = save_inputs_first(*tensors, is_read=is_read)
        return cast(Tensor, RowParallel.apply(comm, handle, *saved))
