"""Turns ``trainer.max_epochs`` into a number of steps: from the length of text that is tokenized already."""

from __future__ import annotations

import math
from dataclasses import replace

from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.packed.fingerprint import directory_of, tokens_fingerprint
from nxd_memopt.training.data.packed.sequences import WindowFiles
from nxd_memopt.training.data.sources.corpora import open_corpus
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.resume.plan import ResumePlan
from nxd_memopt.training.runtime.distributed import is_rank_zero


def with_steps_of_epochs(config: TrainConfig, vocabulary: Vocabulary) -> TrainConfig:
    """Return ``config`` with ``max_steps`` instead of ``max_epochs``. Every rank calls.

    The last step may read the first sequences of one more epoch: every sequence is trained
    ``max_epochs`` times at least.

    Raises:
        ValueError: on every rank, if the text is not tokenized to its end.
    """
    epochs = config.trainer.max_epochs
    if epochs is None:
        return config
    sequences = 0
    with raise_together("counting the steps of trainer.max_epochs"):
        if is_rank_zero():
            sequences = _prepared_sequences(config, vocabulary)
    sequences = int(share_texts(str(sequences))[0])
    # Rounded up: the last step may begin one more epoch, and no sequence is trained less often than was asked for.
    steps = math.ceil(epochs * sequences / config.data.global_batch_size)
    return replace(config, trainer=replace(config.trainer, max_steps=steps, max_epochs=None))


def require_complete_epochs(plan: ResumePlan, epochs: float | None) -> None:
    """Raise ``ValueError`` if the steps of ``trainer.max_epochs`` do not end where the epochs do.

    They count sequences from the first one in steps of one size.
    """
    if epochs is None or plan.sequence_offset == 0:
        return
    steps, size = plan.config.trainer.max_steps, plan.config.data.global_batch_size
    raise ValueError(
        f"trainer.max_epochs {epochs:g} is {steps} steps of data.global_batch_size {size}, and the steps before this "
        f"resume had another size or other text: set trainer.max_steps {steps - plan.sequence_offset // size} instead"
    )


def _prepared_sequences(config: TrainConfig, vocabulary: Vocabulary) -> int:
    """Return the number of training sequences of all text."""
    data, seed = config.data.of_source(config.data.source), config.trainer.seed
    fingerprint = tokens_fingerprint(data, open_corpus(data, seed).fingerprint, vocabulary, seed)
    directory = directory_of(config.trainer.tokens_directory, fingerprint)
    windows = WindowFiles(directory, "train", fingerprint)
    windows.count = windows.written()
    if not windows.last.ended:
        found = "no sequence of it exists yet"
        if windows.count:
            found = f"{windows.last.rows:,} sequences of it are in {directory}"
        raise ValueError(
            f"trainer.max_epochs {config.trainer.max_epochs:g} needs the number of sequences of {data.dataset!r}, "
            f"which is known when all of its text is tokenized, and {found}: run nxd-memopt prepare with the same "
            "options first, or set trainer.max_steps instead"
        )
    return windows.last.rows
