"""Bad inputs: options of packing."""

from __future__ import annotations

from tests.training.bad_inputs.case import BadInput
from tests.training.runs import write_config

CASES: tuple[BadInput, ...] = (
    BadInput(
        "unknown_packing",
        lambda directory: write_config(directory, data={"packing": "bestfit"}),
        ("data.packing", "'bestfit'", "did you mean 'best_fit'"),
    ),
)
