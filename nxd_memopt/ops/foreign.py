"""Owns the question which other packages are there, and whether their kernels take what this library passes."""

from __future__ import annotations

import functools
import importlib
import inspect
from importlib import metadata

from packaging.version import InvalidVersion, Version


@functools.cache
def why_missing(module: str, *, at_least: tuple[str, str] | None = None, **functions: tuple[str, ...]) -> str | None:
    """Why ``module`` cannot be called; ``None``: it can. Imports it, once.

    Args:
        module: dotted name.
        at_least: the distribution that it is of, and the earliest version that will do.
        functions: its names that are used, each with the parameters that it must have; of an empty tuple only the name
            is looked for.
    """
    reason = _outdated(*at_least) if at_least else None
    if reason is not None:
        return reason
    try:
        found = importlib.import_module(module)
    except Exception as error:  # packages raise errors of their own where kernels were, or where a device is missing
        return f"{module} cannot be imported: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    absent = [name for name in functions if not hasattr(found, name)]
    if absent:
        return f"{module} has no {', '.join(absent)}"
    for name, parameters in functions.items():
        if not parameters:
            continue
        try:
            known = inspect.signature(getattr(found, name)).parameters
        except (TypeError, ValueError) as error:
            return f"{module}.{name} cannot be asked for its parameters: {error}"
        lacking = [parameter for parameter in parameters if parameter not in known]
        if lacking:
            return f"{module}.{name} takes no {', '.join(lacking)}"
    return None


def installed(*distributions: str) -> list[str]:
    """``name version`` of those that are installed."""
    return [f"{name} {metadata.version(name)}" for name in distributions if any(metadata.distributions(name=name))]


def _outdated(distribution: str, earliest: str) -> str | None:
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"{distribution} is not installed"
    try:
        is_older = Version(version) < Version(earliest)
    except (InvalidVersion, TypeError):  # a broken installation's is None
        return f"{distribution} has version {version!r}, not one that can be compared with {earliest}"
    return f"{distribution} {version} is older than {earliest}" if is_older else None
