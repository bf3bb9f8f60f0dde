"""Reports errors that a user can cause as one line on standard error, with exit status 2."""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from collections.abc import Iterator

from nxd_memopt._optional import MissingDependencyError
from nxd_memopt.training.distributed import RankVariablesError, is_rank_zero, rank, shows_tracebacks

USAGE_ERROR = 2
# Time that a rank other than 0 waits before it reports an error, so that rank 0 reports an error
# of all ranks once. Before init_process_group the ranks of a busy machine may be this far apart.
INITIALIZED_DELAY_S = 5.0
UNINITIALIZED_DELAY_S = 60.0
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Show a user error as one line and exit with status 2.

    User errors are ``ValueError``, ``OSError`` (such as a full disk) and a missing package. Any
    other exception keeps its traceback; with ``NXD_MEMOPT_TRACEBACK=1`` every exception does.
    """
    try:
        yield
    except (ValueError, OSError, MissingDependencyError) as error:
        if shows_tracebacks():
            raise
        has_rank = not isinstance(error, RankVariablesError)
        if is_rank_zero() or not has_rank or _is_of_this_rank_alone():
            prefix = "error"
            if has_rank and not is_rank_zero():
                prefix = f"error on rank {rank()}"
            # One line: messages of other libraries may have several, and the ranks of a host
            # write to the same terminal.
            print(f"{prefix}: {' '.join(_text_of(error).split())}", file=sys.stderr, flush=True)
        raise SystemExit(USAGE_ERROR) from None


def _text_of(error: Exception) -> str:
    """Return the message of ``error``, with a remedy where another library met a full disk."""
    # Errors that this library raises with a remedy have no number.
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return f"{error}: free disk space and start the same command again"
    return str(error)


def _is_of_this_rank_alone() -> bool:
    """Return whether the error may have occurred on this rank only, after waiting for rank 0.

    If rank 0 fails in the same way, torchrun ends this rank during the wait and nothing is
    printed twice. Before ``init_process_group`` every rank has the same error, so the answer is
    False.
    """
    # From sys.modules: the error may be one of importing torch.
    distributed = sys.modules.get("torch.distributed")
    is_initialized = distributed is not None and distributed.is_initialized()
    time.sleep(INITIALIZED_DELAY_S if is_initialized else UNINITIALIZED_DELAY_S)
    return is_initialized
