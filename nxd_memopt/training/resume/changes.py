"""Compares the options of a resumed run with those in its checkpoint: what is reported, allowed or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from nxd_memopt.checkpoint.sharded.fingerprint import flat_config
from nxd_memopt.options import NEW_RUN, WARM_START, Declaration, Resume, require_one_of
from nxd_memopt.training.config.train_config import SECTIONS, TrainConfig
from nxd_memopt.training.resume.rules import (
    ARCHITECTURE_SHAPE,
    ARCHITECTURE_WHEN_ASKED,
    NOT_ARCHITECTURE,
    RULES,
    options_when_asked,
)

ARCHITECTURE = "architecture."
OVERRIDES = "model.config_overrides."
MICRO_BATCH = "data.micro_batch_size"
DATASET = "data.dataset"
EXPERT_COUNTS = ("num_local_experts", "num_experts")
# They decide, next to a rank's place in its groups, for which tokens and layers it draws random numbers.
DIVISIONS = (
    MICRO_BATCH,
    "parallel.virtual_pipeline_model_parallel_size",
    "parallel.pipeline_model_parallel_layout",
    "parallel.sequence_parallel_enabled",
)
RANDOM = (
    "lora.lora_dropout",
    "moe.moe_input_jitter_eps",
    *(f"{ARCHITECTURE}{name}" for name in (*ARCHITECTURE_WHEN_ASKED, "router_jitter_noise")),
)


@dataclass
class Changes:
    """Differences between a checkpoint and the run that resumes from it.

    Args:
        notes: one line for each difference that is allowed.
        refusals: one text with values and remedy for each difference that is not.
    """

    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def recorded_options(config: TrainConfig, hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return what a checkpoint records of the configuration, as nested mappings.

    ``optimizer.decay_steps`` is resolved, and ``architecture`` has the model's options, of which
    ``config`` may name only some.
    """
    options: dict[str, Any] = dataclasses.asdict(config)
    del options["auto_memory"]  # the techniques that were chosen are recorded
    for name, rule in RULES.items():
        section, _, option = name.partition(".")
        if rule.resume is Resume.NOT_COMPARED:
            options[section].pop(option, None)
    options["optimizer"]["decay_steps"] = config.decay_steps
    # The sources of a mixture may move, like a single one, but not change their shares.
    options["data"]["dataset"] = " + ".join(config.data.sources)
    options["data"]["mixture"] = list(config.data.mixture.values())
    options["data"]["columns"] = sorted(f"{field}={column}" for field, column in config.data.columns.items())
    options["architecture"] = architecture(hf_config)
    return options


def architecture(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return the options of a model's configuration on which a training step may depend."""
    return {
        name: value
        for name, value in hf_config.to_dict().items()
        if name not in NOT_ARCHITECTURE and not name.startswith("_")
    }


def require_known(allowed: Collection[str]) -> None:
    """Raise ``ValueError`` for an entry of ``trainer.allow_changes`` that cannot be allowed."""
    for name in allowed:
        require_one_of("trainer.allow_changes entry", name, tuple(options_when_asked()))


def compare_options(stored: Mapping[str, Any], current: Mapping[str, Any], allowed: Collection[str]) -> Changes:
    """Compare the options of a checkpoint with those of the run that resumes from it.

    Args:
        stored: ``recorded_options`` of the checkpoint's run by dotted name; an earlier version may
            lack some.
        current: ``recorded_options`` of this run.
        allowed: ``trainer.allow_changes``.
    """
    after = flat_config(current)
    changes = Changes()
    for name, rule in RULES.items():
        if rule.resume in (Resume.NOT_COMPARED, Resume.SPECIAL):
            continue
        # An option that was added since does by default what runs did before.
        old = stored[name] if name in stored else _default(name)
        # Capacities and balancing losses are those of a micro-batch.
        if name == MICRO_BATCH and any(after.get(f"{ARCHITECTURE}{each}") for each in EXPERT_COUNTS):
            rule = Declaration(Resume.WHEN_ASKED)
        if old != after[name]:
            judge(changes, name, rule, (old, after[name]), allowed)
    # An option that was removed since might have changed the results; unset ones have not.
    for name, value in stored.items():
        if value and name not in after and not name.startswith((ARCHITECTURE, OVERRIDES)):
            changes.notes.append(f"{name} was {value!r}: this version has no such option")
    for name, values in _architecture_differences(stored, after).items():
        option = name.removeprefix(OVERRIDES)
        change = Resume.WHEN_ASKED if option in ARCHITECTURE_WHEN_ASKED else Resume.REFUSED
        rule = Declaration(change, NEW_RUN if option in ARCHITECTURE_SHAPE else WARM_START)
        judge(changes, name, rule, values, allowed)
    return changes


def changed_draws(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return a line if ranks with restored random states draw their numbers for other tokens or layers, else none.

    Args:
        stored: as in ``compare_options``.
        current: as in ``compare_options``.
    """
    after = flat_config(current)
    if not any(after.get(name) for name in RANDOM):
        return []
    pairs = {name: (stored.get(name), after[name]) for name in DIVISIONS}
    # One stage on each rank has two spellings.
    changed = [name for name, (old, new) in pairs.items() if old != new and not {str(old), str(new)} <= {"None", "1"}]
    if not changed:
        return []
    return [f"changed {', '.join(changed)}: dropout and jitter draw other numbers than an uninterrupted run"]


def _default(name: str) -> Any:
    """Return the default of an option by its dotted name."""
    section, _, option = name.partition(".")
    return getattr(SECTIONS[section](), option)


def judge(changes: Changes, name: str, rule: Declaration, values: tuple[Any, Any], allowed: Collection[str]) -> None:
    """Add the difference of one option to the notes or to the refusals of ``changes``.

    Args:
        changes: differences found so far.
        name: dotted name of the option.
        rule: what happens if the option changes.
        values: value of the checkpoint and value of this run, which differ.
        allowed: ``trainer.allow_changes``.
    """
    old, new = values
    if rule.resume is Resume.REPORTED:
        changes.notes.append(f"{name}: {old} -> {new}")
    elif rule.resume is Resume.SAME_CONFIG:
        changes.notes.append(f"{name}: {old} -> {new}, with an equal configuration; the weights stay as they are")
    elif rule.resume is Resume.SAME_CONTENT:
        # Whether the allowed tokens are others is said where they are compared.
        content = "" if DATASET in allowed else ", with equal content"
        changes.notes.append(f"{name}: {old} -> {new}{content}")
    elif rule.resume is Resume.REFUSED:
        changes.refusals.append(f"{name} was {old!r} and is {new!r}: restore it, or {rule.remedy}")
    elif name in allowed:
        changes.notes.append(f"{name}: {old} -> {new}, from this step on")
    else:
        changes.refusals.append(
            f"{name} was {old!r} and is {new!r}: restore it, or allow the change with --trainer.allow-changes {name}"
        )


def _architecture_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the model's options that differ, under the names that change them, with both values."""
    differences: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys([*before, *after]):
        option = name.replace(ARCHITECTURE, OVERRIDES, 1)
        if not name.startswith(ARCHITECTURE):
            continue
        # An option that only one version of transformers knows is no difference, unless one of
        # the runs sets it.
        one_sided = name not in before or name not in after
        if one_sided and option not in before and option not in after:
            continue
        old, new = before.get(name), after.get(name)
        if old != new:
            differences[option] = (old, new)
    return differences
