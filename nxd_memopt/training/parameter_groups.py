"""Divides the trained parameters into groups with and without weight decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from nxd_memopt.parallel_layers.resharding import full_shape
from nxd_memopt.training.config.optimizer import OptimizerConfig

_SHOWN = 5


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that one group of the optimizer updates.

    Args:
        weight_decay: of all of them.
        parameters: in the model's order.
    """

    weight_decay: float
    parameters: tuple[Tensor, ...]


def parameter_groups(named: Sequence[tuple[str, Tensor]], config: OptimizerConfig) -> list[ParameterGroup]:
    """Return the groups of the trained parameters, those with weight decay first.

    Args:
        named: names and parameters, in the model's order.
        config: patterns and decay.
    """
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for name, param in named:
        # Matrices (embeddings and projections) decay; norm weights and biases, of experts [E, columns], do not.
        is_matrix = param.dim() >= 2 and not getattr(param, "is_bias", False)
        decays = is_matrix or config.do_layer_norm_weight_decay
        if decays and not any(_matches(pattern, name) for pattern in config.no_decay):
            decayed.append(param)
        else:
            others.append(param)
    groups = [ParameterGroup(config.weight_decay, tuple(decayed)), ParameterGroup(0.0, tuple(others))]
    return [group for group in groups if group.parameters]


def require_matches(named: Sequence[tuple[str, Tensor]], config: OptimizerConfig) -> None:
    """Raise ``ValueError`` if a pattern of ``config`` matches none of the trained parameters of the complete model."""
    names = [name for name, _ in named]
    for pattern in config.no_decay:
        if not any(_matches(pattern, name) for name in names):
            raise ValueError(
                f"optimizer.no_decay {pattern!r} matches none of the {len(names)} trained parameters: names are "
                f"like {', '.join(_kinds(names))}"
            )


def describe_groups(model: nn.Module, config: OptimizerConfig) -> list[str]:
    """Return one line for each group of a model that is not sharded over data-parallel ranks.

    Raises:
        ValueError: see ``require_matches``.
    """
    named = trained_parameters(model)
    require_matches(named, config)
    lines: list[str] = []
    for group in parameter_groups(named, config):
        size = sum(count_elements(param) for param in group.parameters)
        number = len(group.parameters)
        lines.append(f"weight decay {group.weight_decay:g}: {size:,} parameters in {number} tensor{'s' * (number > 1)}")
    return lines


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that require gradients with their names, each once."""
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def count_elements(param: Tensor) -> int:
    """Return the elements of the full parameter over tensor-parallel and expert-parallel ranks."""
    return math.prod(full_shape(param))


def _matches(pattern: str, name: str) -> bool:
    """Return whether ``pattern``, with the wildcards of a shell, matches a part of ``name``."""
    return fnmatchcase(name, f"*{pattern}*")


def _kinds(names: Sequence[str]) -> list[str]:
    """Return some names that differ in more than the number of the layer."""
    kinds = dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return list(kinds)[:_SHOWN]
