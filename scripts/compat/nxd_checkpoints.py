"""Compares checkpoints of neuronx-distributed's own code with this library's, in both directions, value by value.

``python scripts/compat/nxd_checkpoints.py --source NXD_CHECKOUT`` prints a table. One library
writes a checkpoint of an example's model and the other reads it at several sizes. Hugging Face
weights are converted, loaded and saved by neuronx-distributed's model, and converted back. The
``CheckpointConverterBase`` of both libraries converts the same weights.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nxd_converters import compare_converters
from train_examples import require_overlay

ROOT = Path(__file__).resolve().parents[2]
RANK = Path(__file__).with_name("nxd_checkpoint_rank.py")
TIMEOUT_S = 1200


@dataclass(frozen=True)
class Case:
    """Checkpoint to write and read.

    Args:
        options: options of ``nxd_checkpoint_rank.py``.
        tensor, world: T and number of ranks of the run that writes.
        readers: (T, ranks) of runs in which this library reads neuronx-distributed's files.
        example: example with the modeling file.
    """

    options: tuple[str, ...]
    tensor: int
    world: int
    readers: tuple[tuple[int, int], ...]
    example: str = "llama"

    def describe(self) -> str:
        """Return example and options as text."""
        return f"{self.example} {' '.join(option.strip('-') for option in self.options)}".replace("api ", "")


CASES = (
    Case(("--api", "trainer", "--xser", "--optimizer"), 2, 4, ((2, 4), (1, 1), (4, 4), (2, 2), (1, 3))),
    Case(("--api", "trainer", "--optimizer"), 4, 4, ((4, 4), (2, 4), (1, 2))),
    Case(("--api", "layers", "--optimizer"), 2, 4, ((2, 4),)),
    Case(("--api", "layers", "--xser"), 2, 2, ((2, 2),)),
    Case(("--api", "trainer", "--xser"), 2, 2, ((2, 2), (1, 1), (4, 4)), "gpt_neox"),
)
ROUND_TRIPS = (
    ("separate", 2, 1, "consecutive", False),
    ("linear", 4, 2, "strided", False),
    ("fused", 4, 2, "strided", True),
)


def main() -> int:
    """Run all parts; the exit code is 0 if all values are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="checkout of neuronx-distributed, release 2.29")
    parser.add_argument("--only", choices=("ranks", "weights", "converters"), help="one part of the table")
    arguments = parser.parse_args()
    source = arguments.source.resolve()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        parts = {"ranks": run_ranks, "weights": run_weights, "converters": compare_converters}
        for name, part in parts.items():
            if arguments.only in (None, name):
                for what, result in part(source, Path(folder)):
                    failures += not result.startswith("equal")
                    print(f"| {what} | {result} |", flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def run_ranks(source: Path, folder: Path):
    """Yield a row for each reader of neuronx-distributed's files, and for NxD reading ours."""
    for number, case in enumerate(CASES):
        theirs, ours = folder / f"nxd_{number}", folder / f"ours_{number}"
        sizes = f"T={case.tensor} D={case.world // case.tensor}"
        launch("nxd", case, "write", source, theirs, case.tensor, case.world)
        for tensor, world in case.readers:
            result = launch("ours", case, "read", source, theirs, tensor, world)
            yield f"{case.describe()}: NxD's {sizes} read here at T={tensor} D={world // tensor}", result
        launch("ours", case, "write", source, ours, case.tensor, case.world)
        result = launch("nxd", case, "read", source, ours, case.tensor, case.world)
        yield f"{case.describe()}: ours {sizes} read by NxD", result


def launch(
    library: str, case: Case, task: str, source: Path, directory: Path, tensor: int, world: int, *more: str
) -> str:
    """Run the ranks; return ``equal, ...`` or the last line of the error."""
    variables = {"nxd": {"NXD_CPU_MODE": "1", "PJRT_DEVICE": "CPU"}, "ours": {"NXD_MEMOPT_BACKEND": "cpu"}}[library]
    overlay = {"PYTHONPATH": str(require_overlay(case.example)), "OMP_NUM_THREADS": "1"}
    python = ROOT / (".venv-xla" if library == "nxd" else ".venv") / "bin" / "python"
    program = [str(RANK)] if library == "nxd" else ["-m", "nxd_memopt.compat", str(RANK)]
    command = [str(python), "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", *program]
    command += ["--library", library, "--task", task, "--example", case.example, "--source", str(source)]
    command += ["--directory", str(directory), "--tensor", str(tensor), *case.options, *more]
    environment = {**os.environ, **variables, **overlay}
    finished = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    counts = [line for line in finished.stdout.splitlines() if "COMPARED" in line]
    if finished.returncode == 0:
        return f"equal, {counts[0].split('COMPARED ')[1] if counts else 'written'} on each rank"
    errors = [line for line in finished.stderr.splitlines() if "Error" in line and "ChildFailed" not in line]
    return f"FAILED {task} on {library}: {errors[-1] if errors else finished.stderr[-500:]}"


def run_weights(source: Path, folder: Path):
    """Yield a row per form of weights: Hugging Face -> our files -> NxD's files -> Hugging Face."""
    import torch
    import transformers
    from safetensors.torch import load_file

    from nxd_memopt.checkpoint.nxd import from_nxd, to_nxd
    from nxd_memopt.checkpoint.nxd.parts import Layout
    from nxd_memopt.checkpoint.nxd.writing import Target

    for form, size, replicas, order, xser in ROUND_TRIPS:
        case = folder / f"weights_{form}"
        sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2 if replicas > 1 else 4}
        config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=False)  # pyright: ignore[reportArgumentType]
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(case / "hf")
        layout = Layout(size, replicas, order)  # pyright: ignore[reportArgumentType]
        target = Target(layout, form, xser=xser)  # pyright: ignore[reportArgumentType]
        to_nxd(case / "hf", case / "ours" / "tag", target, progress=lambda line: None)
        options = ("--api", "trainer", "--kv-replicas", str(replicas), *(("--fused",) if form == "fused" else ()))
        options += ("--xser",) if xser else ()
        more = ("--source-tag", str(case / "ours" / "tag"))
        result = launch("nxd", Case(options, size, size, ()), "copy", source, case / "nxd", size, size, *more)
        if result.startswith("equal"):
            lines: list[str] = []
            config_file = case / "hf" / "config.json"
            from_nxd(case / "nxd" / "tag", case / "back", config=config_file, progress=lines.append)
            wanted, got = (load_file(case / name / "model.safetensors") for name in ("hf", "back"))
            equal = wanted.keys() == got.keys() and all(wanted[name].equal(got[name]) for name in wanted)
            result = f"equal, {len(wanted)} tensors" if equal else "FAILED: other values came back"
        yield f"HF -> NxD -> HF through NxD's model: {form}, T={size}, m={replicas} {order}", result


if __name__ == "__main__":
    sys.exit(main())
