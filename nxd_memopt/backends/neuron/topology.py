"""The order in which tensor-parallel groups take the workers of Trainium nodes.

Neighbours in this order share links.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PLATFORM_OVERRIDE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""Environment variable that names the platform in place of the machine's own."""
_TRN1_STRIDED_SIZE = 4
_TRN2_CORES = 128
PHYSICAL_CORES_PER_CHIP = 8
"""For Trainium2 and Trainium3. A worker uses LNC physical cores."""
TRN2_ROWS_AROUND_TORUS = (0, 3, 1, 2)
"""Rows of chips of a trn2 node, in an order in which neighbours are linked."""


def neuron_order(
    environment: Mapping[str, str],
    world_size: int,
    tensor_model_parallel_size: int,
) -> list[int]:
    """Return the global ranks in the order in which tensor-parallel groups take them.

    On platforms other than trn1 and trn2 the order is ``0, 1, 2, ...``.
    """
    platform = platform_target(environment)
    workers_per_node = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    if platform == "trn1":
        return trn1_order(
            world_size,
            tensor_model_parallel_size,
            workers_per_node=workers_per_node,
        )
    if platform == "trn2":
        return trn2_order(
            world_size,
            tensor_model_parallel_size,
            logical_nc_config=logical_nc_config(environment),
            workers_per_node=workers_per_node,
        )
    return list(range(world_size))


def neuron_kv_rank_stride(
    environment: Mapping[str, str],
    tensor_model_parallel_size: int,
    replicas: int,
) -> int:
    """Return the distance in a tensor-parallel group between the ranks that share one KV head.

    The distance is T/replicas on trn1, and on inf2, which has the same chips: at T = 32 with 4
    replicas the groups are ``[0, 8, 16, 24], [1, 9, 17, 25], ...``, the groups of 4 that a node
    links. It is 1 elsewhere.
    """
    if replicas > 1 and platform_target(environment) in ("trn1", "inf2"):
        return tensor_model_parallel_size // replicas
    return 1


def platform_target(environment: Mapping[str, str]) -> str:
    """Return ``"trn2"``, ``"trn3"``, ..., or ``""`` on other machines.

    ``NEURON_PLATFORM_TARGET_OVERRIDE`` takes precedence over the machine's product name.
    """
    platform = environment.get(PLATFORM_OVERRIDE)
    product = Path("/sys/devices/virtual/dmi/id/product_name")  # on EC2 the instance type
    if not platform and product.exists():
        platform = product.read_text(encoding="ascii", errors="replace")
    # an instance type such as trn2.48xlarge begins with the platform
    found = re.match(r"(trn|inf)\d", (platform or "").strip().lower())
    if not found:
        return ""
    return found[0]


def hardware_name(environment: Mapping[str, str]) -> str:
    """Return the name of one worker's device in ``planner/hardware.py``; trn1 on machines without Neuron."""
    platform = platform_target(environment)
    # Other machines simulate trn1, and inf2 has its cores.
    if platform not in ("trn2", "trn3"):
        return "trn1"
    return f"{platform}-lnc1" if logical_nc_config(environment) == 1 else platform


def logical_nc_config(environment: Mapping[str, str]) -> int:
    """Return LNC, the number of physical cores of one worker; 2 is the default of trn2 and trn3.

    Raises:
        ValueError: the value is neither 1 nor 2, or two variables differ.
    """
    names = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
    # The second variable is the older name of the first. With different values the order could be
    # computed for another number of workers than the node has.
    values = {name: environment[name] for name in names if name in environment}
    if len(set(values.values())) > 1:
        raise ValueError(
            f"{names[0]}={values[names[0]]} differs from {names[1]}={values[names[1]]}: set one, or both alike"
        )
    value = next(iter(values.values()), "2")
    if value not in ("1", "2"):
        raise ValueError(f"{next(iter(values))}={value} is neither 1 nor 2")
    return int(value)


def trn1_order(world_size: int, tensor_model_parallel_size: int, *, workers_per_node: int) -> list[int]:
    """Return the global ranks in the order in which trn1's tensor-parallel groups take them.

    A trn1 node links the cores of a group of 4 only if they are a quarter of the node apart. At
    T = 4 on a node of 32 workers the groups are ``[0, 8, 16, 24], [1, 9, 17, 25], ...``. Every
    other T, and every node size that 4 does not divide, takes consecutive ranks.
    """
    size = tensor_model_parallel_size
    if size != _TRN1_STRIDED_SIZE or workers_per_node % size or world_size % workers_per_node:
        return list(range(world_size))
    stride = workers_per_node // size
    # ranks start, start + stride, ...: one from each quarter of the node
    order = []
    for start in range(stride):
        order += range(start, workers_per_node, stride)
    return _repeat_per_node(order, world_size)


def trn2_order(
    world_size: int,
    tensor_model_parallel_size: int,
    *,
    logical_nc_config: int,
    workers_per_node: int,
) -> list[int]:
    """Return the global ranks in the order in which trn2's tensor-parallel groups take them.

    The cores of a trn2 node form a torus of 4 rows. Rows 0 and 3 are linked, and rows 1 and 2 are
    linked. A group of two rows is therefore made of linked rows. At T = 32 and LNC 2 the groups are
    ``[0..15, 48..63], [16..31, 32..47]``; T = 64 and LNC 1 takes the same rows. Every other T, and
    every partly used node, takes consecutive ranks.

    Args:
        world_size: workers of all nodes.
        tensor_model_parallel_size: T.
        logical_nc_config: LNC, physical cores per worker: 1 or 2.
        workers_per_node: processes on each node.
    """
    full_node = _TRN2_CORES // logical_nc_config
    uses_full_nodes = workers_per_node == full_node and world_size % full_node == 0
    if tensor_model_parallel_size * 2 != full_node or not uses_full_nodes:
        return list(range(world_size))
    # T is half of the node: each group takes two rows, which are neighbours in this order
    row_size = full_node // len(TRN2_ROWS_AROUND_TORUS)
    order = []
    for row in TRN2_ROWS_AROUND_TORUS:
        order += range(row * row_size, (row + 1) * row_size)
    return _repeat_per_node(order, world_size)


def _repeat_per_node(order: list[int], world_size: int) -> list[int]:
    """Repeat the order within one node for all nodes of the world."""
    first_ranks = range(0, world_size, len(order))
    return [first_rank + rank for first_rank in first_ranks for rank in order]
