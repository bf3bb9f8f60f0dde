"""Ranks that wait for tokens: they read the same windows, and stop together at errors, signals and a lagging host."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nxd_memopt.parallel_layers import coordination
from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.packed import feed as token_feed
from nxd_memopt.training.data.packed.feed import TokenFeed, WaitStoppedError
from nxd_memopt.training.data.packed.writer import TokenJob, TokenProcess
from nxd_memopt.training.data.sources.corpora import open_corpus
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from tests.training.packed_tokens import corpus_of, documents, vocabulary, windows_of
from tests.training.runs import LINES, write_jsonl

CONFIG = DataConfig(seq_length=16, eval_sequences=4)


class SlowVocabulary(Vocabulary):
    """A tokenizer that takes 0.4 s a call."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        time.sleep(0.4)
        return super().encode(texts)


class Ranks:
    """Two ranks in threads of this process, each with its feed; they exchange texts as ranks do."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        directory.mkdir()
        words = SlowVocabulary(vocabulary().tokenizer, 257, 256)
        job = TokenJob(directory, "f", "test", CONFIG, words, 0, {"train": 10, "held_out": 4})
        self.feeds = TokenFeed(job, corpus_of(documents(LINES))), TokenFeed(job, None)
        self._rank = threading.local()
        self._texts = ["", ""]
        self._barrier = threading.Barrier(2, timeout=60)
        monkeypatch.setattr(coordination, "share_texts", self._share)
        monkeypatch.setattr(token_feed, "share_texts", self._share)
        monkeypatch.setattr(token_feed, "is_rank_zero", lambda: self._rank.number == 0)

    def _share(self, text: str) -> list[str]:
        self._texts[self._rank.number] = text
        self._barrier.wait()
        texts = list(self._texts)
        self._barrier.wait()
        return texts

    def each(self, action: Callable[[TokenFeed], None]) -> list[Any]:
        """Call ``action`` on both ranks; return the error of each, or None."""
        errors: list[Any] = [None, None]

        def act(number: int) -> None:
            self._rank.number = number
            try:
                action(self.feeds[number])
            except Exception as error:
                errors[number] = error

        threads = [threading.Thread(target=act, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(tmp_path / "tokens", monkeypatch)


def test_ranks_read_the_same_windows_of_a_slow_tokenizer(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(token_feed, "REPORT_S", 0.3)
    # A window takes longer than a file may take to appear on the other host.
    monkeypatch.setattr(token_feed, "VISIBLE_S", 0.3)
    assert ranks.each(lambda feed: feed.wait("train", 10)) == [None, None]
    writer, reader = (feed.windows["train"] for feed in ranks.feeds)
    assert reader.last == writer.last and reader.last.rows >= 10
    assert "waiting for tokens: tokenizing train text: 0 of 10 sequences" in capsys.readouterr().err


def test_an_error_of_rank_zero_ends_the_wait(ranks: Ranks) -> None:
    ranks.feeds[0]._corpus = corpus_of(documents([""] * 40))
    errors = ranks.each(lambda feed: feed.wait("train", 10))
    assert "has any text" in str(errors[0])
    assert "preparing the data failed on rank 0: a split of dataset" in str(errors[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_of_any_rank_stops_all_of_them(ranks: Ranks, rank: int) -> None:
    ranks.feeds[rank].interrupted = lambda: 15
    errors = ranks.each(lambda feed: feed.wait("train", 10))
    assert [(type(error), error.number) for error in errors] == [(WaitStoppedError, 15)] * 2


def test_a_file_system_that_lags_behind_is_waited_for(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer rows a rank would begin its second epoch."""
    asked: list[int] = []
    reader = ranks.feeds[1].windows["train"]
    path = reader.path

    def hidden(number: int) -> Path:
        asked.append(number)
        return path(number) if len(asked) > 3 else Path("/absent")

    monkeypatch.setattr(reader, "path", hidden)
    assert ranks.each(lambda feed: feed.wait("train", 10)) == [None, None]
    assert len(asked) > 3 and reader.last == ranks.feeds[0].windows["train"].last
    # One that shows nothing is an error of every rank. No name is asked for before its file exists.
    monkeypatch.setattr(token_feed, "VISIBLE_S", 0.2)
    monkeypatch.setattr(ranks.feeds[1].windows["held_out"], "path", lambda number: Path("/absent"))
    errors = ranks.each(lambda feed: feed.wait("held_out", 4))
    assert all("held_out.000000.safetensors, written by rank 0, is not visible" in str(error) for error in errors)


@pytest.mark.slow
def test_the_process_opens_no_device_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend that this machine lacks: also what unpickling the job imports must not select it."""
    dataset = write_jsonl(tmp_path / "lines.jsonl", LINES)
    config = DataConfig(dataset=dataset, seq_length=16, eval_sequences=4)
    directory = tmp_path / "tokens"
    directory.mkdir()
    wanted = {"train": 10, "held_out": 4}
    job = TokenJob(directory, "f", open_corpus(config, 0).fingerprint, config, vocabulary(), 0, wanted)
    monkeypatch.setenv("NXD_MEMOPT_BACKEND", "neuron")
    process = TokenProcess(job)
    while not process.has_ended:
        time.sleep(0.1)
    process.require_running()
    assert os.environ["NXD_MEMOPT_BACKEND"] == "neuron"
    assert all(windows_of(directory, name).has(rows) for name, rows in wanted.items())


def single(directory: Path) -> TokenFeed:
    directory.mkdir()
    config = replace(CONFIG, dataset="stdlib")
    job = TokenJob(directory, "f", "test", config, vocabulary(), 0, {"train": 10**6, "held_out": 4})
    return TokenFeed(job, corpus_of(documents(LINES)))


@pytest.mark.slow
def test_the_process_reports_a_changed_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on where rank 0 stopped: the corpus that it opens must be the same one."""
    monkeypatch.setattr(token_feed, "FOREGROUND_S", 0.0)
    feed = single(tmp_path / "tokens")
    with pytest.raises(ValueError, match="'stdlib' has changed since the run started"):
        feed.wait("train", 10**6)
    feed.close()


def test_a_process_that_has_ended_too_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has written what the run wanted when it began."""
    monkeypatch.setattr(token_feed, "FOREGROUND_S", 0.0)
    feed = single(tmp_path / "tokens")
    ended: Any = SimpleNamespace(has_ended=True, require_running=lambda: None)
    feed._process = ended
    with pytest.raises(ValueError, match="tokenizing has ended with 0 sequences of train text, and 10 are needed"):
        feed.wait("train", 10)
