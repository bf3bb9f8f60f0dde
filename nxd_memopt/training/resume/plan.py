"""Decides, before anything is written or loaded, from which checkpoint a run continues and what may differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from nxd_memopt.checkpoint.huggingface.base import find_base
from nxd_memopt.checkpoint.sharded.index import INDEX
from nxd_memopt.checkpoint.sharded.steps import find_latest
from nxd_memopt.checkpoint.sharded.stored_run import StoredRun, read_stored_run
from nxd_memopt.options import NEW_RUN, WARM_START, Declaration, Resume, listed
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.resume.changes import Changes, compare_options, judge, recorded_options, require_known
from nxd_memopt.training.runtime.distributed import world_size

DECAY_STEPS = "optimizer.decay_steps"


@dataclass(frozen=True)
class ResumePlan:
    """How a run starts: from which checkpoint, with which schedule and at which sequence.

    Args:
        config: the run's configuration, with the decay that its schedule has after the resume.
        recorded: options that the run's checkpoints record.
        stored: the checkpoint to continue from; None for a run that starts at step 0.
        base: Hugging Face directory of the weights next to the adapters in ``stored``; None if it has all weights.
        warm_start: the checkpoint whose weights a run at step 0 starts with, if any.
        sequence_offset: ``sequence_offset + s * data.global_batch_size`` sequences are consumed before
            step s. It is 0 unless the run was resumed with another batch size or other text.
        trained_offset: the same for the sequences that are trained, which other text does not set back.
        notes: one line for each option that has changed.
    """

    config: TrainConfig
    recorded: Mapping[str, Any]
    stored: StoredRun | None = None
    base: Path | None = None
    warm_start: Path | None = None
    sequence_offset: int = 0
    trained_offset: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def continues(self) -> bool:
        """Whether the run continues from a checkpoint in its own directory."""
        own = Path(self.config.trainer.checkpoint_directory)
        return self.stored is not None and self.stored.directory.parent == own

    def position(self, step: int) -> int:
        """Return the number of training sequences that ``step`` steps have consumed."""
        return self.sequence_offset + step * self.config.data.global_batch_size

    def trained_sequences(self, step: int) -> int:
        """Return the number of sequences, of any text, that the run has trained after ``step`` steps."""
        return self.trained_offset + step * self.config.data.global_batch_size


def plan_resume(config: TrainConfig, hf_config: PretrainedConfig) -> ResumePlan:
    """Return how the run of ``config`` starts. Every rank calls, before any file is changed.

    The newest checkpoint of the run's own directory comes first, then ``trainer.resume_from``,
    then ``model.warm_start``: a restart with the same command continues the run. Only the
    checkpoint's index is read.

    Raises:
        ValueError: on every rank, for a directory without a checkpoint, and for each option that
            must not change, with both values and the remedy.
    """
    require_known(config.trainer.allow_changes)
    checkpoint = find_latest(config.trainer.checkpoint_directory)
    notes: list[str] = []
    if checkpoint is None and config.trainer.resume_from is not None:
        checkpoint = find_checkpoint("trainer.resume_from", config.trainer.resume_from)
        notes.append(f"continuing the run of {checkpoint}, which stays as it is")
    elif checkpoint is not None and config.trainer.resume_from is not None:
        notes.append(
            f"trainer.resume_from {config.trainer.resume_from} is not read: trainer.output_dir has a checkpoint, "
            f"{checkpoint.name}, and the run goes on from there; to go back, choose another trainer.output_dir"
        )
    if checkpoint is None:
        recorded = recorded_options(config, hf_config)
        return ResumePlan(config, recorded, warm_start=_warm_start(config))
    with raise_together(f"resuming from {checkpoint}"):
        stored = read_stored_run(checkpoint)
        plan = _compared(config, hf_config, stored, notes)
    if stored.base is None:
        return plan
    # The checkpoint has no weights but the adapters': they continue with the base that they were trained with.
    directories = [config.model.pretrained] if config.model.pretrained is not None else []
    return replace(plan, base=find_base(stored.base, checkpoint, directories))


def _warm_start(config: TrainConfig) -> Path | None:
    """Return the checkpoint of ``model.warm_start``, if it is set."""
    if config.model.warm_start is None:
        return None
    return find_checkpoint("model.warm_start", config.model.warm_start)


def find_checkpoint(option: str, name: str) -> Path:
    """Return the newest checkpoint of a run's directory, or the directory of a checkpoint itself.

    Every rank calls.

    Args:
        option: the option that names the directory, for the message.
        name: directory of a run, of its checkpoints, or of one checkpoint.
    """
    directory = Path(name)
    # Rank 0's answer for all ranks, as in find_latest.
    is_checkpoint = share_texts(str((directory / INDEX).is_file()))[0] == str(True)
    if is_checkpoint:
        return directory
    found = find_latest(directory / "checkpoints") or find_latest(directory)
    if found is None:
        remedy = "name a run's trainer.output_dir, or one step_XXXXXXXX directory in its checkpoints"
        if (directory / "config.json").is_file():
            remedy = "it is a model, as model.pretrained takes it; " + remedy
        raise ValueError(f"{option} {name} has no complete checkpoint: {remedy}")
    return found


def _compared(config: TrainConfig, hf_config: PretrainedConfig, stored: StoredRun, notes: list[str]) -> ResumePlan:
    """Return the plan to continue from ``stored``, after comparing its options with this run's."""
    # Other text under the same options would be read at a position that counts other sequences.
    if not {"tokens", "trained_sequences"} <= stored.shared.keys() or "trainer.precision" not in stored.config:
        raise ValueError(
            f"{stored.directory} records no tokens or precision: it was written by an earlier version, or by another "
            f"program: continue with the version or the program that wrote it, or {WARM_START}"
        )
    allowed = config.trainer.allow_changes
    changes = compare_options(stored.config, recorded_options(config, hf_config), allowed)
    _compare_schedules(config, stored, changes)
    if changes.refusals:
        raise ValueError(f"{stored.directory} was written by another configuration: {listed(changes.refusals)}")
    if stored.step > config.trainer.max_steps:
        raise ValueError(
            f"{stored.directory} has done {stored.step} steps, more than trainer.max_steps "
            f"{config.trainer.max_steps}: raise max_steps, or {NEW_RUN}"
        )
    replicas = config.data_parallel_size(world_size())
    before = stored.sizes["data_parallel_size"]
    if before != replicas:
        changes.notes.append(f"data-parallel size: {before} -> {replicas}")
    # Stored, not step * batch: the batch size may have changed in an earlier resume.
    counted = stored.step * config.data.global_batch_size
    return ResumePlan(
        config,
        recorded_options(config, hf_config),
        stored,
        sequence_offset=stored.shared["sequences"] - counted,
        trained_offset=stored.shared["trained_sequences"] - counted,
        notes=[*notes, *changes.notes],
    )


def _compare_schedules(config: TrainConfig, stored: StoredRun, changes: Changes) -> None:
    """Compare the steps at which the decay of the learning rate ends."""
    old = stored.config["optimizer.decay_steps"]
    new = config.decay_steps
    if new == old or not config.optimizer.has_end:
        return
    allowed = config.trainer.allow_changes
    if config.optimizer.decay_steps is not None or DECAY_STEPS in allowed:
        judge(changes, DECAY_STEPS, Declaration(Resume.WHEN_ASKED), (old, new), allowed)
        return
    changes.refusals.append(
        f"the decay of the learning rate ended at step {old} and would end at step {new}, trainer.max_steps: set "
        f"--optimizer.decay-steps {old} (it still ends there, the learning rate then stays at its minimum), or allow "
        f"the change with --trainer.allow-changes {DECAY_STEPS} (it ends at step {new})"
    )
