"""The share of one rank of a model: sizes of its activations, and shapes of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nxd_memopt.architectures.adapters import adapter_shapes
from nxd_memopt.architectures.model_spec import ModelSpec
from nxd_memopt.architectures.parameters import parameters
from nxd_memopt.config import ParallelConfig
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.planner.sizes.rank_sizes import RankSizes, rank_sizes
from nxd_memopt.planner.sizes.states import StateLayout, frozen_weight_bytes

ByteFunction = Callable[[Sequence[Sequence[int]], StateLayout], int]
"""Function of ``states.py`` that counts bytes of parameters of given shapes."""


@dataclass(frozen=True)
class RankModel:
    """A model's share of one rank.

    Args:
        sizes: sizes of its activations.
        layer_shapes: shapes of the trained parameters of one decoder layer.
        other_shapes: shapes of embedding, final norm and head; none with adapters, which alone are trained.
        frozen_layer_shapes: shapes of the parameters of one decoder layer that are not trained.
        frozen_other_shapes: shapes of embedding, final norm and head that are not trained.
    """

    sizes: RankSizes
    layer_shapes: tuple[tuple[int, ...], ...]
    other_shapes: tuple[tuple[int, ...], ...]
    frozen_layer_shapes: tuple[tuple[int, ...], ...] = ()
    frozen_other_shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the head too: the last trained parameter is the final norm's."""
        return bool(self.other_shapes) and len(self.other_shapes[-1]) == 1

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of all trained parameters, in the model's order."""
        return [*self.other_shapes[:1], *(self.layer_shapes * self.sizes.num_layers), *self.other_shapes[1:]]

    @property
    def num_parameters(self) -> int:
        """Trained parameters of the rank."""
        return self.sizes.num_layers * _elements(self.layer_shapes) + _elements(self.other_shapes)

    @property
    def num_frozen(self) -> int:
        """Parameters of the rank that are not trained."""
        return self.sizes.num_layers * _elements(self.frozen_layer_shapes) + _elements(self.frozen_other_shapes)

    def gathered_elements(self, num_layers: int) -> int:
        """Return the elements of all parameters of ``num_layers`` layers, embedding, final norm and head."""
        layer = _elements(self.layer_shapes) + _elements(self.frozen_layer_shapes)
        return num_layers * layer + _elements(self.other_shapes) + _elements(self.frozen_other_shapes)

    def total(self, function: ByteFunction, layout: StateLayout) -> int:
        """Return the bytes that ``function`` counts for all trained parameters."""
        layers = self.sizes.num_layers * function(self.layer_shapes, layout)
        return layers + function(self.other_shapes, layout)

    def frozen_bytes(self, layout: StateLayout) -> int:
        """Return the bytes of the parameters that are not trained, between steps."""
        layers = self.sizes.num_layers * frozen_weight_bytes(self.frozen_layer_shapes, layout)
        return layers + frozen_weight_bytes(self.frozen_other_shapes, layout)


def _elements(shapes: Sequence[Sequence[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def rank_model(
    spec: ModelSpec,
    parallel: ParallelConfig,
    *,
    sequence_length: int,
    micro_batch_size: int,
    dtype: str,
    moe: MoEConfig | None = None,
    lora: LoraConfig | None = None,
) -> RankModel:
    """Return the share of one rank; arguments and errors as ``rank_sizes``."""
    sizes = rank_sizes(
        spec,
        parallel,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        dtype=dtype,
        moe=moe,
        lora=lora,
    )
    size = parallel.tensor_model_parallel_size
    replicas = spec.kv_replicas(size)
    layer: list[tuple[int, ...]] = []
    others: list[tuple[int, ...]] = []
    # Layer 0 stands for every layer: their parameters have equal shapes.
    for parameter in parameters(spec.with_layers(1)):
        shape = parameter.local_shape(size, replicas, parallel.expert_model_parallel_size)
        if ".layers.0." in parameter.name:
            layer.append(shape)
        elif ".layers." not in parameter.name:
            others.append(shape)
    if sizes.adapters is None:
        return RankModel(sizes, tuple(layer), tuple(others))
    trained = adapter_shapes(spec, sizes.adapters, size)
    return RankModel(sizes, tuple(trained), (), tuple(layer), tuple(others))
