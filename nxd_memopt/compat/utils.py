"""neuronx-distributed's helpers of ``parallel_layers.utils``, ``parallel_layers.pad`` and ``utils``."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.backends.neuron.topology import logical_nc_config, platform_target
from nxd_memopt.compat.layers import refuse
from nxd_memopt.compat.rank_groups import hardware
from nxd_memopt.parallel_layers import pad, parallel_state, utils
from nxd_memopt.parallel_layers.utils import divide, is_sharded, map_tensors, padded_size

# Devices and processes


def cpu_mode() -> bool:
    """Return whether the program should use its branches for CPU ranks (NXD_CPU_MODE)."""
    return int(os.environ.get("NXD_CPU_MODE", "0")) > 0


class LogicalNCConfig(IntEnum):
    """Number of physical cores of a logical core."""

    LNC_1 = 1
    LNC_2 = 2


def get_platform_lnc() -> LogicalNCConfig:
    """Return the number of physical cores of a logical core: 1 on trn1 and without Neuron."""
    if platform_target(os.environ) in ("trn2", "trn3"):
        return LogicalNCConfig(logical_nc_config(os.environ))
    return LogicalNCConfig.LNC_1


def get_platform_target() -> str:
    """Return ``"trn1"``, ``"trn2"`` or ``"trn3"``; without Neuron ``"trn2"``.

    Programs choose an order of KV heads by it; on all other devices the layers have the order of trn2.
    """
    return platform_target(os.environ) or "trn2"


def move_all_tensor_to_cpu(data: Any, convert: bool = True) -> Any:
    """Return nested containers with every tensor copied to the host.

    With ``convert=False`` only wait for the device and return ``data`` unchanged.
    """
    if not convert:
        backend.synchronize()
        return data
    return map_tensors(data, Tensor.cpu)


class _FirstRankOnly(logging.Filter):
    """Filter that passes records on global rank 0 only."""

    def filter(self, record: logging.LogRecord) -> bool:
        # Asked for each record, because loggers are created before torch.distributed is
        # initialized; until then torchrun's variable has the rank.
        del record
        if dist.is_initialized():
            return dist.get_rank() == 0
        return int(os.environ.get("RANK", "0")) == 0


def get_logger(name: str = "neuronx_distributed", rank0_only: bool = True) -> logging.Logger:
    """Return a logger with level NXD_LOG_LEVEL (default info), by default active on rank 0 only."""
    # Two loggers per name, with and without the filter. A logger with handlers was set up by an
    # earlier call: a second handler would print each record twice.
    logger = logging.getLogger(f"{name}[0]" if rank0_only else f"{name}[]")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s %(levelname).1s %(name)s] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(os.environ.get("NXD_LOG_LEVEL", "info").upper())
        if rank0_only:
            logger.addFilter(_FirstRankOnly())
    return logger


# Sizes and shards


class EmbeddingUtility:
    """Vocabulary range [first, last) of a rank."""

    @staticmethod
    def range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the range of ``rank`` for a shard of ``per_partition_vocab_size`` rows."""
        del world_size  # NxD's signature has it; the range depends on the shard's size only
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Return the range of ``rank`` for a vocabulary split over ``world_size`` ranks."""
        size = divide(global_vocab_size, world_size)
        return EmbeddingUtility.range_from_per_partition_vocab_size(size, rank, world_size)


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise ``ValueError`` unless ``denominator`` divides ``numerator``."""
    divide(numerator, denominator)


def get_padding_length(numerator: int, denominator: int) -> int:
    """Return how much must be added to ``numerator`` for a multiple of ``denominator``."""
    return padded_size(numerator, denominator) - numerator


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    """Split ``tensor`` along ``dim`` into equal chunks, views unless ``contiguous_split_chunks``.

    Raises:
        ValueError: the chunks are not equal.
    """
    divide(tensor.size(dim), num_partitions)
    chunks = tensor.chunk(num_partitions, dim=dim)
    if not contiguous_split_chunks:
        return chunks
    return tuple(chunk.contiguous() for chunk in chunks)


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    """Split ``tensor`` along the last dimension; see ``split_tensor_along_dim``."""
    return split_tensor_along_dim(tensor, -1, num_partitions, contiguous_split_chunks)


def indices_split_along_dim(tensor: Tensor | None, dim: int, rank: int, num_partitions: int) -> Tensor | None:
    """Return the indices of a rank's chunk along ``dim``, int64, or None if ``tensor`` is None."""
    if tensor is None:
        return None
    size = divide(tensor.size(dim), num_partitions)
    return torch.arange(rank * size, (rank + 1) * size, device=tensor.device)


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Return whether norms over the tensor-parallel group count ``param`` on this rank.

    Sharded parameters count on every rank, replicated ones on the first rank only.
    """
    return is_sharded(param) or parallel_state.get_tensor_model_parallel_rank() == 0


def set_tensor_model_parallel_attributes(
    tensor: Tensor,
    is_parallel: bool,
    dim: int,
    stride: int,
    num_partitions: int = -1,
    rank_ordering: Sequence[int] | None = None,
) -> None:
    """Describe ``tensor`` as a shard; see ``parallel_layers.utils.set_tensor_model_parallel_attributes``.

    Raises:
        ValueError: ``rank_ordering`` is set.
    """
    refuse(rank_ordering=rank_ordering)
    utils.set_tensor_model_parallel_attributes(tensor, is_parallel, dim, stride, num_partitions)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Set the sharding attributes of a replicated tensor, unless ``tensor`` has attributes."""
    if not hasattr(tensor, "tensor_model_parallel"):
        utils.set_tensor_model_parallel_attributes(tensor, False, -1, num_partitions=1)


# Dtypes


def cast_all(state: Any, from_dtype: torch.dtype = torch.float32, to_dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return nested containers with every tensor of ``from_dtype`` cast to ``to_dtype``."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype != from_dtype:
            return tensor
        return tensor.to(to_dtype)

    return map_tensors(state, cast)


def _autocast_dtype() -> torch.dtype | None:
    """Return the dtype of the active autocast, or None.

    Autocast of the backend's device comes first, then ``"cuda"``, which XLA programs use.
    """
    for device_type in (backend.device.type, "cuda"):
        if torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
    return None


def cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """Return the arguments with floating-point tensors except fp64 cast to autocast's dtype."""
    dtype = _autocast_dtype()
    if dtype is None:
        return args

    # As torch.amp.custom_fwd casts: integers have no lower precision, and fp64 was chosen on
    # purpose.
    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype)

    return map_tensors(args, cast)


def verify_casted_dtype(value: Any) -> None:
    """Raise ``AssertionError`` if a tensor in nested containers has not autocast's dtype."""
    # Containers are searched recursively; values of other types are accepted, as arguments of a
    # layer may be numbers or None.
    dtype = _autocast_dtype()
    if dtype is None:
        return
    if isinstance(value, Tensor):
        assert value.dtype == dtype, f"Datatype of tensor is expected to be {dtype}, got {value.dtype} instead"
    elif isinstance(value, Mapping):
        verify_casted_dtype(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            verify_casted_dtype(item)


# Padding of heads


def generate_padding_mask(
    num_heads: int,
    num_heads_with_pad: int,
    num_kv_heads: int,
    tp_degree: int,
    tp_rank: int,
    hardware_type: hardware | None = None,
) -> Tensor:
    """Return which of this rank's query heads are not padding.

    Args:
        num_heads: number of query heads without padding.
        num_heads_with_pad: number of query heads with padding.
        num_kv_heads: number of KV heads.
        tp_degree: T.
        tp_rank: tensor-parallel rank.
        hardware_type: TRN1 has the replicas of a KV head ``num_kv_heads`` ranks apart, TRN2 on
            consecutive ranks; default: the order of the layers on this platform.

    Returns:
        ``[num_heads_with_pad / tp_degree]``, bool.

    Raises:
        RuntimeError: ``hardware_type`` is another platform.
    """
    if hardware_type not in (None, hardware.TRN1, hardware.TRN2):
        raise RuntimeError(f"Unexpected hardware_type {hardware_type!r}: must be hardware.TRN1 or hardware.TRN2")
    if hardware_type != hardware.TRN1:
        # None leaves the order to the backend; a stride of 1 puts replicas on consecutive ranks.
        rank_stride = None
        if hardware_type is not None:
            rank_stride = 1
        return pad.generate_padding_mask(
            num_heads, num_heads_with_pad, num_kv_heads, tp_degree, tp_rank, rank_stride=rank_stride
        )
    # Ranks r, r + g, r + 2g, ... of TRN1 share a KV head (g = num_kv_heads). Together they have
    # the head's query heads, of which the first num_heads / g are real and the rest is padding.
    per_rank = num_heads_with_pad // tp_degree
    first = per_rank * (tp_rank // num_kv_heads)
    return torch.arange(first, first + per_rank) < num_heads // num_kv_heads
