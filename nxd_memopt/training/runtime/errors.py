"""Reports errors that a user can cause as one line on standard error, with exit status 2."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from nxd_memopt._optional import MissingDependencyError
from nxd_memopt.options import ITEM
from nxd_memopt.training.runtime.distributed import RankVariablesError, is_rank_zero, rank, shows_tracebacks

USAGE_ERROR = 2
OUTPUT_CLOSED = 128 + signal.SIGPIPE  # the status that shells give a program that SIGPIPE has ended
# Time that a rank other than 0 waits before it reports an error, so that rank 0 reports an error
# of all ranks once. Before init_process_group the ranks of a busy machine may be this far apart.
INITIALIZED_DELAY_S = 5.0
UNINITIALIZED_DELAY_S = 60.0
# Longer than launchers leave the other ranks after a failure (``launch.agent.FAILED_S``).
LOST_RANK_DELAY_S = 15.0
# Of gloo, and of NCCL: torch has no class for messages to or from a rank that has ended.
LOST_RANK = ("closed by peer", "reset by peer", "Broken pipe", "ncclRemoteError")
_PACKAGE = Path(__file__).resolve().parents[2]
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
        if isinstance(error, BrokenPipeError) and output_is_closed():
            raise SystemExit(OUTPUT_CLOSED) from None
        if shows_tracebacks():
            raise
        has_rank = not isinstance(error, RankVariablesError)
        if is_rank_zero() or not has_rank or _is_of_this_rank_alone():
            prefix = "error"
            if has_rank and not is_rank_zero():
                prefix = f"error on rank {rank()}"
            print(f"{prefix}: {text_of(error)}", file=sys.stderr, flush=True)
        raise SystemExit(USAGE_ERROR) from None
    except RuntimeError as error:
        if any(text in str(error) for text in LOST_RANK):
            # A consequence. The rank that has ended says why, and the launcher ends this one during the wait.
            error.add_note("the connection to another rank is lost: the error of the rank that ended first says why")
            time.sleep(0 if shows_tracebacks() else LOST_RANK_DELAY_S)
        raise


def output_is_closed() -> bool:
    """Return whether nobody reads standard output any more, as in ``nxd-memopt doctor | head -1``.

    What is still to be written is then dropped: at the end of the process it would be an error.
    """
    # A broken pipe may also be of a connection, whose error is not to be hidden.
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # no file, as in tests
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    is_closed = any(events & select.POLLERR for _, events in poll.poll(0))
    if is_closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    return is_closed


def text_of(error: Exception) -> str:
    """Return the message of ``error`` with a remedy for a full disk, or with the place of another library's error.

    The notes of the error follow, such as the stage of a pipeline. It is one line, or one for each problem of several
    (``listed``): messages of other libraries may have any lines, and the ranks of a host write to the same terminal.
    """
    text = "; ".join([_message(error), *getattr(error, "__notes__", ())])
    return ITEM.join(" ".join(problem.split()) for problem in str.split(text, ITEM))


def _message(error: Exception) -> str:
    # Errors that this library raises with a remedy have no number.
    if isinstance(error, OSError):
        if error.errno in FULL_DISK:
            return f"{error}: free disk space and start the same command again"
        return str(error)
    # A ValueError of another library may be a defect, and a run may be hours old: say at least where it was raised.
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    if not own or own[-1] is frames[-1]:
        return str(error)
    raised = f"{frames[-1].filename}:{frames[-1].lineno}"
    called = f"nxd_memopt/{Path(own[-1].filename).relative_to(_PACKAGE)}:{own[-1].lineno}"
    return f"{error} (raised in {raised}, called by {called}; NXD_MEMOPT_TRACEBACK=1 shows all calls)"


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
