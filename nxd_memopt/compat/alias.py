"""Aliases module trees under another package's name, resolved on first use."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Table = Mapping[str, Mapping[str, str]]
"""Alias module -> alias name -> ``"our.module:name"``, or ``"our.module"`` for a module."""

_GUIDE = "docs/migrating_from_nxd.md"


def target(location: str) -> tuple[ModuleType, str]:
    """Return the imported module and the name of ``"our.module:name"``."""
    module, _, name = location.partition(":")
    return importlib.import_module(module), name


class AliasModule(ModuleType):
    """Module without attributes of its own: it reads and writes attributes of other modules.

    A name that is patched through the alias is patched in the module where the library looks it
    up. Every alias module is a package: ``from alias import unknown`` then calls ``AliasFinder``,
    whose message names the nearest name that exists.
    """

    _offered: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        """Return the object that the table names, or a submodule of the alias."""
        # Looked up on each access, not stored: a name that a test or a program replaces in our
        # module is replaced in the alias too.
        if name in self.__dict__.get("_offered", {}):
            owner, attribute = target(self._offered[name])
            if not attribute:
                return owner
            return getattr(owner, attribute)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        finder: AliasFinder = self.__loader__  # pyright: ignore[reportAssignmentType]
        # "import a.b.c" binds submodules itself; this is for attribute access to a submodule that
        # has not been imported, as in "neuronx_distributed.utils.get_device".
        submodule = f"{self.__name__}.{name}"
        if submodule in finder.table:
            return importlib.import_module(submodule)
        raise AttributeError(finder.explain(submodule))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a name of the table in the module that defines it, and any other name here."""
        # The import system sets __spec__, __loader__ and others before _offered exists.
        location = self.__dict__.get("_offered", {}).get(name, "")
        if ":" not in location:
            super().__setattr__(name, value)
            return
        owner, attribute = target(location)
        setattr(owner, attribute, value)

    def __delattr__(self, name: str) -> None:
        """Delete a name of the table from the module that defines it, and any other name here."""
        location = self._offered.get(name, "")
        if ":" not in location:
            super().__delattr__(name)
            return
        owner, attribute = target(location)
        delattr(owner, attribute)


class AliasFinder(MetaPathFinder, Loader):
    """Finder and loader of one aliased module tree.

    Importing a module that is not in the table is an ``ImportError`` that names the nearest one.
    """

    def __init__(self, root: str, table: Table) -> None:
        self.root = root
        self.table = table

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an alias module; None for modules of other packages."""
        # None passes a name on to the next finder. For names of the aliased tree an error is
        # raised instead, or an installed package's modules would mix with the alias.
        del path, target
        if fullname != self.root and not fullname.startswith(f"{self.root}."):
            return None
        if fullname not in self.table:
            # Without name=, the import system keeps this message.
            raise ModuleNotFoundError(self.explain(fullname))
        return ModuleSpec(fullname, self, is_package=True, origin=f"alias of {__package__}")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the alias module of ``spec``."""
        module = AliasModule(spec.name)
        module.__dict__["_offered"] = self.table[spec.name]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Set ``__all__`` to the public names of the table, for ``from alias import *``."""
        module.__dict__["__all__"] = [name for name in self.table[module.__name__] if not name.startswith("_")]

    def explain(self, missing: str) -> str:
        """Return an error message for a missing dotted name, with the nearest name that exists."""
        # Nearest: the same name in another module, else a similar name in the same module.
        offered = list(self.table)
        for module, names in self.table.items():
            offered += [f"{module}.{name}" for name in names]
        parent, _, name = missing.rpartition(".")
        same_name = [full for full in offered if full.rpartition(".")[2] == name]
        siblings = [full for full in offered if full.rpartition(".")[0] == parent]
        nearest = same_name or difflib.get_close_matches(missing, siblings, 1, 0.0) or [self.root]
        return f"{missing} is not offered by nxd_memopt; the nearest name that is: {nearest[0]}; see {_GUIDE}"


def install_alias(root: str, table: Table) -> bool:
    """Install the alias in front of all other importers, once.

    Returns:
        True if it was installed now, False if it was installed before.

    Raises:
        RuntimeError: another package was already imported under this name.
    """
    if any(isinstance(finder, AliasFinder) and finder.root == root for finder in sys.meta_path):
        return False
    if root in sys.modules:
        raise RuntimeError(f"{root} was imported before its alias: import nxd_memopt.compat first")
    # First, so that an installed package of the same name is not found.
    sys.meta_path.insert(0, AliasFinder(root, table))
    return True
