"""Bad inputs: when to save."""

from __future__ import annotations

from tests.training.bad_inputs.case import BadInput
from tests.training.runs import write_config

CASES: tuple[BadInput, ...] = (
    BadInput(
        "save_interval_is_a_word",
        lambda directory: write_config(directory, trainer={"save_interval": "sometimes"}),
        ("trainer.save_interval", "int or 'auto' or 'never'", "'sometimes'"),
    ),
    BadInput(
        "save_interval_is_negative",
        lambda directory: write_config(directory, trainer={"save_interval": -1}),
        ("trainer.save_interval must be at least 0, got -1",),
    ),
    BadInput(
        "save_interval_is_true",
        lambda directory: write_config(directory, trainer={"save_interval": True}),
        ("trainer.save_interval", "int or 'auto' or 'never'", "True"),
    ),
)
