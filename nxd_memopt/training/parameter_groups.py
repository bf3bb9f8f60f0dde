"""Divides the trained parameters into groups of one weight decay and one factor of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.resharding import full_shape
from nxd_memopt.parallel_layers.utils import is_expert_parallel
from nxd_memopt.training.config.optimizer import OptimizerConfig

_SHOWN = 5


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that one group of the optimizer updates.

    Args:
        weight_decay: of all of them.
        lr_multiplier: factor of the learning rate of the step.
        parameters: in the model's order.
    """

    weight_decay: float
    lr_multiplier: float
    parameters: tuple[Tensor, ...]


def parameter_groups(named: Sequence[tuple[str, Tensor]], config: OptimizerConfig) -> list[ParameterGroup]:
    """Return the groups of the trained parameters, those with weight decay first.

    Args:
        named: names and parameters, in the model's order.
        config: patterns, decay and factors.

    Raises:
        ValueError: a pattern matches no name, or two patterns with different factors match one.
    """
    names = [name for name, _ in named]
    for option, patterns in (("no_decay", config.no_decay), ("lr_multipliers", tuple(config.lr_multipliers))):
        for pattern in patterns:
            if not any(_matches(pattern, name) for name in names):
                raise ValueError(
                    f"optimizer.{option} {pattern!r} matches none of the {len(names)} trained parameters: names are "
                    f"like {', '.join(_kinds(names))}"
                )
    members: dict[tuple[bool, float], list[Tensor]] = {}
    for name, param in named:
        # Matrices (embeddings and projections) decay; norm weights and biases, of experts [E, columns], do not.
        is_matrix = param.dim() >= 2 and not getattr(param, "is_bias", False)
        decays = is_matrix or config.do_layer_norm_weight_decay
        decays = decays and not any(_matches(pattern, name) for pattern in config.no_decay)
        members.setdefault((decays, _multiplier(name, config)), []).append(param)
    return [
        ParameterGroup(config.weight_decay if decays else 0.0, multiplier, tuple(params))
        for (decays, multiplier), params in sorted(members.items(), key=lambda item: not item[0][0])
    ]


def describe_groups(model: nn.Module, config: OptimizerConfig) -> list[str]:
    """Return one line for each group of a model that is not sharded over data-parallel ranks.

    Raises:
        ValueError: see ``parameter_groups``.
    """
    lines: list[str] = []
    for group in parameter_groups(trained_parameters(model), config):
        size = sum(count_elements(param) for param in group.parameters)
        factor = f", learning rate x {group.lr_multiplier:g}" if group.lr_multiplier != 1 else ""
        tensors = f"{len(group.parameters)} tensor{'s' if len(group.parameters) > 1 else ''}"
        lines.append(f"weight decay {group.weight_decay:g}{factor}: {size:,} parameters in {tensors}")
    return lines


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that require gradients with their names, each once."""
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def count_elements(param: Tensor) -> int:
    """Return the elements of the full parameter over tensor-parallel and expert-parallel ranks."""
    # Expert-parallel ranks have different experts, as many each.
    ranks = parallel_state.get_expert_model_parallel_size() if is_expert_parallel(param) else 1
    return math.prod(full_shape(param)) * ranks


def _matches(pattern: str, name: str) -> bool:
    """Return whether ``pattern``, with the wildcards of a shell, matches a part of ``name``."""
    return fnmatchcase(name, f"*{pattern}*")


def _multiplier(name: str, config: OptimizerConfig) -> float:
    """Return the factor of the learning rate of the parameter ``name``; 1 if no pattern matches it."""
    matching = {pattern: factor for pattern, factor in config.lr_multipliers.items() if _matches(pattern, name)}
    if len(set(matching.values())) > 1:
        raise ValueError(
            f"optimizer.lr_multipliers has several factors for {name}: {matching}: write patterns of which one matches"
        )
    return next(iter(matching.values()), 1.0)


def _kinds(names: Sequence[str]) -> list[str]:
    """Return some names that differ in more than the number of the layer."""
    kinds = dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return list(kinds)[:_SHOWN]
