"""The packed tokens of a run: opens its sources, and compares their sequences with a checkpoint's."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from nxd_memopt.checkpoint.directories import require_visible
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.training.config.data import DataConfig
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
from nxd_memopt.training.data.packed.fingerprint import directory_of, fingerprint_of
from nxd_memopt.training.data.packed.sequences import Facts, MixedSequences, WindowFiles
from nxd_memopt.training.data.packed.writer import TokenJob
from nxd_memopt.training.data.packing import Tokens
from nxd_memopt.training.data.sources.corpora import Corpus, open_corpus
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.data.tokenize.windows import SPLITS, described
from nxd_memopt.training.resume.plan import ResumePlan
from nxd_memopt.training.runtime.distributed import is_rank_zero


class RunTokens:
    """Packed tokens of all sources of a run, which grow while it trains. Every rank makes the same calls.

    Args:
        blend: the sources and their shares.
        feeds: tokens of each source.
        validation: tokens of ``data.validation_dataset``, which then has all held-out sequences.
    """

    def __init__(self, blend: Blend, feeds: Sequence[TokenFeed], validation: TokenFeed | None = None) -> None:
        self._blend = blend
        self._feeds = list(feeds)
        self._validation = validation
        self._all = list(feeds) if validation is None else [*feeds, validation]
        fingerprints = [feed.fingerprint for feed in self._all]
        self.fingerprint = fingerprints[0]
        if len(fingerprints) > 1:
            self.fingerprint = hashlib.sha256(json.dumps([fingerprints, blend.shares]).encode()).hexdigest()

    def interrupt_by(self, interrupted: Callable[[], int | None]) -> None:
        """Stop waiting for tokens when ``interrupted`` returns a signal."""
        for feed in self._all:
            feed.interrupted = interrupted

    def wait(self, name: str, sequences: int) -> None:
        """Return when the first ``sequences`` sequences of a split exist, or all of their text (``TokenFeed.wait``)."""
        for feed, count in self._shares(name, sequences):
            feed.wait(name, count)

    def wait_for(self, compared: Mapping[str, int]) -> None:
        """Wait for sequences of single sources, by ``split_name``; those that the run does not read are left out."""
        for name, (feed, split) in self._splits().items():
            if name in compared and feed.wanted(split):
                feed.wait(split, compared[name])

    def training_sequences(self) -> MixedSequences:
        """Return the sequences of training."""
        return MixedSequences(self._blend, lambda source: self._feeds[source].open("train"))

    def held_out_sequences(self, sequences: int) -> Tokens:
        """Return at most ``sequences`` held-out sequences, of each source its share, ``[n, S]``."""
        parts = []
        for feed, count in self._shares("held_out", sequences):
            tokens = feed.open("held_out")
            parts.append(tokens.rows(range(min(len(tokens), count))))
        return np.concatenate(parts)

    def epoch(self, consumed: int) -> float | None:
        """Return the passes over the text that ``consumed`` training sequences are.

        None if the length of the text is not known (yet), and for several sources, which have epochs of their own.
        """
        if len(self._feeds) > 1:
            return None
        known = self._feeds[0].windows["train"].last
        return consumed / known.rows if known.ended and known.rows else None

    def trains(self) -> bool:
        """Return whether the run reads sequences of training."""
        return any(feed.wanted("train") for feed in self._feeds)

    def windows(self) -> dict[str, WindowFiles]:
        """Return the windows of each split, by ``split_name``."""
        return {name: feed.windows[split] for name, (feed, split) in self._splits().items()}

    def content(self, consumed: int) -> TokenContent:
        """Return what a checkpoint records of the tokens after ``consumed`` training sequences."""
        counts = self._blend.counts(consumed)
        needed = {split_name("train", source, len(counts)): count for source, count in enumerate(counts)}
        for name, (feed, split) in self._splits().items():
            if split == "held_out" and feed.wanted(split):
                needed[name] = feed.wanted(split)
        return content_at(self.fingerprint, self.windows(), needed)

    def describe(self, plan: ResumePlan) -> tuple[list[str], list[str]]:
        """Return the start report's lines about the data and its size, and others about its order and packing."""
        config, steps = plan.config.data, plan.config.trainer.max_steps
        sequences = plan.position(steps)
        names = self._blend.names
        sizes: list[str] = []
        others = [note for feed in self._all for note in feed.notes]
        for name, share, feed, read in zip(
            names, self._blend.shares, self._feeds, self._blend.counts(sequences), strict=True
        ):
            known = feed.windows["train"].last
            of_mixture = f", {share:.2%} of the sequences" if len(names) > 1 else ""
            size = _describe_size(config, known, f"{steps:,} steps read {read:,}", read)
            sizes.append(f"data: {name!r} ({config.format}){of_mixture}: {size}")
            source = f"{name}: " if len(names) > 1 else ""
            others += [source + line for line in _describe_rows(config, known)]
        return sizes, others + self._describe_held_out()

    def _describe_held_out(self) -> list[str]:
        """Return the start report's line about held-out conversations, if not all of them are complete."""
        held_out = [feed.windows[split].last for feed, split in self._splits().values() if split == "held_out"]
        outcomes = sum((Counter(known.outcomes) for known in held_out), Counter[str]())
        if not outcomes:
            return []
        documents = sum(known.documents for known in held_out)
        return [f"held-out conversations: {documents:,} read so far, of which {described(outcomes)}"]

    def close(self) -> None:
        """End the processes in the background."""
        for feed in self._all:
            feed.close()

    def _splits(self) -> dict[str, tuple[TokenFeed, str]]:
        """Return source and split by ``split_name``."""
        count = len(self._feeds)
        found = {split_name(split, i, count): (feed, split) for i, feed in enumerate(self._feeds) for split in SPLITS}
        if self._validation is None:
            return found
        trained = {name: (feed, split) for name, (feed, split) in found.items() if split == "train"}
        return {**trained, "held_out": (self._validation, "held_out")}

    def _shares(self, split: str, sequences: int) -> list[tuple[TokenFeed, int]]:
        """Return who has the first ``sequences`` sequences of a split, each with its number of them."""
        if split == "held_out" and self._validation is not None:
            return [(self._validation, sequences)]
        shares = zip(self._feeds, self._blend.counts(sequences), strict=True)
        return [(feed, count) for feed, count in shares if count]


def _describe_size(config: DataConfig, known: Facts, reads: str, read: int) -> str:
    """Return how much training text is known, and what the run reads of it.

    Args:
        config: options of the data.
        known: facts of the sequences that exist.
        reads: the steps and the sequences that they read, in words.
        read: sequences that the run reads.
    """
    if not known.rows:
        return "no sequence is tokenized, and none is read"
    size = f"{known.documents:,} documents, {known.rows:,} sequences of {config.seq_length:,} tokens"
    if known.ended:
        return f"{size}; {reads} sequences: {read / known.rows:.1f} epochs"
    goes_on = ": a process tokenizes while the run trains" if read > known.rows else ""
    return f"{size} so far; {reads} sequences{goes_on}"


def _describe_rows(config: DataConfig, known: Facts) -> list[str]:
    """Return the start report's lines about the rows of training that exist."""
    if not known.rows:
        return []
    share = known.not_trained / (known.rows * config.seq_length)
    documents = f"at most {known.most_documents} documents in a row"
    lines = [f"packing {config.packing}: {documents}, {share:.2%} of the tokens are padding or not trained"]
    if config.has_conversations:
        lines.append(f"conversations: {known.documents:,} read so far, of which {described(known.outcomes)}")
    return lines


def open_tokens(plan: ResumePlan, vocabulary: Vocabulary) -> RunTokens:
    """Find the documents on rank 0, and return the packed tokens of the run. Every rank calls."""
    # The sources share the seconds in which rank 0 tokenizes in the foreground, so that a mixture starts as early as
    # one source.
    data = plan.config.data
    blend = Blend(data.sources)
    wanted = wanted_sequences(plan, blend.counts)
    feeds: dict[str, TokenFeed] = {}
    for name, of_source in zip(blend.names, wanted, strict=False):  # the validation text may follow
        feed = _open_source(plan.config, name, vocabulary, of_source, foreground_share=1 / len(wanted))
        for other, known in feeds.items():
            # Two writers of one directory.
            if known.corpus_fingerprint == feed.corpus_fingerprint:
                raise ValueError(f"data.mixture: {other!r} and {name!r} have the same text: leave one of them out")
        feeds[name] = feed
    if data.validation_dataset is None:
        return RunTokens(blend, list(feeds.values()))
    name = data.validation_dataset
    held_out = _open_source(plan.config, name, vocabulary, wanted[-1], foreground_share=1 / len(wanted))
    for other, known in feeds.items():
        # Held-out text that is trained on would say nothing about the model.
        if known.corpus_fingerprint == held_out.corpus_fingerprint:
            raise ValueError(f"data.validation_dataset {name!r} has the documents of {other!r}: name another one")
    return RunTokens(blend, list(feeds.values()), held_out)


def _open_source(
    config: TrainConfig, name: str, vocabulary: Vocabulary, wanted: Mapping[str, int], *, foreground_share: float
) -> TokenFeed:
    """Return the packed tokens of one source, or of the validation text. Every rank calls."""
    data, seed, parent = config.data.of_source(name), config.trainer.seed, config.trainer.tokens_directory
    corpus: Corpus | None = None
    texts = ("", "")
    # raise_together is a barrier and raises on every rank if one rank failed, so no rank waits in
    # a collective for a rank that has stopped.
    with raise_together("preparing the data"):
        if is_rank_zero():
            corpus = open_corpus(data, seed)
            texts = (fingerprint_of(config, name, corpus, vocabulary), corpus.fingerprint)
            directory_of(parent, texts[0]).mkdir(parents=True, exist_ok=True)
    fingerprint, of_corpus = share_texts(" ".join(texts))[0].split(" ")
    directory = directory_of(parent, fingerprint)
    with raise_together("reading the prepared data"):
        require_visible(directory)
    is_validation = name == config.data.validation_dataset
    job = TokenJob(directory, fingerprint, of_corpus, data, vocabulary, seed, wanted, is_validation)
    return TokenFeed(job, corpus, foreground_share=foreground_share)


def prepare_data(plan: ResumePlan, tokens: RunTokens) -> ResumePlan:
    """Wait for the tokens of the first evaluation and step; return the plan, compared with the tokens."""
    config = plan.config
    # Held-out rows first, as they are written first. A resumed run also waits for all rows that its checkpoint has
    # read: they are compared before any of them is trained on.
    if config.data.eval_sequences:
        tokens.wait("held_out", config.data.eval_sequences)
    steps_done = 0 if plan.stored is None else plan.stored.step
    if config.trainer.max_steps > steps_done:
        tokens.wait("train", config.data.global_batch_size)
    tokens.wait_for(compared_sequences(plan))
    return with_same_tokens(plan, tokens.fingerprint, tokens.windows())
