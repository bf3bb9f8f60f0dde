"""A rank of the self-test, which runs the checks in order.

``python -m nxd_memopt.selftest.worker DIRECTORY FIRST STOP_S SIZES`` runs the checks from number FIRST on.
It writes what each check says into ``DIRECTORY/rank<R>.jsonl``, and what libraries print into
``rank<R>.log``. A check that hangs ends the process after ``LIMIT_S``; after one that fails in another
way than by its figures, the ranks may be out of step, and the process ends too.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from nxd_memopt.selftest.check import ABSENT, FAILED, PASSED, STARTED, AbsentError, Check, CheckError, Record, State
from nxd_memopt.training.runtime.distributed import rank

LIMIT_S = 240
"""Of one check: neuronx-cc may take minutes for the graphs of a training step."""
END = "end"
"""Name of the last record of a rank that has run all checks."""
TIME_IS_OVER = "not run: the time is over; the next run is faster, because compiled graphs are kept"


class Recorder:
    """Writes the records of this rank.

    Args:
        directory: directory of all ranks' files.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / f"rank{rank()}.jsonl"

    def write(self, index: int, check: Check, state: State, text: str) -> None:
        """Append a record; it is in the file on return."""
        name = check.name
        if check.tensor_model_parallel_size > 1:
            name += f", T={check.tensor_model_parallel_size}"
        record = Record(index, name, check.instead, state, text, time.time())
        with self._file.open("a", encoding="utf-8") as file:
            file.write(record.to_line())


def table(sizes: list[int]) -> list[Check]:
    """Return all checks, in the order in which they run."""
    # Their imports select the backend and open the device.
    from nxd_memopt.selftest import attention, collectives, operators, training

    return [*operators.checks(), *attention.checks(), *collectives.checks(sizes), *training.checks(sizes)]


def installation() -> str:
    """Return what ``nxd-memopt doctor`` says of versions, backend and device."""
    from nxd_memopt.commands.doctor import describe

    return "\n".join(describe())


def run_check(check: Check) -> tuple[State, str, bool]:
    """Run a check; return how it ended, its text, and whether the ranks can go on with the next one."""
    from nxd_memopt.parallel_layers import parallel_state

    try:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(check.tensor_model_parallel_size)
        return PASSED, check.run(), True
    except AbsentError as absent:
        return ABSENT, str(absent), True
    except CheckError as wrong:
        return FAILED, str(wrong), True
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return FAILED, f"{type(error).__name__}: {lines[-1]}", False


def run_checks(checks: list[Check], first: int, stop_s: float, recorder: Recorder) -> bool:
    """Run the checks from ``first`` on; return whether all of them have run.

    Args:
        checks: all checks; check 0 has been run by the caller.
        first: number of the first check.
        stop_s: no check starts after this time, seconds since the epoch.
        recorder: writes what they say.
    """
    for index, check in enumerate(checks[first:], start=first):
        # Of all ranks: they read the clock at other times, and a rank alone would wait.
        if _any_rank(time.time() > stop_s):
            recorder.write(index, check, FAILED, TIME_IS_OVER)
            continue
        recorder.write(index, check, STARTED, "")
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.stderr)
        state, text, goes_on = run_check(check)
        faulthandler.cancel_dump_traceback_later()
        recorder.write(index, check, state, text)
        if not goes_on:
            return False
    return True


def _any_rank(is_over: bool) -> bool:
    """Return whether the time is over on a rank. Every rank calls."""
    from nxd_memopt.parallel_layers.coordination import share_texts

    return "over" in share_texts("over" if is_over else "")


def main(make_table: Callable[[list[int]], list[Check]] = table) -> int:
    """Run the checks that the command line names; return the exit status."""
    directory, first, stop_s, sizes = sys.argv[1:]
    # Without what earlier ranks have printed, which would be taken for the reason why these have ended.
    log = os.open(Path(directory) / f"rank{rank()}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    # Compilers and runtimes write to the descriptors themselves.
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    faulthandler.enable()
    recorder = Recorder(Path(directory))
    start = Check("versions and backend", installation, "NXD_MEMOPT_BACKEND=cpu, which runs on the CPU")
    if first == "0":
        recorder.write(0, start, STARTED, "")
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.stderr)
    from nxd_memopt.backends import backend

    backend.init_process_group(timeout=timedelta(seconds=LIMIT_S))
    checks = [start, *make_table([int(size) for size in sizes.split(",")])]
    faulthandler.cancel_dump_traceback_later()
    if not run_checks(checks, int(first), float(stop_s), recorder):
        return 1
    recorder.write(len(checks), Check(END, str, ""), PASSED, "")
    # Without the destructors of runtimes, one of which may wait for a rank that has ended.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
