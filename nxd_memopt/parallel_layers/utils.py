"""Describes a parameter as a shard of a full one; helpers of the parallel layers."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nxd_memopt.config import require_divisible
from nxd_memopt.ops.autograd import cast_if_autocast_enabled as cast_if_autocast_enabled  # a name of NxD's utils
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.fusion import FusibleModule
from nxd_memopt.parallel_layers.rank_order import kv_shard_of_rank

SHARD_ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "num_partitions",
    "full_shape",
    "replicas",
    "rank_stride",
    "partition_index",
    "sequence_parallel_enabled",
    "blocks",
    "expert_model_parallel",
    "expert_partition_index",
    "num_expert_partitions",
    "is_bias",
    "shared",
)
"""Attributes that the layers set on parameters; other tools may rely on each of them."""


@dataclass(frozen=True)
class ShardBlock:
    """Rows of a fused parameter that are sharded separately; ``param.blocks`` lists them in order.

    Attributes:
        full_rows: rows of the block over all ranks.
        rows: rows of the block on each rank.
        replicas: number of ranks that hold the same rows.
    """

    full_rows: int
    rows: int
    replicas: int


def blocks_within(blocks: Sequence[ShardBlock], first: int, stop: int) -> tuple[ShardBlock, ...]:
    """Return the blocks of the range ``[first, stop)`` of a fused parameter.

    Rows of the range after the last block, which are padding, are a block with ``full_rows`` 0.

    Args:
        blocks: the blocks of the parameter; lengths in rows, or in any other unit.
        first: first row of the range.
        stop: one after the last row of the range.
    """
    inside = []
    start = 0
    for block in blocks:
        # Each block [start, end) contributes the intersection of the two ranges.
        end = start + block.rows
        rows = max(min(end, stop) - max(start, first), 0)
        inside.append(ShardBlock(block.full_rows, rows, block.replicas))
        start = end
    padding = stop - first - sum(block.rows for block in inside)
    return (*inside, ShardBlock(0, padding, 1))


def divide(numerator: int, denominator: int) -> int:
    """Divide without remainder; raise ValueError if there is one."""
    return require_divisible("size", numerator, "divisor", denominator)


def padded_size(size: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def partition_size(
    what: str,
    size: int,
    partitions: int,
    *,
    pad: bool = False,
    stride: int = 1,
    alignment: int = 1,
    pad_option: str = "pad=True",
) -> int:
    """Return the size of a shard that consists of one chunk of each of ``stride`` blocks.

    Args:
        what: argument of the layer, for messages.
        size: number of features over all ranks, without padding.
        partitions: number of distinct shards.
        pad: divide ``size`` rounded up.
        stride: number of separately sharded blocks.
        alignment: with ``pad``, each chunk is a multiple of this.
        pad_option: option of the layer that allows padding, for messages.

    Raises:
        ValueError: the size is not divisible, and ``pad`` is False.
    """
    # Each block is divided over the partitions by itself: partitions * stride equal chunks.
    chunks = partitions * stride
    if pad:
        return padded_size(size, chunks * alignment) // partitions
    remedy = f"pass {pad_option} or use {padded_size(size, chunks)}"
    return stride * require_divisible(what, size, "tensor_model_parallel_size", chunks, remedy)


def check_sequence_dimension(sequence_dimension: int | None) -> int:
    """Return the dimension, 0 for None; raise ValueError for anything but None, 0 and 1."""
    if sequence_dimension not in (None, 0, 1):
        raise ValueError(f"sequence_dimension must be 0 ([S, B, H]) or 1 ([B, S, H]), got {sequence_dimension}")
    return sequence_dimension or 0


def set_tensor_model_parallel_attributes(
    tensor: Tensor,
    is_parallel: bool,
    dim: int,
    stride: int = 1,
    num_partitions: int = -1,
    *,
    full_shape: tuple[int, ...] | None = None,
    replicas: int = 1,
    rank_stride: int = 1,
    rank: int | None = None,
) -> None:
    """Describe ``tensor`` as one of ``num_partitions`` shards of a full parameter.

    Args:
        tensor: the local parameter; the attributes are set on it.
        is_parallel: False for a replicated parameter.
        dim: the sharded dimension.
        stride: number of separately sharded blocks along ``dim`` (3 for ``[q, k, v]``).
        num_partitions: number of distinct shards; -1 for T / ``replicas``.
        full_shape: shape of the full parameter without padding.
        replicas: number of ranks that hold each shard (KV heads if T exceeds them).
        rank_stride: distance between ranks with consecutive shard positions, see ``rank_order``.
        rank: this rank in the group that shares the parameter; default its tensor-parallel rank.
    """
    if num_partitions < 0:
        num_partitions = parallel_state.get_tensor_model_parallel_size() // replicas
    if rank is None:
        rank = parallel_state.get_tensor_model_parallel_rank()
    partition = kv_shard_of_rank(rank, num_partitions * replicas, replicas, rank_stride)
    values = (is_parallel, dim, stride, num_partitions, full_shape, replicas, rank_stride, partition)
    # The first attributes of the list, in its order. The remaining ones are set by the layers that
    # have them.
    for name, value in zip(SHARD_ATTRIBUTES, values, strict=False):
        setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copy every shard attribute that ``source_tensor`` has."""
    for name in SHARD_ATTRIBUTES:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def is_sharded(param: Tensor) -> bool:
    """Return whether tensor-parallel ranks hold different parts of the parameter."""
    return getattr(param, "tensor_model_parallel", False)


def describe_shard(weight: Tensor, size: int) -> str:
    """Return what the ``repr`` of a layer says about this rank's shard of a weight on ``size`` ranks."""
    return f"weight_per_partition={list(weight.shape)}, tensor_model_parallel_size={size}, dtype={weight.dtype}"


def set_expert_model_parallel_attributes(param: Tensor) -> None:
    """Describe dim 0 of ``param`` as this rank's experts; no attributes without expert parallelism.

    Expert-parallel ranks are data-parallel ranks with different experts: gradients of such a
    parameter are summed over the expert-data-parallel group only.
    """
    size = parallel_state.get_expert_model_parallel_size()
    if size == 1:
        return
    description: Any = param
    description.expert_model_parallel = True
    description.expert_partition_index = parallel_state.get_expert_model_parallel_rank()
    description.num_expert_partitions = size


def is_expert_parallel(param: Tensor) -> bool:
    """Return whether expert-parallel ranks hold different experts of the parameter."""
    return getattr(param, "expert_model_parallel", False)


def first_expert(param: Tensor) -> int:
    """Return the index of the parameter's first expert in the full tensor; 0 for other parameters."""
    if not is_expert_parallel(param):
        return 0
    return cast(Any, param).expert_partition_index * param.shape[0]


def shard_ranges(param: Tensor, *, rank: int | None = None) -> list[tuple[int, int]]:
    """Return a rank's index ranges along ``partition_dim`` of the padded full parameter.

    With n partitions and stride k the full dimension is k blocks ``[A_1 .. A_n] [B_1 .. B_n] ...``;
    partition i holds ``[A_i B_i ...]``. Indices from ``full_shape[partition_dim]`` on are padding.
    A parameter with ``blocks`` is sharded block by block.

    Args:
        param: a parameter described by ``set_tensor_model_parallel_attributes``.
        rank: rank in the group that shares the parameter; default this rank.

    Returns:
        Half-open ranges ``(start, stop)``, in the order of the local elements.
    """
    description: Any = param
    partition = description.partition_index
    if rank is not None:
        size = description.num_partitions * description.replicas
        partition = kv_shard_of_rank(rank, size, description.replicas, description.rank_stride)
    if getattr(param, "blocks", None):
        return _block_ranges(description.blocks, partition)
    length = param.size(description.partition_dim) // description.partition_stride
    block = length * description.num_partitions
    starts = [i * block + partition * length for i in range(description.partition_stride)]
    return [(start, start + length) for start in starts]


def _block_ranges(blocks: tuple[ShardBlock, ...], position: int) -> list[tuple[int, int]]:
    # A block with m replicas has size / m distinct shards: m consecutive positions share one.
    # ``first`` is the block's first row in the padded full parameter.
    ranges: list[tuple[int, int]] = []
    first = 0
    for block in blocks:
        start = first + position // block.replicas * block.rows
        ranges.append((start, start + block.rows))
        first += block.full_rows
    return ranges


def requires_init_pg_override() -> bool:
    """Return whether ``init_process_group`` needs ``init_method="pjrt://"``.

    Early torch_xla needed it; no backend of this library does.
    """
    return False


def bit_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether dtypes, shapes and all bits are equal; a NaN equals itself here."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    # Compared as bytes: as numbers a NaN differs from itself, and 0.0 equals -0.0.
    first_bytes = first.contiguous().reshape(-1).view(torch.uint8)
    second_bytes = second.contiguous().reshape(-1).view(torch.uint8)
    return torch.equal(first_bytes, second_bytes)


def map_leaves(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every ``kind`` in nested dicts, lists and tuples; keep other values."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_leaves(item, kind, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        make: Any = getattr(type(value), "_make", type(value))  # of a named tuple
        return make([map_leaves(item, kind, function) for item in value])
    return value


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply ``function`` to every tensor in nested dicts, lists and tuples; keep other values."""
    return map_leaves(value, Tensor, function)


def map_distinct_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``map_tensors`` with one call for tensors with the same elements, such as tied weights.

    torch_xla's tensors do not expose their storage, so each of them is treated as distinct.
    """
    results: dict[Any, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if tensor.device.type == "xla" or tensor.layout is not torch.strided:
            return function(tensor)
        # Two views of one storage have the same elements only if all of this agrees: other
        # offsets, shapes or strides are other elements, and the bits of lazy conjugation and
        # negation change their values.
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride())
        lazy_bits = (tensor.is_conj(), tensor.is_neg())
        key = (tensor.untyped_storage()._cdata, tensor.dtype, *layout, *lazy_bits)
        if key not in results:
            results[key] = function(tensor)
        return results[key]

    return map_tensors(value, once)


def move_model_to_device(model: nn.Module, device: torch.device) -> None:
    """Move ``model`` in place and keep shard attributes and ties.

    Meta tensors become uninitialized. Parameters that are on ``device`` stay the same objects, as do those of
    devices between which torch can replace a parameter's data (CPU and CUDA): an optimizer may have them.
    ``Module.to`` creates new parameters for other devices, which loses attributes and ties.
    """
    # By id, so that tied parameters stay tied.
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in moved:
                moved[id(param)] = _moved_parameter(param, device)
            setattr(module, name, moved[id(param)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _to_device(buffer, device))


def _moved_parameter(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return ``param`` with its data on ``device``, or a new parameter with its attributes."""
    values = _to_device(param.detach(), device)
    # torch's own test of whether ``Module.to`` may keep the parameter.
    if torch._has_compatible_shallow_copy_type(param, values):  # pyright: ignore[reportPrivateImportUsage]
        grad = param.grad
        param.data = values
        param.grad = None if grad is None else _to_device(grad, device)
        return param
    moved = nn.Parameter(values, requires_grad=param.requires_grad)
    copy_tensor_model_parallel_attributes(moved, param)
    return moved


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; an uninitialized tensor for a meta tensor."""
    if tensor.is_meta:
        return torch.empty_like(tensor, device=device)
    return tensor.to(device)


def mark_sequence_parallel(module: nn.Module, enabled: bool) -> None:
    """Tag the module's own parameters: under sequence parallelism their gradients are partial."""
    for param in module.parameters(recurse=False):
        param.sequence_parallel_enabled = enabled  # pyright: ignore[reportAttributeAccessIssue]


class ShardedModule(FusibleModule):
    """Module that keeps shard attributes if torch replaces or copies its parameters.

    This happens in ``to_empty``, ``load_state_dict(assign=True)`` and ``copy.deepcopy``. Copies
    share the process groups.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Depending on the devices and on torch's settings, ``_apply`` creates new parameters,
        # which lack the attributes, or replaces ``.data`` of the existing ones, which keep them.
        before = dict(self._parameters)
        super()._apply(fn, recurse)
        self._describe_like(before)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        before = dict(self._parameters)
        super()._load_from_state_dict(*args, **kwargs)
        self._describe_like(before)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Process groups cannot be copied: the memo makes the copy share them.
        for group in parallel_state.process_groups():
            memo[id(group)] = group
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        copied._describe_like(self._parameters)
        return copied

    def _describe_like(self, described: Mapping[str, Tensor | None]) -> None:
        """Copy the shard attributes of ``described`` to parameters that were replaced."""
        for name, param in self._parameters.items():
            source = described.get(name)
            if param is not None and source is not None and param is not source:
                copy_tensor_model_parallel_attributes(param, source)


def leave_process_groups() -> None:
    """Destroy every process group, also the world's, and stop their threads; call it last.

    The threads of a group stop when the last reference to the group is dropped. A thread that drops
    a tensor during interpreter shutdown is killed inside a destructor, and the process ends with
    SIGABRT.
    """
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # models and optimizers in reference cycles hold groups too
