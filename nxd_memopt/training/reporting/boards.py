"""Sends values of a run to TensorBoard and, if it is asked for, to Weights & Biases."""

from __future__ import annotations

import importlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from nxd_memopt._optional import require_installed
from nxd_memopt.files import write_text
from nxd_memopt.training.reporting.expert_load import write_layers

WANDB_ID = "wandb_id"


class Boards:
    """TensorBoard's files of a run, and its run of Weights & Biases.

    ``WANDB_MODE=offline`` keeps the values in ``output_dir/wandb``, for ``wandb sync``; wandb's
    other environment variables have their meaning too. A resumed run continues the same run of
    Weights & Biases, whose id is in ``output_dir/wandb_id``; the values of repeated steps are
    there twice, because wandb cannot remove values.

    Args:
        directory: output directory of the run.
        first_step: optimizer steps done before this process; TensorBoard hides the points of later
            steps that an earlier process has written.
        wandb_project: name of the project of Weights & Biases; None without it.
    """

    def __init__(self, directory: Path, *, first_step: int, wandb_project: str | None) -> None:
        self._tensorboard = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step + 1)
        self._wandb = None if wandb_project is None else _wandb_run(wandb_project, directory)

    def options(self, text: str, values: Mapping[str, Any]) -> None:
        """Record the options of the run: as TensorBoard's text, and in wandb's run.

        Args:
            text: the options as YAML.
            values: the options by section.
        """
        # Markdown needs an indentation of 4 for text that is shown as it is.
        self._tensorboard.add_text("options", re.sub("^", "    ", text, flags=re.MULTILINE))
        if self._wandb is not None:
            # A resumed run may have other options.
            self._wandb.config.update(dict(values), allow_val_change=True)

    def scalars(self, values: Mapping[str, Any], step: int) -> None:
        """Record the values of a step by name; a list has a value, or the tokens of each expert, for each layer."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for name, number in numbers.items():
            self._tensorboard.add_scalar(name, number, step)
        for name, value in values.items():
            if isinstance(value, list):
                write_layers(self._tensorboard, name.rpartition("/")[2], value, step)
        if self._wandb is not None:
            self._wandb.log({**numbers, "step": step})

    def close(self, exit_code: int) -> None:
        """Write what is left; ``exit_code`` above 0 marks wandb's run as failed."""
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=exit_code)


def require_boards(wandb_project: str | None) -> None:
    """Raise ``MissingDependencyError`` if wandb is asked for and is not installed."""
    if wandb_project is not None:
        require_installed("trainer.wandb_project", "wandb", extra="wandb")


def _wandb_run(project: str, directory: Path) -> Any:
    """Return a new run of Weights & Biases, or the one that earlier processes of this run have begun."""
    wandb: Any = importlib.import_module("wandb")
    path = directory / WANDB_ID
    if not path.is_file():
        # Written before the run exists: a process that is killed here leaves an id without a run,
        # which the next one begins.
        write_text(path, secrets.token_hex(8))
    run = wandb.init(
        project=project,
        name=directory.resolve().name,
        id=path.read_text(encoding="utf-8"),
        resume="allow",
        dir=str(directory),
    )
    # wandb's own step only rises, and drops the values of steps that a resumed run repeats.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run
