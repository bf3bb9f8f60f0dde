"""neuronx-distributed's small helpers of ``parallel_layers.utils``, ``parallel_layers.pad`` and ``utils``."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.compat.rank_groups import hardware
from nxd_memopt.parallel_layers import pad, parallel_state
from nxd_memopt.parallel_layers.utils import (
    divide,
    is_sharded,
    map_tensors,
    padded_size,
    set_tensor_model_parallel_attributes,
)

# Devices and processes


def cpu_mode() -> bool:
    """Whether NXD_CPU_MODE asks for plain CPU ranks in a program's own branches."""
    return int(os.environ.get("NXD_CPU_MODE", "0")) > 0


def mark_step() -> None:
    backend.mark_step()


def get_device() -> torch.device:
    return backend.device


def master_print(msg: object) -> None:
    if parallel_state.is_global_rank_zero():
        print(msg)


def get_local_world_size() -> int:
    """Processes on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def move_all_tensor_to_cpu(data: Any, convert: bool = True) -> Any:
    """Nested dicts, lists and tuples with every tensor on the host; without ``convert`` only wait for the device."""
    if not convert:
        backend.synchronize()
        return data
    return map_tensors(data, Tensor.cpu)


class _FirstRankOnly(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        del record
        return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0


def get_logger(name: str = "neuronx_distributed", rank0_only: bool = True) -> logging.Logger:
    """A logger at NXD_LOG_LEVEL (default info), which the first rank alone writes unless asked otherwise."""
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
    """Half-open ranges of the vocabulary that a rank holds."""

    @staticmethod
    def range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        del world_size
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        size = divide(global_vocab_size, world_size)
        return EmbeddingUtility.range_from_per_partition_vocab_size(size, rank, world_size)


def ensure_divisibility(numerator: int, denominator: int) -> None:
    divide(numerator, denominator)


def get_padding_length(numerator: int, denominator: int) -> int:
    return padded_size(numerator, denominator) - numerator


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    divide(tensor.size(dim), num_partitions)  # raises ValueError unless the chunks are equal
    chunks = tensor.chunk(num_partitions, dim=dim)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else chunks


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    return split_tensor_along_dim(tensor, -1, num_partitions, contiguous_split_chunks)


def indices_split_along_dim(tensor: Tensor | None, dim: int, rank: int, num_partitions: int) -> Tensor | None:
    """The indices along ``dim`` of a rank's chunk, int64; ``None`` for ``None``."""
    if tensor is None:
        return None
    size = divide(tensor.size(dim), num_partitions)
    return torch.arange(rank * size, (rank + 1) * size, device=tensor.device)


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Whether this rank is the one to count ``param``: it holds a shard of its own, or is the first."""
    return is_sharded(param) or parallel_state.get_tensor_model_parallel_rank() == 0


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Describe ``tensor`` as one that every rank holds whole, unless it is described."""
    if not hasattr(tensor, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(tensor, False, -1, num_partitions=1)


# Dtypes


def cast_all(state: Any, from_dtype: torch.dtype = torch.float32, to_dtype: torch.dtype = torch.bfloat16) -> Any:
    """Nested dicts, lists and tuples with every ``from_dtype`` tensor cast."""
    return map_tensors(state, lambda tensor: tensor.to(to_dtype) if tensor.dtype == from_dtype else tensor)


def _autocast_dtype() -> torch.dtype | None:
    """The dtype of the autocast that is on: the device's, or ``"cuda"``, which XLA programs name."""
    for device_type in (backend.device.type, "cuda"):
        if torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
    return None


def cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """The arguments, their floating-point tensors below fp64 cast as autocast asks."""
    dtype = _autocast_dtype()
    if dtype is None:
        return args
    return map_tensors(args, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t)


def verify_casted_dtype(value: Any) -> None:
    """``AssertionError`` for a tensor, in nested containers too, that has not the dtype of the autocast that is on."""
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
    """Which of this rank's query heads are real: boolean ``[num_heads_with_pad / tp_degree]``.

    Args:
        hardware_type: TRN1 puts the replicas of a KV head ``num_kv_heads`` ranks apart, TRN2 on consecutive ranks;
            default: as the layers have them on this platform.
    """
    if hardware_type not in (None, hardware.TRN1, hardware.TRN2):
        raise RuntimeError(f"Unexpected hardware_type {hardware_type!r}: must be hardware.TRN1 or hardware.TRN2")
    if hardware_type != hardware.TRN1:
        rank_stride = None if hardware_type is None else 1
        return pad.generate_padding_mask(
            num_heads, num_heads_with_pad, num_kv_heads, tp_degree, tp_rank, rank_stride=rank_stride
        )
    per_rank = num_heads_with_pad // tp_degree
    first = per_rank * (tp_rank // num_kv_heads)
    return torch.arange(first, first + per_rank) < num_heads // num_kv_heads
