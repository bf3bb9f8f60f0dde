"""The blocks of memory that a model and its optimizer own: weights, gradients, optimizer states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from nxd_memopt.profiling.ranges import gradients_of

_OWN = ("nxd_memopt.", "torch.optim")
"""Packages whose objects are searched for tensors."""


def owned_blocks(model: nn.Module, optimizer: object, device_type: str) -> dict[int, tuple[int, str]]:
    """Return the address of each storage on the device, with its bytes and category.

    Args:
        model: its parameters and buffers are weights.
        optimizer: all other tensors that it refers to are its states; None for none.
        device_type: storages elsewhere are left out.
    """
    parameters = list(model.parameters())
    states = reachable_tensors(optimizer)
    gradients = [gradient for tensor in (*parameters, *states) for gradient in gradients_of(tensor)]
    blocks: dict[int, tuple[int, str]] = {}
    # The first category of a storage counts: a gradient may be among the optimizer's tensors.
    for category, tensors in (
        ("weights", [*parameters, *model.buffers()]),
        ("gradients", gradients),
        ("optimizer states", states),
    ):
        for address, size in _storages(tensors, device_type):
            blocks.setdefault(address, (size, category))
    return blocks


def _storages(tensors: Iterable[Tensor], device_type: str) -> list[tuple[int, int]]:
    """Return address and bytes of the storages that have memory on the device."""
    found: list[tuple[int, int]] = []
    for tensor in tensors:
        # A DTensor has no storage of its own, its local tensor has.
        local: Any = getattr(tensor, "to_local", lambda tensor=tensor: tensor)()
        if local.device.type == device_type and local.untyped_storage().nbytes():
            found.append((local.untyped_storage().data_ptr(), local.untyped_storage().nbytes()))
    return found


def reachable_tensors(root: object) -> list[Tensor]:
    """Return the tensors that an optimizer refers to, through containers and objects of this library."""
    found: list[Tensor] = []
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        each = waiting.pop()
        # Objects refer to each other in circles, such as an optimizer and its groups.
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each
        elif not isinstance(each, nn.Module | type) and type(each).__module__.startswith(_OWN):
            waiting += vars(each).values() if hasattr(each, "__dict__") else ()
    return found


def owned_bytes(model: nn.Module, optimizer: object) -> dict[str, int]:
    """Return the bytes of weights and optimizer states by their shapes, where storages have no address."""
    counted: set[int] = set()
    found: dict[str, int] = {}
    # A tensor that is both, such as a parameter in a group of the optimizer, is a weight.
    weights = [*model.parameters(), *model.buffers()]
    for category, tensors in (("weights", weights), ("optimizer states", reachable_tensors(optimizer))):
        found[category] = 0
        for tensor in tensors:
            if id(tensor) not in counted:
                counted.add(id(tensor))
                found[category] += tensor.nbytes
    return found
