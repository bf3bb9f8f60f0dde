"""Prints as JSON the step graphs that each pretended rank of four would compile; run as a program.

``python -m tests.xla.graphs MODEL RANK`` traces one rank in a process of its own, as a real rank would.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from nxd_memopt.backends import backend
from nxd_memopt.backends.neuron import xla_inspect
from nxd_memopt.certify.measure import hlo
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.models.mixtral import MixtralForCausalLM
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.selftest.golden import MODELS
from tests.reference_models import mixtral_config
from tests.xla.lint import unsupported

WORLD_SIZE = 4
# Static forms of experts, with the dispatcher between two expert-parallel ranks; T = 2.
EXPERTS: dict[str, dict[str, Any]] = {
    "padded_alltoall": {"moe_pad_expert_input_to_capacity": True, "moe_token_dispatcher_type": "alltoall"},
    "padded_allgather": {"moe_pad_expert_input_to_capacity": True},
    "blocks_allgather": {"moe_expert_block_size": 16},
}
SEQUENCE_LENGTH, BATCH_SIZE = 32, 2


def build(name: str) -> Any:
    """A model with sequence parallelism and full recompute."""
    memory = MemoryConfig(recompute_granularity="full")
    if name in MODELS:
        model_class, config = MODELS[name]
        parallel = ParallelConfig(WORLD_SIZE, sequence_parallel_enabled=True)
        return model_class(config(), parallel=parallel, memory=memory, device=backend.device)
    factor = 1.5 if "moe_pad_expert_input_to_capacity" in EXPERTS[name] else None
    moe = MoEConfig(4, moe_aux_loss_coeff=0.1, moe_expert_capacity_factor=factor, **EXPERTS[name])
    parallel = ParallelConfig(2, sequence_parallel_enabled=True, expert_model_parallel_size=2)
    return MixtralForCausalLM(mixtral_config(), parallel=parallel, memory=memory, moe=moe, device=backend.device)


def step_outputs(name: str) -> list[Tensor]:
    """Loss and gradients of a step with the gradient hook, not yet run."""
    model = build(name)
    ids = torch.arange(BATCH_SIZE * SEQUENCE_LENGTH).view(BATCH_SIZE, SEQUENCE_LENGTH) % model.config.vocab_size
    ids = ids.to(backend.device)
    backend.mark_step()
    loss = model(ids, labels=ids).loss
    loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    return [loss, *(param.grad for param in model.parameters())]


def compiled(outputs: list[Tensor]) -> str:
    """The optimised graph's text."""
    before = xla_inspect.dumped_modules()
    xla_inspect.compile_only(outputs)
    (name,) = xla_inspect.dumped_modules() - before
    (file,) = xla_inspect.dump_directory().glob(f"{name}.*after_optimizations.txt")
    return file.read_text(encoding="utf-8")


def describe(text: str) -> dict[str, object]:
    kinds = Counter(f"{c.kind} {c.full_bytes} over {c.group_size}" for c in hlo.collectives(text).elements())
    return {"hash": hlo.fingerprint(text), "collectives": kinds, "matmuls": hlo.matmul_count(text)}


def main(name: str, rank: int, output: Path) -> None:
    dist.init_process_group("fake", rank=rank, world_size=WORLD_SIZE, store=FakeStore())
    with xla_inspect.pretended_rank(WORLD_SIZE, rank):
        is_dense = name in MODELS
        parallel_state.initialize_model_parallel(
            WORLD_SIZE if is_dense else 2, expert_model_parallel_size=1 if is_dense else 2
        )
        outputs = step_outputs(name)
        text = xla_inspect.traced_hlo(outputs)
        result = {"traced": describe(text) | {"unsupported": unsupported(text)}}
        if rank == 0 and is_dense:
            result["optimized"] = describe(compiled(outputs))
    output.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # the pretended world's collectives must never run, not even at exit
