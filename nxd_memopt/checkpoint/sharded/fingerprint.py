"""Compares the configuration of a resumed run with the configuration in the checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nxd_memopt.checkpoint.plain import decode, encode
from nxd_memopt.options import listed
from nxd_memopt.parallel_layers import parallel_state


def parallel_sizes() -> dict[str, int]:
    """Return the sizes that a checkpoint records: world size, T and D, and with several stages P."""
    stages = parallel_state.get_pipeline_model_parallel_size()
    pipeline = {"pipeline_model_parallel_size": stages} if stages > 1 else {}
    return pipeline | {
        "world_size": parallel_state.get_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_size(),
        "data_parallel_size": parallel_state.get_data_parallel_size(),
    }


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten ``config`` to dotted names and JSON values, with ``nan`` and ``inf`` encoded by
    ``plain.encode``.
    """
    # Through JSON, because the saved configuration was: tuples become lists, for example, before
    # the comparison.
    plain = json.loads(json.dumps(config, default=_to_plain))
    return {name: _encoded(value) for name, value in _flatten(plain).items()}


def _encoded(value: Any) -> Any:
    """Encode a value for comparison: nan differs from itself. An encoded value does not change."""
    return encode(decode(value, _no_tensor), _no_tensor)


def _no_tensor(tensor: Any) -> Any:
    raise AssertionError("a configuration has no tensors: json.dumps made them strings")


def _to_plain(value: Any) -> Any:
    """Convert a value that JSON cannot store: a dataclass to a dict, anything else to a string."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested ``values`` by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def require_same_config(
    checkpoint: Path, saved: Mapping[str, Any], current: Mapping[str, Any], not_compared: Collection[str] = ()
) -> None:
    """Raise ``ValueError`` naming every field that differs, with both values.

    ``not_compared`` may differ.
    """
    # The union of both key sets, in order: a field that exists on one side only is a difference
    # too.
    differences = []
    for name in dict.fromkeys([*saved, *current]):
        if name in not_compared:
            continue
        is_in_both = name in saved and name in current
        if not is_in_both or _encoded(saved[name]) != _encoded(current[name]):
            differences.append(f"{name} was {_spell(saved, name)} and is {_spell(current, name)}")
    if differences:
        raise ValueError(
            f"{checkpoint} was written by another configuration (resume with the saved values, or start a new run in "
            f"another directory): {listed(differences)}"
        )


def _spell(values: Mapping[str, Any], name: str) -> str:
    """Return a value for an error message."""
    if name not in values:
        return "absent"
    return repr(decode(values[name], _no_tensor))
