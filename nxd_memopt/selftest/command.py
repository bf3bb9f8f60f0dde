"""The command ``nxd-memopt selftest``: arguments, the page of results, and their JSON."""

from __future__ import annotations

import json
import os
import platform as host
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from nxd_memopt import __version__
from nxd_memopt._optional import require_installed
from nxd_memopt.command_line import FlagParser, count, require_directory
from nxd_memopt.files import write_text
from nxd_memopt.launch.machine import Machine
from nxd_memopt.launch.platforms import PLATFORMS
from nxd_memopt.selftest.check import ABSENT, FAILED, PASSED
from nxd_memopt.selftest.ranks import Collector, Result, default_platform, environment, ranks_of, run_ranks, sizes_of

TIME_S = 540
"""No check starts later: the last one may take a minute of the ten."""
_MARKS = {PASSED: "pass", FAILED: "FAIL", ABSENT: "n/a "}


def _parser() -> FlagParser:
    parser = FlagParser(
        "selftest",
        "Check this library on the device at hand, in ten minutes at most: operators, collectives, "
        "training, compilations, memory and checkpoints. Exit status 0: no check failed; 1: one failed; 2: wrong "
        "arguments.",
    )
    parser.add_argument(
        "--nproc", type=count, metavar="N", help="number of ranks; default: the host's NeuronCores or GPUs, 2 on CPUs"
    )
    default = "default: this host's"
    parser.add_argument("--platform", metavar="NAME", help=f"{', '.join(PLATFORMS)}, or an instance type; {default}")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON, for a bug report")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run all checks and print a line of each as it ends; return 0 if none failed, otherwise 1.

    Raises:
        ValueError: an argument is not valid, or the environment contradicts the platform.
        MissingDependencyError: a package of the training program is not installed.
    """
    options = _parser().parse_args(list(arguments))
    if options.output is not None:
        require_directory("--output", options.output)
    # Of the training program, which the ranks run; none is imported here.
    packages = ("transformers", "yaml", "rich", "tensorboard", "filelock")
    require_installed("nxd-memopt selftest", *packages, extra="train")
    started_s = time.time()
    machine = Machine.here()
    platform = options.platform or default_platform(os.environ, machine)
    processes = ranks_of(platform, options.nproc, machine)
    sizes = sizes_of(platform, processes)
    environ = environment(platform, processes, os.environ, machine)
    print(f"nxd-memopt selftest: {processes} ranks of platform {platform}, T of {sizes}", flush=True)
    with tempfile.TemporaryDirectory(prefix="nxd-memopt-selftest-") as directory:
        collector = Collector(Path(directory), processes, lambda result: print(line_of(result), flush=True))
        rest = [str(started_s + TIME_S), ",".join(map(str, sizes))]
        run_ranks(rest, processes, environ, collector, directory=Path(directory))
    failed = [result for result in collector.results if result.state == FAILED]
    passed = [result for result in collector.results if result.state == PASSED]
    seconds = round(time.time() - started_s)
    print(f"{len(passed)} passed, {len(failed)} failed, in {seconds} s", flush=True)
    if options.output is not None:
        document = {
            "version": __version__,
            "python": host.python_version(),
            "system": host.platform(),
            "platform": platform,
            "ranks": processes,
            "seconds": seconds,
            "results": [asdict(result) for result in collector.results],
        }
        write_text(options.output, json.dumps(document, indent=1) + "\n")
    return int(bool(failed))


def line_of(result: Result) -> str:
    """Return the line of a result; of a failed one a second line says what to turn off."""
    first, *others = result.text.split("\n")
    lines = [f"{_MARKS[result.state]} {result.name} ({result.seconds} s): {first}", *others]
    if result.state == FAILED and result.instead:
        lines.append(f"meanwhile: {result.instead}")
    return "\n     ".join(lines)
