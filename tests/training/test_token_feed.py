"""Ranks that wait for tokens: heartbeats, errors and signals of rank 0, and a tokenizer that is slow."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.packed import feed as token_feed
from nxd_memopt.training.data.packed.feed import TokenFeed, WaitStoppedError
from nxd_memopt.training.data.packed.files import create_directory
from nxd_memopt.training.data.packed.log import TokenLog
from nxd_memopt.training.data.packed.writer import TokenJob, TokenProcess
from nxd_memopt.training.data.sources.corpora import open_corpus
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from tests.training.packed_tokens import corpus_of, documents, vocabulary
from tests.training.runs import LINES, write_jsonl

CONFIG = DataConfig(seq_length=16, eval_sequences=4)


class SlowVocabulary(Vocabulary):
    """A tokenizer that takes 0.4 s a call."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        time.sleep(0.4)
        return super().encode(texts)


def feeds(directory: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 2.0) -> tuple[TokenFeed, TokenFeed]:
    """The feeds of rank 0 and of another rank, with a store in this process and a short timeout."""
    create_directory(directory, "f")
    words = SlowVocabulary(vocabulary().tokenizer, 257, 256)
    job = TokenJob(directory, "test", CONFIG, words, 0, {"train": 10, "held_out": 4})
    writer, reader = TokenFeed(job, "f", corpus_of(documents(LINES))), TokenFeed(job, "f", None)
    writer._store = reader._store = dist.HashStore()
    writer._store.set_timeout(timedelta(seconds=timeout_s))
    reader._key = writer._key
    monkeypatch.setattr(
        reader, "wait", lambda name, rows: reader._has(name, rows) or reader._wait_for_rank_zero(name, rows)
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    return writer, reader


def in_thread(feed: TokenFeed) -> tuple[threading.Thread, list[Any]]:
    """Let a rank wait for its first training sequences; the list has the error that it gets."""
    errors: list[Any] = []

    def wait() -> None:
        try:
            feed.wait("train", 10)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, errors


def test_a_slow_tokenizer_runs_into_no_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """About 8 calls of 0.4 s, and a timeout of 2 s: the heartbeat names the work."""
    monkeypatch.setattr(token_feed, "BEAT_S", 0.1)
    monkeypatch.setattr(token_feed, "REPORT_S", 0.3)
    writer, reader = feeds(tmp_path / "tokens", monkeypatch)
    thread, errors = in_thread(reader)
    writer.wait("train", 10)
    thread.join()
    assert not errors and reader.log("train").last.rows >= 10
    lines = capsys.readouterr().err
    assert "rank 3 is waiting for rank 0: tokenizing" in lines and "waiting for tokens: tokenizing" in lines


def test_silence_and_errors_of_rank_zero_end_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = feeds(tmp_path / "tokens", monkeypatch)
    with pytest.raises(RuntimeError, match=r"rank 3 waited .* without a sign of rank 0, which was opening the data"):
        reader.wait("train", 10)
    broken = documents(LINES)
    writer._corpus = corpus_of(type(broken)(lambda _: "", broken.train, broken.held_out, "test"))
    thread, errors = in_thread(reader)
    with pytest.raises(ValueError, match="has any text"):
        writer.wait("train", 10)
    thread.join()
    assert "preparing the data failed on rank 0: a split of dataset" in str(errors[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_of_any_rank_stops_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    writer, reader = feeds(tmp_path / "tokens", monkeypatch, timeout_s=20)
    (writer, reader)[rank].interrupted = lambda: 15
    thread, errors = in_thread(reader)
    with pytest.raises(WaitStoppedError):
        writer.wait("train", 10)
    thread.join()
    assert isinstance(errors[0], WaitStoppedError) and errors[0].number == 15


def test_a_file_system_that_lags_behind_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a split that is not asked for now: with fewer rows a rank would begin its second epoch."""
    writer, reader = feeds(tmp_path / "tokens", monkeypatch, timeout_s=20)
    writer.wait("train", 10)
    refresh, calls = reader.log("train").refresh, iter(range(3))
    monkeypatch.setattr(reader.log("train"), "refresh", lambda: refresh() if next(calls, None) is None else None)
    reader.wait("held_out", 4)
    assert reader.log("train").last == writer.log("train").last


def test_the_process_opens_no_device_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend that this machine lacks: also what unpickling the job imports must not select it."""
    dataset = write_jsonl(tmp_path / "lines.jsonl", LINES)
    config = DataConfig(dataset=dataset, seq_length=16, eval_sequences=4)
    directory = tmp_path / "tokens"
    create_directory(directory, "f")
    wanted = {"train": 10, "held_out": 4}
    job = TokenJob(directory, open_corpus(config, 0).fingerprint, config, vocabulary(), 0, wanted)
    monkeypatch.setenv("NXD_MEMOPT_BACKEND", "neuron")
    process = TokenProcess(job)
    while not process.has_ended:
        time.sleep(0.1)
    process.require_running()
    assert os.environ["NXD_MEMOPT_BACKEND"] == "neuron"
    for name, rows in wanted.items():
        log = TokenLog(directory, name, 16)
        log.refresh()
        assert log.has(rows)


def test_the_process_reports_a_changed_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on where rank 0 stopped: the corpus that it opens must be the same one."""
    monkeypatch.setattr(token_feed, "FOREGROUND_S", 0.0)
    writer, _ = feeds(tmp_path / "tokens", monkeypatch)
    with pytest.raises(ValueError, match="'stdlib' has changed since the run started"):
        writer.wait("train", 10**6)
    writer.close()


def test_a_process_that_has_ended_too_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has written what the run wanted when it began."""
    writer, _ = feeds(tmp_path, monkeypatch)
    writer._is_foreground_over = True
    ended: Any = SimpleNamespace(has_ended=True, require_running=lambda: None)
    writer._process = ended
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(ValueError, match="tokenizing has ended with 0 sequences of train text, and 10 are needed"):
        writer.wait("train", 10)


def test_the_end_of_the_pipe_of_a_process_without_an_error_is_none() -> None:
    process: Any = object.__new__(TokenProcess)
    process._receiving, sending = multiprocessing.Pipe(duplex=False)
    process._process = SimpleNamespace(is_alive=lambda: False, exitcode=0)
    sending.close()
    process.require_running()
    assert process.has_ended
