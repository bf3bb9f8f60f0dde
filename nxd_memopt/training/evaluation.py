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
    # Each data-parallel rank sums the losses of its sequences; the all-reduce adds the ranks'
    # sums. The caller's next train_step switches the model back to train mode.
    model.eval()
    rank = parallel_state.get_data_parallel_rank()
    replicas = parallel_state.get_data_parallel_size()
    batches = _batches(config, rank, replicas, backend.device)
    total = _total_loss(lambda ids, labels: model(ids, labels=labels).loss, batches)
    total = sum_over_data_parallel_ranks(total)
    backend.mark_step()
    count = _held_out_sequences(config)
    if count == 0 or is_extracting_graphs():
        return None
    return total.item() / count


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
    device = backend.device
    if backend.name == "xla":
        device = torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, device_map={"": device}).eval()
    # This rank evaluates the sequences of all data-parallel ranks, as the only one of 1 replica.
    batches = _batches(config, 0, 1, device)
    total = _total_loss(lambda ids, labels: model(ids, labels=labels, use_cache=False).loss, batches)
    count = _held_out_sequences(config)
    if count == 0:
        return None
    return total.item() / count


def _held_out_tokens(config: TrainConfig) -> TokenFile | None:
    """Return the held-out sequences, or None if ``data.eval_sequences`` is 0."""
    if not config.data.eval_sequences:
        return None
    return TokenFile(tokens_directory(config) / "held_out.bin", config.data.seq_length)


def _held_out_sequences(config: TrainConfig) -> int:
    """Return the sequences of one evaluation: ``data.eval_sequences``, or fewer if there are."""
    tokens = _held_out_tokens(config)
    if tokens is None:
        return 0
    return min(len(tokens), config.data.eval_sequences)


def _batches(config: TrainConfig, rank: int, replicas: int, device: torch.device) -> list[Batch]:
    """Return this data-parallel rank's share of the held-out sequences.

    Every rank has ceil(count / replicas / B) batches of shape ``[B, S]``, so XLA compiles one
    graph and every rank runs the same collectives. Missing sequences are padded with sequence 0,
    whose labels are ignored in the loss.
    """
    tokens = _held_out_tokens(config)
    if tokens is None:
        return []
    size = config.data.micro_batch_size
    count = _held_out_sequences(config)
    # Rank r has the sequences r, r + D, r + 2D, ...: ranks differ by one sequence at most. The
    # number of batches follows from ceil(count / D), the largest share, on every rank.
    rows = range(count)[rank::replicas]
    starts = range(0, -(-count // replicas), size)
    return [_batch(tokens, rows[start : start + size], size, device) for start in starts]


def _batch(tokens: TokenFile, rows: range, size: int, device: torch.device) -> Batch:
    """Return the sequences ``rows``, padded to ``size`` sequences, on ``device``."""
    # [real, S] and [B - real, S]. A rank without real sequences gets an empty slice for its
    # dtype.
    first = tokens.sequences(range(1))
    real = tokens.sequences(rows) if rows else first[:0]
    padding = first.expand(size - len(real), -1)
    ids = torch.cat([real, padding])
    labels = torch.cat([real, torch.full_like(padding, IGNORE_INDEX)])
    # The count is a tensor: a Python number could become a constant of the XLA graph, and a last
    # batch with another count would compile again.
    count = torch.tensor(float(len(real)))
    return Batch(ids.to(device), labels.to(device), count.to(device))


def _total_loss(loss_of: Callable[[Tensor, Tensor], Tensor], batches: list[Batch]) -> Tensor:
    """Return the sum of the mean losses of all sequences that are not padding, 0-dim, fp32.

    All sequences have S tokens, so dividing the sum by their number gives the mean over tokens.
    """
    # Created on the host and copied: zeros made on an XLA device would be a constant inside the
    # first batch's graph, so the first batch would compile a graph of its own.
    device = batches[0].ids.device if batches else backend.device
    total = torch.zeros(()).to(device)
    for batch in batches:
        # loss_of returns the mean over the tokens that are not ignored: times count, the sum over
        # the batch's sequences.
        total += loss_of(batch.ids, batch.labels).float() * batch.count
        backend.mark_step()  # ends the graph of a batch
    return total
