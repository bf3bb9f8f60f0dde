"""The share of one rank of a model: sizes of its activations, and shapes of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from nxd_memopt.architectures.adapters import adapter_shapes
from nxd_memopt.architectures.model_spec import ModelSpec
from nxd_memopt.architectures.parameters import parameters
from nxd_memopt.planner.sizes.rank_sizes import RankSizes
from nxd_memopt.planner.sizes.states import StateLayout, elements, frozen_weight_bytes

ByteFunction = Callable[[Sequence[Sequence[int]], StateLayout], int]
"""Function of ``states.py`` that counts bytes of parameters of given shapes."""


Shapes = tuple[tuple[int, ...], ...]
"""Shapes of some parameters on one rank."""


@dataclass(frozen=True)
class ModelPart:
    """Consecutive or several runs of decoder layers, with what is around them: stages of a pipeline.

    Args:
        layers: global numbers of the layers.
        has_embedding: whether the embedding is before the first one.
        has_head: whether final norm and head are behind the last one.
    """

    layers: tuple[int, ...]
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class RankModel:
    """A model's share of one rank.

    With adapters, which alone are trained, embedding, final norm and head have no shapes.

    Args:
        sizes: sizes of its activations.
        layer_shapes: shapes of the trained parameters of one decoder layer.
        embedding: shape of the embedding's table.
        final_norm: shapes of the final norm's weight and bias.
        head: shape of the head's weight; empty if the head shares the embedding's.
        frozen_layer_shapes: shapes of the parameters of one decoder layer that are not trained.
        frozen_other_shapes: shapes of embedding, final norm and head that are not trained.
    """

    sizes: RankSizes
    layer_shapes: Shapes
    embedding: Shapes = ()
    final_norm: Shapes = ()
    head: Shapes = ()
    frozen_layer_shapes: Shapes = ()
    frozen_other_shapes: Shapes = ()

    @property
    def is_tied(self) -> bool:
        """Whether the trained embedding is the head too."""
        return bool(self.embedding) and not self.head and self.sizes.has_head

    @property
    def other_shapes(self) -> Shapes:
        """Shapes of the trained parameters outside of the decoder layers."""
        return (*self.embedding, *self.final_norm, *self.head)

    @property
    def shapes(self) -> Shapes:
        """Shapes of all trained parameters, in the model's order."""
        return (*self.embedding, *(self.layer_shapes * self.sizes.num_layers), *self.final_norm, *self.head)

    @property
    def num_parameters(self) -> int:
        """Trained parameters of the rank."""
        return self.sizes.num_layers * elements(self.layer_shapes) + elements(self.other_shapes)

    def gathered_elements(self, num_layers: int) -> int:
        """Return the elements of all parameters of ``num_layers`` layers, embedding, final norm and head."""
        layer = elements(self.layer_shapes) + elements(self.frozen_layer_shapes)
        return num_layers * layer + elements(self.other_shapes) + elements(self.frozen_other_shapes)

    def total(self, function: ByteFunction, layout: StateLayout) -> int:
        """Return the bytes that ``function`` counts for all trained parameters."""
        layers = self.sizes.num_layers * function(self.layer_shapes, layout)
        return layers + function(self.other_shapes, layout)

    def frozen_bytes(self, layout: StateLayout) -> int:
        """Return the bytes of the parameters that are not trained, between steps."""
        sizes = self.sizes
        layers = sizes.num_layers * frozen_weight_bytes(self.frozen_layer_shapes, layout)
        if sizes.fp8 is not None and sizes.fp8.stores_weights:
            # a byte in the place of an element
            saved = sum(sizes.linear_elements.values()) * (layout.element_bytes - 1)
            layers -= sum(sizes.fp8.layers) * saved
        return layers + frozen_weight_bytes(self.frozen_other_shapes, layout)


# A search asks for the same shapes with every memory technique and ZeRO stage.
@lru_cache(maxsize=512)
def rank_model(spec: ModelSpec, sizes: RankSizes, part: ModelPart | None = None) -> RankModel:
    """Return the share of one rank.

    Args:
        spec: the model.
        sizes: sizes of a rank with all layers.
        part: the layers of the rank; None: all.
    """
    if part is not None:
        sizes = _of_part(sizes, part)
    size = sizes.tensor_model_parallel_size
    replicas = spec.kv_replicas(size)
    expert_ranks = 1 if sizes.moe is None else sizes.moe.expert_ranks
    # Layer 0 stands for every layer: their parameters have equal shapes. One layer is listed instead of all of them,
    # because a search asks for the shapes of each pair of T and B.
    found: dict[str, list[tuple[int, ...]]] = {"layer": [], "embedding": [], "final norm": [], "head": []}
    for parameter in parameters(spec.with_layers(1)):
        if ".layers.0." in parameter.name:
            place = "layer"
        elif parameter.name == "lm_head.weight":
            place = "head"
        elif parameter.sharding == "vocab":
            place = "embedding"
        else:
            place = "final norm"
        found[place].append(parameter.local_shape(size, replicas, expert_ranks))
    if not sizes.has_head:
        found["head"] = found["final norm"] = []
    elif not sizes.has_embedding and not found["head"]:
        # The last stage has a copy of the embedding that is its head.
        found["head"] = found["embedding"]
    if not sizes.has_embedding:
        found["embedding"] = []
    # With adapters the model's own parameters are frozen: they have weights between steps, and neither gradients nor
    # states. Only the adapters count as parameters then.
    layer, *others = (tuple(shapes) for shapes in found.values())
    if sizes.adapters is None:
        return RankModel(sizes, layer, *others)
    frozen = tuple(shape for shapes in others for shape in shapes)
    trained = tuple(adapter_shapes(spec, sizes.adapters, size))
    return RankModel(sizes, trained, frozen_layer_shapes=layer, frozen_other_shapes=frozen)


def _of_part(sizes: RankSizes, part: ModelPart) -> RankSizes:
    """Return the sizes of a rank that has a part of the layers."""
    windows = sizes.windows
    if windows:
        windows = tuple(windows[number] for number in part.layers)
    fp8 = sizes.fp8
    if fp8 is not None:
        fp8 = replace(fp8, layers=tuple(fp8.layers[number] for number in part.layers))
    return replace(
        sizes,
        num_layers=len(part.layers),
        windows=windows,
        fp8=fp8,
        has_embedding=part.has_embedding,
        has_head=part.has_head,
    )
