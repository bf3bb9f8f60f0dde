"""Runs neuronx-distributed's LLaMA script with stages, ``run_llama_nxd.py``, unchanged on this library's alias.

``python tests/nxd_upstream/nxd_script.py --source NXD_CHECKOUT`` trains T=2 on two CPU ranks, and with two stages on
four, from the same weights, and resumes their checkpoints. Losses and norms must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from installed import environment_with_wheel

STEPS = 4
SAVED = 2
ROWS = 64
SEQUENCE = 32
VOCABULARY = 128
LAYERS = 4
TIMEOUT_S = 600
# fp32 numbers near 5 are 5e-7 apart. Stages add micro-batches and norms in another order.
TOLERANCE = 2e-6
ARGUMENTS = ("--tensor_parallel_size", "2", "--train_batch_size", "8", "--num_microbatches", "4")
ARGUMENTS += ("--seq_len", str(SEQUENCE), "--max_steps", str(STEPS), "--checkpoint_freq", str(SAVED))
ARGUMENTS += ("--lr", "0.003", "--min_lr", "0.0001", "--warmup_steps", "1", "--constant_steps", "0")
ARGUMENTS += ("--use_zero1_optimizer", "1")
_STEP = re.compile(r"^step (\d+) .* step loss (\S+) grad norm (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """A run of the script.

    Args:
        name: directory of its checkpoints.
        stages: P, on 2 * P ranks.
        options: further options.
        resumes: run whose checkpoint it begins from; empty for none.
    """

    name: str
    stages: int
    options: tuple[str, ...] = ()
    resumes: str = ""


CASES = (
    Case("whole", 1),
    Case("stages", 2),
    Case("chunks", 2, ("--virtual_pipeline_size", "2")),
    Case("meta", 2, ("--use_meta_device_init", "1")),
    Case("resumed_stages", 2, resumes="stages"),
    Case("stages_on_whole", 1, resumes="stages"),
    Case("whole_on_stages", 2, resumes="whole"),
)
EXACT = {"resumed_stages": "stages"}
"""Runs that have the bits of another one; all have the losses of the first run."""


def main() -> int:
    """Run all cases; the exit code is 0 if all are as expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="checkout of neuronx-distributed, release 2.29")
    parser.add_argument("--write-inputs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write_inputs is not None:
        write_inputs(options.write_inputs)
        return 0
    python = environment_with_wheel("llama") / "bin" / "python"
    problems: list[str] = []
    found: dict[str, dict[int, tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        # The environment of the example has the datasets library, in whose format the script reads.
        program = [python, str(Path(__file__).resolve()), "--write-inputs", str(directory)]
        subprocess.run(program, check=True, cwd=directory)
        for case in CASES:
            found[case.name] = run(case, python, options.source.resolve(), directory)
            print(case.name, found[case.name], flush=True)
            problems += check(case, found)
    print("\n".join(problems) or f"{len(CASES)} runs of the script as expected")
    return int(bool(problems))


def write_inputs(directory: Path) -> None:
    """Write random rows of tokens, and the configuration of a small model."""
    import datasets
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, SEQUENCE)).tolist()
    rows = {"input_ids": tokens, "attention_mask": [[1] * SEQUENCE] * ROWS, "labels": tokens}
    datasets.Dataset.from_dict(rows).save_to_disk(str(directory / "data"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "max_position_embeddings": SEQUENCE,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 4,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }
    (directory / "config").mkdir()
    (directory / "config" / "config.json").write_text(json.dumps(config))


def run(case: Case, python: Path, source: Path, directory: Path) -> dict[int, tuple[float, float]]:
    """Return loss and norm of each step that a run of the script has logged."""
    folder = source / "examples" / "training" / "llama"
    script = folder / "tp_pp_llama_hf_pretrain" / "run_llama_nxd.py"
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(2 * case.stages)]
    checkpoints = directory / (case.resumes or case.name)
    arguments = [*ARGUMENTS, "--pipeline_parallel_size", str(case.stages), *case.options]
    arguments += ["--training_dir", str(directory / "data"), "--training_config", str(directory / "config")]
    arguments += ["--checkpoint_dir", str(checkpoints)]
    if case.resumes:
        arguments += ["--loading_step", str(SAVED)]
    finished = subprocess.run(
        [str(python), *ranks, "-m", "nxd_memopt.compat", str(script), *arguments],
        # The script imports its neighbors.
        env={**os.environ, "PYTHONPATH": str(folder), "NXD_MEMOPT_BACKEND": "cpu", "OMP_NUM_THREADS": "1"},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if finished.returncode:
        raise RuntimeError(f"{case} failed:\n{finished.stdout[-2000:]}\n{finished.stderr[-6000:]}")
    return {int(step): (float(loss), float(norm)) for step, loss, norm in _STEP.findall(finished.stdout)}


def check(case: Case, found: dict[str, dict[int, tuple[float, float]]]) -> list[str]:
    """Return a message for each step of a case whose loss or norm is not the expected one."""
    first = SAVED if case.resumes else 0
    own = found[case.name]
    if list(own) != list(range(first, STEPS)):
        return [f"{case}: steps {list(own)}"]
    problems: list[str] = []
    for step, values in own.items():
        expected = found[CASES[0].name][step]
        if max(abs(a - b) for a, b in zip(values, expected, strict=True)) > TOLERANCE:
            problems.append(f"{case}: step {step} has {values}, expected {expected}")
        exact = found[EXACT.get(case.name, case.name)][step]
        if values != exact:
            problems.append(f"{case}: step {step} has {values}, expected exactly {exact}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
