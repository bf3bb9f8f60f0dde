"""Puts ``nxd_memopt.memory.checkpoint`` in the place of ``torch.utils.checkpoint.checkpoint`` on XLA."""

from __future__ import annotations

import sys
import types

import torch.utils.checkpoint

from nxd_memopt.memory import checkpoint

_KEPT = "nxd_memopt"  # this library asks for torch's own function where it wants that


def install() -> list[str]:
    """Replace torch's function, which fails on XLA devices, for ``import`` statements of either form.

    A module that was imported before, as transformers' may have been, holds torch's function under a name of its own:
    that name is replaced too. What holds it otherwise (an argument's default, a partial) is not found: import
    ``nxd_memopt.compat`` first.

    Returns:
        The modules imported before, in which the function was replaced.
    """
    original = torch.utils.checkpoint.checkpoint
    replaced: list[str] = []
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == _KEPT or not isinstance(module, types.ModuleType):
            continue
        attributes = [attribute for attribute, value in list(vars(module).items()) if value is original]
        for attribute in attributes:
            setattr(module, attribute, checkpoint)
        if attributes and module is not torch.utils.checkpoint:
            replaced.append(name)
    return replaced
