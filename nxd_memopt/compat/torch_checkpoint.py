"""Replaces ``torch.utils.checkpoint.checkpoint`` with ``nxd_memopt.memory.checkpoint`` on XLA."""

from __future__ import annotations

import sys
import types

import torch.utils.checkpoint

from nxd_memopt.memory import checkpoint

_EXCLUDED = "nxd_memopt"  # this library calls torch's own function on purpose


def install() -> None:
    """Replace ``torch.utils.checkpoint.checkpoint``, which fails on XLA devices.

    Modules that were imported before, such as those of transformers, may have torch's function as
    an attribute, which is replaced too. Other references (default arguments, partials) are not
    found: import ``nxd_memopt.compat`` first.
    """
    # ``from torch.utils.checkpoint import checkpoint`` binds the function in the importing
    # module. torch.utils.checkpoint itself is among sys.modules, so its attribute is replaced
    # too.
    original = torch.utils.checkpoint.checkpoint
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == _EXCLUDED or not isinstance(module, types.ModuleType):
            continue
        # vars, not getattr: lazy modules would import their submodules on an attribute access.
        for attribute, value in list(vars(module).items()):
            if value is original:
                setattr(module, attribute, checkpoint)
