"""Stubs of packages that neuronx-distributed's source and tests import and that no open index has.

A stub module answers every attribute with a class that can be subclassed, called and used as a decorator, so that
imports succeed; a test that relies on what a stub does fails.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _StubType(type):
    """The type of stub classes, whose attributes and items are stubs again."""

    def __getattr__(cls, name: str) -> Any:
        return _stub(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else super().__call__(*args, **kwargs)

    def __getitem__(cls, item: Any) -> Any:
        return cls


class _Stub(metaclass=_StubType):
    """An instance of a stub class; a call with one function returns it, as a decorator does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __getattr__(self, name: str) -> Any:
        return _stub(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


def _stub(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _StubType(name, (_Stub,), {})


class StubModule(ModuleType):
    """A module that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        return _stub(name)


class StubFinder(MetaPathFinder, Loader):
    """Imports any module below ``roots`` as a stub; the last finder, so that installed packages come first."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = tuple(roots)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        below = any(fullname == root or fullname.startswith(f"{root}.") for root in self._roots)
        return ModuleSpec(fullname, self, is_package=True) if below else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


def install_stubs(*roots: str) -> None:
    """Stub the roots that are not installed."""
    sys.meta_path.append(StubFinder([root for root in roots if "." in root or PathFinder.find_spec(root) is None]))
