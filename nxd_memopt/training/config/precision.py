"""NeMo's names of precisions, and what each means for parameters, master weights and loss scaling."""

from __future__ import annotations

from dataclasses import dataclass

from nxd_memopt.config import require_one_of

MAX_LOSS_SCALE = 2.0**96
"""Largest loss scale, equal to ``optimizer.loss_scaler.MAX_SCALE``, which cannot be read without torch."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of one precision.

    Args:
        dtype: dtype of parameters and activations.
        master_weights: whether the optimizer keeps fp32 weights, states and gradient sums; None if
            that makes no difference, because the parameters are fp32.
        description: the precision in words, for the start report.
    """

    dtype: str
    master_weights: bool | None
    description: str


PRECISIONS = {
    "32-true": Precision("float32", None, "fp32 parameters and optimizer states"),
    "bf16-true": Precision("bfloat16", False, "bf16 parameters and optimizer states, without fp32 master weights"),
    "bf16-mixed": Precision("bfloat16", True, "bf16 parameters, fp32 master weights, states and gradient sums"),
    "16-mixed": Precision(
        "float16", True, "fp16 parameters, fp32 master weights, states and gradient sums, dynamic loss scale"
    ),
}
ALIASES = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}
"""NeMo's short names, with NeMo's meaning."""


def resolve_precision(
    precision: str | int | None,
    dtype: str,
    master_weights: bool | None,
) -> tuple[str, str, bool]:
    """Return the precision's name, dtype and master weights that three options state together.

    Args:
        precision: ``trainer.precision``; None follows the other two options.
        dtype: ``model.dtype``; ``auto`` follows the precision, and is float32 without one.
        master_weights: ``optimizer.master_weights``; None follows the precision, and is True
            without one.

    Raises:
        ValueError: the name is unknown, or the options contradict each other.
    """
    if precision is None:
        return _name_of(dtype, master_weights)
    allowed = (*PRECISIONS, *ALIASES)
    require_one_of("trainer.precision", str(precision), allowed)
    name = ALIASES.get(str(precision), str(precision))
    meaning = PRECISIONS[name]
    if dtype not in ("auto", meaning.dtype):
        raise ValueError(
            f"trainer.precision {precision} means model.dtype {meaning.dtype}, and model.dtype is {dtype}: "
            "remove one of the two"
        )
    if None not in (master_weights, meaning.master_weights) and master_weights != meaning.master_weights:
        raise ValueError(
            f"trainer.precision {precision} means optimizer.master_weights {meaning.master_weights}, and "
            f"optimizer.master_weights is {master_weights}: remove one of the two"
        )
    if master_weights is None:
        master_weights = meaning.master_weights is not False
    return name, meaning.dtype, master_weights


def _name_of(dtype: str, master_weights: bool | None) -> tuple[str, str, bool]:
    """Return the precision that ``model.dtype`` and ``optimizer.master_weights`` mean."""
    if dtype == "auto":
        dtype = "float32"
    if master_weights is None:
        master_weights = True
    for name, meaning in PRECISIONS.items():
        if meaning.dtype == dtype and meaning.master_weights in (None, master_weights):
            return name, dtype, master_weights
    raise ValueError(
        f"model.dtype {dtype} with optimizer.master_weights {master_weights} is not supported: updates and squared "
        "gradients are below fp16's range; set optimizer.master_weights to true"
    )
