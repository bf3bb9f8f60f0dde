"""Computes whether a step fits a device, from every term of a rank's memory."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
DEVICE_GIB = {"trn1": 16.0, "trn2": 24.0, "trn2-lnc1": 12.0, "trn3": 36.0}
"""Memory per worker process: a NeuronCore of trn1; on trn2 a logical core of two, or of one (two share a bank)."""
RESERVE_GIB = 1.25
"""What tensors cannot use: the runtime's microcode, collective buffers, compiled programs. An estimate."""
_FP32_BYTES = 4
_ADAM_MOMENTS = 2


@dataclass(frozen=True)
class OptimizerState:
    """What AdamW keeps beside the parameters.

    Args:
        master_weights: fp32 copies of narrower parameters; gradients then accumulate in fp32 too.
        zero1: moments and masters are sharded over the data-parallel ranks (arXiv:1910.02054).
        data_parallel_size: how many those are.
    """

    master_weights: bool = False
    zero1: bool = False
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.data_parallel_size < 1:
            raise ValueError(f"data_parallel_size must be at least 1, got {self.data_parallel_size}")
        if self.data_parallel_size > 1 and not self.zero1:
            raise ValueError(
                f"data_parallel_size {self.data_parallel_size} changes one rank's memory only with zero1: "
                "switch zero1 on, or leave data_parallel_size out"
            )


@dataclass(frozen=True)
class MemoryTerms:
    """One rank's memory in bytes, by what it is for.

    Args:
        terms: name to bytes.
        capacity_bytes: the device's.
    """

    terms: dict[str, int]
    capacity_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.capacity_bytes


def memory_terms(
    *,
    num_parameters: int,
    element_bytes: int,
    optimizer: OptimizerState,
    temporary_bytes: int,
    input_bytes: int,
    capacity_gib: float,
    reserve_gib: float = RESERVE_GIB,
) -> MemoryTerms:
    """Add up one rank's memory at the fullest moment of a step.

    Args:
        num_parameters: on this rank.
        element_bytes: of a parameter and, without master weights, of its gradient.
        optimizer: AdamW's state.
        temporary_bytes: activations and scratch, without the terms above.
        input_bytes: ids and labels.
        capacity_gib: the device's memory.
        reserve_gib: what of it no tensor can use.
    """
    masters = optimizer.master_weights and element_bytes < _FP32_BYTES
    shards = optimizer.data_parallel_size if optimizer.zero1 else 1
    per_shard = -(-num_parameters // shards)
    terms = {
        "parameters": num_parameters * element_bytes,
        "gradients": num_parameters * (_FP32_BYTES if masters else element_bytes),
        "optimizer moments (fp32)": per_shard * _ADAM_MOMENTS * _FP32_BYTES,
        "fp32 master weights": per_shard * _FP32_BYTES if masters else 0,
        "activations and temporaries": temporary_bytes,
        "inputs": input_bytes,
        "reserve": int(reserve_gib * GIB),
    }
    return MemoryTerms(terms, int(capacity_gib * GIB))


def extrapolate(measured: dict[int, int], num_layers: int, *, least_per_layer: int) -> int:
    """Bytes at ``num_layers``, on a line from the deeper of two measured models.

    Each further layer keeps the same tensors. The slope is the measured one, or ``least_per_layer`` where that is
    greater: in shallow models the fullest moment may lie where no layer's tensors are kept, and the line through two of
    them would be too flat. Where it grew from there, the result is an upper bound.

    Args:
        measured: layers to bytes, for two depths.
        num_layers: of the whole model.
        least_per_layer: bytes that each layer keeps whatever is recomputed: its input.
    """
    (few, at_few), (many, at_many) = sorted(measured.items())
    per_layer = max((at_many - at_few) / (many - few), least_per_layer)
    return round(at_many + (num_layers - many) * per_layer)
