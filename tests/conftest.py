"""Session-wide pytest setup: the CPU backend, one thread per process, pools closed at the end."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

os.environ.setdefault("NXD_MEMOPT_BACKEND", "cpu")  # the backend is chosen at import: before anything imports it

import pytest
import torch

from nxd_memopt._optional import why_missing
from tests.dist import pool

# A shell's background job ignores Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # as in the ranks: bit-equal comparisons need the same summation order


@pytest.fixture(autouse=True)
def clean_process_state() -> Iterator[None]:
    """Start every test with the same random state and leave no process groups or stand-ins' traces behind."""
    pool.reset_process(seed=pool.SEED)
    yield
    pool.reset_process(seed=pool.SEED)
    why_missing.cache_clear()


def pytest_collection_finish() -> None:
    """Leave what imports and the collection made out of garbage collection, which took 0.5 s each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Stop the worker processes."""
    pool.close_all()
