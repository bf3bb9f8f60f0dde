"""NeMo's names of precisions, and what each means for parameters, master weights and loss scaling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """Dtypes of one precision.

    Args:
        dtype: dtype of parameters and activations.
        master_weights: whether the optimizer keeps fp32 weights, states and gradient sums for parameters of
            another dtype.
        description: the precision in words, for the start report.
    """

    dtype: str
    master_weights: bool
    description: str


PRECISIONS = {
    "32-true": Precision("float32", True, "fp32 parameters and optimizer states"),
    "bf16-true": Precision("bfloat16", False, "bf16 parameters and optimizer states, without fp32 master weights"),
    "bf16-mixed": Precision("bfloat16", True, "bf16 parameters, fp32 master weights, states and gradient sums"),
    "16-mixed": Precision(
        "float16", True, "fp16 parameters, fp32 master weights, states and gradient sums, dynamic loss scale"
    ),
}

# NeMo's short names, with NeMo's meaning. YAML reads 16 and 32 as numbers.
SHORT_NAMES = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}


def precision_name(value: str | int) -> str:
    """Return the full name of a precision; a name that is unknown stays as it is."""
    return SHORT_NAMES.get(str(value), str(value))
