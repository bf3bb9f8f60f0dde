"""What all moments of a training step have in common: model, techniques, layout of states, kept activations."""

from __future__ import annotations

from dataclasses import dataclass

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.memory.activations import SHARED_TENSORS, Activations, activations
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.sizes.rank_model import RankModel
from nxd_memopt.planner.sizes.rank_sizes import RankSizes
from nxd_memopt.planner.sizes.states import StateLayout
from nxd_memopt.planner.techniques import peer_slots
from nxd_memopt.planner.techniques.offloaded_weights import OffloadedWeights

ABSENT = "weights in host memory"
"""Term of a moment that is subtracted from the weights."""


@dataclass(frozen=True)
class Step:
    """A step of a rank.

    Args:
        model: the rank's share of the model.
        memory: memory techniques.
        kernels: operations and attention.
        layout: weights, gradients and states.
        kept: activations between forward and backward.
        offloaded: weights in host memory.
        accumulated_gradients: gradients of the micro-batches before, which exist in forward already.
        has_slots: gathered tensors lie in the slots of peer memory.
        received_bytes: the gradient of its output that a stage of a pipeline has received, which exists until its
            backward has ended.
    """

    model: RankModel
    memory: MemoryConfig
    kernels: Kernels
    layout: StateLayout
    kept: Activations
    offloaded: OffloadedWeights
    accumulated_gradients: int
    has_slots: bool
    received_bytes: int = 0

    @classmethod
    def of(
        cls,
        model: RankModel,
        memory: MemoryConfig,
        kernels: Kernels,
        layout: StateLayout,
        *,
        accumulated_gradients: int,
        cuda_graph: bool,
    ) -> Step:
        """Return the step; ``cuda_graph`` makes a graph of forward and backward."""
        kept = activations(model.sizes, memory, kernels)
        offloaded = OffloadedWeights.of(model.layer_shapes, memory, layout, model.sizes.num_layers)
        has_slots = kernels.fused and peer_slots.holds_layers(model.sizes, cuda_graph=cuda_graph)
        return cls(model, memory, kernels, layout, kept, offloaded, accumulated_gradients, has_slots)

    @property
    def sizes(self) -> RankSizes:
        """Sizes of the activations."""
        return self.model.sizes

    @property
    def kept_in_backward(self) -> int:
        """Bytes of the activations when the backward of the layers begins: loss and final norm are done."""
        remaining = sum(self.kept.layer_bytes)
        for name in SHARED_TENSORS:
            remaining += self.kept.around.get(name, 0)
        return remaining

    @property
    def casts_gradients(self) -> bool:
        """Whether each gradient is cast to an fp32 sum, which is created next to it."""
        layout = self.layout
        is_summed = layout.master_weights and layout.gradient_element_bytes > layout.element_bytes
        return is_summed and not layout.in_backward and layout.sharding not in ("zero2", "zero3")

    def absent_weights(self, backward_of: int | None = None) -> int:
        """Return minus the bytes of the weights in host memory; ``backward_of`` as ``OffloadedWeights``."""
        return -self.offloaded.absent_bytes(self.sizes.num_layers, backward_of)
