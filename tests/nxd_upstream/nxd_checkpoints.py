"""Compares checkpoints of neuronx-distributed's own code with this library's, in both directions, value by value.

``python tests/nxd_upstream/nxd_checkpoints.py --source NXD_CHECKOUT`` prints a table. One library
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

from nxd_converters import VARIABLES, VENVS, compare_converters
from train_examples import require_overlay

ROOT = Path(__file__).resolve().parents[2]
RANK = Path(__file__).with_name("nxd_checkpoint_rank.py")
TIMEOUT_S = 1200
# ``python -m nxd_memopt.compat PROGRAM`` runs the ranks' program with the alias.
PROGRAMS = {"nxd": (str(RANK),), "ours": ("-m", "nxd_memopt.compat", str(RANK))}


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
        options = " ".join(option.strip("-") for option in self.options)
        return f"{self.example} {options}".replace("api ", "")


CASES = (
    Case(
        ("--api", "trainer", "--xser", "--optimizer"),
        2,
        4,
        ((2, 4), (1, 1), (4, 4), (2, 2), (1, 3)),
    ),
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
    # Results are texts that begin with "equal" or "FAILED": a failure does not end the run, and
    # the table shows all of them.
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        comparisons = {
            "ranks": run_ranks,
            "weights": run_weights,
            "converters": compare_converters,
        }
        for name, rows_of in comparisons.items():
            if arguments.only not in (None, name):
                continue
            for what, result in rows_of(source, Path(folder)):
                failures += not result.startswith("equal")
                print(f"| {what} | {result} |", flush=True)
    print(f"{failures} failures")
    return int(failures > 0)


def run_ranks(source: Path, folder: Path):
    """Yield a row for each reader of neuronx-distributed's files, and for NxD reading ours."""
    # Our reader may have other T and D than the run that wrote. neuronx-distributed is only asked
    # to read files of its own sizes.
    for number, case in enumerate(CASES):
        theirs = folder / f"nxd_{number}"
        ours = folder / f"ours_{number}"
        sizes = f"T={case.tensor} D={case.world // case.tensor}"
        launch("nxd", case, "write", source, theirs, case.tensor, case.world)
        for tensor, world in case.readers:
            result = launch("ours", case, "read", source, theirs, tensor, world)
            read_at = f"T={tensor} D={world // tensor}"
            yield f"{case.describe()}: NxD's {sizes} read here at {read_at}", result
        launch("ours", case, "write", source, ours, case.tensor, case.world)
        result = launch("nxd", case, "read", source, ours, case.tensor, case.world)
        yield f"{case.describe()}: ours {sizes} read by NxD", result


def launch(
    library: str,
    case: Case,
    task: str,
    source: Path,
    directory: Path,
    tensor: int,
    world: int,
    *more: str,
) -> str:
    """Run the ranks; return ``equal, ...`` or the last line of the error."""
    # Both libraries run the example's modeling file, so both need the transformers version that
    # the example pins: the overlay precedes the environments' own.
    environment = {
        **os.environ,
        **VARIABLES[library],
        "PYTHONPATH": str(require_overlay(case.example)),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        str(ROOT / VENVS[library] / "bin" / "python"),
        *("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"),
        *PROGRAMS[library],
        *("--library", library),
        *("--task", task),
        *("--example", case.example),
        *("--source", str(source)),
        *("--directory", str(directory)),
        *("--tensor", str(tensor)),
        *case.options,
        *more,
    ]
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # Ranks that compare print what they have compared. torchrun's own error, ChildFailedError,
    # follows those of the ranks and does not say what happened.
    if finished.returncode == 0:
        counts = [line for line in finished.stdout.splitlines() if "COMPARED" in line]
        compared = "written"
        if counts:
            compared = counts[0].split("COMPARED ")[1]
        return f"equal, {compared} on each rank"
    lines = [line for line in finished.stderr.splitlines() if "Error" in line]
    errors = [line for line in lines if "ChildFailed" not in line]
    error = finished.stderr[-500:]
    if errors:
        error = errors[-1]
    return f"FAILED {task} on {library}: {error}"


def run_weights(source: Path, folder: Path):
    """Yield a row per form of weights: Hugging Face -> our files -> NxD's files -> Hugging Face."""
    import torch
    import transformers
    from safetensors.torch import load_file

    from nxd_memopt.checkpoint.nxd import from_nxd, to_nxd
    from nxd_memopt.checkpoint.nxd.parts import Layout
    from nxd_memopt.checkpoint.nxd.writing import Target

    for form, size, replicas, order, xser in ROUND_TRIPS:
        # The sizes of example_rank.py's models. With KV replicas, 2 KV heads for 4 ranks: each
        # head is on two of them.
        case = folder / f"weights_{form}"
        kv_heads = 4
        if replicas > 1:
            kv_heads = 2
        config = transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=False,
        )
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(case / "hf")
        layout = Layout(size, replicas, order)  # pyright: ignore[reportArgumentType]
        target = Target(layout, form, xser=xser)  # pyright: ignore[reportArgumentType]
        to_nxd(case / "hf", case / "ours" / "tag", target, progress=lambda line: None)
        options = ["--api", "trainer", "--kv-replicas", str(replicas)]
        if form == "fused":
            options.append("--fused")
        if xser:
            options.append("--xser")
        # neuronx-distributed's model loads our files and saves its own: what comes back has been
        # accepted by its loader and written by its code.
        more = ("--source-tag", str(case / "ours" / "tag"))
        copy = Case(tuple(options), size, size, ())
        result = launch("nxd", copy, "copy", source, case / "nxd", size, size, *more)
        if result.startswith("equal"):
            lines: list[str] = []
            config_file = case / "hf" / "config.json"
            from_nxd(case / "nxd" / "tag", case / "back", config=config_file, progress=lines.append)
            expected = load_file(case / "hf" / "model.safetensors")
            actual = load_file(case / "back" / "model.safetensors")
            result = f"equal, {len(expected)} tensors"
            if expected.keys() != actual.keys() or not all(
                tensor.equal(actual[name]) for name, tensor in expected.items()
            ):
                result = "FAILED: other values came back"
        what = f"HF -> NxD -> HF through NxD's model: {form}, T={size}, m={replicas} {order}"
        yield what, result


if __name__ == "__main__":
    sys.exit(main())
