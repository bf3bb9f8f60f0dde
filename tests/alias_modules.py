"""Imports modules of nxd_memopt.compat without installing the alias, which would stay for the process's other tests."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

_PACKAGE = "nxd_memopt.compat"


def import_without_alias(name: str) -> ModuleType:
    """Return ``nxd_memopt.compat.<name>``; the package's own ``__init__``, which installs the alias, does not run."""
    if _PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(_PACKAGE)
        assert spec is not None
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)  # has the package's __path__, nothing else
    return importlib.import_module(f"{_PACKAGE}.{name}")
