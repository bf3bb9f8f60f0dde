"""Owns exact resumption: what a checkpoint of the training script holds, and putting it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import find_latest, load_training_state, save_training_state
from nxd_memopt.parallel_layers.random import get_rng_tracker
from train_config import TrainConfig
from train_errors import world_size
from train_optimizer import AdamW


@dataclass
class Training:
    """A run under way: what changes from step to step.

    Args:
        step: optimizer steps done. The data position and the learning rate follow from it.
        data_fingerprint: of the packed tokens that the position counts in.
        forward_backward: maps a micro-batch ``[B, S]`` to its share of the step's loss, and makes its gradients.
    """

    model: nn.Module
    optimizer: AdamW
    forward_backward: Callable[[Tensor], Tensor]
    data_fingerprint: str
    step: int = 0

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": random_state(),
            "data_fingerprint": self.data_fingerprint,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if state["data_fingerprint"] != self.data_fingerprint:
            raise ValueError(
                "the dataset or the tokenizer has changed since the checkpoint was written: restore it, or start a new "
                "run in another trainer.output_dir"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        set_random_state(state["random"])


def checkpoint_directory(config: TrainConfig) -> Path:
    return Path(config.trainer.output_dir) / "checkpoints"


def save(training: Training, config: TrainConfig) -> None:
    """Write a checkpoint of the step that has been done. Every rank calls."""
    save_training_state(
        checkpoint_directory(config),
        training.step,
        state=training.state(),
        config=config.resume_identity(world_size()),
        keep=config.trainer.keep_checkpoints,
    )


def resume(training: Training, config: TrainConfig) -> None:
    """Continue from the newest checkpoint of the output directory, if there is one. Every rank calls.

    Raises:
        ValueError: when it comes from another configuration or other data, or is past ``trainer.max_steps``.
    """
    directory = checkpoint_directory(config)
    if find_latest(directory) is None:
        return
    step, state = load_training_state(directory, config=config.resume_identity(world_size()))
    if step > config.trainer.max_steps:
        raise ValueError(
            f"{directory} holds step {step}, past trainer.max_steps {config.trainer.max_steps}: raise it or "
            "choose another trainer.output_dir"
        )
    training.load_state(state)
    training.step = step


def random_state() -> dict[str, Any]:
    """The state of every random number generator that training draws from."""
    return {"host": torch.get_rng_state(), "device": backend.get_rng_state(), "tracker": get_rng_tracker().get_states()}


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["host"])
    backend.set_rng_state(state["device"])
    get_rng_tracker().set_states(state["tracker"])
