"""Owns how the training script fails: what a user caused is one line on standard error and exit code 2."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

USAGE_ERROR = 2
OTHER_RANK_DELAY_S = 5.0


def is_rank_zero() -> bool:
    return os.environ.get("RANK", "0") == "0"


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Show a ``ValueError``, which a user can cause, as one line on standard error, and exit with code 2.

    Any other exception keeps its traceback, and so does every one under ``NXD_MEMOPT_TRACEBACK=1``.
    """
    try:
        yield
    except ValueError as error:
        if os.environ.get("NXD_MEMOPT_TRACEBACK") == "1":
            raise
        prefix = "error"
        if not is_rank_zero():
            # Rank 0 mostly fails with the same message, and torchrun then ends the others before they speak.
            time.sleep(OTHER_RANK_DELAY_S)
            prefix = f"error on rank {os.environ['RANK']}"
        print(f"{prefix}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise SystemExit(USAGE_ERROR) from None
