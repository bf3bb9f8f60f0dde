"""Files by which ranks that write into one directory tell rank 0 that they are done or have failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.1
FAILED = ".failed"
Heartbeat = Callable[[], None]
"""Called during a wait or a write. Raises an exception to abandon it."""


class AbandonedError(Exception):
    """The program ends or another rank has failed: this save stays incomplete, and earlier
    checkpoints are kept.
    """


def rank_file(directory: Path, rank: int, suffix: str) -> Path:
    """Return the path of a rank's file in ``directory``."""
    return directory / f"rank_{rank:05d}{suffix}"


def report_failure(directory: Path, rank: int, message: str) -> None:
    """Write a file that tells rank 0, which may be waiting for this rank's files, about a
    failure.
    """
    if directory.is_dir():
        rank_file(directory, rank, FAILED).write_text(message, encoding="utf-8", errors="backslashreplace")


def wait_for_ranks(directory: Path, world_size: int, suffix: str, heartbeat: Heartbeat) -> None:
    """Wait until every rank's file with ``suffix`` exists. Rank 0 calls, without collectives.

    Raises:
        AbandonedError: a rank has failed, or was told that another rank has failed.
    """
    # Files are polled instead of a collective: the caller is a thread, and a rank may have died.
    missing = list(range(world_size))
    while missing:
        for rank in missing:
            failed = rank_file(directory, rank, FAILED)
            if failed.is_file():
                raise AbandonedError(f"rank {rank} failed: {failed.read_text(encoding='utf-8')}")
        missing = [rank for rank in missing if not rank_file(directory, rank, suffix).is_file()]
        if missing:
            heartbeat()
            time.sleep(POLL_S)
