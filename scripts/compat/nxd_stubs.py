"""Stubs of packages that neuronx-distributed's source and tests import and that no open index has.

Every attribute of a stub module is a class that can be subclassed, called and used as a decorator,
so imports succeed. A test that depends on the behavior of a stub fails.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _StubType(type):
    """Metaclass of stub classes; their attributes and items are stubs too."""

    def __getattr__(cls, name: str) -> Any:
        return _stub(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else super().__call__(*args, **kwargs)

    def __getitem__(cls, item: Any) -> Any:
        return cls


class _Stub(metaclass=_StubType):
    """Stub class; as a decorator, it and its instances return the function."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __getattr__(self, name: str) -> Any:
        return _stub(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


def _stub(name: str) -> Any:
    """Return a new stub class, or raise ``AttributeError`` for names that start with ``__``."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _StubType(name, (_Stub,), {})


class StubModule(ModuleType):
    """Module that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        return _stub(name)


class StubFinder(MetaPathFinder, Loader):
    """Finder that imports any module below ``roots`` as a stub.

    It is the last finder, so installed packages take precedence.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = tuple(roots)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a stub module, or None for modules that are not below the roots."""
        del path, target
        below = any(fullname == root or fullname.startswith(f"{root}.") for root in self._roots)
        return ModuleSpec(fullname, self, is_package=True) if below else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a stub module."""
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing; a stub module has no code."""
        del module


def install_stubs(*roots: str) -> None:
    """Install stubs for the roots that are not installed, and for dotted names."""
    sys.meta_path.append(StubFinder([root for root in roots if "." in root or PathFinder.find_spec(root) is None]))
