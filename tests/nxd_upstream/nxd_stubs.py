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
        # ``@stub`` above a function calls the class with the function alone: the function must
        # stay what it is. Any other call creates an instance, as ``@stub(option=1)`` does.
        if _decorates(args, kwargs):
            return args[0]
        return super().__call__(*args, **kwargs)

    def __getitem__(cls, item: Any) -> Any:
        return cls


class _Stub(metaclass=_StubType):
    """Stub class; as a decorator, it and its instances return the function."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __getattr__(self, name: str) -> Any:
        return _stub(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _decorates(args, kwargs):
            return args[0]
        return self


def _decorates(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call is that of a decorator: one callable and nothing else."""
    return len(args) == 1 and callable(args[0]) and not kwargs


def _stub(name: str) -> Any:
    """Return a new stub class, or raise ``AttributeError`` for names that start with ``__``."""
    # Python looks for special names, such as __path__ or __mro_entries__, to learn what an object
    # can do: a stub that had all of them would claim every protocol.
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
        # Every stub is a package, so that its submodules are asked for here too.
        for root in self._roots:
            if fullname == root or fullname.startswith(f"{root}."):
                return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a stub module."""
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing; a stub module has no code."""
        del module


def install_stubs(*roots: str) -> None:
    """Install stubs for the roots that are not installed, and for dotted names."""
    # PathFinder and not importlib.util.find_spec: the latter would ask all finders, the alias
    # finders and earlier stubs included. It cannot look up a dotted name without importing the
    # parent; as the last finder, a stub of an installed module is never asked for.
    missing = [root for root in roots if "." in root or PathFinder.find_spec(root) is None]
    sys.meta_path.append(StubFinder(missing))
