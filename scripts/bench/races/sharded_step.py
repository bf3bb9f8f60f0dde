"""Benchmark of ZeRO-3: full steps with clipping, next to FSDP2 on transformers' model with Liger-Kernel.

    torchrun --nproc_per_node 2 -m scripts.bench.races.sharded_step --model llama3-8b --tokens 8192 --append

Every process is a data-parallel rank with a sequence of its own; with ``--tensor-parallel T``, of ours alone,
T processes are one, with sequence parallelism. Random weights, fused AdamW,
clipping by the global norm. ``--states fp32``: the shards are fp32 masters, gradients are reduced
in fp32, 16 bytes per parameter over D ranks. ``--states bf16``: weights, gradients and moments in
bf16, 8 bytes per parameter over D ranks. The compute dtype is bf16 in both (fp32 on the CPU), for the peers too.
Peers recompute every layer with ``--recompute full`` and none otherwise; ``--memory`` is of ours alone.
"""

from __future__ import annotations

import argparse
from typing import Any, cast

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig
from nxd_memopt.data_parallel import Zero3Optimizer, shard_model
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.optimizer import AdamW
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.parallel_layers.utils import leave_process_groups
from scripts.bench.harness.configs import CONFIGS
from scripts.bench.harness.steps import (
    LossFunction,
    Row,
    limit_device_memory,
    random_tokens,
    recompute_of_all_layers,
    record_rows,
    step_parser,
    timed_steps,
    with_figures,
    with_options,
)
from scripts.bench.races.offload_peers import LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, ClippedAdamW, Stepper, with_fsdp2
from scripts.bench.races.peers import Builder, build_hf, build_liger, with_flash4, with_torch_flash4
from scripts.bench.races.train_step import build_ours, build_ours_compiled

STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS: dict[str, Builder] = {"ours": build_ours, "ours compiled": build_ours_compiled}
PEERS: dict[str, tuple[Builder, bool]] = {  # with compiled layers or without
    "hf": (build_hf, False),
    "liger": (build_liger, False),
    "liger, flash4": (with_flash4(build_liger), False),
    "liger compiled": (build_liger, True),
    "liger compiled, flash4": (with_torch_flash4(build_liger), True),
}


class OurOptimizer:
    """Our optimizer with the peers' interface."""

    def __init__(self, model: nn.Module) -> None:
        self._optimizer = Zero3Optimizer(
            model.parameters(), AdamW, max_norm=MAX_NORM, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )

    def step(self) -> None:
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def norm(self) -> float:
        return cast(Tensor, self._optimizer.grad_norm).item()


def build(
    variant: str, config: Any, states: torch.dtype, memory: MemoryConfig, *, keeps_gathered: bool = False
) -> tuple[nn.Module, LossFunction, Stepper]:
    """Return a sharded model, its loss and its optimizer.

    Args:
        variant: key of ``OURS`` or ``PEERS``.
        config: transformers' configuration.
        states: dtype of the shards.
        memory: techniques of ours.
        keeps_gathered: ours keeps the gathered weights until backward.
    """
    if variant in OURS:
        model, loss_of = OURS[variant](config, memory)
        # With bf16 states gradients are reduced in bf16, as FSDP2 reduces them without reduce_dtype.
        reduce_dtype = torch.float32 if states == torch.float32 else None
        shard_model(
            cast(ParallelCausalLM, model),
            master_dtype=states,
            reduce_dtype=reduce_dtype,
            reshard_after_forward=not keeps_gathered,
        )
        return model, loss_of, OurOptimizer(model)
    builder, compiled = PEERS[variant]
    model, loss_of = with_fsdp2(builder, states, compile_layers=compiled)(config, memory)
    return model, loss_of, ClippedAdamW(model)


def measure(variant: str, tokens: int, memory: MemoryConfig, args: argparse.Namespace) -> Row:
    """Return the columns of a row; the memory is free again afterwards."""
    # All ranks of all variants begin with the same seed; each rank has tokens of its own.
    model_parallel_manual_seed(7)
    config = CONFIGS[args.model]()
    model, loss_of, optimizer = build(variant, config, STATES[args.states], memory, keeps_gathered=args.keep_gathered)
    model.train()
    result = timed_steps(loss_of, optimizer, random_tokens(config, 1, tokens)[0], args)
    return result | {"grad_norm": round(optimizer.norm(), 4)}


def measured_row(variant: str, tokens: int, args: argparse.Namespace) -> Row:
    """Return the row of a variant; one that does not run is a row with its failure."""
    memory = recompute_of_all_layers(args.recompute)
    words = [args.recompute]
    if variant in OURS:
        memory = with_options(memory, args.memory)
        words += args.memory
        if args.keep_gathered:
            words.append("gathered weights kept")
    row: Row = {
        "model": args.model,
        "variant": variant,
        "data_parallel": parallel_state.get_data_parallel_size(),
        "tensor_parallel": args.tensor_parallel,
        "tokens": tokens,
        "states": args.states,
        "recompute": ", ".join(words),
        "cap_gib": args.cap_gib or "",
    }
    return with_figures(row, lambda: measure(variant, tokens, memory, args))


def argument_parser() -> argparse.ArgumentParser:
    # timed_steps reads the last three, which this benchmark does not vary.
    defaults = {"variants": ["ours", "hf"], "accumulation": 1, "warm_up_tokens": None, "read_loss": False}
    parser = step_parser(__doc__, "sharded_step", (*OURS, *PEERS), **defaults)
    parser.add_argument("--states", choices=STATES, default="fp32")
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--keep-gathered", action="store_true", help="ours: reshard_after_forward: false")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ours: T of each replica")
    return parser


def main() -> None:
    parser = argument_parser()
    args = parser.parse_args()
    peers = [variant for variant in args.variants if variant in PEERS]
    if args.tensor_parallel > 1 and peers:
        parser.error(f"--tensor-parallel {args.tensor_parallel} is of ours alone: leave out {', '.join(peers)}")
    backend.init_process_group()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tensor_parallel)
    limit_device_memory(args.cap_gib)
    record_rows(args, lambda variant, tokens: measured_row(variant, tokens, args))
    leave_process_groups()


if __name__ == "__main__":
    main()
