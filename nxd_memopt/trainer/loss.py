"""Finds the loss in a model's output by ``output_loss_value_spec`` of ``pipeline_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def find_loss_from_output_and_spec(output_val: Any, spec_val: Any) -> Tensor | None:
    """Return the tensor in ``output_val`` that is marked True in ``spec_val``, or None.

    Args:
        output_val: a model's output.
        spec_val: True or False, or a tuple, list or dict of them with the output's shape.

    Raises:
        RuntimeError: the output has another shape, or its marked part is no tensor, or nothing is marked.
    """
    if spec_val is None or spec_val is False:
        return None
    if spec_val is True:
        if not isinstance(output_val, Tensor):
            raise RuntimeError(
                f"the loss must be a tensor, got {type(output_val).__name__}: change output_loss_value_spec"
            )
        return output_val
    for output, spec in _pairs(output_val, spec_val):
        loss = find_loss_from_output_and_spec(output, spec)
        if loss is not None:
            return loss
    raise RuntimeError(f"output_loss_value_spec {spec_val} marks no loss: set one entry to True")


def _pairs(output: Any, spec: Any) -> list[tuple[Any, Any]]:
    """Return the parts of ``output`` with their specification."""
    if isinstance(spec, dict):
        if not isinstance(output, Mapping) or output.keys() != spec.keys():
            keys = list(output) if isinstance(output, Mapping) else type(output).__name__
            raise RuntimeError(f"output_loss_value_spec has the keys {list(spec)}, the output {keys}: make them equal")
        return [(output[key], spec[key]) for key in spec]
    if not isinstance(spec, tuple | list):
        raise RuntimeError(
            f"output_loss_value_spec may have True, False, tuples, lists and dicts, got {type(spec).__name__}"
        )
    if not isinstance(output, tuple | list) or len(output) != len(spec):
        size = len(output) if isinstance(output, tuple | list) else type(output).__name__
        raise RuntimeError(f"output_loss_value_spec has {len(spec)} entries, the output {size}: make them equal")
    return list(zip(output, spec, strict=True))
