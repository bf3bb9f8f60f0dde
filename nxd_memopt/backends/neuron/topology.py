"""The order in which tensor-parallel groups take the workers of Trainium nodes, so that neighbours share links."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PLATFORM_OVERRIDE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""Environment variable that names the platform instead of the machine."""
_TRN1_STRIDED_SIZE = 4
_TRN2_CORES = 128
PHYSICAL_CORES_PER_CHIP = 8
"""Of Trainium2 and Trainium3; LNC of them make one worker."""
TRN2_ROWS_AROUND_TORUS = (0, 3, 1, 2)
"""A trn2 node's rows of chips in an order in which neighbours are linked."""


def neuron_order(environment: Mapping[str, str], world_size: int, tensor_model_parallel_size: int) -> list[int]:
    """Global ranks in the order in which this machine's tensor-parallel groups take them; elsewhere neighbours."""
    platform = platform_target(environment)
    workers_per_node = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    if platform == "trn1":
        return trn1_order(world_size, tensor_model_parallel_size, workers_per_node=workers_per_node)
    if platform == "trn2":
        lnc = logical_nc_config(environment)
        return trn2_order(
            world_size, tensor_model_parallel_size, logical_nc_config=lnc, workers_per_node=workers_per_node
        )
    return list(range(world_size))


def neuron_kv_rank_stride(environment: Mapping[str, str], tensor_model_parallel_size: int, replicas: int) -> int:
    """How far apart in a tensor-parallel group the ``replicas`` ranks are that hold the same KV head.

    On trn1, and on inf2, which has its chips, T/replicas: at T = 32 with 4 replicas the groups are
    ``[0, 8, 16, 24], [1, 9, 17, 25], ...``, the groups of 4 that a node links. Elsewhere neighbours.
    """
    strided = replicas > 1 and platform_target(environment) in ("trn1", "inf2")
    return tensor_model_parallel_size // replicas if strided else 1


def platform_target(environment: Mapping[str, str]) -> str:
    """``"trn2"``, ``"trn3"``, ...: what ``NEURON_PLATFORM_TARGET_OVERRIDE`` names, or else the machine; or ``""``."""
    override = environment.get(PLATFORM_OVERRIDE)
    product = Path("/sys/devices/virtual/dmi/id/product_name")  # on EC2 the instance type
    named = override or (product.read_text(encoding="ascii", errors="replace") if product.exists() else "")
    found = re.match(r"(trn|inf)\d", named.strip().lower())
    return found[0] if found else ""


def logical_nc_config(environment: Mapping[str, str]) -> int:
    """LNC, the physical cores of one worker; trn2's and trn3's default is 2.

    Raises:
        ValueError: neither 1 nor 2, or two variables that differ.
    """
    names = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
    given = {name: environment[name] for name in names if name in environment}
    if len(set(given.values())) > 1:
        raise ValueError(
            f"{names[0]}={given[names[0]]} differs from {names[1]}={given[names[1]]}: set one, or both alike"
        )
    value = next(iter(given.values()), "2")
    if value not in ("1", "2"):
        raise ValueError(f"{next(iter(given))}={value} is neither 1 nor 2")
    return int(value)


def trn1_order(world_size: int, tensor_model_parallel_size: int, *, workers_per_node: int) -> list[int]:
    """Global ranks in the order in which trn1's tensor-parallel groups take them.

    A trn1 node links the cores of a group of 4 only when they lie a quarter of the node apart: at T = 4 the groups are
    ``[0, 8, 16, 24], [1, 9, 17, 25], ...`` of a node of 32 workers. Every other size takes neighbours, as do nodes that
    4 does not divide.
    """
    size = tensor_model_parallel_size
    if size != _TRN1_STRIDED_SIZE or workers_per_node % size or world_size % workers_per_node:
        return list(range(world_size))
    stride = workers_per_node // size
    within = [start + step * stride for start in range(stride) for step in range(size)]
    return _repeat_per_node(within, world_size)


def trn2_order(
    world_size: int, tensor_model_parallel_size: int, *, logical_nc_config: int, workers_per_node: int
) -> list[int]:
    """Global ranks in the order in which trn2's tensor-parallel groups take them.

    The cores of a trn2 node form a torus of 4 rows; rows 0 and 3 are linked, rows 1 and 2 are. A group of two rows is
    therefore made of linked rows: T = 32 at LNC 2, ``[0..15, 48..63], [16..31, 32..47]``, and T = 64 at LNC 1. Every
    other size takes neighbours, as does a node of which only a part takes part.

    Args:
        world_size: workers of all nodes.
        tensor_model_parallel_size: T.
        logical_nc_config: LNC, physical cores per worker: 1 or 2.
        workers_per_node: processes on each node.
    """
    full_node = _TRN2_CORES // logical_nc_config
    if tensor_model_parallel_size * 2 != full_node or workers_per_node != full_node or world_size % full_node:
        return list(range(world_size))
    row = full_node // len(TRN2_ROWS_AROUND_TORUS)
    within = [rank for first in TRN2_ROWS_AROUND_TORUS for rank in range(first * row, (first + 1) * row)]
    return _repeat_per_node(within, world_size)


def _repeat_per_node(within: list[int], world_size: int) -> list[int]:
    return [node + rank for node in range(0, world_size, len(within)) for rank in within]
