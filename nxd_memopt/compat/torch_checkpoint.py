"""Replaces ``torch.utils.checkpoint.checkpoint`` with ``nxd_memopt.memory.checkpoint`` on XLA."""

from __future__ import annotations

import sys
import types

import torch.utils.checkpoint

from nxd_memopt.memory import checkpoint

_EXCLUDED = "nxd_memopt"  # this library calls torch's own function on purpose


def install() -> list[str]:
    """Replace ``torch.utils.checkpoint.checkpoint``, which fails on XLA devices.

    Modules that were imported before, such as those of transformers, may have torch's function as
    an attribute, which is replaced too. Other references (default arguments, partials) are not
    found: import ``nxd_memopt.compat`` first.

    Returns:
        Names of the already imported modules in which the function was replaced.
    """
    # ``from torch.utils.checkpoint import checkpoint`` binds the function in the importing
    # module. torch.utils.checkpoint itself is among sys.modules, so its attribute is replaced
    # too.
    original = torch.utils.checkpoint.checkpoint
    replaced: list[str] = []
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == _EXCLUDED or not isinstance(module, types.ModuleType):
            continue
        # vars, not getattr: lazy modules would import their submodules on an attribute access.
        values = list(vars(module).items())
        attributes = [attribute for attribute, value in values if value is original]
        for attribute in attributes:
            setattr(module, attribute, checkpoint)
        if attributes and module is not torch.utils.checkpoint:
            replaced.append(name)
    return replaced
