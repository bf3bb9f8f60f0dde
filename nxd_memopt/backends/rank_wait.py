"""Says which ranks are missing while the process group is made, and which environment variables name them."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

WAIT_S = 10.0
# Ranks that began to wait at about the same time, and the connection to rank 0.
ARRIVAL_S = 2.0
VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def reported_wait(wait_s: float = WAIT_S) -> Iterator[None]:
    """Report once how many ranks wait, if the block, which waits for all of them, takes longer than ``wait_s`` seconds.

    The block goes on waiting: the ranks of other hosts may start minutes later. Variables that an earlier
    job has left in a shell would let a single process wait for 30 minutes without a word.
    """
    is_done = threading.Event()

    def watch() -> None:
        if not is_done.wait(wait_s):
            _report(is_done, wait_s)

    threading.Thread(target=watch, name="rank-wait", daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def _report(is_done: threading.Event, wait_s: float) -> None:
    """Print the line, on rank 0, or on the first rank of a host if rank 0 does not answer."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    waiting = _count_waiting()
    if is_done.is_set() or (waiting is None and os.environ.get("LOCAL_RANK", "0") != "0"):
        return
    if waiting is not None and os.environ["RANK"] != "0":
        return
    found = f"rank 0 does not answer at {address}"
    if waiting is not None:
        found = f"{waiting} of {os.environ.get('WORLD_SIZE')} ranks have joined at {address}"
    names = [name for name in VARIABLES if name in os.environ]
    values = " ".join(f"{name}={os.environ[name]}" for name in names)
    print(
        f"waiting for ranks since {wait_s:.0f} s: {found}, as the environment says ({values}); start the other ranks, "
        f"or for one process stop this one and unset {' '.join(names)}",
        file=sys.stderr,
        flush=True,
    )


def _count_waiting() -> int | None:
    """Return the number of ranks that wait too, or None if rank 0, which has the store, does not answer."""
    # The store's own count of the ranks has a key that no client can read, so each rank that waits adds one here.
    key = f"nxd_memopt/waiting/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    try:
        # Of a connection that fails, the store would write its frames.
        socket.create_connection((host, port), timeout=ARRIVAL_S).close()
        store: Any = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host, port, wait_for_workers=False, timeout=timedelta(seconds=ARRIVAL_S)
        )
        store.add(key, 1)
        time.sleep(ARRIVAL_S)
        return store.add(key, 0)
    except (OSError, RuntimeError):  # includes dist.DistError
        return None
