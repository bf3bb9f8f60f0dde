"""Compares neuronx-distributed's example models: its package, this library through the alias, our own files.

``python tests/nxd_upstream/train_examples.py --source NXD_CHECKOUT`` trains each case for five steps on
CPU ranks and writes docs/benchmarks/nxd_examples.csv. The example on our library runs in an
environment with the transformers version that it pins and with our wheel (.venv-compat, created on
demand). neuronx-distributed runs in .venv-xla with the example's pins first on its path. Our own
modeling files run in .venv.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from installed import PINS, environment_with_wheel

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "benchmarks" / "nxd_examples.csv"
OVERLAYS = ROOT / ".venv-compat"
# fp32 numbers near 5 are 5e-7 apart. Five steps of AdamW with another order of sums stay within 20
# of these steps.
TOLERANCE = 1e-5
TIMEOUT_S = 600


@dataclass(frozen=True)
class Case:
    """Training to compare.

    Args:
        example: example with the modeling file.
        tensor: T. Sequence parallelism is on if T exceeds 1.
        world: number of ranks, which have world / T data-parallel replicas.
        options: options of ``example_rank.py``, for every library.
        nxd_options: additional options for neuronx-distributed.
        stages: P of the example on our library; the others train without stages.
        chunks: V, stages of each rank.
        fault: fault of neuronx-distributed or of the example if losses must differ; else empty.
        differs: pairs of libraries whose losses must differ.
        libraries: those that are compared.
    """

    example: str
    tensor: int = 2
    world: int = 2
    options: tuple[str, ...] = ()
    nxd_options: tuple[str, ...] = ()
    stages: int = 1
    chunks: int = 1
    fault: str = ""
    differs: tuple[tuple[str, str], ...] = ()
    libraries: tuple[str, ...] = ("nxd", "ours", "models")


# Our own Mixtral has transformers' names and layout, and E instead of E/k in its balancing loss: it
# is compared with transformers (docs/numerics.md).
BOTH = ("nxd", "ours")
CASES = (
    Case("llama"),
    Case("llama", options=("--recompute",)),
    Case("llama", options=("--ignored-labels",)),
    Case("llama", world=4),
    Case("llama", tensor=1, world=1, stages=2, options=("--layers=4",)),
    Case("llama", tensor=1, world=1, stages=2, chunks=2, options=("--layers=4",)),
    Case("llama", stages=2, options=("--layers=4", "--recompute")),
    Case("gpt_neox", tensor=1, world=1),
    Case(
        "gpt_neox",
        fault="stride=3 of query_key_value against its per-head view: the example's model depends on T",
        differs=(("ours", "models"), ("nxd", "models")),
    ),
    Case("gpt_neox", options=("--recompute",), fault="as above", differs=(("ours", "models"), ("nxd", "models"))),
    Case(
        "gpt_neox",
        nxd_options=("--without-hook",),
        fault="the script never sums sequence-parallel gradients; our ZeRO-1 does",
        differs=(("ours", "nxd"), ("ours", "models"), ("nxd", "models")),
    ),
    Case(
        "gpt_neox",
        tensor=1,
        world=1,
        options=("--ignored-labels",),
        fault="the example averages over all tokens; labels of -100 count in neuronx-distributed's loss, as 0 in ours",
        differs=(("ours", "nxd"), ("ours", "models"), ("nxd", "models")),
    ),
    Case("mixtral", libraries=BOTH),
    Case("mixtral", libraries=BOTH, options=("--capacity-factor=1.0",)),
)
# Environment and variables of each library's ranks; the example on ours has the wheel's own.
VENVS = {"nxd": ".venv-xla", "models": ".venv"}
VARIABLES = {
    "nxd": {"NXD_CPU_MODE": "1", "PJRT_DEVICE": "CPU"},
    "ours": {"NXD_MEMOPT_BACKEND": "cpu"},
    "models": {"NXD_MEMOPT_BACKEND": "cpu"},
}


def main() -> int:
    """Train all cases and write the table; the exit code is 0 if all are as expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="checkout of neuronx-distributed, release 2.29")
    parser.add_argument("--output", type=Path, default=TABLE)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to run, from 0; default all")
    options = parser.parse_args()
    chosen = [case for i, case in enumerate(CASES) if options.only is None or i in options.only]
    source = options.source.resolve()
    rows: list[dict[str, str]] = []
    problems: list[str] = []
    for case in chosen:
        losses = {library: run(case, library, source) for library in case.libraries}
        problems += check(case, losses)
        rows += [row(case, library, losses) for library in case.libraries]
        print("\n".join(str(each) for each in rows[-len(case.libraries) :]), flush=True)
    write(options.output, rows)
    print("\n".join(problems) or f"{len(chosen)} cases as expected; {options.output}")
    return int(bool(problems))


def run(case: Case, library: str, source: Path) -> list[float]:
    """Return the losses of one library, trained in new processes."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "losses.json"
        arguments = [
            *("--library", library),
            *("--example", case.example),
            *("--source", str(source)),
            *("--output", str(output)),
            *("--tensor", str(case.tensor)),
            *case.options,
        ]
        # ``python -m nxd_memopt.compat PROGRAM`` runs a program with the alias: its imports of
        # neuronx_distributed are imports of this library. Without it they are NxD's own package.
        rank = str(Path(__file__).with_name("example_rank.py"))
        program = ["-m", "nxd_memopt.compat", rank]
        if library == "nxd":
            program = [rank]
            arguments += case.nxd_options
        world = case.world
        if library == "ours":
            world *= case.stages
            arguments += [f"--pipeline={case.stages}", f"--chunks={case.chunks}"]
        python = str(folder_of(case, library) / "bin" / "python")
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
        finished = subprocess.run(
            [python, *ranks, *program, *arguments],
            env=environment(case, library),
            cwd=directory,  # in the checkout, -m would import the library from there
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if finished.returncode:
            text = f"{finished.stdout[-2000:]}\n{finished.stderr[-6000:]}"
            raise RuntimeError(f"{library} failed on {case}:\n{text}")
        return json.loads(output.read_text(encoding="utf-8"))


def folder_of(case: Case, library: str) -> Path:
    """Return the virtual environment in which a library runs."""
    if library == "ours":
        return environment_with_wheel(case.example)
    return ROOT / VENVS[library]


def environment(case: Case, library: str) -> dict[str, str]:
    """Return the environment variables of a library's ranks."""
    # One thread per rank: the order of sums in a matmul depends on the number of threads.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **VARIABLES[library]}
    if library == "nxd":
        variables["PYTHONPATH"] = str(require_overlay(case.example))
    return variables


def require_overlay(example: str) -> Path:
    """Return a folder with only the packages that the example pins, to precede .venv-xla's path."""
    pins = PINS[example]
    folder = OVERLAYS / f"overlay-{pins[0].replace('==', '-')}"
    if not (folder / "transformers").is_dir():
        # Without dependencies: the other packages, PyTorch above all, are .venv-xla's.
        python = str(ROOT / ".venv" / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), *pins], check=True)
    return folder


def check(case: Case, losses: dict[str, list[float]]) -> list[str]:
    """Return a message for each pair of libraries that does not compare as expected."""
    # Losses that are equal where a fault is documented are a problem too: the fault may have been
    # repaired, and then the documentation is out of date.
    problems: list[str] = []
    for first, second in (("ours", "nxd"), ("ours", "models"), ("nxd", "models")):
        if not {first, second} <= losses.keys():
            continue
        difference = max_difference(losses[first], losses[second])
        expected = (first, second) in case.differs
        if (difference > TOLERANCE) != expected:
            problems.append(f"{case}: {first} and {second} differ by {difference:.1e}, expected: {expected}")
    return problems


def max_difference(first: list[float], second: list[float]) -> float:
    """Return the largest absolute difference of two lists of losses."""
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def row(case: Case, library: str, losses: dict[str, list[float]]) -> dict[str, str]:
    """Return a library's row of the table."""
    names = {
        "nxd": "neuronx-distributed",
        "ours": "the example on nxd_memopt",
        "models": "nxd_memopt.models",
    }
    return {
        "example": case.example,
        "tensor_parallel": str(case.tensor),
        "data_parallel": str(case.world // case.tensor),
        "options": " ".join(option.strip("-") for option in (*case.options, *case.nxd_options)),
        "pipeline_parallel": f"{case.stages} x {case.chunks}" if library == "ours" else "1 x 1",
        "library": names[library],
        **{f"loss_{step}": f"{loss:.6f}" for step, loss in enumerate(losses[library])},
        "max_difference_to_nxd": f"{max_difference(losses[library], losses['nxd']):.1e}",
        "fault": case.fault,
    }


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write the table as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
