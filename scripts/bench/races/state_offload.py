"""Benchmark of optimizer states in host memory: steps with clipping, the link's floor and peers in the same run.

    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # long sequences leave no room for fragments
    python -m scripts.bench.races.state_offload --model llama3-8b --tokens 8192 16384 32768 --staging-gib 48 --append
    python -m scripts.bench.races.state_offload --model llama3-8b --tokens 65536 --variants ours "liger, flash4"

Random weights, bf16 weights and gradients, fp32 masters and moments (12 bytes per parameter; 10 with
``--remainders``, of which 2 are what the masters have beyond the weights), batch 1, clipping by the
global norm. A peer recomputes every layer and has the states that fit without offload, bf16 moments
and no masters (``states`` in its row); ``fsdp2`` has fp32 weights, gradients and moments on the host,
``fsdp2 bf16`` the same in bf16, and ``deepspeed`` (ZeRO-Offload) bf16 weights on the device and
gradients, fp32 masters and moments on the host. A peer with a package that is not installed is named
and skipped. ``floor_ms`` is the time in which the link moves the states that are on the host, once in
each direction at the same time, at the speed that the row measured before. ``host_gib`` are states and
offloaded activations, ``host_peak_gib`` is the process's peak resident memory, pinned buffers included.

With ``--document-tokens`` attention stays within documents of that length: every tensor of the step
has its full size, but attention does not have its full time ("memory only").
"""

from __future__ import annotations

import argparse
import functools
import resource
import time
from typing import Any, cast

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, require_divisible
from nxd_memopt.memory import apply_memory
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.memory.offload import OFFLOAD_OWNER
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.optimizer import OffloadedZero1Optimizer
from nxd_memopt.optimizer.streamed_adamw import OWNER
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.parallel_layers.utils import leave_process_groups
from nxd_memopt.planner.hardware import GIB
from nxd_memopt.planner.memory.activations import offloaded_checkpoint_bytes
from nxd_memopt.profiling.calibration import host_copies_per_s
from scripts.bench.harness.configs import CONFIGS
from scripts.bench.harness.steps import (
    Row,
    limit_device_memory,
    random_tokens,
    record_rows,
    step_parser,
    timed_steps,
    with_figures,
    with_options,
)
from scripts.bench.races.offload_peers import PEERS, DeepSpeedAdamW
from scripts.bench.races.peers import dtype
from scripts.bench.races.train_step import build_ours


def packed_loss(model: nn.Module, bounds: Tensor, ids: Tensor) -> Tensor:
    """Return the loss of documents that begin and end at ``bounds``."""
    return model(ids, labels=ids, cu_seqlens=bounds).loss


def measure(config: Any, tokens: int, memory: MemoryConfig, args: argparse.Namespace) -> Row:
    """Return the columns of a row; the memory is free again afterwards."""
    transfers = backend.host_transfers()
    assert transfers is not None
    link = host_copies_per_s(transfers)
    model, loss_of = build_ours(config, memory)
    model.train()
    if args.document_tokens:
        bounds = torch.arange(0, tokens + 1, args.document_tokens, device=backend.device)
        loss_of = functools.partial(packed_loss, model, bounds)
    pool = HostPool(pinned=backend.name == "cuda")
    start = time.perf_counter()
    activation_bytes = reserve_checkpoints(model, memory, tokens, pool)
    optimizer = OffloadedZero1Optimizer(
        model.parameters(),
        optimizer_offload_fraction=args.fraction,
        staging_bytes=int(args.staging_gib * GIB),
        pool=pool,
        use_grad_acc_hook=args.fp32_sums,
        store_param_remainders=args.remainders,
        lr=1e-5,
    )
    model = cast(ParallelCausalLM, model)
    layers = model.decoder_layers()
    optimizer.pace_backward(layers)
    if args.in_forward:
        optimizer.update_in_forward(layers, after_layers=model.modules_after_layers())
    backend.synchronize()
    setup_s = time.perf_counter() - start
    state_bytes = pool.ledger().get(OWNER, 0)
    result = timed_steps(loss_of, optimizer, random_tokens(config, 1, tokens)[0], args)
    # The next variant allocates the memory into which the states of a next step are being copied.
    optimizer.finish_update()
    sums = ", fp32 gradient sums" if args.fp32_sums else ""
    remainders = " as remainders" if args.remainders else ""
    return result | {
        "states": f"fp32 masters{remainders} and moments{sums}",
        "grad_norm": round(cast(Tensor, optimizer.grad_norm).item(), 4),
        "host_gib": round((state_bytes + activation_bytes) / GIB, 2),
        "host_peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2),
        "link_gb_per_s": round(link / 1e9, 1),
        "floor_ms": round(state_bytes / link * 1e3, 1),
        "setup_s": round(setup_s, 1),
    }


def reserve_checkpoints(model: nn.Module, memory: MemoryConfig, tokens: int, pool: HostPool) -> int:
    """Apply ``memory`` with ``pool``, and allocate what its offloaded checkpoints take; return the bytes."""
    causal_lm = cast(ParallelCausalLM, model)
    if not memory.cpu_offloading_activations:
        return 0
    apply_memory(causal_lm, memory, pool=pool)
    size = offloaded_checkpoint_bytes(
        causal_lm.spec,
        causal_lm.parallel,
        memory,
        sequence_length=tokens,
        micro_batch_size=1,
        dtype=str(dtype()).removeprefix("torch."),
    )
    pool.reserve(size, OFFLOAD_OWNER)
    return pool.allocated_bytes


def measure_peer(variant: str, config: Any, tokens: int, args: argparse.Namespace) -> Row:
    """Return the columns of a peer's row, with full recompute."""
    peer = PEERS[variant]
    if peer.optimizer is DeepSpeedAdamW and args.accumulation > 1:
        raise ValueError(f"--accumulation {args.accumulation}: DeepSpeed's engine has one micro-batch per step here")
    model, loss_of = peer.build(config, MemoryConfig(recompute_granularity="full"))
    model.train()
    optimizer = peer.optimizer(model)
    result = timed_steps(loss_of, optimizer, random_tokens(config, 1, tokens)[0], args)
    return result | {"states": peer.states, "grad_norm": round(optimizer.norm(), 4)}


def measured_row(variant: str, tokens: int, memory: MemoryConfig, args: argparse.Namespace) -> Row:
    """Return the row of one variant."""
    row: Row = {
        "model": args.model,
        "variant": variant,
        "tensor_parallel": parallel_state.get_world_size(),
        "tokens": tokens,
        "accumulation": args.accumulation,
        "document_tokens": args.document_tokens or "",
        "cap_gib": args.cap_gib or "",
        "failure": "",
    }
    # The same weights for ours whatever ran before.
    model_parallel_manual_seed(7)
    config = CONFIGS[args.model]()
    if variant == "ours":
        row |= {"fraction": args.fraction, "staging_gib": args.staging_gib, "memory": " ".join(args.memory)}
        return row | measure(config, tokens, memory, args)
    row["memory"] = "recompute_granularity=full"
    return with_figures(row, lambda: measure_peer(variant, config, tokens, args))


def argument_parser() -> argparse.ArgumentParser:
    parser = step_parser(__doc__, "state_offload", ("ours", *PEERS))
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--staging-gib", type=float, default=2.0)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--fp32-sums", action="store_true", help="ours: add the micro-batches' gradients in fp32")
    parser.add_argument("--remainders", action="store_true", help="ours: 10 bytes per parameter instead of 12")
    parser.add_argument("--read-loss", action="store_true", help="read the loss after every step")
    parser.add_argument("--in-forward", action="store_true", help="updates overlap with the next forward")
    parser.add_argument("--document-tokens", type=int, help="attention within documents of this length; memory only")
    parser.add_argument("--warm-up-tokens", type=int, help="tokens of a warm-up step, default --tokens")
    return parser


def main() -> None:
    parser = argument_parser()
    args = parser.parse_args()
    if args.warm_up_tokens and args.document_tokens:
        parser.error("--warm-up-tokens has no documents of --document-tokens: leave one out")
    backend.init_process_group()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=parallel_state.get_world_size())
    limit_device_memory(args.cap_gib)
    memory = with_options(MemoryConfig(), args.memory)
    for tokens in args.tokens:
        if args.document_tokens:
            require_divisible("--tokens", tokens, "--document-tokens", args.document_tokens)

    def measured(variant: str, tokens: int) -> Row | None:
        missing = [] if variant == "ours" else PEERS[variant].missing()
        if missing and parallel_state.is_global_rank_zero():
            print(f"{variant}: skipped, not installed: {', '.join(missing)}", flush=True)
        return None if missing else measured_row(variant, tokens, memory, args)

    record_rows(args, measured)
    leave_process_groups()


if __name__ == "__main__":
    main()
