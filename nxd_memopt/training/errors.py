"""Reports errors that a user can cause as one line on standard error, with exit status 2."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from nxd_memopt._optional import MissingDependencyError
from nxd_memopt.training.distributed import is_rank_zero, rank, shows_tracebacks

USAGE_ERROR = 2
JOINED_RANK_DELAY_S = 5.0
ALONE_RANK_DELAY_S = 60.0  # ranks may start as far apart on a busy machine


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Show an error that a user can cause as one line and exit with status 2.

    These are ``ValueError``, a missing package and ``OSError``, such as a full disk. Any other exception keeps its
    traceback, and under ``NXD_MEMOPT_TRACEBACK=1`` every exception does.
    """
    try:
        yield
    except (ValueError, OSError, MissingDependencyError) as error:
        if shows_tracebacks():
            raise
        if is_rank_zero() or _is_of_this_rank_alone():
            prefix = "error" if is_rank_zero() else f"error on rank {rank()}"
            print(f"{prefix}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise SystemExit(USAGE_ERROR) from None


def _is_of_this_rank_alone() -> bool:
    """Wait for rank 0 to fail in the same way: torchrun then ends this rank. Return whether that can have been in vain.

    Before the ranks have joined, every one of them meets the same error.
    """
    distributed = sys.modules.get("torch.distributed")
    has_joined = distributed is not None and distributed.is_initialized()
    time.sleep(JOINED_RANK_DELAY_S if has_joined else ALONE_RANK_DELAY_S)
    return has_joined
