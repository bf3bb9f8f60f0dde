"""Owns the held-out loss: of the model under training, and of its export by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state
from train_config import TrainConfig
from train_ranks import sum_over_replicas
from train_tokens import TokenFile, tokens_directory


@torch.no_grad()
def held_out_loss(model: nn.Module, config: TrainConfig) -> float | None:
    """Mean over all held-out tokens, fp32, the same on every rank; ``None`` without any. Every rank calls."""
    model.eval()
    rank, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    batches = _batches(config, rank, replicas)
    loss_and_count = _loss_and_count(lambda batch: model(batch, labels=batch).loss, batches)
    loss, count = sum_over_replicas(loss_and_count).tolist()
    return loss / count if count else None


@torch.no_grad()
def held_out_loss_by_transformers(directory: Path, config: TrainConfig) -> float | None:
    """Load a Hugging Face directory with transformers, on this rank's device, and return its held-out loss."""
    disable_progress_bar()
    dtype = getattr(torch, config.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, device_map={"": backend.device}).eval()
    batches = _batches(config, 0, 1)
    loss, count = _loss_and_count(lambda batch: model(batch, labels=batch, use_cache=False).loss, batches).tolist()
    return loss / count if count else None


def _batches(config: TrainConfig, rank: int, replicas: int) -> list[Tensor]:
    """This data-parallel rank's share of the held-out sequences, ``[<= B, S]`` each."""
    size = config.data.micro_batch_size
    if not config.data.eval_sequences:
        return []
    tokens = TokenFile(tokens_directory(config) / "held_out.bin", config.data.seq_length)
    rows = range(min(len(tokens), config.data.eval_sequences))[rank::replicas]
    return [tokens.sequences(rows[start : start + size]).to(backend.device) for start in range(0, len(rows), size)]


def _loss_and_count(loss_of: Callable[[Tensor], Tensor], batches: list[Tensor]) -> Tensor:
    """``[2]``: the sum of the sequences' losses, fp32, and how many sequences there were; all are equally long."""
    total = torch.zeros(2, device=backend.device)
    for batch in batches:
        total += torch.stack([loss_of(batch).float(), torch.ones((), device=backend.device)]) * len(batch)
    return total
