"""State of a training run: what changes from step to step, saving it, exact resumption, and warm starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import BackgroundSaver, TrainingState, save_training_state
from nxd_memopt.checkpoint.files import Sources
from nxd_memopt.checkpoint.huggingface.base import find_base
from nxd_memopt.checkpoint.huggingface.importing import model_sources, opened_weights
from nxd_memopt.checkpoint.sharded.index import Index
from nxd_memopt.checkpoint.sharded.loading import load_weights
from nxd_memopt.checkpoint.sharded.training import load_checkpoint
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed, random_states, set_random_states
from nxd_memopt.training.config.lora import recorded_lora
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.data.packed.run_tokens import RunTokens
from nxd_memopt.training.optimizer import MasterWeightOptimizer
from nxd_memopt.training.pipeline import PipelinedForwardBackward
from nxd_memopt.training.reporting.step_metrics import Trained
from nxd_memopt.training.resume.changes import changed_draws
from nxd_memopt.training.resume.plan import ResumePlan


@dataclass
class Training:
    """State of a running training.

    Args:
        model: this rank's shard of the model.
        optimizer: optimizer of the model's trainable parameters.
        forward_backward: maps a micro-batch to its share of the step's loss, and accumulates its
            gradients; of a pipeline, the same for all micro-batches together.
        plan: how the run has started.
        tokens: packed tokens of the run.
        step: optimizer steps done, skipped ones included. The data position follows from it and
            from ``plan``, the learning rate from ``updates`` and ``plan``.
        base: where the weights are that a run with adapters (LoRA) does not train, as its checkpoints record it;
            None if they store all weights.
        adapter_base: directory that the files of adapters name as their base; None if none can be named.
        best: step and held-out loss of the best checkpoint, with ``trainer.keep_best``; None before the first.
        files: directory of the files that rank 0 copies into each checkpoint: configuration and tokenizer.
    """

    model: nn.Module
    optimizer: MasterWeightOptimizer
    forward_backward: Callable[[MicroBatch], Tensor] | PipelinedForwardBackward
    plan: ResumePlan
    tokens: RunTokens
    step: int = 0
    base: Mapping[str, Any] | None = None
    adapter_base: str | None = None
    best: tuple[int, float] | None = None
    files: Path | None = None

    @property
    def updates(self) -> int:
        """Steps that have updated the weights: all but those skipped after an overflow in fp16."""
        return self.step - self.optimizer.skipped_steps

    def improves(self, loss: float | None) -> bool:
        """Return whether the held-out loss of this step is the lowest one, which ``best`` then is."""
        lowest = math.inf if self.best is None else self.best[1]
        # Not "not greater": a loss may be NaN.
        if loss is None or not loss < lowest:
            return False
        self.best = (self.step, loss)
        return True

    def trained(self, step: int) -> Trained:
        """Return what the run has trained after ``step`` steps, those of earlier processes included."""
        tokens = self.plan.trained_sequences(step) * self.plan.config.data.seq_length
        return Trained(tokens, self.tokens.epoch(self.plan.position(step)))

    def state(self) -> TrainingState:
        """Return everything that a checkpoint stores of this rank."""
        self.optimizer.finish_update()
        # References to the model and the optimizer, copies of the random states only: the save
        # copies everything else before the next update changes it.
        consumed = self.plan.position(self.step)
        shared: dict[str, Any] = {
            "tokens": dict(self.tokens.content(consumed)),
            "sequences": consumed,
            "trained_sequences": self.plan.trained_sequences(self.step),
        }
        if self.optimizer.loss_scaler is not None:
            shared["loss_scaler"] = self.optimizer.loss_scaler.state_dict()
        return TrainingState(
            self.model,
            self.optimizer.inner,
            shared=shared,
            per_rank={"random": {"backend": backend.name, **random_states()}},
            base=self.base,
            files=self.files,
        )


class Saver:
    """Writer of a run's checkpoints; a context manager.

    Checkpoints are written in the background if ``trainer.async_save`` is set. Every rank makes
    the same calls.
    """

    def __init__(self, training: Training, config: TrainConfig) -> None:
        self._training = training
        self._config = config
        self._background: BackgroundSaver | None = None
        self._is_reserved = False

    def __enter__(self) -> Saver:
        trainer = self._config.trainer
        if trainer.async_save and trainer.saves_checkpoints:
            self._background = BackgroundSaver(trainer.checkpoint_directory, keep=trainer.keep_checkpoints)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._background is not None:
            self._background.__exit__(kind, error, traceback)

    def after_step(self) -> None:
        """Raise on every rank if a background save failed. Call it after each optimizer step."""
        # The optimizer states exist after the first update. Host memory is allocated then, so the
        # first step that saves is not slower, and a lack of memory is found at once.
        if self._background is None:
            return
        if not self._is_reserved and self._training.updates:
            self._background.reserve(self._training.state())
            self._is_reserved = True
        self._background.poll()

    @property
    def is_busy(self) -> bool:
        """Whether a save is running in the background, equal on every rank."""
        return self._background is not None and self._background.is_busy

    def finish(self) -> None:
        """Wait until the running save is complete. Every rank calls."""
        if self._background is not None:
            self._background.finish()

    def save(self) -> None:
        """Save a checkpoint of the current step, in the background with ``trainer.async_save``."""
        config = self._training.plan.recorded
        keep_step = self._training.best and self._training.best[0]
        if self._background is not None:
            self._background.save(self._training.step, self._training.state(), config, keep_step=keep_step)
            return
        save_training_state(
            self._config.trainer.checkpoint_directory,
            self._training.step,
            state=self._training.state(),
            config=config,
            keep=self._config.trainer.keep_checkpoints,
            keep_step=keep_step,
        )


def resume(training: Training) -> list[str]:
    """Load the checkpoint of ``training.plan``, if it has one. Every rank calls.

    T, D and ZeRO-1 may differ from the run that saved: parameters, master weights and optimizer
    states are resharded without a change of values. Random states are restored if T and D are the
    same; otherwise every random stream is seeded with ``trainer.seed`` plus the step.

    Returns:
        Messages about everything that is not resumed exactly; empty for an exact resume.

    Raises:
        ValueError: the checkpoint is damaged, or fits another model or optimizer.
    """
    plan = training.plan
    if plan.stored is None:
        return []
    # plan_resume has compared the configurations. The checkpoint is loaded into the tensors of
    # the model and the optimizer, so no second copy of them exists.
    restored = load_checkpoint(plan.stored.directory, training.state())
    # The checkpoint's hyperparameters came with the optimizer states: they would undo a change
    # that plan_resume has allowed.
    training.optimizer.use_configured_options()
    # Random states are stored per rank: they are of use only if every rank has the same position
    # in the same groups. Otherwise seed + step gives new streams, not those of the run's start.
    training.step = restored.step
    if training.optimizer.loss_scaler is not None:
        training.optimizer.loss_scaler.load_state_dict(restored.shared.get("loss_scaler", {}))
    changed = "the number of tensor-parallel, pipeline-parallel or data-parallel ranks has changed"
    if restored.per_rank is not None:
        random = restored.per_rank["random"]
        # Generators of another kind of device have other states. Earlier versions recorded no backend.
        before = random.get("backend", backend.name)
        if before == backend.name:
            set_random_states(random)
            return [*restored.notes, *changed_draws(plan.stored.config, plan.recorded)]
        changed = f"the backend has changed from {before} to {backend.name}"
    seed = plan.config.trainer.seed
    model_parallel_manual_seed(seed + restored.step, per_stage=True)
    return [
        *restored.notes,
        f"{changed}: random streams are seeded with trainer.seed + {restored.step}, so dropout draws other numbers "
        "than an uninterrupted run",
    ]


def load_warm_start(model: nn.Module, plan: ResumePlan) -> list[str]:
    """Fill ``model`` with the weights of ``plan.warm_start``, if it has one. Every rank calls.

    The optimizer must not exist yet: its master weights are copies of the model's. The model's adapters
    exist: the checkpoint's are loaded or merged (``load_weights``).

    Returns:
        One line that names the checkpoint; empty without a warm start.

    Raises:
        ValueError: on every rank, if the model has other names or shapes, or a file is damaged.
    """
    if plan.warm_start is None:
        return []
    with raise_together(f"loading the weights of {plan.warm_start}"):
        index = Index(plan.warm_start)
        lora = recorded_lora(index.content["config"])
    task = f"loading the weights of {plan.warm_start}"
    with ExitStack() as stack:
        base: Sources = {}
        if index.base is None:
            stack.enter_context(raise_together(task))
        else:
            directories = [index.base["directory"], plan.config.model.pretrained or index.base["directory"]]
            directory = find_base(index.base, plan.warm_start, directories)
            base = model_sources(model, stack.enter_context(opened_weights(directory, task)))
        has_loaded = load_weights(index, model, lora and lora.scale, base)
    # On XLA the graph of loading ends here, as in build_model.
    backend.mark_step()
    adapters = ""
    if lora is not None:
        adapters = " and adapters" if has_loaded else ", with its adapters merged,"
    return [f"warm start: weights{adapters} of {plan.warm_start}; optimizer, step and data start from the beginning"]
