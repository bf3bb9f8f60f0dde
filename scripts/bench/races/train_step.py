"""The full-step benchmark: our models and their peers on transformers' models, in one run.

    torchrun --nproc_per_node 4 -m scripts.bench.races.train_step --model llama3-8b --tokens 2048 8192 --append

Random weights, bf16 weights and gradients, AdamW with bf16 states (torch's fused AdamW for the
peers), batch 1. T is the number of processes; with ``--expert-parallel EP`` it is divided by EP, and each
of the EP data-parallel ranks has a sequence of its own. ``ours`` has variants as one CUDA graph and with
compiled layers. Peers: ``hf`` (transformers in one process), ``liger`` (``hf`` with Liger-Kernel)
and ``dtensor`` (PyTorch's tensor- and sequence-parallel plan on transformers' model; also with
compiled layers, with asynchronous tensor parallelism, and in float8). ``torchao`` is ``liger``'s loss with
compiled layers in float8. Ours uses FlashAttention-4 if it is
installed, and so do peers called ``flash4`` (those with compiled layers through PyTorch's attention); the other peers
have PyTorch's choice.

``--recompute full`` recomputes every layer. Ours may keep the attention kernel's result
(``--keep-core-attn``), recompute the first layers only (``--recompute-layers``), keep the first
layers' activations in host memory and recompute the layers after them (``--offload-layers``),
run the optimizer inside backward (``--in-backward``), and use any other memory technique
(``--memory OPTION=VALUE``). ``--accumulation N`` adds up the gradients of N sequences in a step.

MFU counts 6 x parameters (without the input embedding; k of E experts) x tokens + 6 x layers x heads
x head size x S^2 against
``--peak-tflops``; recompute does not count. ``exposed_ms`` is the time in one more, profiled step
in which the first GPU only communicated.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, ParallelConfig, require_divisible
from nxd_memopt.memory import GraphedLoss, apply_memory
from nxd_memopt.models import model_class
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.modules.fp8 import use_fp8
from nxd_memopt.modules.moe.hf_options import options_of
from nxd_memopt.ops.fp8 import Fp8Recipe
from nxd_memopt.optimizer import AdamW, OptimizerInBackward
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.parallel_layers.utils import leave_process_groups
from scripts.bench.harness.configs import CONFIGS
from scripts.bench.harness.steps import (
    Row,
    exposed_ms,
    limit_device_memory,
    random_tokens,
    recompute_of_all_layers,
    record_rows,
    step_parser,
    synchronized_steps,
    with_figures,
    with_options,
)
from scripts.bench.races.peers import (
    Builder,
    LossFunction,
    build_dtensor,
    build_hf,
    build_liger,
    build_liger_grouped,
    dtensor_with_float8,
    dtype,
    with_async_tp,
    with_compiled_layers,
    with_flash4,
    with_float8,
    with_torch_flash4,
)


def build_ours(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
    """Return our model and its loss, with sequence parallelism on several ranks."""
    return _built(config, memory)


def _built(config: Any, memory: MemoryConfig, **options: Any) -> tuple[nn.Module, LossFunction]:
    """Return our model with ``options`` of its class, and its loss."""
    size = parallel_state.get_tensor_model_parallel_size()
    parallel = ParallelConfig(
        size,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_size(),
        sequence_parallel_enabled=size > 1,
        use_cpu_initialization=False,
    )
    model = model_class(config.model_type)(
        config, parallel=parallel, memory=memory, dtype=dtype(), device=backend.device, **options
    )
    return model, lambda ids: model(ids, labels=ids).loss


def build_ours_alltoall(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
    """Return ``build_ours`` of a model with experts whose tokens are dispatched by all-to-all."""
    return _built(config, memory, moe=replace(options_of(config), moe_token_dispatcher_type="alltoall"))


def build_ours_compiled(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
    """Return ``build_ours`` with each layer compiled, as with ``trainer.compile: layer``."""
    model, loss_of = build_ours(config, memory)
    apply_memory(cast(ParallelCausalLM, model), memory, compile="layer")
    return model, loss_of


def build_ours_graphed(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
    """Return ``build_ours`` with forward and backward as one CUDA graph."""
    model, loss_of = build_ours(config, memory)
    return model, GraphedLoss(model.parameters(), loss_of)


def build_ours_fp8(recipe: Fp8Recipe) -> Builder:
    """Return ``build_ours_graphed`` whose decoder layers multiply in float8."""

    def build(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
        model, loss_of = build_ours(config, memory)
        use_fp8(cast(ParallelCausalLM, model), recipe)
        return model, GraphedLoss(model.parameters(), loss_of)

    return build


BUILDERS: dict[str, Builder] = {
    "ours": build_ours,
    "ours, CUDA graph": build_ours_graphed,
    "ours, fp8 tensorwise": build_ours_fp8(Fp8Recipe("hybrid", "tensorwise")),
    "ours, fp8 rowwise": build_ours_fp8(Fp8Recipe("e4m3", "rowwise")),
    "ours compiled": build_ours_compiled,
    "ours, all-to-all": build_ours_alltoall,
    "hf": build_hf,
    "hf, flash4": with_flash4(build_hf),
    "liger": build_liger,
    "liger, flash4": with_flash4(build_liger),
    "hf compiled": with_compiled_layers(build_hf),
    "liger compiled": with_compiled_layers(build_liger),
    "torchao tensorwise, flash4": with_torch_flash4(with_float8("tensorwise")),
    "torchao rowwise, flash4": with_torch_flash4(with_float8("rowwise")),
    "liger, grouped_mm": build_liger_grouped,
    "liger, grouped_mm, compiled": with_compiled_layers(build_liger_grouped),
    "dtensor": build_dtensor,
    "dtensor compiled": with_compiled_layers(build_dtensor),
    "dtensor compiled, flash4": with_torch_flash4(with_compiled_layers(build_dtensor)),
    "dtensor torchao tensorwise, flash4": with_torch_flash4(dtensor_with_float8("tensorwise")),
    "dtensor torchao rowwise, flash4": with_torch_flash4(dtensor_with_float8("rowwise")),
    # Last, because its compiler setting stays on for the rest of the process.
    "dtensor compiled, async TP": with_async_tp(with_compiled_layers(build_dtensor)),
    "dtensor torchao tensorwise, async TP": with_torch_flash4(with_async_tp(dtensor_with_float8("tensorwise"))),
}


def measure(
    variant: str, config: Any, tokens: int, memory: MemoryConfig, args: argparse.Namespace, trace: Path | None = None
) -> Row:
    """Return the median step time, peak memory and losses of one variant.

    Its memory is free again afterwards.

    Args:
        variant: key of ``BUILDERS``.
        config: transformers' configuration of the model.
        tokens: S; the batch size is 1.
        memory: recompute and offload.
        args: with ``steps``, ``warm_up_steps``, ``accumulation`` and ``in_backward``.
        trace: file for the Chrome trace of one more step, on a GPU.
    """
    accumulation = args.accumulation
    model_parallel_manual_seed(7)
    model, loss_of = BUILDERS[variant](config, memory)
    model.train()
    is_ours = variant.startswith("ours")
    if is_ours:
        optimizer = AdamW(model.parameters(), lr=1e-5)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    in_backward = args.in_backward and is_ours
    stepper = optimizer
    if in_backward:
        stepper = OptimizerInBackward(optimizer)
    ids = random_tokens(config, accumulation, tokens)

    def step() -> Tensor:
        total = torch.zeros((), device=backend.device)
        for micro_batch in ids:
            loss = loss_of(micro_batch) / accumulation
            # A CUDA graph and the DTensor peer run backward themselves and return a detached loss,
            # which cannot be divided before backward.
            if loss.requires_grad:
                loss.backward()
            elif accumulation > 1:
                raise ValueError(f"{variant} runs backward itself, which --accumulation {accumulation} cannot scale")
            total += loss.detach()
        # Gradients of norms and biases are partial sums over each rank's sequence shard. The
        # optimizer in backward sums them itself, before it updates and frees each gradient.
        if is_ours and not in_backward:
            grads.allreduce_sequence_parallel_gradients(model)
            grads.bucket_allreduce_gradients(model)
        stepper.step()
        stepper.zero_grad()
        return total

    sequences = accumulation * parallel_state.get_data_parallel_size()
    result = synchronized_steps(step, tokens * sequences, args)
    # After the timed steps: the profiler slows a step down, and its buffers would count as memory.
    if backend.name == "cuda":
        result["exposed_ms"] = round(exposed_ms(step, trace), 1)
    return result


def model_flops(config: Any, tokens: int) -> float:
    """Return the FLOPs of one step without recompute: 6 P S + 6 L A S^2.

    P is the number of parameters that a token passes, without the input embedding: k of E experts.
    Forward costs 2 FLOPs per parameter and token, and backward twice that. A is the width of
    attention, heads times their size. Causal attention has 2 matmuls of S^2 A / 2 multiply-adds per
    layer in forward, and backward costs twice that.
    """
    # On the meta device: only the shapes are needed, and nothing is allocated.
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    parameters = -config.vocab_size * config.hidden_size
    for name, param in model.named_parameters():
        active = param.numel()
        if ".experts." in name:
            active = active * config.num_experts_per_tok // param.size(0)
        parameters += active
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_size
    return 6 * parameters * tokens + 6 * config.num_hidden_layers * width * tokens**2


def recompute(args: argparse.Namespace) -> tuple[MemoryConfig, str]:
    """Return the memory configuration of ours, and its description for the row."""
    # ``--recompute-layers 0`` means no recompute for ours, whereas None, its default, means all
    # layers. ``block`` recomputes the first N layers, as in Megatron-LM.
    layers = args.recompute_layers
    offloaded = args.offload_layers
    memory = MemoryConfig(cpu_offloading_num_layers=offloaded)
    words = ["none"]
    if args.recompute == "full" and layers != 0:
        options: dict[str, Any] = {
            "recompute_granularity": "full",
            "recompute_keep_core_attn": args.keep_core_attn,
        }
        words = ["full"]
        if layers:
            options |= {"recompute_method": "block", "recompute_num_layers": layers}
            words = [f"{layers} layers"]
        if args.keep_core_attn:
            words.append("attention kept")
        memory = replace(memory, **options)
    if offloaded:
        words.append(f"{offloaded} layers offloaded")
    memory = with_options(memory, args.memory)
    words += args.memory
    if args.cap_gib:
        words.append(f"{args.cap_gib:g} GiB")
    if args.in_backward:
        words.append("optimizer in backward")
    return memory, ", ".join(words + accumulated(args))


def accumulated(args: argparse.Namespace) -> list[str]:
    """Return the words that describe the accumulation of gradients, for all variants."""
    if args.accumulation == 1:
        return []
    return [f"{args.accumulation} micro-batches"]


def model_flops_utilization(args: argparse.Namespace, row: dict[str, Any]) -> float | str:
    """Return the share of ``--peak-tflops`` that a row's step reaches; "" if the peak is 0."""
    tokens = row["tokens"]
    flops = row["tokens_per_s_per_device"] / tokens * model_flops(CONFIGS[args.model](), tokens)
    if not args.peak_tflops:
        return ""
    return round(flops / (args.peak_tflops * 1e12), 3)


def trace_file(folder: Path | None, row: dict[str, Any]) -> Path | None:
    """Return the file of a row's Chrome trace on this rank, or None without ``folder``.

    Traces of all ranks show which rank waits for which.
    """
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    rank = parallel_state.get_global_rank()
    names = (
        row["model"],
        row["variant"],
        f"T{row['tensor_parallel']}_EP{row['expert_parallel']}",
        row["tokens"],
        row["recompute"],
        f"rank{rank}",
    )
    stem = "_".join(map(str, names)).replace(", ", "_").replace(" ", "-")
    return folder / f"{stem}.json.gz"


def measured_row(variant: str, tokens: int, args: argparse.Namespace) -> Row:
    """Return the row of a variant."""
    # The finer options of recompute and offload are of ours alone: a peer recomputes all layers or
    # none.
    memory = recompute_of_all_layers(args.recompute)
    description = ", ".join([args.recompute, *accumulated(args)])
    if variant.startswith("ours"):
        memory, description = recompute(args)
    row: Row = {
        "model": args.model,
        "variant": variant,
        "tensor_parallel": parallel_state.get_world_size() // args.expert_parallel,
        "expert_parallel": args.expert_parallel,
        "tokens": tokens,
        "recompute": description,
    }
    # Every variant gets a configuration of its own, because flash4 peers change theirs.
    config = CONFIGS[args.model]()
    trace = trace_file(args.traces, row)
    row = with_figures(row, lambda: measure(variant, config, tokens, memory, args, trace))
    if not row["failure"]:
        row["mfu"] = model_flops_utilization(args, row)
    return row


def argument_parser() -> argparse.ArgumentParser:
    defaults = {"model": "llama-110m", "variants": ["ours", "dtensor"], "steps": 8}
    parser = step_parser(__doc__, "train_step", BUILDERS, **defaults)
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--recompute-layers", type=int, help="ours: recompute the first N layers only, 0 none")
    parser.add_argument("--keep-core-attn", action="store_true", help="ours: keep the attention kernel's result")
    parser.add_argument(
        "--offload-layers", type=int, default=0, help="ours: the first N layers' activations go to the host"
    )
    parser.add_argument("--in-backward", action="store_true", help="ours: run the optimizer inside backward")
    parser.add_argument("--accumulation", type=int, default=1, help="sequences whose gradients a step adds up")
    parser.add_argument("--expert-parallel", type=int, default=1, help="ranks that share the experts of a layer: ours")
    # 989 TFLOP/s: dense bf16 of an H100 SXM or H200. On other devices MFU is not computed.
    peak_tflops = 989.0 if backend.name == "cuda" else 0.0
    parser.add_argument("--peak-tflops", type=float, default=peak_tflops)
    parser.add_argument("--traces", type=Path, help="write Chrome traces of one step of each variant there, one a rank")
    return parser


def main() -> None:
    parser = argument_parser()
    args = parser.parse_args()
    if args.in_backward and args.accumulation > 1:
        parser.error("--in-backward frees each gradient in its backward: it excludes --accumulation")
    if args.in_backward and args.expert_parallel > 1:
        parser.error("--in-backward does not reduce over data-parallel ranks: it excludes --expert-parallel")
    if args.recompute == "none" and (args.keep_core_attn or args.recompute_layers is not None):
        parser.error("--keep-core-attn and --recompute-layers say how --recompute full is done: add it")
    if args.traces and backend.name != "cuda":
        parser.error(f"--traces needs an NVIDIA GPU, the backend is {backend.name}")
    backend.init_process_group()
    size = parallel_state.get_world_size()
    experts = args.expert_parallel
    require_divisible("the number of processes", size, "--expert-parallel", experts)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=size // experts, expert_model_parallel_size=experts
    )
    limit_device_memory(args.cap_gib)
    failed: list[str] = []

    def measured(variant: str, tokens: int) -> Row:
        row = measured_row(variant, tokens, args)
        # A failure of ours is an error of the run as well.
        if row["failure"] and variant.startswith("ours"):
            failed.append(f"{variant} at {tokens} tokens")
        return row

    record_rows(args, measured)
    leave_process_groups()
    if failed:
        raise SystemExit(f"error: {', '.join(failed)} failed")


if __name__ == "__main__":
    main()
