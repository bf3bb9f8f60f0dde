"""Pipeline stages beside one device and beside torch.distributed.pipelining, in one run.

    torchrun --nproc_per_node 2 -m scripts.bench.races.pipeline --model llama3-8b --tokens 8192 --append

Random weights, bf16 weights, gradients and AdamW states, batch 1, ``--micro-batches`` sequences a step. ``one device``
trains the complete model on every device, without a reduction, with the same micro-batches. ``ours, T`` is tensor and
sequence parallelism over all devices; four or more devices also run T=2 with half as many stages. ``torch 1F1B`` and
``torch interleaved`` are PyTorch's schedules on transformers' layers with Liger-Kernel. ``share`` is tokens per second
and device as a share of ``one device``'s times (1 - bubble). ``exposed_ms`` is the time of one more, profiled step in
which a GPU only communicated or waited for the others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from nxd_memopt._optional import is_importable
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.architectures.stages import balanced_layers
from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.models import model_class
from nxd_memopt.modules.lora import add_adapters
from nxd_memopt.optimizer import AdamW
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.parallel_layers.utils import leave_process_groups
from nxd_memopt.pipeline.causal_lm import PipelinedCausalLM
from nxd_memopt.pipeline.tied import sum_tied_gradients
from nxd_memopt.planner.techniques.pipeline_schedule import bubble
from scripts.bench.harness.configs import CONFIGS
from scripts.bench.harness.gpu_race import first_line
from scripts.bench.harness.record import append, environment
from scripts.bench.harness.steps import (
    Row,
    exposed_ms,
    figures,
    free_memory,
    recompute_of_all_layers,
    step_parser,
    with_options,
)
from scripts.bench.races.peers import dtype

Step = Callable[[Sequence[Tensor]], Tensor]
IGNORED = -100


def build_ours(
    config: Any,
    memory: MemoryConfig,
    lora: LoraConfig | None = None,
    *,
    stages: int = 1,
    chunks: int | None = None,
    tensor: int = 1,
) -> tuple[Any, Step]:
    """Return our model, or its stages, and forward and backward of a step's micro-batches."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, stages)
    model_parallel_manual_seed(7)
    parallel = ParallelConfig(
        tensor,
        sequence_parallel_enabled=tensor > 1,
        use_cpu_initialization=False,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
    )
    model = model_class(config.model_type)(
        config, parallel=parallel, memory=memory, dtype=dtype(), device=backend.device
    )
    if lora is not None:
        add_adapters(model, lora)

    def arguments(ids: Tensor, count: int) -> dict[str, Any]:
        divisor = torch.tensor([float(count * (ids.numel() - ids.size(0)))], device=ids.device)
        return {"input_ids": ids, "labels": ids, "num_items_in_batch": divisor}

    if stages > 1:
        pipeline = PipelinedCausalLM(model)

        def staged(ids: Sequence[Tensor]) -> Tensor:
            loss = pipeline.train([arguments(each, len(ids)) for each in ids])
            sum_tied_gradients(model.parameters())
            return loss

        return model, staged

    def accumulated(ids: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), device=backend.device)
        for each in ids:
            loss = model(**arguments(each, len(ids))).loss
            loss.backward()
            total += loss.detach()
        grads.allreduce_sequence_parallel_gradients(model)
        return total

    return model, accumulated


def peer_attention() -> str:
    """Return transformers' name of the attention that ours takes too: FlashAttention-4 where it is installed."""
    if is_importable("flash_attn.cute"):
        return "flash_attention_4"
    return "sdpa"


class TransformersStage(nn.Module):
    """Layers ``[first, last)`` of transformers' LLaMA with Liger-Kernel's replacements; the last stage has the loss."""

    def __init__(self, config: Any, first: int, last: int) -> None:
        super().__init__()
        from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearCrossEntropyLoss,
            _apply_liger_kernel_to_instance,
        )

        own = type(config)(**{**config.to_dict(), "num_hidden_layers": last - first})
        with backend.device:
            model = transformers.AutoModelForCausalLM.from_config(
                own, dtype=dtype(), attn_implementation=peer_attention()
            )
        _apply_liger_kernel_to_instance(model=model)  # pyright: ignore[reportArgumentType]
        base = model.model
        self.embed = base.embed_tokens if first == 0 else None
        self.layers = base.layers
        self.rotary = base.rotary_emb
        is_last = last == config.num_hidden_layers
        self.norm = base.norm if is_last else None
        self.head = model.lm_head if is_last else None
        self.loss = LigerFusedLinearCrossEntropyLoss() if is_last else None

    def forward(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        hidden = hidden if self.embed is None else self.embed(hidden)
        positions = torch.arange(hidden.size(1), device=hidden.device).unsqueeze(0)
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary, attention_mask=None, use_cache=False)
        return hidden if self.norm is None else self.norm(hidden)

    def loss_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the loss of the last stage's output."""
        assert self.head is not None and self.loss is not None
        labels = nn.functional.pad(ids, (0, 1), value=IGNORED)[:, 1:]
        return self.loss(self.head.weight, hidden.flatten(0, 1), labels.flatten())


def build_torch(config: Any, chunks: int, count: int) -> tuple[Any, Step]:
    """Return the stages of PyTorch's schedule with ``chunks`` stages a rank, and its step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, dist.get_world_size())
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    counts = balanced_layers(model_spec(config), size, chunks)
    numbers = [rank + chunk * size for chunk in range(chunks)]
    modules = [TransformersStage(config, sum(counts[:n]), sum(counts[: n + 1])) for n in numbers]
    stages = [
        PipelineStage(module, n, size * chunks, backend.device) for module, n in zip(modules, numbers, strict=True)
    ]
    last = modules[-1]
    # Without a loss a rank would run no backward, and keep the activations of all micro-batches.
    options: dict[str, Any] = {"n_microbatches": count, "scale_grads": True, "loss_fn": last.loss_of}
    schedule: Any = (
        Schedule1F1B(stages[0], **options) if chunks == 1 else ScheduleInterleaved1F1B(list(stages), **options)
    )

    def step(ids: Sequence[Tensor]) -> Tensor:
        whole = torch.cat(list(ids))
        losses: list[Tensor] = []
        inputs = (whole,) if rank == 0 else ()
        if last.head is not None:
            schedule.step(*inputs, target=whole, losses=losses)
            return torch.stack(losses).mean().detach()
        schedule.step(*inputs)
        return torch.zeros((), device=backend.device)

    return nn.ModuleList(modules), step


def builders(
    size: int, count: int, memory: MemoryConfig, lora: LoraConfig | None
) -> dict[str, tuple[Callable[[Any], tuple[Any, Step]], float]]:
    """Return for each variant how it is built, and its bubble."""
    ours = partial(build_ours, memory=memory, lora=lora)
    one, two, four = (bubble(size, chunks, count) for chunks in (1, 2, 4))
    both: dict[str, tuple[Callable[[Any], tuple[Any, Step]], float]] = {}
    if size >= 4 and size % 2 == 0:
        name, staged = f"ours, T=2, P={size // 2}", partial(ours, tensor=2, stages=size // 2)
        both = {
            name: (staged, bubble(size // 2, 1, count)),
            f"{name}, V=2": (partial(staged, chunks=2), bubble(size // 2, 2, count)),
        }
    return {
        "one device": (ours, 0.0),
        f"ours, P={size}": (partial(ours, stages=size), one),
        f"ours, P={size}, V=2": (partial(ours, stages=size, chunks=2), two),
        f"ours, P={size}, V=4": (partial(ours, stages=size, chunks=4), four),
        f"ours, T={size}": (partial(ours, tensor=size), 0.0),
        **both,
        "torch 1F1B": (partial(build_torch, chunks=1, count=count), one),
        "torch interleaved": (partial(build_torch, chunks=2, count=count), two),
    }


def measure(build: Callable[[Any], tuple[Any, Step]], config: Any, tokens: int, args: argparse.Namespace) -> Row:
    """Return the time of a step, the losses, and the peak memory of each device."""
    count = args.micro_batches
    model, run = build(config)
    model.train()
    is_peer = isinstance(model, nn.ModuleList)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=1e-5, fused=True) if is_peer else AdamW(trained, lr=1e-5)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, config.vocab_size, (count, 1, tokens), generator=generator).to(backend.device)
    times: list[float] = []
    losses: list[float] = []

    def step() -> Tensor:
        loss = run(list(ids))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for i in range(args.warm_up_steps + args.steps):
        if i == args.warm_up_steps:
            backend.reset_peak_memory_stats()
        dist.barrier()
        backend.synchronize()
        start = time.perf_counter()
        loss = step()
        backend.synchronize()
        dist.barrier()
        times.append(time.perf_counter() - start)
        # Stages without the head have 0.
        losses.append(round(backend.all_reduce(loss, dist.group.WORLD, "max").item(), 4))
    sequences = count * parallel_state.get_data_parallel_size()
    row = figures(times[args.warm_up_steps :], losses, tokens * sequences)
    row["peak_gib"] = _of_each_rank((backend.max_memory_allocated() or 0) / 2**30)
    if backend.name == "cuda":
        row["exposed_ms"] = _of_each_rank(exposed_ms(step))
    return row


def _of_each_rank(value: float) -> str:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return " ".join(f"{each:.1f}" for each in values)


def main() -> None:
    parser = step_parser(__doc__, "pipeline", (), steps=3)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--recompute", choices=("none", "full"), default="none", help="ours: of all layers")
    parser.add_argument("--lora-rank", type=int, help="ours: train adapters of this rank on all linear layers")
    parser.add_argument("--only", nargs="+", help="parts of the names of variants")
    args = parser.parse_args()
    backend.init_process_group()
    is_first = dist.get_rank() == 0
    memory = with_options(recompute_of_all_layers(args.recompute), args.memory)
    lora = None if args.lora_rank is None else LoraConfig(lora_rank=args.lora_rank)
    for tokens in args.tokens:
        alone: float | None = None
        for name, (build, share) in builders(dist.get_world_size(), args.micro_batches, memory, lora).items():
            if args.only and not any(part in name for part in args.only):
                continue
            row: Row = {"model": args.model, "variant": name, "tokens": tokens, "micro_batches": args.micro_batches}
            row["recompute"] = "none"
            if "torch" not in name:
                row["recompute"] = " ".join([args.recompute, *args.memory])
                row["lora_rank"] = args.lora_rank
            try:
                row |= measure(build, CONFIGS[args.model](), tokens, args)
            except (torch.OutOfMemoryError, ImportError, ValueError) as error:
                row["failure"] = first_line(error)
            else:
                alone = row["tokens_per_s_per_device"] if name == "one device" else alone
                if alone is not None:
                    row["share"] = round(row["tokens_per_s_per_device"] / (alone * (1 - share)), 4)
            free_memory()
            if is_first:
                print(row, flush=True)
                if args.append:
                    append([row | environment()], args.csv)
    leave_process_groups()


if __name__ == "__main__":
    main()
