"""Runs neuronx-distributed's scripts unchanged: importing this package aliases ``neuronx_distributed``.

``python -m nxd_memopt.compat script.py ...`` imports the package before it runs the script. On
all backends but xla, ``torch_xla`` is an alias too, with the functions that such scripts use: see
``xla``. On backend xla, ``torch.utils.checkpoint.checkpoint`` is replaced with
``nxd_memopt.memory.checkpoint``: see ``torch_checkpoint``.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder

from nxd_memopt.backends import backend
from nxd_memopt.compat import torch_checkpoint, xla
from nxd_memopt.compat.alias import Table, install_alias
from nxd_memopt.compat.names import NAMES, TORCH_NEURONX

__all__ = ["install"]


def install() -> None:
    """Alias ``neuronx_distributed``, ``torch_xla`` unless the backend is xla, and an absent ``torch_neuronx``.

    Installed packages of these names are ignored, with one line of notice each. On backend xla
    ``torch.utils.checkpoint.checkpoint`` is replaced. A second call does nothing.

    Raises:
        RuntimeError: one of the real packages was imported before.
    """
    # The device mode and the process-group wrapper stack on what is there, so they are installed
    # only if the alias is new. On backend xla the real torch_xla must stay in place.
    _alias("neuronx_distributed", NAMES)
    # Of an installed torch_neuronx more is used than this name.
    if "torch_neuronx" not in sys.modules and PathFinder.find_spec("torch_neuronx") is None:
        _alias("torch_neuronx", TORCH_NEURONX)
    if backend.name != "xla" and _alias("torch_xla", xla.NAMES):
        xla.device.install()
        xla.process_group.install()
    if backend.name == "xla":
        torch_checkpoint.install()


def _alias(root: str, names: Table) -> bool:
    """Install the alias and report a real package that it hides. Return whether it is new."""
    if not install_alias(root, names):
        return False
    # PathFinder looks at installed packages only, not at the alias. The notice appears once:
    # which of the two packages a script runs on must not be a guess.
    real = PathFinder.find_spec(root)
    if real is not None:
        print(f"nxd_memopt.compat: {root} of {real.origin} is ignored", file=sys.stderr)
    return True


install()
