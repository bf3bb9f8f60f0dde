"""A rank of the self-test with checks that fail on one rank, end a process, and hang; run as a program."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

import torch.distributed as dist

from nxd_memopt.selftest import worker
from nxd_memopt.selftest.check import Check, CheckError


def differ_on_one_rank() -> str:
    if dist.get_rank() == 1:
        raise CheckError("0.5 of 0.1")
    return "0.01 of 0.1"


def end() -> str:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    return "not reached"


def hang() -> str:
    # Sooner than the limit of all checks.
    faulthandler.dump_traceback_later(2, exit=True, file=sys.stderr)
    if dist.get_rank() == 0:
        signal.pause()
    dist.barrier()
    return "not reached"


def checks(sizes: list[int]) -> list[Check]:
    assert sizes == [1, 2]
    bodies = (differ_on_one_rank, end, hang)
    return [*(Check(body.__name__, body, f"without {body.__name__}") for body in bodies), Check("last", str, "")]


if __name__ == "__main__":
    worker.installation = lambda: "versions"
    sys.exit(worker.main(checks))
