"""The full-step benchmark: our models and their peers on transformers' models, in one run.

    torchrun --nproc_per_node 4 -m scripts.bench.train_step --model llama3-8b --tokens 2048 8192 --append

Random weights, bf16 weights and gradients, AdamW with bf16 states (torch's fused AdamW for the
peers), batch 1. T is the number of processes. ``ours`` has variants as one CUDA graph and with
compiled layers. Peers: ``hf`` (transformers in one process), ``liger`` (``hf`` with Liger-Kernel)
and ``dtensor`` (PyTorch's tensor- and sequence-parallel plan on transformers' model; also with
compiled layers and with asynchronous tensor parallelism). Ours uses FlashAttention-4 if it is
installed, and so do peers called ``flash4``; the other peers have PyTorch's choice.

``--recompute full`` recomputes every layer. Ours may keep the attention kernel's result
(``--keep-core-attn``), recompute the first layers only (``--recompute-layers``), keep the first
layers' activations in host memory and recompute the layers after them (``--offload-layers``), and
run the optimizer inside backward (``--in-backward``).

MFU counts 6 x parameters (without the input embedding) x tokens + 6 x layers x H x S^2 against
``--peak-tflops``; recompute does not count. ``exposed_ms`` is the time in one more, profiled step
in which the first GPU only communicated.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import GPTNeoXConfig, LlamaConfig

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.memory import GraphedLoss, apply_memory
from nxd_memopt.models import model_class
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.optimizer import AdamW, OptimizerInBackward
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.parallel_layers.utils import leave_process_groups
from scripts.bench.exposure import profiled
from scripts.bench.gpu_race import first_line
from scripts.bench.peers import (
    Builder,
    LossFunction,
    build_dtensor,
    build_dtensor_async,
    build_dtensor_compiled,
    build_hf,
    build_liger,
    dtype,
    with_flash4,
)
from scripts.bench.record import append, environment

WARM_UP_STEPS = 3
CSV = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "train_step.csv"
LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-tiny": lambda: LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=256,
    ),
    "neox-tiny": lambda: GPTNeoXConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=8, vocab_size=256
    ),
    "llama-110m": lambda: LlamaConfig(
        num_hidden_layers=12, hidden_size=768, intermediate_size=2048, num_attention_heads=12
    ),
    "smollm2-135m": lambda: LlamaConfig(
        num_hidden_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    ),
    "llama3.2-1b": lambda: LlamaConfig(
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "llama3-8b": lambda: LlamaConfig(
        **LLAMA3,
        num_hidden_layers=32,
        num_key_value_heads=8,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "gpt-neox-20b": GPTNeoXConfig,
}


def build_ours(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
    """Return our model and its loss, with sequence parallelism on several ranks."""
    size = parallel_state.get_tensor_model_parallel_size()
    parallel = ParallelConfig(size, sequence_parallel_enabled=size > 1, use_cpu_initialization=False)
    model = model_class(config.model_type)(
        config, parallel=parallel, memory=memory, dtype=dtype(), device=backend.device
    )
    return model, lambda ids: model(ids, labels=ids).loss


def build_ours_compiled(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
    """Return ``build_ours`` with each layer compiled, as with ``trainer.compile: layer``."""
    model, loss_of = build_ours(config, memory)
    apply_memory(cast(ParallelCausalLM, model), memory, compile="layer")
    return model, loss_of


def build_ours_graphed(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
    """Return ``build_ours`` with forward and backward as one CUDA graph."""
    model, loss_of = build_ours(config, memory)
    return model, GraphedLoss(model.parameters(), loss_of)


BUILDERS: dict[str, Builder] = {
    "ours": build_ours,
    "ours, CUDA graph": build_ours_graphed,
    "ours compiled": build_ours_compiled,
    "hf": build_hf,
    "hf, flash4": with_flash4(build_hf),
    "liger": build_liger,
    "liger, flash4": with_flash4(build_liger),
    "dtensor": build_dtensor,
    "dtensor compiled": build_dtensor_compiled,
    "dtensor compiled, flash4": with_flash4(build_dtensor_compiled),
    # Last, because its compiler setting stays on for the rest of the process.
    "dtensor compiled, async TP": build_dtensor_async,
}


def measure(
    variant: str,
    config: Any,
    tokens: int,
    memory: MemoryConfig,
    steps: int,
    *,
    in_backward: bool,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Return the median step time, peak memory and losses of one variant.

    Its memory is free again afterwards.

    Args:
        variant: key of ``BUILDERS``.
        config: transformers' configuration of the model.
        tokens: S; the batch size is 1.
        memory: recompute and offload.
        steps: number of timed steps after the warm-up.
        in_backward: run our optimizer inside backward.
        trace: file for the Chrome trace of one more step, on a GPU.
    """
    model_parallel_manual_seed(7)
    model, loss_of = BUILDERS[variant](config, memory)
    model.train()
    is_ours = variant.startswith("ours")
    options: dict[str, Any] = {} if is_ours else {"fused": True}
    optimizer = (AdamW if is_ours else torch.optim.AdamW)(model.parameters(), lr=1e-5, **options)
    in_backward = in_backward and is_ours
    stepper = OptimizerInBackward(optimizer) if in_backward else optimizer
    ids = torch.randint(0, config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(3)).to(
        backend.device
    )

    def step() -> Tensor:
        loss = loss_of(ids)
        # A CUDA graph and the DTensor peer run backward themselves and return a detached loss.
        if loss.requires_grad:
            loss.backward()
        if is_ours and not in_backward:
            grads.allreduce_sequence_parallel_gradients(model)
        stepper.step()
        stepper.zero_grad()
        return loss

    # Each step is timed until the device has finished. Peak memory counts from the end of the
    # warm-up, which compiles kernels and records CUDA graphs.
    times, losses = [], []
    for i in range(WARM_UP_STEPS + steps):
        if i == WARM_UP_STEPS:
            backend.reset_peak_memory_stats()
        backend.synchronize()
        start = time.perf_counter()
        loss = step()
        backend.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(round(loss.item(), 4))
    step_s = statistics.median(times[WARM_UP_STEPS:])
    result = {"step_ms": round(step_s * 1e3, 2), "first_loss": losses[0], "loss": losses[-1]}
    peak_bytes = backend.max_memory_allocated()
    result["peak_gib"] = None if peak_bytes is None else round(peak_bytes / 2**30, 2)
    result["tokens_per_s_per_device"] = round(tokens / step_s / parallel_state.get_world_size(), 1)
    if backend.name == "cuda":
        found = profiled(step, trace)
        result["exposed_ms"] = round(found["exposed_communication"], 1)
    return result


def model_flops(config: Any, tokens: int) -> float:
    """Return the FLOPs of one step without recompute: 6 P S + 6 L H S^2.

    P is the number of parameters without the input embedding. Forward costs 2 FLOPs per parameter
    and token, and backward twice that. Causal attention has 2 matmuls of S^2 H / 2 multiply-adds
    per layer in forward, and backward costs twice that.
    """
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    embedding = config.vocab_size * config.hidden_size
    parameters = sum(p.numel() for p in model.parameters()) - embedding
    return 6 * parameters * tokens + 6 * config.num_hidden_layers * config.hidden_size * tokens**2


def recompute(args: argparse.Namespace) -> tuple[MemoryConfig, str]:
    """Return the memory configuration of ours, and its description for the row."""
    layers, offloaded = args.recompute_layers, args.offload_layers
    memory = MemoryConfig(cpu_offloading_num_layers=offloaded)
    parts = ["none"]
    if args.recompute == "full" and layers != 0:
        method: dict[str, Any] = {"recompute_method": "block", "recompute_num_layers": layers} if layers else {}
        keeps = {"recompute_keep_core_attn": args.keep_core_attn}
        memory = replace(memory, recompute_granularity="full", **keeps, **method)
        parts = [f"{layers} layers" if layers else "full", "attention kept" if args.keep_core_attn else ""]
    parts.append(f"{offloaded} layers offloaded" if offloaded else "")
    parts.append("optimizer in backward" if args.in_backward else "")
    return memory, ", ".join(part for part in parts if part)


def trace_file(folder: Path | None, row: dict[str, Any]) -> Path | None:
    """Return the file of a row's Chrome trace on this rank, or None without ``folder``.

    Traces of all ranks show which rank waits for which.
    """
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    rank = parallel_state.get_global_rank()
    names = (row["model"], row["variant"], f"T{row['tensor_parallel']}", row["tokens"], row["recompute"], f"rank{rank}")
    return folder / f"{'_'.join(map(str, names)).replace(', ', '_').replace(' ', '-')}.json.gz"


def run(args: argparse.Namespace) -> list[str]:
    """Measure, print and append row by row, so a failure loses no earlier rows.

    Returns:
        Descriptions of our variants that failed.
    """
    failed, size = [], parallel_state.get_world_size()
    about = environment("scripts.bench.train_step")
    peers_memory = MemoryConfig(recompute_granularity="full" if args.recompute == "full" else None)
    for tokens in args.tokens:
        for variant in args.variants:
            memory, description = recompute(args) if variant.startswith("ours") else (peers_memory, args.recompute)
            row: dict[str, Any] = {"model": args.model, "variant": variant, "tensor_parallel": size}
            row |= {"tokens": tokens, "recompute": description}
            try:
                options = {"in_backward": args.in_backward, "trace": trace_file(args.traces, row)}
                row |= measure(variant, CONFIGS[args.model](), tokens, memory, args.steps, **options)
                per_device = row["tokens_per_s_per_device"] / tokens * model_flops(CONFIGS[args.model](), tokens)
                row["mfu"] = round(per_device / (args.peak_tflops * 1e12), 3) if args.peak_tflops else ""
                row["failure"] = ""
            except (RuntimeError, AttributeError, ValueError, ImportError) as error:  # all ranks fail alike
                row["failure"] = first_line(error)
                failed += [f"{variant} at {tokens} tokens"] if variant.startswith("ours") else []
            # The next variant starts with the memory of this one returned to the device.
            gc.collect()
            if backend.name == "cuda":
                torch.cuda.empty_cache()
            if parallel_state.is_global_rank_zero():
                print({name: row[name] for name in row if name != "failure" or row[name]}, flush=True)
                if args.append:
                    append([row | about], args.csv)
    return failed


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="llama-110m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512])
    parser.add_argument("--variants", choices=BUILDERS, nargs="+", default=["ours", "dtensor"])
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--recompute-layers", type=int, help="ours: recompute the first N layers only, 0 none")
    parser.add_argument("--keep-core-attn", action="store_true", help="ours: keep the attention kernel's result")
    parser.add_argument(
        "--offload-layers", type=int, default=0, help="ours: the first N layers' activations go to the host"
    )
    parser.add_argument("--in-backward", action="store_true", help="ours: run the optimizer inside backward")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--peak-tflops", type=float, default=989.0 if backend.name == "cuda" else 0.0)
    parser.add_argument("--traces", type=Path, help="write Chrome traces of one step of each variant there, one a rank")
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--append", action="store_true", help="append the rows to --csv")
    return parser


def main() -> None:
    parser = argument_parser()
    args = parser.parse_args()
    for name, values in (("--steps", [args.steps]), ("--tokens", args.tokens)):
        if min(values) < 1:
            parser.error(f"{name} must be at least 1, got {min(values)}")
    if args.recompute == "none" and (args.keep_core_attn or args.recompute_layers is not None):
        parser.error("--keep-core-attn and --recompute-layers say how --recompute full is done: add it")
    if args.traces and backend.name != "cuda":
        parser.error(f"--traces needs an NVIDIA GPU, the backend is {backend.name}")
    backend.init_process_group()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=parallel_state.get_world_size())
    failed = run(args)
    leave_process_groups()
    if failed:
        raise SystemExit(f"error: {', '.join(failed)} failed")


if __name__ == "__main__":
    main()
