"""Checks that optional packages are installed, with the versions and signatures that are called."""

from __future__ import annotations

import functools
import importlib
import inspect
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType

from packaging.version import InvalidVersion, Version

TRANSFORMERS_VERSION = "5.0"
"""Earliest transformers version with the configs that models and checkpoint functions read."""


class MissingDependencyError(ImportError):
    """An optional package is not installed, is too old or cannot be imported.

    The message has the remedy.
    """


def require_transformers(feature: str, *, extra: str = "models") -> ModuleType:
    """Import transformers for ``feature`` and return it.

    The version that is checked is the imported module's, not the installed distribution's. The
    two differ if another copy comes earlier on ``sys.path``.

    Args:
        feature: name, known to users, of the feature that needs transformers; begins the message.
        extra: extra of this distribution that installs transformers.

    Raises:
        MissingDependencyError: transformers is not installed, is older than
            ``TRANSFORMERS_VERSION``, or cannot be imported. The message has the required version,
            what was found, and the command that installs it.
    """
    needed = f"{feature} needs transformers {TRANSFORMERS_VERSION} or newer"
    command = f"pip install 'nxd_memopt[{extra}]'"
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        # an ImportError from inside transformers means that it is installed and broken
        found = f"the installed one cannot be imported ({error})"
        if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
            found = "it is not installed"
        message = f"{needed}, and {found}: {command}"
        raise MissingDependencyError(message, name="transformers") from error
    version = getattr(transformers, "__version__", None)
    if not isinstance(version, str):
        # A directory called "transformers" without __init__.py, on sys.path, is imported as a
        # namespace package.
        location = ", ".join(getattr(transformers, "__path__", ["an unknown place"]))
        raise MissingDependencyError(
            f"{needed}, and what is imported from {location} is not transformers (it has no "
            f"__version__): remove it from sys.path; {command}",
            name="transformers",
        )
    if _is_older(version, TRANSFORMERS_VERSION):
        raise MissingDependencyError(
            f"{needed}, and {version} is installed: {command}, into another environment if this "
            f"one must keep {version}; parallel layers, optimizers, trainer and the alias of "
            "neuronx-distributed work with either",
            name="transformers",
        )
    return transformers


def require_installed(feature: str, *modules: str, extra: str) -> None:
    """Check that ``modules`` are installed, without importing them.

    Args:
        feature: name of the feature that needs them; begins the message.
        modules: dotted names.
        extra: extra of this distribution that installs them.

    Raises:
        MissingDependencyError: modules are missing; the message names them and the ``extra``.
    """
    missing = [module for module in modules if not is_importable(module)]
    if missing:
        raise MissingDependencyError(
            f"{feature} needs {', '.join(missing)}, not installed here: pip install 'nxd_memopt[{extra}]'",
            name=missing[0],
        )


@functools.cache
def why_missing(
    module: str,
    *,
    at_least: tuple[str, str] | None = None,
    **functions: tuple[str, ...],
) -> str | None:
    """Return why ``module`` cannot be used, or None if it can. The module is imported once.

    Args:
        module: dotted name.
        at_least: name of the distribution with the module, and the earliest version that is
            accepted.
        functions: names in the module that are used, each with the parameters that it must have;
            with an empty tuple only the name is checked.
    """
    if at_least is not None:
        reason = _outdated(*at_least)
        if reason is not None:
            return reason
    try:
        # Import the module: only then are missing shared libraries and the functions' signatures
        # known.
        found = importlib.import_module(module)
    except Exception as error:  # of any type, if a kernel or a device is missing
        lines = str(error).splitlines() or [""]
        return f"{module} cannot be imported: {type(error).__name__}: {lines[0]}"
    absent = [name for name in functions if not hasattr(found, name)]
    if absent:
        return f"{module} has no {', '.join(absent)}"
    for name, parameters in functions.items():
        if not parameters:
            continue
        try:
            # built-in functions may have no signature
            known = inspect.signature(getattr(found, name)).parameters
        except (TypeError, ValueError) as error:
            return f"{module}.{name} cannot be asked for its parameters: {error}"
        lacking = [parameter for parameter in parameters if parameter not in known]
        if lacking:
            return f"{module}.{name} takes no {', '.join(lacking)}"
    return None


def installed(*distributions: str) -> list[str]:
    """Return ``name version`` of each distribution that is installed."""
    found = [name for name in distributions if any(metadata.distributions(name=name))]
    return [f"{name} {metadata.version(name)}" for name in found]


def _outdated(distribution: str, earliest: str) -> str | None:
    """Return why ``distribution`` is missing or older than ``earliest``, or None."""
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"{distribution} is not installed"
    try:
        is_older = _is_older(version, earliest)
    except (InvalidVersion, TypeError):  # the version of a broken installation is None
        return f"{distribution} has version {version!r}, not one that can be compared with {earliest}"
    if not is_older:
        return None
    return f"{distribution} {version} is older than {earliest}"


def is_importable(module: str) -> bool:
    """Return whether ``module`` can be found, without importing it."""
    try:
        return find_spec(module) is not None
    except ImportError:  # from an import hook that refuses the module
        return False


def _is_older(version: str, earliest: str) -> bool:
    return Version(version) < Version(earliest)
