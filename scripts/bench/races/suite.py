"""Lists the races of ``suite.toml`` for one number of GPUs, and runs them: most of the performance tables.

    python -m scripts.bench.races.suite --gpus 1 --append
    python -m scripts.bench.races.suite --gpus 2 --only llama3-8b-8k --traces build/traces
    python -m scripts.bench.races.suite --gpus 4 --list

Each race is a process (one per GPU with several GPUs) whose output goes to ``--logs``. A race that
fails or exceeds ``--timeout-s`` does not stop the others; all races end after ``--seconds``. cuBLAS
runs without its counter resets (docs/gpus.md), for the peers too.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
TABLE = Path(__file__).with_name("suite.toml")
PACKAGE = "scripts.bench.races"
GRACE_S = 60  # torchrun waits 30 s for its ranks to end


@dataclass(frozen=True)
class Race:
    """Benchmark to run.

    Args:
        name: for ``--only`` and the log.
        benchmark: module of this package.
        gpus: 1, 2 for any other number of GPUs, 4 for multiples of 4 in addition.
        options: of the benchmark, as on a command line.
        variants: ours and peers; empty for those that the benchmark has without the option.
        variables: environment variables of its process.
    """

    name: str
    benchmark: str
    gpus: Sequence[int]
    options: str = ""
    variants: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The benchmark's full name."""
        return f"{PACKAGE}.{self.benchmark}"

    def command(self, gpus: int, *, append: bool, rows: Path | None, traces: Path | None) -> list[str]:
        """Return the command that runs the race on ``gpus`` GPUs."""
        # Without a launcher a single process has no process group, so that neither the rendezvous
        # nor collectives of size 1 are part of what is measured.
        command = [sys.executable]
        if gpus > 1:
            command += ["-m", "torch.distributed.run", "--nproc_per_node", str(gpus)]
        command += ["-m", self.module, *shlex.split(self.options)]
        if self.variants:
            command += ["--variants", *self.variants]
        if append:
            command.append("--append")
        if rows:
            command += ["--csv", str(rows / f"{self.benchmark}.csv")]
        if traces and self.benchmark == "train_step":
            command += ["--traces", str(traces)]
        return command


def races(gpus: int) -> list[Race]:
    """Return the races for a number of GPUs, the most important first."""
    table: dict[str, Any] = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    sets = [1]
    if gpus > 1:
        sets = [2, 4] if gpus % 4 == 0 else [2]
    found: list[Race] = []
    for row in table["race"]:
        variables = table["variables"].get(row["benchmark"], {}) | row.get("variables", {})
        race = Race(**{**row, "variables": variables})
        if set(sets) & set(race.gpus):
            found.append(race)
    return found


def run(race: Race, args: argparse.Namespace, limit_s: float) -> bool:
    """Run a race for at most ``limit_s`` seconds and return whether it succeeded.

    Afterwards the process and its ranks have ended, except ranks of a launcher that hung.
    """
    command = race.command(args.gpus, append=args.append, rows=args.rows, traces=args.traces)
    log = args.logs / f"{race.name}_T{args.gpus}.log"
    # A user's own setting takes precedence: it is later in the dict.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", **race.variables, **os.environ}
    print(f"{race.name}: {shlex.join(command)} > {log}", flush=True)
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        # A session of its own makes the race a process group, which _end can kill, and keeps a
        # Ctrl-C in the terminal from it: this process receives the signal and ends the race.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        result = "done"
        try:
            code = process.wait(limit_s)
            if code != 0:
                result = f"failed ({code})"
        except subprocess.TimeoutExpired:
            result = f"failed (stopped after {limit_s:.0f} s: see --timeout-s and --seconds)"
        finally:
            _end(process)
    print(f"{race.name}: {result}, {time.monotonic() - start:.0f} s", flush=True)
    return result == "done"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a race's process, if it still runs."""
    # SIGTERM first: torchrun then ends its ranks, which are in other sessions and so are not in the
    # process group that SIGKILL reaches.
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="races by name")
    parser.add_argument("--list", action="store_true", help="print the races' commands and end")
    parser.add_argument("--append", action="store_true", help="append the rows to the files of --rows")
    parser.add_argument("--rows", type=Path, help="folder of the rows' files, default docs/benchmarks")
    parser.add_argument("--traces", type=Path, help="write Chrome traces of one step of each variant there, one a rank")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--timeout-s", type=float, default=1800, help="limit of one race")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="limit of all races together")
    args = parser.parse_args()
    # The races run in the repository's root.
    args.traces = args.traces and args.traces.resolve()
    args.rows = args.rows and args.rows.resolve()
    if args.gpus < 1:
        parser.error(f"--gpus must be at least 1, got {args.gpus}")
    chosen = races(args.gpus)
    names = [race.name for race in chosen]
    unknown = sorted(set(args.only or ()) - set(names))
    if unknown:
        missing = ", ".join(unknown)
        parser.error(f"no races called {missing} with --gpus {args.gpus}: there are {', '.join(names)}")
    chosen = [race for race in chosen if not args.only or race.name in args.only]
    if args.list:
        for race in chosen:
            command = race.command(args.gpus, append=args.append, rows=args.rows, traces=args.traces)
            variables = [f"{name}={value}" for name, value in race.variables.items()]
            print(f"{race.name}: {shlex.join([*variables, *command])}")
        return 0
    if args.gpus > visible_gpus():
        parser.error(f"--gpus {args.gpus} needs as many NVIDIA GPUs, {visible_gpus()} are visible")
    return run_all(chosen, args)


def run_all(chosen: Sequence[Race], args: argparse.Namespace) -> int:
    """Run the races and return the exit code: 0, 1 if a race failed, or 128 + a signal's number."""
    # SystemExit passes through run's ``finally``, which ends the running race.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    args.logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    failed: list[str] = []
    for race in chosen:
        limit_s = min(args.timeout_s, end - time.monotonic())
        if limit_s <= 0 or not run(race, args, limit_s):
            failed.append(race.name)
    if failed:
        names = ", ".join(failed)
        print(f"error: {len(failed)} of {len(chosen)} races failed or did not begin, logs in {args.logs}: {names}")
        return 1
    return 0


def visible_gpus() -> int:
    """Return the number of visible NVIDIA GPUs."""
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
