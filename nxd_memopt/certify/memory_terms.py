"""The memory of one rank from a measured step: a term for each purpose, their sum, and extrapolation over depth."""

from __future__ import annotations

from dataclasses import dataclass

from nxd_memopt.architectures.parameters import ExpertShape
from nxd_memopt.planner.hardware import GIB, RESERVE_GIB
from nxd_memopt.planner.memory.compiled_graphs import graph_terms
from nxd_memopt.planner.search.plan import Plan
from nxd_memopt.planner.sizes.states import StateLayout, gradient_bytes, master_bytes, moment_bytes, weight_bytes

MARGIN = "margin of the allocator"
RESERVE = "reserve"


@dataclass(frozen=True)
class MemoryTerms:
    """Memory of one rank in bytes, by purpose.

    Args:
        terms: purpose -> bytes.
        capacity_bytes: memory of the device.
        host_bytes: host memory for offloaded tensors.
        usable_host_bytes: host memory that a rank can use.
    """

    terms: dict[str, int]
    capacity_bytes: int
    host_bytes: int = 0
    usable_host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of all terms in bytes."""
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        """Whether device and host memory are large enough."""
        return self.total_bytes <= self.capacity_bytes and self.host_bytes <= self.usable_host_bytes


def planned_terms(plan: Plan, capacity_gib: float) -> MemoryTerms:
    """Return the planned memory of one rank at the peak of a step."""
    memory, capacity_bytes = plan.memory, int(capacity_gib * GIB)
    terms = {name: size for name, size in memory.device.items() if size}
    terms |= {
        MARGIN: memory.reserved_bytes - memory.device_bytes,
        RESERVE: capacity_bytes - plan.usable_bytes,
    }
    return MemoryTerms(terms, capacity_bytes, memory.host_bytes, plan.usable_host_bytes)


def memory_terms(
    *,
    num_parameters: int,
    states: StateLayout,
    temporary_bytes: int,
    input_bytes: int,
    capacity_gib: float,
    reserve_gib: float = RESERVE_GIB,
    num_expert_parameters: int = 0,
    in_graphs: bool = False,
) -> MemoryTerms:
    """Add up one rank's memory at the peak of a step.

    Args:
        num_parameters: number of parameters on this rank, those of experts included.
        states: how the run stores parameters, gradients and the states of AdamW.
        temporary_bytes: activations and scratch memory at the peak.
        input_bytes: bytes of the token ids and labels.
        capacity_gib: memory of the device in GiB.
        reserve_gib: memory in GiB that tensors cannot use.
        num_expert_parameters: number of parameters of this rank's experts.
        in_graphs: the device runs each step as compiled graphs (torch_xla on NeuronCores).
    """
    shapes = [(num_parameters - num_expert_parameters,), ExpertShape((num_expert_parameters,))]
    terms = {
        "parameters": weight_bytes(shapes, states),
        "gradients": gradient_bytes(shapes, states),
        "optimizer moments": moment_bytes(shapes, states),
        "master weights": master_bytes(shapes, states),
        "activations and temporaries": temporary_bytes,
        "inputs": input_bytes,
        RESERVE: int(reserve_gib * GIB),
    }
    if in_graphs:
        weights = weight_bytes(shapes, states)
        terms |= graph_terms(temporary_bytes, weights, master_weights=states.master_weights)
    return MemoryTerms(terms, int(capacity_gib * GIB))


def extrapolate(measured: dict[int, int], num_layers: int, *, least_per_layer: int) -> int:
    """Return the bytes at ``num_layers`` by linear extrapolation from two measured depths.

    Every additional layer keeps the same tensors. The slope is the measured one, or
    ``least_per_layer`` if that is greater: the peak of a shallow model may be at a point where no
    layer's tensors are kept, and the line through two such peaks is too flat. With the slope
    ``least_per_layer`` the result is an upper bound.

    Args:
        measured: number of layers -> bytes, for two depths.
        num_layers: number of layers of the full model.
        least_per_layer: bytes that each layer keeps with any recomputation: its input.
    """
    (few, at_few), (many, at_many) = sorted(measured.items())
    # Start at the deeper model, from which fewer layers are extrapolated.
    per_layer = max((at_many - at_few) / (many - few), least_per_layer)
    return round(at_many + (num_layers - many) * per_layer)
