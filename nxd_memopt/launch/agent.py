"""Starts the ranks of a run on this host, forwards signals to them and ends them together.

    nxd-memopt train --nproc 8 --config FILE.yaml

The ranks get the environment variables that torchrun sets. Three things differ from torchrun,
which reports every failure with a traceback of its own and kills the ranks 30 s after a signal:
a user error is the line that rank 0 prints, the exit status is the ranks', and after a signal the
ranks have the time that their last save took, twice, and at least ``STOP_S``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from nxd_memopt._optional import require_installed
from nxd_memopt.child_process import death_signal
from nxd_memopt.command_line import Parser, count
from nxd_memopt.training.runtime.errors import USAGE_ERROR, user_errors
from nxd_memopt.training.runtime.signals import SECOND_AFTER_S, SIGNALS, exit_status, final_status

PROGRAM = (sys.executable, "-m", "nxd_memopt.training")
STOP_S = 120.0
UNMEASURED_STOP_S = 600.0
"""Time to stop for a run that has not saved yet, so nobody knows how long a save takes."""
RANKS_LEAVE_S = 15.0
"""Time that the other ranks have to end after one has ended, while the run stops."""
FAILED_S = 5.0
"""Time that the other ranks have to report the same failure, or its cause."""
SECOND_S = 2.0
POLL_S = 0.05


class Agent:
    """The ranks of one run on this host.

    Args:
        command: program and arguments of each rank.
        processes: number of ranks.
        environ: environment variables of the ranks, to which those of each rank are added.
        remedy: what to do after a rank was ended by a signal.
        watch: called again and again while the ranks run.
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        environ: Mapping[str, str],
        *,
        remedy: str = "start the same command to continue from the last checkpoint",
        watch: Callable[[], object] = lambda: None,
    ) -> None:
        self._remedy = remedy
        self._watch = watch
        self._command = list(command)
        self._processes = processes
        self._environ = environ
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._received: list[int] = []
        self._stop_file = Path()
        self._first_s: float | None = None
        self._kill_s = float("inf")
        self._killed: set[int] = set()
        self._status = 0
        self._ended: set[int] = set()

    def run(self) -> int:
        """Start the ranks, wait for all of them, and return the exit status of the first failure."""
        with _recorded(self._received), tempfile.TemporaryDirectory(prefix="nxd-memopt-train-") as directory:
            # Imported here: this takes seconds, in which a signal is recorded already.
            from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

            # The agent's process hosts the store of the rendezvous, as torchrun's does: it outlives
            # rank 0, whose error the other ranks can then still read, and its port cannot be taken.
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._stop_file = Path(directory) / "stop_s"
            try:
                self._start(store.port)
                while len(self._ended) < self._processes:
                    time.sleep(POLL_S)
                    self._forward()
                    self._collect()
                    self._kill_late()
                    self._watch()
            finally:
                self._kill()
        return self._status

    def _start(self, port: int) -> None:
        """Start every rank with the signals blocked, until its handlers for them exist."""
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        dies_with_agent = death_signal()
        try:
            for rank in range(self._processes):
                environ = dict(self._environ) | self._rank_variables(rank, port)
                process = subprocess.Popen(self._command, env=environ, preexec_fn=dies_with_agent)
                self._ranks.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def _rank_variables(self, rank: int, port: int) -> dict[str, str]:
        """Return the environment variables that torchrun would set for a rank."""
        size = str(self._processes)
        # Without a value, PyTorch would start one thread per core in every rank.
        threads = max(1, (os.cpu_count() or 1) // self._processes)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size,
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"nxd_memopt_{os.getpid()}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "NXD_MEMOPT_STOP_TIME_FILE": str(self._stop_file),
            "OMP_NUM_THREADS": self._environ.get("OMP_NUM_THREADS", str(threads)),
        }

    def _forward(self) -> None:
        """Forward the received signals: the first one, and those that end the ranks at once."""
        while self._received:
            number = self._received.pop(0)
            now = time.monotonic()
            if self._first_s is None:
                self._first_s = now
                self._kill_s = now + stop_s(self._stop_file)
            elif now - self._first_s > SECOND_AFTER_S:
                self._kill_s = min(self._kill_s, now + SECOND_S)
            else:
                continue  # the same signal, delivered twice
            for process in self._ranks:
                process.send_signal(number)

    def _collect(self) -> None:
        """Record the ranks that have ended, and set the others a limit if one has failed."""
        for rank, process in enumerate(self._ranks):
            if rank in self._ended or process.poll() is None:
                continue
            self._ended.add(rank)
            if process.returncode == 0:
                continue
            self._kill_s = min(self._kill_s, time.monotonic() + self._patience_s(rank, process.returncode))
            if self._status == 0:
                self._status = _status(process.returncode)
                self._report(rank, process.returncode)

    def _patience_s(self, rank: int, returncode: int) -> float:
        """Return the time that the other ranks have after the failure of ``rank``."""
        if self._first_s is not None:
            return RANKS_LEAVE_S
        # Rank 0 has reported the user error, of which the other ranks do not say more.
        if rank == 0 and returncode == USAGE_ERROR:
            return 0.0
        return FAILED_S

    def _report(self, rank: int, returncode: int) -> None:
        """Say why a rank ended that could not say it itself."""
        if returncode >= 0 or rank in self._killed:
            return
        name = signal.Signals(-returncode).name
        hint = ""
        if -returncode == signal.SIGKILL:
            hint = " (the system does so when the host's memory is exhausted)"
        _say(f"error: rank {rank} was ended by {name}{hint}: {self._remedy}")

    def _kill_late(self) -> None:
        """Kill the ranks that have not ended in time."""
        if time.monotonic() < self._kill_s:
            return
        if self._first_s is not None and not self._ended and not self._killed:
            waited_s = time.monotonic() - self._first_s
            _say(
                f"error: the ranks were killed {waited_s:.0f} s after the signal: the last complete checkpoint is valid"
            )
        self._kill()

    def _kill(self) -> None:
        for rank, process in enumerate(self._ranks):
            if rank not in self._ended and rank not in self._killed:
                self._killed.add(rank)
                process.kill()


@contextmanager
def _recorded(received: list[int]) -> Iterator[None]:
    """Append the signals of this process to ``received`` inside the block."""
    previous = {number: signal.signal(number, lambda number, _: received.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def stop_s(file: Path) -> float:
    """Return the time in seconds that the ranks have to stop: what ``file`` says, or more."""
    try:
        measured_s = float(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return UNMEASURED_STOP_S
    return max(STOP_S, measured_s)


def _status(returncode: int) -> int:
    """Return the exit status of a process for a shell."""
    if returncode < 0:
        return exit_status(-returncode)
    return returncode


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training program on the ranks that ``--nproc`` names; return the exit status.

    Args:
        arguments: ``--nproc N`` and the arguments of the training program; defaults to the command
            line's.
    """
    parser = Parser("train", "Train on the ranks of this host.")
    parser.add_argument("--nproc", type=count, required=True, metavar="N", help="number of ranks")
    with user_errors():
        options, train_arguments = parser.separate(sys.argv[1:] if arguments is None else arguments)
        if "RANK" in os.environ:
            raise ValueError(
                f"--nproc {options.nproc} starts the ranks, but RANK is {os.environ['RANK']}: torchrun has started "
                "them already, so omit --nproc or torchrun"
            )
        # An error of the options or of a missing file is reported here once, before N processes import torch.
        require_installed("nxd-memopt train", "yaml", extra="train")
        from nxd_memopt.training.config.parsing import parse_config
        from nxd_memopt.training.inputs import require_inputs

        config = parse_config(train_arguments)
        config.accumulation_steps(options.nproc)
        config.require_expert_ranks(options.nproc)
        require_inputs(config)
        return Agent([*PROGRAM, *train_arguments], options.nproc, os.environ).run()


if __name__ == "__main__":
    sys.exit(final_status(main()))
