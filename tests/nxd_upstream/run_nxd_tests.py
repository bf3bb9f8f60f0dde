"""Runs neuronx-distributed's own tests, unchanged, on CPU ranks, and records the counts.

tests/nxd_upstream/run_nxd_tests.py --source DIR [--library neuronx_distributed] [--only NAME] [--append]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("nxd_test_driver.py")
RECORD = ROOT / "docs" / "benchmarks" / "nxd_tests.csv"
COLUMNS = (
    *("library", "file", "ranks", "passed", "passes_on_nxd", "failed"),
    *("nxd_revision", "date", "torch", "commit"),
)
# Test tools that neuronx-distributed's MoE tests import; not in .venv, because nothing else needs them.
TOOLS = ROOT / ".venv-compat" / "test-tools"
TOOL_PINS = ("parameterized==0.9.0", "pytest-mock==3.15.1")
REVISION = "fbac349"  # release 2.29, neuronx-distributed 0.18
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Case:
    """Test file on a number of ranks.

    Attributes:
        file: path below the source's ``test`` folder.
        ranks: number of ranks; 0 runs pytest in one process.
        passes_on_nxd: number of tests that pass on neuronx-distributed itself, in its CPU mode with
            torch 2.9.
        mended: tests that must fail here, because they expect a fault of neuronx-distributed.
        select: pytest's ``-k`` expression.
        pins: packages that the file needs in other versions; see ``overlay``.
    """

    file: str
    ranks: int
    passes_on_nxd: int
    mended: tuple[str, ...] = ()
    select: str = ""
    pins: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """File and number of ranks."""
        if self.ranks == 0:
            return self.file
        return f"{self.file}@{self.ranks}"


UNIT = "unit_test/parallel_layers"
LAYERS = "integration/parallel_layers"
MOE = "unit_test/modules/moe"
# The names of cases of training have "training" in them. The other cases of the file are inference,
# and take 15 GB.
TRAINING = "(fwd and training) or bwd or loss_fn or shared_expert_correctness or group_limited"
PIPELINE = "unit_test/pipeline"
STAGES = "integration/parallel_layers/pipeline"
# transformers 5 has no fx tracer. The names of GPT-2's graph are those of 4.36.
GPT2_PINS = ("transformers==4.36.2", "tokenizers==0.15.2", "huggingface_hub==0.36.0")
LLAMA_PINS = ("transformers==4.48.0", "tokenizers==0.21.4", "huggingface_hub==0.36.0")
CASES = [
    Case(f"{PIPELINE}/test_auto_partition.py", 0, 2),
    Case(f"{PIPELINE}/test_input_signature.py", 0, 1),
    # The others replace private state of NxD's own execution, which the stages here do not have.
    Case(f"{PIPELINE}/test_manual_pipe.py", 0, 7, select="not stage_io"),
    Case(f"{PIPELINE}/test_partition.py", 0, 3, pins=GPT2_PINS),
    Case(f"{PIPELINE}/test_post_partition_hooks.py", 0, 2),
    Case(f"{PIPELINE}/test_scheduler.py", 0, 10),
    Case(f"{PIPELINE}/test_shared_weights.py", 0, 1, pins=GPT2_PINS),
    Case(f"{PIPELINE}/test_trace.py", 0, 8),
    Case("unit_test/utils/test_serialization.py", 0, 3),
    Case(f"{STAGES}/test_comm.py", 8, 2),
    Case(f"{STAGES}/manual_pp/test_training_pp.py", 4, 4),
    Case(f"{STAGES}/manual_pp/test_training_tp_pp.py", 4, 1, pins=LLAMA_PINS),
    Case(f"{STAGES}/manual_pp/test_training_tp_pp.py", 8, 2, pins=LLAMA_PINS),
    Case(f"{UNIT}/test_gqa_groups.py", 0, 1),
    Case(f"{UNIT}/test_padding.py", 0, 6),
    Case(f"{UNIT}/test_parallel_state.py", 0, 6),
    Case(f"{UNIT}/test_layers.py", 0, 3, select="lm_head_padding or RPL_preshard or check_pad_false"),
    Case("unit_test/utils/test_grouping_ranks.py", 0, 4),
    Case("unit_test/utils/test_parallel_layer_utils.py", 0, 1),
    Case("unit_test/utils/test_casting_utils.py", 0, 3),
    Case("unit_test/wrapper/test_nxd_config.py", 0, 7),
    Case(f"{LAYERS}/test_layers.py", 2, 22),
    Case(f"{LAYERS}/test_layers.py", 4, 33),
    Case(f"{LAYERS}/test_layers.py", 8, 44),
    Case(f"{LAYERS}/test_loss_functions.py", 1, 2),
    Case(f"{LAYERS}/test_loss_functions.py", 2, 4),
    Case(f"{LAYERS}/test_loss_functions.py", 4, 6),
    Case(f"{LAYERS}/test_parallel_state.py", 1, 2),
    Case(f"{LAYERS}/test_parallel_state.py", 2, 4),
    Case(f"{LAYERS}/test_parallel_state.py", 4, 6, mended=("test_get_tensor_model_parallel_src_rank[4]",)),
    Case("integration/modules/test_qkv_linear.py", 4, 2),
    Case("integration/modules/test_qkv_linear.py", 8, 2),
    Case(f"{MOE}/test_moe_configs.py", 0, 12),
    Case(f"{MOE}/test_moe_config_validator.py", 0, 15),
    Case(f"{MOE}/test_token_shuffle.py", 0, 1),
    Case(f"{MOE}/test_impl_correctness.py", 0, 118, select=TRAINING),
]


@dataclass(frozen=True)
class Outcome:
    """Result of a case: names of tests, and the output of its process."""

    case: Case
    passed: list[str]
    failed: list[str]
    output: str

    @property
    def as_expected(self) -> bool:
        """Whether exactly the mended tests fail, and no test is missing."""
        expected = self.case.passes_on_nxd - len(self.case.mended)
        return set(self.failed) == set(self.case.mended) and len(self.passed) == expected


def main() -> int:
    """Run the cases one after another; the exit code is 0 if all results are as expected."""
    args = parse_args()
    # The expectations are those of our library. On neuronx-distributed itself the run only counts,
    # to check the numbers in ``passes_on_nxd``.
    is_ours = args.library == "nxd_memopt"
    require_tools()
    outcomes: list[Outcome] = []
    for case in CASES:
        if args.only not in case.name:
            continue
        outcome = run(case, args.source.resolve(), args.library)
        outcomes.append(outcome)
        print(row(outcome), flush=True)
        if is_ours and not outcome.as_expected:
            print(outcome.output, file=sys.stderr)
    passed = sum(len(outcome.passed) for outcome in outcomes)
    cases = sum(outcome.case.passes_on_nxd for outcome in outcomes)
    print(f"{args.library}: {passed} of the {cases} cases that pass on neuronx-distributed")
    if args.append:
        append(outcomes, args.library)
    if is_ours and not all(outcome.as_expected for outcome in outcomes):
        return 1
    return 0


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="neuronx-distributed's source tree")
    parser.add_argument("--library", choices=("nxd_memopt", "neuronx_distributed"), default="nxd_memopt")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--append", action="store_true", help=f"record the counts in {RECORD.relative_to(ROOT)}")
    return parser.parse_args()


def require_tools() -> None:
    """Install the test tools, without dependencies, unless they are there."""
    marker = TOOLS / "complete.txt"
    content = "\n".join(TOOL_PINS)
    if marker.is_file() and marker.read_text() == content:
        return
    shutil.rmtree(TOOLS, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(TOOLS)]
    subprocess.run([*pip, *TOOL_PINS], check=True)
    marker.write_text(content)


def run(case: Case, source: Path, library: str) -> Outcome:
    """Run the driver, once or on each rank, and return its result."""
    kind = "unit"
    launcher: list[str] = []
    if case.ranks:
        kind = "integration"
        launcher = [
            *("-m", "torch.distributed.run", "--standalone"),
            f"--nproc_per_node={case.ranks}",
        ]
    # ``--select=...`` as one word: an expression may begin with a hyphen or be empty.
    arguments = [
        *(str(DRIVER), kind, case.file),
        *("--source", str(source)),
        *("--library", library),
        f"--select={case.select}",
    ]
    environment = {
        **os.environ,
        "NXD_MEMOPT_BACKEND": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(TOOLS), *map(str, overlay(case.pins))]),
    }
    # Some tests write files where they run.
    with tempfile.TemporaryDirectory() as directory:
        finished = subprocess.run(
            [sys.executable, *launcher, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            cwd=directory,
            timeout=TIMEOUT_S,
            check=False,
        )
    # The driver ends with exit code 0 even if tests fail, so a process without a result has
    # crashed: it counts as a failure, with a name that no case expects.
    output = finished.stdout + finished.stderr
    results = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    if not results:
        return Outcome(case, [], ["no result"], output)
    result = json.loads(results[-1].removeprefix("RESULT "))
    return Outcome(case, result["passed"], result["failed"], output)


def overlay(pins: tuple[str, ...]) -> list[Path]:
    """Return the folder of packages that precede .venv's, without their dependencies; none without pins."""
    if not pins:
        return []
    folder = TOOLS.with_name(f"test-{pins[0].replace('==', '-')}")
    if not (folder / "complete.txt").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *pins], check=True)
        (folder / "complete.txt").write_text("")
    return [folder]


def row(outcome: Outcome) -> str:
    """Return one line of text."""
    case = outcome.case
    text = f"{case.name:58} {len(outcome.passed):3} of {case.passes_on_nxd:3}"
    if outcome.failed:
        text += f"  failed: {', '.join(outcome.failed)}"
    return text


def append(outcomes: list[Outcome], library: str) -> None:
    """Append one line per case to the record."""
    import torch

    is_new = not RECORD.exists()
    revision = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(revision, capture_output=True, text=True, check=True).stdout.strip()
    today = datetime.now(UTC).date().isoformat()
    with RECORD.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        for outcome in outcomes:
            case = outcome.case
            cells = [library, case.file, case.ranks, len(outcome.passed), case.passes_on_nxd]
            cells += [" ".join(outcome.failed), REVISION, today, torch.__version__, commit]
            writer.writerow(cells)


if __name__ == "__main__":
    sys.exit(main())
