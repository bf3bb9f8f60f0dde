"""Trains a LLaMA checkpoint on a text file, with one tensor-parallel group over all ranks.

    torchrun --nproc_per_node 2 docs/examples/train_loop.py --model MODEL --text FILE --output EXPORT

MODEL is a Hugging Face directory with config.json, safetensors and a tokenizer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoTokenizer

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import load_config, load_pretrained, save_pretrained
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.optimizer import AdamW, NeuronZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state


def main() -> None:
    args = parse_arguments()
    backend.init_process_group()
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)

    # "meta": load_pretrained allocates the parameters, and each rank reads only its own slices of the files.
    model = LlamaForCausalLM(
        load_config(args.model),
        parallel=ParallelConfig(tensor_model_parallel_size=size, sequence_parallel_enabled=size > 1),
        memory=MemoryConfig(recompute_granularity="full"),
        dtype=torch.bfloat16,
        device="meta",
    )
    load_pretrained(model, args.model)

    # fp32 master weights and moments, sharded over data-parallel ranks (of which there is one here). step() also sums
    # the gradients of sequence-parallel norms over the tensor-parallel ranks, and clips by the global norm.
    optimizer = NeuronZero1Optimizer(
        model.parameters(), AdamW, optimizer_dtype=torch.float32, grad_clipping=True, max_norm=1.0, lr=args.lr
    )

    for step, input_ids in enumerate(batches(args), start=1):
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        backend.mark_step()  # ends the step's graph on XLA; a no-op elsewhere
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    save_pretrained(model, args.output)  # AutoModelForCausalLM.from_pretrained loads it


def batches(args: argparse.Namespace) -> Iterator[Tensor]:
    """Yield token ids ``[1, S]``, the same on every tensor-parallel rank, ``args.steps`` times."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = torch.tensor(tokenizer(args.text.read_text(encoding="utf-8"))["input_ids"])
    rows = ids[: len(ids) // args.seq_length * args.seq_length].view(-1, args.seq_length)
    for step in range(args.steps):
        yield rows[step % len(rows)].unsqueeze(0).to(backend.device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seq-length", type=int, default=1024, help="S, a multiple of the number of ranks")
    parser.add_argument("--lr", type=float, default=1e-5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
