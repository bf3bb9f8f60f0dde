"""neuronx-distributed's signatures of the linear and embedding layers, where they differ.

Its defaults: reductions in fp32, a whole bias beside a gathered output, ``pad=True`` for inference alone.
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

from nxd_memopt.parallel_layers import base_linear, embedding, layers, parallel_state
from nxd_memopt.parallel_layers.functional.linear import ColumnActivationSharding
from nxd_memopt.parallel_layers.initialization import InitMethod, initialize_sharded_
from nxd_memopt.parallel_layers.mappings import gather_from_tensor_model_parallel_region
from nxd_memopt.parallel_layers.utils import divide, set_tensor_model_parallel_attributes


def refuse(**options: Any) -> None:
    """``ValueError`` for the first option that is set: neuronx-distributed has it, the layers here do not."""
    for name, value in options.items():
        if value:
            raise ValueError(f"{name}={value!r} is not offered by nxd_memopt: leave it out")


def _with_defaults(layer: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, with neuronx-distributed's ``reduce_dtype`` where none is given."""
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
    """``X W^t + b`` with the communication of a column-parallel layer; plain where neither flag asks for it.

    Args:
        input: ``[..., input_size]``, a sequence shard with ``sequence_parallel_enabled``.
        weight: this rank's rows.
        bias: this rank's part.
        async_grad_allreduce: sum dX over the group.
        save_for_backward: False makes a result without gradient.
    """
    refuse(autograd_func_class=autograd_func_class)
    if not (async_grad_allreduce or sequence_parallel_enabled):
        return F.linear(input, weight, bias)
    dimension = (sequence_dimension or 0) if sequence_parallel_enabled else None
    sharding = ColumnActivationSharding(process_group, dimension, reduce_dtype, (None,))
    with torch.set_grad_enabled(torch.is_grad_enabled() and save_for_backward):
        (output,) = layers.column_parallel(input, [(weight, bias)], sharding)
    return output


class LinearWithAsyncCommunication:
    """``apply`` is ``linear_with_async_allreduce`` with the arguments of neuronx-distributed's autograd function."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        async_grad_allreduce: bool,
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None = 0,
        save_for_backward: bool = True,
        process_group: ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> Tensor:
        return linear_with_async_allreduce(
            input,
            weight,
            bias,
            async_grad_allreduce,
            sequence_parallel_enabled,
            sequence_dimension,
            save_for_backward=save_for_backward,
            process_group=process_group,
            reduce_dtype=reduce_dtype,
        )


class BaseParallelLinear(base_linear.BaseParallelLinear):
    """What both linear layers add to ours."""

    pad: bool = False

    @property
    def pad_size(self) -> int:
        """Rows or columns of padding of the whole layer."""
        raise NotImplementedError

    def _group_size(self) -> int:
        return 1 if self.tensor_parallel_group is None else dist.get_world_size(group=self.tensor_parallel_group)

    def _check_pad_false_for_training(self) -> None:
        """Padded columns would be vocabulary to neuronx-distributed's loss, which is not told about them."""
        if self.pad and self.training:
            raise RuntimeError("pad=True is for inference: call model.eval(), or use nxd_memopt's own layers to train")

    def _pad_entry(self, state_dict: dict[str, Tensor], name: str, dim: int, value: float = 0.0) -> None:
        """Grow a full tensor of ``state_dict`` by ``pad_size`` along ``dim``, which must be as long as the layer's."""
        tensor, expected = state_dict[name], (self.output_size, self.full_input_size)[dim]
        if tensor.size(dim) != expected:
            raise ValueError(f"{name} has {tensor.size(dim)} entries along dimension {dim}, the layer {expected}")
        padding = [0, 0] * (tensor.dim() - 1 - dim) + [0, self.pad_size]
        state_dict[name] = F.pad(tensor, padding, value=value)


class ColumnParallelLinear(BaseParallelLinear, layers.ColumnParallelLinear):
    """``layers.ColumnParallelLinear``; the bias of a gathered output is whole on every rank and added after the gather.

    Additional arguments: see ``layers.ColumnParallelLinear``; ``rank_ordering`` is refused (``ValueError``).
    """

    def __init__(self, *args: Any, rank_ordering: Sequence[int] | None = None, **kwargs: Any) -> None:
        refuse(rank_ordering=rank_ordering)
        options = _with_defaults(layers.ColumnParallelLinear, args, kwargs)
        self.pad = options.get("pad", False)
        super().__init__(**options)

    def set_weight_and_bias_config(self) -> None:
        super().set_weight_and_bias_config()
        if self.gather_output and self.use_bias:
            self.bias_shape, self.bias_partition_dim = (self.output_size + self.pad_size,), None

    @property
    def pad_size(self) -> int:
        return self.output_size_per_partition * self._group_size() - self.output_size

    def forward(self, input: Tensor, slice_indices: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """``slice_indices`` picks rows of this rank's weight."""
        self._check_pad_false_for_training()
        weight = self.weight if slice_indices is None else self.weight[slice_indices]
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
            output = gather_from_tensor_model_parallel_region(output, process_group=self.tensor_parallel_group)
            output = self._in_full_order(output)
        bias = self.bias
        if self.gather_output and not self.keep_padded_output:
            output, bias = output[..., : self.output_size], None if bias is None else bias[: self.output_size]
        if self.skip_bias_add:
            return output, bias
        return output if bias is None else output + bias.to(output.dtype)

    def preshard_hook(self, model_state_dict: dict[str, Tensor], prefix: str) -> None:
        """Pad the full tensor ``prefix``: a weight with zeros, a bias with its dtype's minimum, a logit that loses."""
        if self.pad_size:
            lowest = torch.finfo(model_state_dict[prefix].dtype).min
            self._pad_entry(model_state_dict, prefix, 0, lowest if prefix.endswith("bias") else 0.0)


class RowParallelLinear(BaseParallelLinear, layers.RowParallelLinear):
    """``layers.RowParallelLinear``; ``tile_cc`` and ``rank_ordering`` are refused (``ValueError``)."""

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
        refuse(slice_indices=slice_indices is not None)
        self._check_pad_false_for_training()
        return super().forward(input)

    def preshard_hook(self, model_state_dict: dict[str, Tensor], prefix: str) -> None:
        """Pad the full weight named ``prefix`` with zeros; the bias is not sharded."""
        if self.pad_size and prefix.endswith("weight"):
            self._pad_entry(model_state_dict, prefix, 1)


def create_local_weight(
    full_weight: Tensor, partition_dim: int, per_partition_size: int, stride: int, out_weight: Tensor | None = None
) -> Tensor:
    """This rank's shard of ``full_weight`` along ``partition_dim``: of ``stride`` blocks, a part of each.

    Args:
        full_weight: replicated.
        per_partition_size: length of a shard along ``partition_dim``.
        stride: separately sharded blocks.
        out_weight: filled and returned; default a new tensor.
    """
    size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    length = divide(per_partition_size, stride)
    starts = range(rank * length, full_weight.size(partition_dim), size * length)
    pieces = [full_weight.narrow(partition_dim, start, length) for start in starts]
    with torch.no_grad():
        return torch.cat(pieces, dim=partition_dim, out=out_weight)


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
    """Describe ``param`` as a shard and fill it with its slice of ``init_method`` of the full tensor."""
    full_shape = list(param.shape)
    full_shape[partition_dim] *= num_partitions
    set_tensor_model_parallel_attributes(
        param, True, partition_dim, stride, num_partitions, full_shape=tuple(full_shape)
    )
    full = initialize_sharded_(param, init_method, keep_full=return_master_param)
    return None if full is None else full.to(param_dtype)


class ParallelEmbedding(embedding.ParallelEmbedding):
    """``embedding.ParallelEmbedding`` with neuronx-distributed's order of arguments.

    Options of ``torch.nn.Embedding`` and of inference that ours lacks are refused (``ValueError``).
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
        del norm_type  # of max_norm, which is refused
        refuse(max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        refuse(use_spmd_rank=use_spmd_rank, tile_cc=tile_cc, rank_ordering=rank_ordering)
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
