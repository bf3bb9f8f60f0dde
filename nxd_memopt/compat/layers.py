"""neuronx-distributed's signatures of the linear and embedding layers, where they differ.

Its defaults: reductions in fp32, a full bias with a gathered output, ``pad=True`` for inference
only.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.parallel_layers import base_linear, embedding, layers, mappings, parallel_state
from nxd_memopt.parallel_layers.functional.linear import ColumnActivationSharding
from nxd_memopt.parallel_layers.initialization import InitMethod, initialize_sharded_
from nxd_memopt.parallel_layers.utils import divide, set_tensor_model_parallel_attributes


def refuse(**options: Any) -> None:
    """Raise ``ValueError`` for the first option that is set; the layers here do not support it."""
    for name, value in options.items():
        if value:
            raise ValueError(f"{name}={value!r} is not offered by nxd_memopt: leave it out")


def _with_defaults(layer: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, with NxD's default of ``reduce_dtype``, fp32."""
    # By name, because the caller may pass reduce_dtype by position: it then overrides the
    # default.
    return {"reduce_dtype": torch.float32, **inspect.signature(layer).bind(*args, **kwargs).arguments}


def linear_with_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
    sequence_dimension: int | None = 0,
    autograd_func_class: None = None,
    save_for_backward: bool = True,
    process_group: ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """Return ``X W^t + b`` with the communication of a column-parallel layer.

    Without ``async_grad_allreduce`` and ``sequence_parallel_enabled`` it is ``F.linear``.

    Args:
        input: ``[..., input_size]``, a sequence shard with ``sequence_parallel_enabled``.
        weight: this rank's rows, ``[output_size / T, input_size]``.
        bias: this rank's shard, ``[output_size / T]``.
        async_grad_allreduce: sum dX over the group.
        sequence_parallel_enabled: all-gather X in forward and reduce-scatter dX in backward.
        sequence_dimension: dimension of X that is sharded; default 0.
        save_for_backward: with False the result has no gradient.
        process_group: tensor-parallel group; ``None`` is the global one.
        reduce_dtype: dtype in which dX is summed.

    Raises:
        ValueError: ``autograd_func_class`` is set.
    """
    refuse(autograd_func_class=autograd_func_class)
    if not (async_grad_allreduce or sequence_parallel_enabled):
        return F.linear(input, weight, bias)
    # None means that X is not sharded: forward has no collective, and backward all-reduces dX.
    dimension = None
    if sequence_parallel_enabled:
        dimension = sequence_dimension or 0
    # save_for_backward=False disables gradients; it does not enable them inside torch.no_grad.
    sharding = ColumnActivationSharding(mappings.resolve_group(process_group), dimension, reduce_dtype, (None,))
    with torch.set_grad_enabled(torch.is_grad_enabled() and save_for_backward):
        (output,) = layers.column_parallel(input, [(weight, bias)], sharding)
    return output


class LinearWithAsyncCommunication:
    """Column-parallel matmul with the ``apply`` of neuronx-distributed's autograd function."""

    @staticmethod
    def apply(*args: Any) -> Tensor:
        """Return ``X W^t + b``; see ``linear_with_async_allreduce``, whose ``autograd_func_class`` is left out here."""
        arguments: list[Any] = [*args[:6], None, *args[6:]]
        return linear_with_async_allreduce(*arguments)


class BaseParallelLinear(base_linear.BaseParallelLinear):
    """Base of both linear layers: padding of full weights for inference."""

    pad: bool = False

    @property
    def can_be_adapted(self) -> bool:
        """Whether ``modules.lora`` may replace the class: without padding the layer computes what ours does.

        A subclass may compute something else.
        """
        return not self.pad and type(self) in (ColumnParallelLinear, RowParallelLinear)

    @property
    def pad_size(self) -> int:
        """Number of padding rows or columns of the full layer."""
        raise NotImplementedError

    def _group_size(self) -> int:
        """Return T, the number of ranks of the layer's process group."""
        if self.tensor_parallel_group is None:
            return 1
        return dist.get_world_size(group=self.tensor_parallel_group)

    def _check_pad_false_for_training(self) -> None:
        """Raise ``RuntimeError`` for a padded layer in training.

        neuronx-distributed's loss does not know the padding and would take padded columns as
        vocabulary.
        """
        if self.pad and self.training:
            raise RuntimeError("pad=True is for inference: call model.eval(), or use nxd_memopt's own layers to train")

    def _pad_entry(self, state_dict: dict[str, Tensor], name: str, dim: int, value: float = 0.0) -> None:
        """Pad a full tensor of ``state_dict`` with ``pad_size`` entries of ``value`` along ``dim``.

        Raises:
            ValueError: the tensor has not the layer's size along ``dim``.
        """
        # Weights are [output_size, input_size], biases [output_size].
        tensor = state_dict[name]
        expected = (self.output_size, self.full_input_size)[dim]
        if tensor.size(dim) != expected:
            raise ValueError(f"{name} has {tensor.size(dim)} entries along dimension {dim}, the layer {expected}")
        # F.pad takes (before, after) pairs from the last dimension to the first.
        padding = [0, 0] * (tensor.dim() - 1 - dim) + [0, self.pad_size]
        state_dict[name] = F.pad(tensor, padding, value=value)


class ColumnParallelLinear(BaseParallelLinear, layers.ColumnParallelLinear):
    """Column-parallel linear layer with neuronx-distributed's defaults.

    With ``gather_output`` every rank has the full bias, which is added after the all-gather. For
    the arguments see ``layers.ColumnParallelLinear``.

    Raises:
        ValueError: ``rank_ordering`` is set.
    """

    def __init__(self, *args: Any, rank_ordering: Sequence[int] | None = None, **kwargs: Any) -> None:
        refuse(rank_ordering=rank_ordering)
        options = _with_defaults(layers.ColumnParallelLinear, args, kwargs)
        self.pad = options.get("pad", False)
        super().__init__(**options)

    def set_weight_and_bias_config(self) -> None:
        """Set the shapes of weight and bias; with a gathered output the bias is not sharded."""
        super().set_weight_and_bias_config()
        # nxd_memopt's own layer adds its bias shard before the all-gather. Checkpoints and
        # scripts of neuronx-distributed expect the full bias on every rank.
        if self.gather_output and self.use_bias:
            self.bias_shape = (self.output_size + self.pad_size,)
            self.bias_partition_dim = None

    @property
    def pad_size(self) -> int:
        return self.output_size_per_partition * self._group_size() - self.output_size

    def forward(self, input: Tensor, slice_indices: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return ``X W^t + b``, or a tuple of ``X W^t`` and ``b`` with ``skip_bias_add``.

        Args:
            input: ``[..., input_size]``, a sequence shard with sequence parallelism.
            slice_indices: rows of this rank's weight to use; default: all.
        """
        self._check_pad_false_for_training()
        # The matmul runs without bias, which is added at the end: with gather_output it is full.
        weight = self.weight
        if slice_indices is not None:
            weight = weight[slice_indices]
        output = linear_with_async_allreduce(
            input=input,
            weight=weight,
            bias=None,
            async_grad_allreduce=not self.sequence_parallel_enabled,
            sequence_parallel_enabled=self.sequence_parallel_enabled,
            sequence_dimension=self.sequence_dimension,
            process_group=self.tensor_parallel_group,
            reduce_dtype=self.reduce_dtype,
        )
        if self.gather_output:
            output = self._gathered(output)
        # Padding is last in the bias, as in the gathered output.
        bias = self.bias
        if self.gather_output and not self.keep_padded_output and bias is not None:
            bias = bias[: self.output_size]
        if self.skip_bias_add:
            return output, bias
        if bias is None:
            return output
        return output + bias.to(output.dtype)

    def preshard_hook(self, model_state_dict: dict[str, Tensor], prefix: str) -> None:
        """Pad the full tensor named ``prefix``.

        A weight is padded with zeros, a bias with its dtype's minimum: a padded logit is never
        the largest.
        """
        # Called on a full state dict before it is sharded. Columns are divided over T ranks, so
        # their number must be a multiple of T.
        if not self.pad_size:
            return
        value = 0.0
        if prefix.endswith("bias"):
            value = torch.finfo(model_state_dict[prefix].dtype).min
        self._pad_entry(model_state_dict, prefix, 0, value)


class RowParallelLinear(BaseParallelLinear, layers.RowParallelLinear):
    """Row-parallel linear layer with neuronx-distributed's defaults; see ``layers``.

    Raises:
        ValueError: ``tile_cc`` or ``rank_ordering`` is set.
    """

    def __init__(
        self, *args: Any, tile_cc: bool = False, rank_ordering: Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        refuse(tile_cc=tile_cc, rank_ordering=rank_ordering)
        options = _with_defaults(layers.RowParallelLinear, args, kwargs)
        self.pad = options.get("pad", False)
        super().__init__(**options)

    @property
    def pad_size(self) -> int:
        return self.input_size - self.full_input_size

    def forward(self, input: Tensor, slice_indices: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return the output of ``layers.RowParallelLinear``; ``slice_indices`` is not supported."""
        refuse(slice_indices=slice_indices is not None)
        self._check_pad_false_for_training()
        return super().forward(input)

    def preshard_hook(self, model_state_dict: dict[str, Tensor], prefix: str) -> None:
        """Pad the full weight named ``prefix`` with zeros; the bias is not sharded."""
        # Padding inputs have weights 0, so they add nothing to the sum over ranks. The bias has
        # one entry per output and is equal on all ranks.
        if self.pad_size and prefix.endswith("weight"):
            self._pad_entry(model_state_dict, prefix, 1)


def create_local_weight(
    full_weight: Tensor, partition_dim: int, per_partition_size: int, stride: int, out_weight: Tensor | None = None
) -> Tensor:
    """Return this rank's shard of ``full_weight`` along ``partition_dim``.

    ``full_weight`` consists of ``stride`` blocks, and the shard has an equal part of each block.

    Args:
        full_weight: full tensor.
        partition_dim: sharded dimension.
        per_partition_size: length of a shard along ``partition_dim``.
        stride: number of blocks that are sharded separately, such as 3 for query, key and value.
        out_weight: tensor to fill and return; default: a new tensor.
    """
    size = parallel_state.get_tensor_model_parallel_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    length = divide(per_partition_size, stride)
    # Block i starts at i * T * length; within each block rank r has [r * length, (r + 1) *
    # length).
    starts = range(rank * length, full_weight.size(partition_dim), size * length)
    chunks = [full_weight.narrow(partition_dim, start, length) for start in starts]
    # out= is refused by autograd for a parameter, hence no_grad. The chunks are views, so this is
    # the only copy.
    with torch.no_grad():
        return torch.cat(chunks, dim=partition_dim, out=out_weight)


def _initialize_parameter_cpu(
    param: Tensor,
    partition_dim: int,
    num_partitions: int,
    init_method: InitMethod,
    return_master_param: bool = False,
    *,
    param_dtype: torch.dtype = torch.float32,
    stride: int = 1,
) -> Tensor | None:
    """Set sharding attributes on ``param`` and fill it with its slice of the full tensor.

    Returns:
        The full tensor in ``param_dtype`` with ``return_master_param``, else None.
    """
    # The attributes come first: initialize_sharded_ reads the shard's position from them. Every
    # rank draws the values of the full tensor and takes its slice, so they do not depend on T.
    full_shape = list(param.shape)
    full_shape[partition_dim] *= num_partitions
    set_tensor_model_parallel_attributes(
        param, True, partition_dim, stride, num_partitions, full_shape=tuple(full_shape)
    )
    full = initialize_sharded_(param, init_method, keep_full=return_master_param)
    if full is None:
        return None
    return full.to(param_dtype)


class ParallelEmbedding(embedding.ParallelEmbedding):
    """Vocabulary-parallel embedding with neuronx-distributed's order of arguments.

    Raises:
        ValueError: an option of ``torch.nn.Embedding`` or of inference is set that
            ``embedding.ParallelEmbedding`` does not have.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = nn.init.normal_,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        use_spmd_rank: bool = False,
        sequence_dimension: int | None = None,
        tile_cc: bool = False,
        rank_ordering: Sequence[int] | None = None,
        collect_output: bool = True,
    ) -> None:
        # The order of the arguments is neuronx-distributed's, for calls by position. An option
        # that would change values or gradients is refused instead of ignored.
        del norm_type  # an option of max_norm, which is not supported
        refuse(max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        refuse(use_spmd_rank=use_spmd_rank, tile_cc=tile_cc, rank_ordering=rank_ordering)
        # neuronx-distributed ignores sequence parallelism here and returns all tokens.
        if shard_across_embedding:
            refuse(sequence_parallel_enabled=sequence_parallel_enabled)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            init_method=init_method,
            device=device,
            dtype=dtype,
            shard_across_embedding=shard_across_embedding,
            pad=pad,
            sequence_parallel_enabled=sequence_parallel_enabled,
            sequence_dimension=sequence_dimension,
            tensor_model_parallel_group=tensor_model_parallel_group,
            collect_output=collect_output,
        )
