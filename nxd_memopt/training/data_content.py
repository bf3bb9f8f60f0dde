"""Compares the packed tokens of a resumed run with those of its checkpoint, wherever text and tokenizer are.

A path, a modification time or a file format says little about a dataset. What a resumed run needs
is that every sequence that its checkpoint counts is the same: a hash of the packed sequences says
that, for the text and the tokenizer together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_memopt.checkpoint.stored_run import StoredRun
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.training.config import DataConfig
from nxd_memopt.training.distributed import is_rank_zero
from nxd_memopt.training.resume import ResumePlan
from nxd_memopt.training.resume_rules import WARM_START
from nxd_memopt.training.tokens import SPLITS

CHUNK_BYTES = 2**22

TokenContent = Mapping[str, Any]
"""What a checkpoint records of the tokens: ``fingerprint`` of text, tokenizer and settings, and
``splits``: for each split the number of its ``sequences``, their ``sha256``, and ``ended``: whether
the text has no more."""


def wanted_sequences(plan: ResumePlan) -> tuple[int, DataConfig]:
    """Return the training sequences to pack, and the data options to pack them with.

    At least as many as the checkpoint's run packed, so that all of those can be compared.
    """
    data = plan.config.data
    train = plan.position(plan.config.trainer.max_steps)
    if plan.stored is None:
        return train, data
    counts = {name: split["sequences"] for name, split in stored_tokens(plan.stored)["splits"].items()}
    if data.eval_sequences:
        held_out = max(data.eval_sequences, counts.get("held_out", 0))
        data = dataclasses.replace(data, eval_sequences=held_out)
    return max(train, counts.get("train", 0)), data


def stored_tokens(stored: StoredRun) -> TokenContent:
    """Return the content of the tokens that a checkpoint records."""
    return stored.shared["tokens"]


def describe_tokens(
    paths: Mapping[str, Path], seq_length: int, fingerprint: str, wanted: Mapping[str, int]
) -> TokenContent:
    """Return the content of token files, which rank 0 reads. Every rank calls.

    Args:
        paths: the file of each split; a split without a file is left out.
        seq_length: S, tokens of 4 bytes per sequence.
        fingerprint: hash of text, tokenizer and settings.
        wanted: sequences that were to be packed for each split.
    """
    # SHA-256 reads 1 GB/s or more: 10 s for 2.5 billion tokens, once per start.
    splits: dict[str, dict[str, Any]] = {}
    with raise_together("reading the prepared data"):
        if is_rank_zero():
            for name, path in paths.items():
                count = path.stat().st_size // (4 * seq_length)
                digest = file_digest(path, count * seq_length * 4)
                splits[name] = {"sequences": count, "sha256": digest, "ended": count < wanted[name]}
    return json.loads(share_texts(json.dumps({"fingerprint": fingerprint, "splits": splits}))[0])


def file_digest(path: Path, size: int) -> str:
    """Return the SHA-256 of the first ``size`` bytes of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0:
            chunk = file.read(min(size, CHUNK_BYTES))
            if not chunk:
                break
            digest.update(chunk)
            size -= len(chunk)
    return digest.hexdigest()


def with_same_tokens(plan: ResumePlan, content: TokenContent, paths: Mapping[str, Path]) -> ResumePlan:
    """Return ``plan`` after comparing the tokens with the checkpoint's. Every rank calls.

    Args:
        plan: how the run starts.
        content: ``describe_tokens`` of this run.
        paths: the token file of each split.

    Raises:
        ValueError: on every rank, if the tokens differ, unless ``trainer.allow_changes`` names
            ``data.dataset``: the run then reads the other tokens from their first sequence on.
    """
    if plan.stored is None:
        return plan
    with raise_together("comparing the tokens with the checkpoint's"):
        differs = False
        if is_rank_zero():
            differs = not _is_same(plan.stored, content, paths, plan.config.data.seq_length)
    if share_texts(str(differs))[0] != str(True):
        return dataclasses.replace(plan, notes=[*plan.notes, *_moved_notes(plan.stored, content)])
    if "data.dataset" not in plan.config.trainer.allow_changes:
        raise ValueError(
            f"the dataset or the tokenizer has changed since {plan.stored.directory} was written: the packed "
            f"tokens differ: restore it, or {WARM_START}, or continue at the first sequence of the other "
            "tokens with --trainer.allow-changes data.dataset"
        )
    offset = -plan.stored.step * plan.config.data.global_batch_size
    note = "data.dataset: the tokens differ from the checkpoint's; they are read from their first sequence on"
    return dataclasses.replace(plan, sequence_offset=offset, notes=[*plan.notes, note])


def _moved_notes(stored: StoredRun, content: TokenContent) -> list[str]:
    """Return a line if text or tokenizer are not those of the checkpoint, and lead to its tokens."""
    tokens = stored_tokens(stored)
    if tokens["fingerprint"] == content["fingerprint"]:
        return []
    # Text after the packed sequences may differ: no run has read it yet.
    counts = ", ".join(f"{split['sequences']} {name}" for name, split in tokens["splits"].items())
    return [f"text or tokenizer have moved or changed: the sequences packed so far are equal ({counts})"]


def _is_same(stored: StoredRun, content: TokenContent, paths: Mapping[str, Path], seq_length: int) -> bool:
    """Return whether the files have the sequences that the checkpoint counts, in the same order."""
    for name in SPLITS:
        old, new = stored_tokens(stored)["splits"].get(name), content["splits"].get(name)
        # Without evaluation a run has no held-out tokens.
        if old is None or new is None:
            continue
        # A file that ended with its text is repeated from its end on: it must end there again.
        count = old["sequences"]
        has_other_end = old["ended"] and new["sequences"] != count
        if new["sequences"] < count or has_other_end:
            return False
        digest = new["sha256"]
        if new["sequences"] > count:
            digest = file_digest(paths[name], count * seq_length * 4)
        if digest != old["sha256"]:
            return False
    return True
