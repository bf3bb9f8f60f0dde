"""The weights that ``cpu_offloading_weights`` has on the device from moment to moment, and on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.sizes.states import StateLayout, weight_bytes
from nxd_memopt.planner.techniques.recomputation import nested_chunk_layers

ALIGNMENT = 512
"""Each weight begins at a multiple of this in host memory, a boundary that DMA engines prefer."""


@dataclass(frozen=True)
class OffloadedWeights:
    """Weights of the first layers, which are on the device around their use only.

    A unit is what is copied together: a layer, or a chunk of layers that share a checkpoint.

    Args:
        layer_bytes: weights of a layer.
        host_layer_bytes: the same with padding between them.
        chunk: layers of a unit.
        units: number of units on the host.
    """

    layer_bytes: int
    host_layer_bytes: int
    chunk: int
    units: int

    @classmethod
    def of(
        cls, shapes: Sequence[Sequence[int]], memory: MemoryConfig, layout: StateLayout, num_layers: int
    ) -> OffloadedWeights:
        """Return the weights of layers of ``shapes``; none without ``cpu_offloading_weights``.

        Raises:
            ValueError: more layers than the model has, or their weights are sharded.
        """
        if not memory.cpu_offloading_weights:
            return cls(0, 0, 1, 0)
        first = memory.cpu_offloading_num_layers
        if first > num_layers:
            raise ValueError(f"cpu_offloading_num_layers {first} exceeds the model's {num_layers} layers: lower it")
        if layout.sharding == "zero3":
            raise ValueError("cpu_offloading_weights and sharding zero3 both take weights away: leave one out")
        chunk = 1
        if memory.recompute_granularity == "full" and memory.recompute_method in ("uniform", "nested"):
            chunk = memory.recompute_num_layers or nested_chunk_layers(num_layers)
        on_host = sum(-(-math.prod(shape) * layout.element_bytes // ALIGNMENT) * ALIGNMENT for shape in shapes)
        return cls(weight_bytes(shapes, layout), on_host, chunk, -(-first // chunk))

    def layers(self, num_layers: int) -> int:
        """Return the offloaded layers: a chunk belongs to its first one."""
        return min(self.units * self.chunk, num_layers)

    def absent_bytes(self, num_layers: int, backward_of: int | None = None) -> int:
        """Return the bytes of the weights that are not on the device.

        In the loss no offloaded weight is on the device. In backward the device has the weights of three units:
        of the unit that runs, of the unit before it, which are fetched, and of the unit after it, which go to the host.

        Args:
            num_layers: layers of the model.
            backward_of: number of the layer whose backward runs; None in the loss.
        """
        offloaded = self.layers(num_layers)
        if backward_of is None or not offloaded:
            return offloaded * self.layer_bytes
        running = backward_of // self.chunk
        present = sum(
            min(self.chunk, offloaded - unit * self.chunk)
            for unit in (running - 1, running, running + 1)
            if 0 <= unit < self.units
        )
        return (offloaded - present) * self.layer_bytes

    def host_bytes(self, num_layers: int) -> int:
        """Return the bytes of host memory."""
        return self.layers(num_layers) * self.host_layer_bytes
