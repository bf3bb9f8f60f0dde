"""The packed tokens of a run: opens its sources, mixes their sequences, and compares them with a checkpoint's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.mixture import Blend
from nxd_memopt.training.data.packed.content import (
    TokenContent,
    compared_sequences,
    content_at,
    split_name,
    wanted_sequences,
    with_same_tokens,
)
from nxd_memopt.training.data.packed.feed import TokenFeed
from nxd_memopt.training.data.packed.files import (
    GrowingTokenFile,
    create_directory,
    describe_rows,
    directory_of,
    require_directory,
    tokens_fingerprint,
)
from nxd_memopt.training.data.packed.log import TokenLog
from nxd_memopt.training.data.packed.writer import TokenJob
from nxd_memopt.training.data.packing import Tokens
from nxd_memopt.training.data.sources.corpora import Corpus, open_corpus
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.data.tokenize.windows import SPLITS
from nxd_memopt.training.resume.plan import ResumePlan
from nxd_memopt.training.runtime.distributed import is_rank_zero


class MixedSequences:
    """Training sequences of all sources, in the order of a ``Blend``.

    Args:
        blend: says which source is next.
        open_source: returns the packed sequences of a source by its number, when it is first read.
    """

    def __init__(self, blend: Blend, open_source: Callable[[int], GrowingTokenFile]) -> None:
        self._blend = blend
        self._open_source = open_source
        self._files: dict[int, GrowingTokenFile] = {}

    @property
    def documents_per_row(self) -> int:
        """The largest number of documents in a row that was read."""
        return max(file.documents_per_row for file in self._files.values())

    def rows(self, positions: range) -> Tokens:
        """Return the rows at ``positions``, ``[len(positions), S]``; wait until they exist."""
        sources = self._blend.sources(positions)
        found: Tokens | None = None
        for source, indices in self._by_source(positions):
            rows = self._file(source).rows(indices)
            if found is None:
                found = np.empty((len(positions), rows.shape[1]), rows.dtype)
            found[sources == source] = rows
        assert found is not None
        return found

    def begun_epochs(self, positions: range) -> list[str]:
        """Return in words which epochs begin at ``positions``, without the first ones."""
        lines = []
        for source, indices in self._by_source(positions):
            file = self._file(source)
            epoch, length = file.epoch(indices.stop - 1)
            if epoch > max(0, file.epoch(indices.start - 1)[0]):
                of_source = f" of {self._blend.names[source]}" if len(self._blend.names) > 1 else ""
                lines.append(f"epoch {epoch + 1} of {length:,} sequences{of_source}")
        return lines

    def _by_source(self, positions: range) -> list[tuple[int, range]]:
        """Return the sources at ``positions``, each with its own sequences there."""
        before = self._blend.counts(positions.start)
        after = self._blend.counts(positions.stop)
        ranges = [range(start, stop) for start, stop in zip(before, after, strict=True)]
        return [(source, indices) for source, indices in enumerate(ranges) if indices]

    def _file(self, source: int) -> GrowingTokenFile:
        if source not in self._files:
            self._files[source] = self._open_source(source)
        return self._files[source]


class RunTokens:
    """Packed tokens of all sources of a run, which grow while it trains. Every rank makes the same calls.

    Args:
        blend: the sources and their shares.
        feeds: tokens of each source.
    """

    def __init__(self, blend: Blend, feeds: Sequence[TokenFeed]) -> None:
        self._blend = blend
        self._feeds = list(feeds)
        fingerprints = [feed.fingerprint for feed in feeds]
        self.fingerprint = fingerprints[0]
        if len(feeds) > 1:
            self.fingerprint = hashlib.sha256(json.dumps([fingerprints, blend.shares]).encode()).hexdigest()

    def interrupt_by(self, interrupted: Callable[[], int | None]) -> None:
        """Stop waiting for tokens when ``interrupted`` returns a signal."""
        for feed in self._feeds:
            feed.interrupted = interrupted

    def wait(self, name: str, sequences: int) -> None:
        """Return when the first ``sequences`` sequences of a split exist, or all of their text (``TokenFeed.wait``)."""
        for feed, count in zip(self._feeds, self._blend.counts(sequences), strict=True):
            if count:
                feed.wait(name, count)

    def wait_for(self, compared: Mapping[str, int]) -> None:
        """Wait for sequences of single sources, by ``split_name``; those that the run does not read are left out."""
        for name, (feed, split) in self._splits().items():
            if name in compared and feed.wants(split):
                feed.wait(split, compared[name])

    def training_sequences(self) -> MixedSequences:
        """Return the sequences of training."""
        return MixedSequences(self._blend, lambda source: self._feeds[source].open("train"))

    def held_out_sequences(self, sequences: int) -> Tokens:
        """Return at most ``sequences`` held-out sequences, of each source its share, ``[n, S]``."""
        parts = []
        for feed, count in zip(self._feeds, self._blend.counts(sequences), strict=True):
            if count:
                tokens = feed.open("held_out")
                parts.append(tokens.rows(range(min(len(tokens), count))))
        return np.concatenate(parts)

    def trains(self) -> bool:
        """Return whether the run reads sequences of training."""
        return any(feed.wants("train") for feed in self._feeds)

    def logs(self) -> dict[str, TokenLog]:
        """Return the log of each split, by ``split_name``."""
        return {name: feed.log(split) for name, (feed, split) in self._splits().items()}

    def content(self, consumed: int) -> TokenContent:
        """Return what a checkpoint records of the tokens after ``consumed`` training sequences."""
        needed: dict[str, int] = {}
        counts = self._blend.counts(consumed)
        for source, feed in enumerate(self._feeds):
            needed[split_name("train", source, len(self._feeds))] = counts[source]
            if feed.wants("held_out"):
                needed[split_name("held_out", source, len(self._feeds))] = feed.wanted("held_out")
        return content_at(self.fingerprint, self.logs(), needed)

    def describe(self, config: TrainConfig, sequences: int) -> list[str]:
        """Return the start report's lines about sources and packed sequences, of which the run reads ``sequences``."""
        names = self._blend.names
        lines = [note for feed in self._feeds for note in feed.notes]
        if len(names) > 1:
            shares = ", ".join(f"{share:.2%} of {name}" for name, share in zip(names, self._blend.shares, strict=True))
            lines.append(f"data: the sequences are {shares}")
        for name, feed, read in zip(names, self._feeds, self._blend.counts(sequences), strict=True):
            source = f"{name}: " if len(names) > 1 else ""
            lines += [source + line for line in describe_rows(config, feed.log("train"), read)]
        return lines

    def close(self) -> None:
        """End the processes in the background."""
        for feed in self._feeds:
            feed.close()

    def _splits(self) -> dict[str, tuple[TokenFeed, str]]:
        """Return source and split by ``split_name``."""
        count = len(self._feeds)
        return {split_name(split, i, count): (feed, split) for i, feed in enumerate(self._feeds) for split in SPLITS}


def open_tokens(plan: ResumePlan, vocabulary: Vocabulary) -> RunTokens:
    """Find the documents on rank 0, and return the packed tokens of the run. Every rank calls."""
    # raise_together is a barrier and raises on every rank if one rank failed, so no rank waits in
    # a collective for a rank that has stopped.
    blend = Blend(plan.config.data.sources)
    feeds: list[TokenFeed] = []
    for name, wanted in zip(blend.names, wanted_sequences(plan, blend.counts), strict=True):
        feed = _open_source(plan.config, name, vocabulary, wanted, foreground_share=1 / len(blend.names))
        equal = [
            other for other, known in zip(blend.names, feeds, strict=False) if known.fingerprint == feed.fingerprint
        ]
        if equal:
            raise ValueError(f"data.mixture: {equal[0]!r} and {name!r} have the same text: leave one of them out")
        feeds.append(feed)
    return RunTokens(blend, feeds)


def _open_source(
    config: TrainConfig, name: str, vocabulary: Vocabulary, wanted: Mapping[str, int], *, foreground_share: float
) -> TokenFeed:
    """Return the packed tokens of one source. Every rank calls."""
    data, seed = config.data.of_source(name), config.trainer.seed
    corpus: Corpus | None = None
    texts = ("", "")
    with raise_together("preparing the data"):
        if is_rank_zero():
            corpus = open_corpus(data, seed)
            fingerprint = tokens_fingerprint(data, corpus.fingerprint, vocabulary, seed)
            create_directory(directory_of(config.trainer.tokens_directory, fingerprint), fingerprint)
            texts = (fingerprint, corpus.fingerprint)
    fingerprint, of_corpus = share_texts(" ".join(texts))[0].split(" ")
    directory = directory_of(config.trainer.tokens_directory, fingerprint)
    with raise_together("reading the prepared data"):
        require_directory(directory, fingerprint)
    job = TokenJob(directory, of_corpus, data, vocabulary, seed, wanted)
    return TokenFeed(job, fingerprint, corpus, foreground_share=foreground_share)


def prepare_data(plan: ResumePlan, tokens: RunTokens) -> ResumePlan:
    """Wait for the tokens of the first evaluation and step; return the plan, compared with the tokens."""
    config = plan.config
    if config.data.eval_sequences:
        tokens.wait("held_out", config.data.eval_sequences)
    steps_done = 0 if plan.stored is None else plan.stored.step
    if config.trainer.max_steps > steps_done:
        tokens.wait("train", config.data.global_batch_size)
    tokens.wait_for(compared_sequences(plan))
    return with_same_tokens(plan, tokens.fingerprint, tokens.logs())
