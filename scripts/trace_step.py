"""Lists the files that one training step enters: LLaMA on two CPU ranks, from forward to optimizer.

torchrun --nproc_per_node 2 scripts/trace_step.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from source_lines import code_lines
from transformers import LlamaConfig

from nxd_memopt.backends import backend
from nxd_memopt.config import ParallelConfig
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.optimizer import AdamW, NeuronZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.utils import leave_process_groups

ROOT = Path(__file__).resolve().parent.parent
ROOTS = (str(ROOT / "nxd_memopt"), str(ROOT / "models"))
CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
)


class Tracer:
    """Collects the files of this library whose functions are called."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        del event, argument
        # Only calls are traced: the function returns None, so the lines of a call are not.
        file = frame.f_code.co_filename
        if file.startswith(ROOTS):
            self.files.add(str(Path(file).resolve().relative_to(ROOT)))


def main() -> None:
    backend.init_process_group()
    world = parallel_state.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    parallel = ParallelConfig(world, sequence_parallel_enabled=world > 1)
    model = LlamaForCausalLM(CONFIG, parallel=parallel, dtype=torch.bfloat16)
    optimizer = NeuronZero1Optimizer(
        model.parameters(), AdamW, optimizer_dtype=torch.float32, grad_clipping=True, max_norm=1.0, lr=1e-3
    )
    ids = torch.arange(32).unsqueeze(0)

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    # The second step is traced: the first one builds what later steps reuse. On the CPU backward
    # runs on the calling thread.
    step()
    tracer = Tracer()
    sys.setprofile(tracer)
    step()
    sys.setprofile(None)

    if parallel_state.is_global_rank_zero():
        lines = {file: len(code_lines((ROOT / file).read_text(encoding="utf-8"))) for file in tracer.files}
        for file in sorted(lines):
            print(f"{lines[file]:5d} {file}")
        print(f"{sum(lines.values()):5d} lines of code in {len(lines)} files")
    leave_process_groups()


if __name__ == "__main__":
    main()
