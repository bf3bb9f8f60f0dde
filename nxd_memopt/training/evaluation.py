"""Held-out loss: of the model under training, and of its export loaded by transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from nxd_memopt.backends import backend
from nxd_memopt.modules.causal_lm import IGNORE_INDEX
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.training.config import TrainConfig
from nxd_memopt.training.distributed import is_extracting_graphs
from nxd_memopt.training.metrics import sum_over_data_parallel_ranks
from nxd_memopt.training.tokens import TokenFile, tokens_directory


@dataclass(frozen=True)
class Batch:
    """Sequences of one forward pass.

    Args:
        ids: token ids, ``[B, S]``, int64.
        labels: ``ids``, or ``IGNORE_INDEX`` in padding sequences, ``[B, S]``, int64.
        count: number of sequences that are not padding, 0-dim, fp32.
    """

    ids: Tensor
    labels: Tensor
    count: Tensor


@torch.no_grad()
def held_out_loss(model: nn.Module, config: TrainConfig) -> float | None:
    """Return the mean loss over all held-out tokens, fp32, equal on every rank. Every rank calls.

    Returns None without held-out tokens, and while ``neuron_parallel_compile`` collects graphs.
    """
    # Each data-parallel rank sums the losses of its sequences; the all-reduce adds the ranks' sums.
    # The caller's next train_step switches the model back to train mode.
    model.eval()
    rank, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    batches = _batches(config, rank, replicas, backend.device)
    total = sum_over_data_parallel_ranks(_total_loss(lambda ids, labels: model(ids, labels=labels).loss, batches))
    backend.mark_step()
    count = _held_out_sequences(config)
    return None if count == 0 or is_extracting_graphs() else total.item() / count


@torch.no_grad()
def held_out_loss_by_transformers(directory: Path, config: TrainConfig) -> float | None:
    """Load a Hugging Face directory with transformers, and return its held-out loss.

    The full model runs on this rank's device. On backend xla it runs on the host, because a full
    model may not fit a NeuronCore's memory.

    Returns:
        The mean over all held-out tokens, fp32, or None without held-out tokens.
    """
    disable_progress_bar()
    dtype = getattr(torch, config.model.dtype)
    device = torch.device("cpu") if backend.name == "xla" else backend.device
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, device_map={"": device}).eval()
    batches = _batches(config, 0, 1, device)
    total = _total_loss(lambda ids, labels: model(ids, labels=labels, use_cache=False).loss, batches)
    count = _held_out_sequences(config)
    return total.item() / count if count else None


def _held_out_tokens(config: TrainConfig) -> TokenFile | None:
    """Return the held-out sequences, or None if ``data.eval_sequences`` is 0."""
    directory = tokens_directory(config)
    return TokenFile(directory / "held_out.bin", config.data.seq_length) if config.data.eval_sequences else None


def _held_out_sequences(config: TrainConfig) -> int:
    """Return the sequences of one evaluation: ``data.eval_sequences``, or fewer if there are."""
    tokens = _held_out_tokens(config)
    return 0 if tokens is None else min(len(tokens), config.data.eval_sequences)


def _batches(config: TrainConfig, rank: int, replicas: int, device: torch.device) -> list[Batch]:
    """Return this data-parallel rank's share of the held-out sequences.

    Every rank has ceil(count / replicas / B) batches of shape ``[B, S]``, so XLA compiles one graph
    and every rank runs the same collectives. Missing sequences are padded with sequence 0, whose
    labels are ignored in the loss.
    """
    tokens, size = _held_out_tokens(config), config.data.micro_batch_size
    if tokens is None:
        return []
    count = _held_out_sequences(config)
    rows = range(count)[rank::replicas]
    starts = range(0, -(-count // replicas), size)
    return [_batch(tokens, rows[start : start + size], size, device) for start in starts]


def _batch(tokens: TokenFile, rows: range, size: int, device: torch.device) -> Batch:
    """Return the sequences ``rows``, padded to ``size`` sequences, on ``device``."""
    # [real, S] and [B - real, S]. A rank without real sequences gets an empty slice for its dtype.
    real = tokens.sequences(rows) if rows else tokens.sequences(range(1))[:0]
    filler = tokens.sequences(range(1)).expand(size - len(real), -1)
    ids = torch.cat([real, filler])
    labels = torch.cat([real, torch.full_like(filler, IGNORE_INDEX)])
    return Batch(*(tensor.to(device) for tensor in (ids, labels, torch.tensor(float(len(real))))))


def _total_loss(loss_of: Callable[[Tensor, Tensor], Tensor], batches: list[Batch]) -> Tensor:
    """Return the sum of the mean losses of all sequences that are not padding, 0-dim, fp32.

    All sequences have S tokens, so dividing the sum by their number gives the mean over tokens.
    """
    # Created on the host and copied: zeros made on an XLA device would be a constant inside the
    # first batch's graph, so the first batch would compile a graph of its own.
    total = torch.zeros(()).to(batches[0].ids.device if batches else backend.device)
    for batch in batches:
        # loss_of returns the mean over the tokens that are not ignored: times count, the sum over
        # the batch's sequences.
        total += loss_of(batch.ids, batch.labels).float() * batch.count
        backend.mark_step()  # ends the graph of a batch
    return total
