"""Starts the ranks of the self-test, collects their records, and starts them again after a rank has ended."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nxd_memopt._optional import is_importable
from nxd_memopt.config import MemoryConfig
from nxd_memopt.launch.agent import Agent
from nxd_memopt.launch.hosts import Hosts
from nxd_memopt.launch.machine import Machine
from nxd_memopt.launch.platforms import TORCH_XLA_PACKAGE, platform_named
from nxd_memopt.launch.trainium import TRN1_2XLARGE_GROUP_SIZES, TRN1_GROUP_SIZES
from nxd_memopt.launch.variables import Run, merged
from nxd_memopt.selftest.check import FAILED, STARTED, Record, State
from nxd_memopt.selftest.worker import END
from nxd_memopt.training.config.train_config import ModelConfig, TrainConfig
from nxd_memopt.training.runtime.distributed import BACKEND_VARIABLE
from nxd_memopt.training.runtime.signals import SIGNALS, exit_status

WORKER = (sys.executable, "-m", "nxd_memopt.selftest.worker")
CPU_RANKS = 2
_GROUP_SIZES = {"trn1": TRN1_GROUP_SIZES, "trn1-2xlarge": TRN1_2XLARGE_GROUP_SIZES}
_REMEDY = "the check that it ran has failed"
_FATAL = ("Fatal Python error", "Timeout (")
"""Beginnings of the lines that faulthandler prints when it ends a rank."""


@dataclass(frozen=True)
class Result:
    """One line of the results, of all ranks together.

    Args:
        name: name of the check.
        state: how it ended on the ranks.
        text: figures of rank 0, or what is wrong on the rank that failed first.
        seconds: how long it took.
        instead: what to turn off, or use, while it fails.
    """

    name: str
    state: State
    text: str
    seconds: float
    instead: str


def default_platform(environ: Mapping[str, str], machine: Machine) -> str:
    """Return the platform of this host, without opening a device."""
    chips = machine.chips()
    name = environ.get(BACKEND_VARIABLE)
    if name is None and chips:
        name = "xla" if is_importable(TORCH_XLA_PACKAGE) else "neuron"
    if name == "xla":
        return {0: "xla_cpu", 1: "trn1-2xlarge"}.get(chips, "trn1")
    if name == "neuron":
        return "trn2-3xlarge" if chips == 1 else "trn2"
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def ranks_of(platform: str, requested: int | None, machine: Machine) -> int:
    """Return the number of ranks.

    Raises:
        ValueError: the platform has fewer cores, or their number is not known.
    """
    default = CPU_RANKS
    if platform == "cuda":
        default = max(1, torch.cuda.device_count())
    return platform_named(platform).processes_per_host(requested, default, machine)


def sizes_of(platform: str, processes: int) -> list[int]:
    """Return every T that divides the number of ranks and has collectives on the platform."""
    sizes = [size for size in range(1, processes + 1) if processes % size == 0]
    allowed = _GROUP_SIZES.get(platform_named(platform).name, sizes)
    return [size for size in sizes if size in allowed]


def environment(platform: str, processes: int, environ: Mapping[str, str], machine: Machine) -> dict[str, str]:
    """Return the environment that ``nxd-memopt launch`` gives the ranks of a run with bf16 and recompute.

    Raises:
        ValueError: ``environ`` has another value of a variable that the platform needs.
    """
    # Full recompute sets the compiler's level; of the model nothing is read.
    config = TrainConfig(
        ModelConfig(tokenizer="none", config_overrides={"model_type": "llama"}),
        memory=MemoryConfig(recompute_granularity="full"),
    )
    chosen = platform_named(platform)
    chosen.require_package()
    run = Run(config, processes, Hosts(), environ, machine)
    return dict(environ) | merged(chosen.variables(run), environ)


class Collector:
    """Reads the records of all ranks while they run, and makes one result of each check.

    Args:
        directory: directory of the ranks' files.
        processes: number of ranks.
        show: called with each result, in order.
    """

    def __init__(self, directory: Path, processes: int, show: Callable[[Result], object]) -> None:
        self.results: list[Result] = []
        self.is_finished = False
        self._directory = directory
        self._processes = processes
        self._show = show
        self._read = [0] * processes
        self._started: dict[int, Record] = {}
        self._ended: dict[int, list[Record]] = {}

    @property
    def next(self) -> int:
        """Number of the first check without a result."""
        return len(self.results)

    def poll(self) -> None:
        """Read what the ranks have written since the last call."""
        for rank in range(self._processes):
            for record in self._new_records(rank):
                if record.state == STARTED:
                    self._started.setdefault(record.index, record)
                else:
                    self._ended.setdefault(record.index, []).append(record)
        while len(self._ended.get(self.next, [])) == self._processes and not self.is_finished:
            if self._ended[self.next][0].name == END:
                self.is_finished = True
                return
            self._close()

    def end(self, status: int) -> bool:
        """Make a result of the check that the ranks have not finished; return False if they have not started one."""
        self.poll()
        if self.next not in self._started:
            return False
        # The errors of other ranks follow from a rank that a signal, or the limit of time, has ended.
        is_cause = status > exit_status(0) or bool(self._last_line(_FATAL))
        self._close(self.why(status), is_cause=is_cause)
        return True

    def why(self, status: int) -> str:
        """Return how the ranks ended, and the last line that one of them printed; faulthandler's before others."""
        printed = self._last_line(_FATAL) or self._last_line(("",)) or "nothing was printed"
        return f"{_describe(status)}: {printed}"

    def add(self, result: Result) -> None:
        """Add a result and show it."""
        self.results.append(result)
        self._show(result)

    def _new_records(self, rank: int) -> list[Record]:
        file = self._directory / f"rank{rank}.jsonl"
        if not file.exists():
            return []
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        # A line without an end is still being written.
        lines = [line for line in lines if line.endswith("\n")]
        new = lines[self._read[rank] :]
        self._read[rank] = len(lines)
        return [Record(**json.loads(line)) for line in new]

    def _close(self, unfinished: str = "", *, is_cause: bool = False) -> None:
        """Add the result of the next check.

        Args:
            unfinished: what is known of ranks that have not ended it.
            is_cause: it comes before what other ranks say.
        """
        records = self._ended.get(self.next, [])
        # The first failure: the failures of other ranks may follow from it.
        failed = sorted((record for record in records if record.state == FAILED), key=lambda record: record.time_s)
        started = self._started.get(self.next, (records or [None])[0])
        assert started is not None
        state, text = FAILED, unfinished
        if failed and not is_cause:
            text = failed[0].text
        elif len(records) == self._processes:
            state, text = records[0].state, records[0].text
        seconds = max((record.time_s for record in records), default=started.time_s) - started.time_s
        self.add(Result(started.name, state, text, round(seconds, 1), started.instead))

    def _last_line(self, beginnings: tuple[str, ...]) -> str:
        """Return the last line with one of the beginnings of the first rank that has one; empty without."""
        for rank in range(self._processes):
            log = self._directory / f"rank{rank}.log"
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
            found = [line.strip() for line in lines if line.strip() and line.startswith(beginnings)]
            if found:
                return f"rank {rank}: {found[-1]}"
        return ""


def _describe(status: int) -> str:
    """Return how the ranks ended."""
    if status > exit_status(0):
        return f"a rank was ended by {signal.Signals(status - exit_status(0)).name}"
    return f"a rank ended with exit status {status}"


def run_ranks(
    arguments: Sequence[str],
    processes: int,
    environ: Mapping[str, str],
    collector: Collector,
    *,
    directory: Path,
    command: Sequence[str] = WORKER,
) -> None:
    """Run all checks on ``processes`` ranks, which are started again after a check that has ended them.

    Args:
        arguments: the last arguments of the rank's program.
        processes: number of ranks.
        environ: environment of the ranks.
        collector: reads their records.
        directory: directory of the ranks' files.
        command: the rank's program.

    Raises:
        SystemExit: this process has received a signal, which has ended the ranks.
    """
    while not collector.is_finished:
        first = collector.next
        full = [*command, str(directory), str(first), *arguments]
        status = Agent(full, processes, environ, remedy=_REMEDY, watch=collector.poll).run()
        if status in [exit_status(number) for number in SIGNALS]:
            raise SystemExit(status)
        if not collector.end(status) and not collector.is_finished and collector.next == first:
            collector.add(Result("start of the ranks", FAILED, collector.why(status), 0.0, "NXD_MEMOPT_BACKEND=cpu"))
            return
