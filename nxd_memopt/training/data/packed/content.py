"""Compares the packed tokens of a resumed run with the tokens of its checkpoint, wherever text and tokenizer are.

A path, a modification time or a file format says little about a dataset. What a resumed run needs
is that every sequence that its checkpoint counts is the same: a hash of the packed sequences says
that, for the text and the tokenizer together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nxd_memopt.checkpoint.sharded.stored_run import StoredRun
from nxd_memopt.options import WARM_START
from nxd_memopt.parallel_layers.coordination import from_rank_zero, raise_together
from nxd_memopt.training.data.packed.sequences import WindowFiles
from nxd_memopt.training.resume.plan import ResumePlan
from nxd_memopt.training.runtime.distributed import is_rank_zero

CONTENT_VERSION = 4

TokenContent = Mapping[str, Any]
"""What a checkpoint records of the tokens: ``version``, ``fingerprint`` of text, tokenizer and
settings, and ``splits``: for each split the number of ``sequences`` up to the end of the window that
training has reached, their ``sha256``, and ``ended``: whether the text has no more."""


def split_name(split: str, source: int, num_sources: int) -> str:
    """Return the name of a source's split in the records; a single source has no number."""
    return split if num_sources == 1 else f"{split}.{source}"


def wanted_sequences(plan: ResumePlan, counts: Callable[[int], list[int]]) -> list[dict[str, int]]:
    """Return for each source, and then for ``data.validation_dataset``, the sequences of each split that the run reads.

    At least as many as its checkpoint has read, so that those can be compared.

    Args:
        plan: how the run starts.
        counts: how many of the first n sequences are of each source.
    """
    data = plan.config.data
    trained = counts(plan.position(plan.config.trainer.max_steps))
    compared = compared_sequences(plan)

    def evaluated(name: str, number: int) -> int:
        # Without evaluation a run reads no held-out sequences, whatever its checkpoint has read.
        return max(number, compared.get(name, 0)) if number else 0

    wanted = [
        {"train": max(number, compared.get(split_name("train", source, len(trained)), 0)), "held_out": 0}
        for source, number in enumerate(trained)
    ]
    if data.validation_dataset is not None:
        return [*wanted, {"train": 0, "held_out": evaluated("held_out", data.eval_sequences)}]
    for source, number in enumerate(counts(data.eval_sequences)):
        wanted[source]["held_out"] = evaluated(split_name("held_out", source, len(trained)), number)
    return wanted


def compared_sequences(plan: ResumePlan) -> dict[str, int]:
    """Return the sequences of each split that ``with_same_tokens`` compares; empty for a new run."""
    if plan.stored is None:
        return {}
    return {name: split["sequences"] for name, split in plan.stored.shared["tokens"]["splits"].items()}


def content_at(fingerprint: str, windows: Mapping[str, WindowFiles], needed: Mapping[str, int]) -> TokenContent:
    """Return the content up to the end of the windows with the first ``needed`` sequences of each split."""
    # The hash is known at the ends of windows alone, so the count is rounded up to one. ``rows > facts.rows`` says that
    # the run needs more rows than the text has, and has begun its second epoch: the end of the text then counts too.
    splits = {}
    for name, rows in needed.items():
        facts = windows[name].facts_at(rows)
        splits[name] = {"sequences": facts.rows, "sha256": facts.sha256, "ended": facts.ended and rows > facts.rows}
    return {"version": CONTENT_VERSION, "fingerprint": fingerprint, "splits": splits}


def with_same_tokens(plan: ResumePlan, fingerprint: str, windows: Mapping[str, WindowFiles]) -> ResumePlan:
    """Return ``plan`` after comparing the tokens with the checkpoint's. Every rank calls.

    Args:
        plan: how the run starts.
        fingerprint: fingerprint of this run's text, tokenizer and settings.
        windows: windows of each split, with at least ``compared_sequences``, or with all of the text.

    Raises:
        ValueError: on every rank, if the tokens differ, unless ``trainer.allow_changes`` names
            ``data.dataset``: the run then reads the other tokens from their first sequence on.
    """
    if plan.stored is None:
        return plan
    differing: list[str] = []
    with raise_together("comparing the tokens with the checkpoint's"):
        if is_rank_zero():
            differing = _differing_splits(plan.stored, windows)
    differing = from_rank_zero(differing)
    if not differing:
        return dataclasses.replace(plan, notes=[*plan.notes, *_moved_notes(plan.stored, fingerprint)])
    is_allowed = "data.dataset" in plan.config.trainer.allow_changes
    if "train" not in differing:
        if not is_allowed:
            raise ValueError(
                f"the held-out text has changed since {plan.stored.directory} was written: restore it, or "
                "evaluate the other text with --trainer.allow-changes data.dataset"
            )
        note = "data.dataset: the held-out text differs from the checkpoint's; the training text goes on where it was"
        return dataclasses.replace(plan, notes=[*plan.notes, note])
    if not is_allowed:
        raise ValueError(
            f"the dataset or the tokenizer has changed since {plan.stored.directory} was written: the packed "
            f"tokens differ: restore it, or {WARM_START}, or continue at the first sequence of the other "
            "tokens with --trainer.allow-changes data.dataset"
        )
    # position(step) = offset + step * global_batch_size: this offset makes it 0 at the step of the checkpoint, whatever
    # the size of the batch was before.
    offset = -plan.stored.step * plan.config.data.global_batch_size
    note = "data.dataset: the tokens differ from the checkpoint's; they are read from their first sequence on"
    return dataclasses.replace(plan, sequence_offset=offset, notes=[*plan.notes, note])


def _moved_notes(stored: StoredRun, fingerprint: str) -> list[str]:
    """Return a line if text or tokenizer are not those of the checkpoint, and lead to its tokens."""
    tokens = stored.shared["tokens"]
    if tokens["fingerprint"] == fingerprint:
        return []
    # Text after the packed sequences may differ: no run has read it yet.
    counts = ", ".join(f"{split['sequences']} {name}" for name, split in tokens["splits"].items())
    return [f"text or tokenizer have moved or changed: the sequences packed so far are equal ({counts})"]


def _differing_splits(stored: StoredRun, windows: Mapping[str, WindowFiles]) -> list[str]:
    """Return which of ``train`` and ``held_out`` lack the sequences that the checkpoint counts, in the same order."""
    differing = set()
    for name, split in stored.shared["tokens"]["splits"].items():
        if name not in windows:  # another number of sources is another text
            differing.add("train")
        elif not _is_same(split, windows[name]):
            differing.add(name.partition(".")[0])
    return sorted(differing)


def _is_same(split: Mapping[str, Any], windows: WindowFiles) -> bool:
    """Return whether a split begins with the sequences that a checkpoint has counted."""
    # Nothing was read yet, or, without evaluation, a run has no held-out tokens.
    if not split["sequences"] or not windows.count:
        return True
    found = windows.facts_at(split["sequences"])
    if (found.rows, found.sha256) != (split["sequences"], split["sha256"]):
        return False
    # A text that ended is repeated from its end on: it must end there again.
    return not split["ended"] or found.ended
