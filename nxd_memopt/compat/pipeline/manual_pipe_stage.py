"""A stage of a model that is given as a list of layers, each called with the output of the one before."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

WEIGHT_SHARING_ATTR_NAME = "weight_sharing"
Partition = Callable[[Sequence[nn.Module], int], Mapping[nn.Module, int]]
SharedWeights = dict[str, list[Any]]
"""Name of a group of equal weights -> ``[stages, [this stage's layer, path of its weight]]``."""


class PipelineStageModule(nn.Module):
    """The layers of one stage, under the names ``pipeline_stage_modules.<number>.<class>``.

    Args:
        layers: all layers of the model, in order.
        num_stages: P.
        stage_index: which stage this is.
        partition_fn: returns the stage of each layer from the layers and P; default: equal numbers of layers, with the
            rest on the last stage.
    """

    def __init__(
        self, layers: Sequence[nn.Module], num_stages: int, stage_index: int, partition_fn: Partition | None = None
    ) -> None:
        super().__init__()
        if not isinstance(layers, list | tuple):
            raise TypeError(f"layers must be a list or a tuple of modules, got {type(layers).__name__}")
        self.num_stages = num_stages
        self.stage_index = stage_index
        self.stage_modules, self.shared_weights_on_pp_stages = self._partition(
            layers, num_stages, stage_index, partition_fn
        )
        # Registered, so that train(), to() and state dicts reach the layers. One module per part of their names.
        self.pipeline_stage_modules = nn.Module()
        for i, layer in enumerate(self.stage_modules):
            numbered = nn.Module()
            numbered.add_module(type(layer).__name__, layer)
            self.pipeline_stage_modules.add_module(str(i), numbered)

    def forward(self, x: Any) -> Any:
        """Return the output of the last layer."""
        for layer in self.stage_modules:
            x = layer(x)
        return x

    @staticmethod
    def _partition_evenly(layers: Sequence[nn.Module], num_stages: int) -> dict[nn.Module, int]:
        """Return the stage of each layer: ``floor(layers / stages)`` each, and the rest on the last one."""
        size = len(layers) // num_stages
        assert size > 0, f"{len(layers)} layers cannot be cut into {num_stages} stages: use fewer stages"
        return {layer: min(i // size, num_stages - 1) for i, layer in enumerate(layers)}

    @staticmethod
    def _partition(
        layers: Sequence[nn.Module], num_stages: int, stage_idx: int, partition_fn: Partition | None = None
    ) -> tuple[list[nn.Module], SharedWeights]:
        """Return the layers of a stage, and the weights that it has in common with others.

        Raises:
            ValueError: ``partition_fn`` leaves layers out.
        """
        stages = (partition_fn or PipelineStageModule._partition_evenly)(layers, num_stages)
        missing = [i for i, layer in enumerate(layers) if stages.get(layer) not in range(num_stages)]
        if missing:
            raise ValueError(
                f"the partition gives layers {missing} no stage from 0 to {num_stages - 1}: list all layers"
            )
        own = [layer for layer in layers if stages[layer] == stage_idx]
        return own, PipelineStageModule._gather_pp_stage_idxs_for_weight_sharing(stages, stage_idx)

    @staticmethod
    def _gather_pp_stage_idxs_for_weight_sharing(
        stage_idx_mapping: Mapping[nn.Module, int], current_stage_idx: int
    ) -> SharedWeights:
        """Return the groups of equal weights of a stage: with their stages, and the stage's layer and weight."""
        stages: dict[str, set[int]] = {}
        own: dict[str, list[Any]] = {}
        for layer, stage in stage_idx_mapping.items():
            for group, path in getattr(layer, WEIGHT_SHARING_ATTR_NAME, {}).items():
                stages.setdefault(group, set()).add(stage)
                if stage != current_stage_idx:
                    continue
                if group in own and _weight(*own[group]) is not _weight(layer, path):
                    raise ValueError(
                        f"stage {stage} has two weights of the shared group {group!r}: make them one parameter"
                    )
                own[group] = [layer, path]
        return {group: [sorted(stages[group]), weight] for group, weight in own.items()}

    @staticmethod
    def mark_weight_sharing(
        layer_and_weight_path: Sequence[tuple[nn.Module, str]], sharing_group_name: str = "default"
    ) -> None:
        """Declare that weights are one weight; call before the stages are built.

        Args:
            layer_and_weight_path: layers with the path of the weight in each, such as ``"weight"``.
            sharing_group_name: name of this set of weights.

        Raises:
            ValueError: the weights differ in shape, or a layer has a weight in the group already.
        """
        shapes = {tuple(_weight(layer, path).shape) for layer, path in layer_and_weight_path}
        if len(shapes) > 1:
            raise ValueError(f"the weights of the shared group {sharing_group_name!r} have the shapes {sorted(shapes)}")
        for layer, path in layer_and_weight_path:
            marks: dict[str, str] = layer.__dict__.setdefault(WEIGHT_SHARING_ATTR_NAME, {})
            if sharing_group_name in marks:
                raise ValueError(
                    f"a layer has a weight in the shared group {sharing_group_name!r} already: name another"
                )
            marks[sharing_group_name] = path


def _weight(layer: nn.Module, path: str) -> Any:
    return operator.attrgetter(path)(layer)
