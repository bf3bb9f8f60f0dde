"""Runs the training program with optimizer states on a simulated host; kills itself at a chosen copy, update or rename.

``python -m tests.training.streamed_program EVENT NUMBER COUNTS --config FILE``: the process ends with SIGKILL before
event ``NUMBER`` of the kind ``EVENT``; a run that gets to its end writes the numbers of all events to ``COUNTS``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from nxd_memopt.backends import backend
from nxd_memopt.optimizer.offloaded_zero1 import OffloadedZero1Optimizer
from nxd_memopt.optimizer.streamed_adamw import StreamedAdamW
from nxd_memopt.training.__main__ import main
from tests.deferred_transfers import DeferredTransfers

CHUNKS = {"resident_elements": 100, "chunk_elements": 256, "staging_bytes": 3 * 12 * 256}
"""Chunks of 256 elements, three of them on the device; only norms are too small for the host."""


def run(kind: str, number: int, counts: Path, arguments: list[str]) -> int:
    """Train, and count the events; end the process before event ``number`` of ``kind``."""
    seen: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            if name == kind and seen[name] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    patches = [
        mock.patch.object(type(backend), "host_transfers", lambda self: DeferredTransfers()),
        mock.patch.dict(OffloadedZero1Optimizer.__init__.__kwdefaults__, CHUNKS),
        mock.patch.object(DeferredTransfers, "copy_in", counted("copy_in", DeferredTransfers.copy_in)),
        mock.patch.object(DeferredTransfers, "copy_out", counted("copy_out", DeferredTransfers.copy_out)),
        mock.patch.object(StreamedAdamW, "_update", counted("update", StreamedAdamW._update)),
        mock.patch.object(os, "replace", counted("rename", os.replace)),
    ]
    for patch in patches:
        patch.start()
    status = main(arguments)
    counts.write_text(json.dumps(seen), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
