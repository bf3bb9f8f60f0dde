"""Held-out loss: of the model under training, and of its export loaded by transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.backends import backend
from nxd_memopt.ops.math_attention import window_mask
from nxd_memopt.ops.packed import PackedDocuments
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.training.config.moe import has_experts
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.data.packing import NOT_TRAINED, Tokens, documents_per_row, trained_tokens
from nxd_memopt.training.pipeline import PipelinedForwardBackward
from nxd_memopt.training.reporting.step_metrics import HeldOut
from nxd_memopt.training.runtime.distributed import is_extracting_graphs
from nxd_memopt.training.runtime.reductions import sum_over_replicas_and_stages
from nxd_memopt.training.state import Training

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def held_out_loss(
    training: Training, config: TrainConfig, *, before_batch: Callable[[], None] = lambda: None
) -> float | None:
    """Return the mean loss over all held-out tokens, fp32, equal on every rank. Every rank calls.

    Returns None without held-out tokens, and while ``neuron_parallel_compile`` collects graphs.
    ``before_batch`` is called at the same points on every rank, and may raise on all of them.
    """
    # Each data-parallel rank sums the losses of its rows; the all-reduce adds the ranks' sums. The
    # caller's next train_step switches the model back to train mode.
    model = training.model
    model.eval()
    rows = held_out_rows(training, config)
    rank = parallel_state.get_data_parallel_rank()
    replicas = parallel_state.get_data_parallel_size()
    batches = _batches(rows, config, rank, replicas, backend.device)
    if isinstance(training.forward_backward, PipelinedForwardBackward):
        total = training.forward_backward.evaluate(batches, before_batch)
    else:
        total = _total_loss(lambda batch: batch.loss(model), batches, before_batch)
    total = sum_over_replicas_and_stages(total)
    backend.mark_step()
    if not batches or is_extracting_graphs():
        return None
    return total.item()


def held_out_rows(training: Training, config: TrainConfig) -> Tokens | None:
    """Return the rows of one evaluation, ``[<= eval_sequences, S]``, or None if there are none."""
    if not config.data.eval_sequences:
        return None
    return training.tokens.held_out_sequences(config.data.eval_sequences)


def held_out_text(training: Training, config: TrainConfig) -> HeldOut | None:
    """Return size and digest of the held-out text of one evaluation, or None without an evaluation."""
    rows = held_out_rows(training, config)
    if rows is None:
        return None
    isolated = config.data.isolate_documents
    digest = hashlib.sha256(rows.tobytes())
    digest.update(str(isolated).encode())
    return HeldOut(len(rows), trained_tokens(rows, isolated=isolated), digest.hexdigest()[:16])


@torch.no_grad()
def held_out_loss_by_transformers(directory: Path, training: Training, config: TrainConfig) -> float | None:
    """Load a Hugging Face directory with transformers, and return its held-out loss.

    The full model runs on this rank's device, next to what training has there, or on the host where it does not fit.

    Returns:
        The mean over all held-out tokens, fp32, or None without held-out tokens.
    """
    # Imported here: transformers' models import torch._dynamo, which takes seconds in every process.
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    rows = held_out_rows(training, config)
    if rows is None:
        return None
    dtype = getattr(torch, config.dtype)
    device = torch.device("cpu")
    if fits_device(directory):
        device = backend.device
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, device_map={"": device}).eval()
    # This rank evaluates the sequences of all data-parallel ranks, as the only one of 1 replica.
    batches = _batches(rows, config, 0, 1, device)
    total = _total_loss(lambda batch: _transformers_loss(model, batch), batches)
    return total.item()


def fits_device(directory: Path) -> bool:
    """Return whether the weights of a directory take at most half of the memory that is free on this rank's device."""
    # A NeuronCore has 16 GB, and transformers' model would be compiled for it.
    if backend.name == "xla":
        return False
    transfers = backend.host_transfers()
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    # The other half is for activations and logits. A device without such copies is the host itself, or Trainium.
    return transfers is None or 2 * size <= transfers.free_bytes()


def _batches(
    rows: Tokens | None, config: TrainConfig, rank: int, replicas: int, device: torch.device
) -> list[MicroBatch]:
    """Return this data-parallel rank's share of the held-out rows.

    The sum of all losses on all ranks is the mean over the trained tokens: the divisor of each
    batch is their number in all rows. Every rank has ceil(count / replicas / B) batches of shape
    ``[B, S]``, so XLA compiles one graph and every rank runs the same collectives. Missing rows
    are copies of the first one, without trained tokens.
    """
    if rows is None:
        return []
    size = config.data.micro_batch_size
    isolated = config.data.isolate_documents
    divisor = max(trained_tokens(rows, isolated=isolated), 1)
    num_boundaries = size * documents_per_row(rows) + 1 if isolated else None
    # Rank r has the rows r, r + D, r + 2D, ...: ranks differ by one row at most. The number of
    # batches follows from ceil(count / D), the largest share, on every rank.
    own = rows[rank::replicas]
    batches = []
    for start in range(0, -(-len(rows) // replicas), size):
        real = own[start : start + size]
        missing = np.repeat(rows[:1] | NOT_TRAINED, size - len(real), axis=0)
        batch = MicroBatch.of(np.concatenate([real, missing]), divisor=divisor, num_boundaries=num_boundaries)
        batches.append(batch.to(device))
    return batches


def _transformers_loss(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the loss of ``batch`` by a transformers model, 0-dim."""
    # In evaluation too, a model that outputs its routers' logits adds its balancing loss.
    options: dict[str, Any] = {}
    if has_experts(model.config):
        options["output_router_logits"] = False
    if batch.documents is not None:
        options["attention_mask"] = _masks(model, batch.documents)
        options["position_ids"] = batch.documents.positions()
    output = model(batch.ids, labels=batch.labels, use_cache=False, num_items_in_batch=batch.divisor[0], **options)
    return output.loss


def _masks(model: PreTrainedModel, documents: PackedDocuments) -> Tensor | dict[str, Tensor]:
    """Return the mask of all layers, ``[B, 1, S, S]``, or the masks by type of layer, for a transformers model."""
    # transformers has no argument for document bounds. A mask that is added to the scores is what all
    # its attention implementations accept. It adds no attention window to such a mask.
    dtype = next(model.parameters()).dtype
    same = documents.mask()

    def mask(window: int | None) -> Tensor:
        visible = same & window_mask(same.size(-1), window, same.device)
        hidden = torch.zeros(visible.shape, dtype=dtype, device=same.device)
        return hidden.masked_fill(~visible, torch.finfo(dtype).min)

    windows = set(model_spec(model.config).windows)
    if len(windows) == 1:
        return mask(windows.pop())
    return {"full_attention": mask(None), "sliding_attention": mask(model.config.sliding_window)}


def _total_loss(
    loss_of: Callable[[MicroBatch], Tensor],
    batches: list[MicroBatch],
    before_batch: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return the sum of the losses of ``batches``, 0-dim, fp32."""
    # Created on the host and copied: zeros made on an XLA device would be a constant inside the
    # first batch's graph, so the first batch would compile a graph of its own.
    device = batches[0].ids.device if batches else backend.device
    total = torch.zeros(()).to(device)
    for batch in batches:
        before_batch()
        total += loss_of(batch).float()
        backend.mark_step()  # ends the graph of a batch
    return total
