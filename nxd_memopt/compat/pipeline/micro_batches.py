"""Cuts a batch into micro-batches, and says how much each counts in the mean loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

WeightFunction = Callable[[dict[str, Tensor]], Any]
"""Returns the number of values over which the model averages its loss, from the inputs of a micro-batch."""
_NOT_TRAINED = -100


def split_batch(batch: Mapping[str, Tensor], num_micro_batches: int) -> list[dict[str, Tensor]]:
    """Return rows ``[k B / M, (k + 1) B / M)`` of each tensor as micro-batch k.

    Raises:
        ValueError: an input is no tensor, or has no rows.
        RuntimeError: the tensors have different numbers of rows, or M does not divide them.
    """
    for name, tensor in batch.items():
        if not isinstance(tensor, Tensor) or tensor.ndim == 0:
            raise ValueError(
                f"the input {name!r} must be a tensor of at least one dimension, got {type(tensor).__name__}"
            )
    sizes = {name: tensor.size(0) for name, tensor in batch.items()}
    if len(set(sizes.values())) > 1:
        raise RuntimeError(f"the inputs have different numbers of rows, {sizes}: give every input one row per sample")
    rows = next(iter(sizes.values()), num_micro_batches)
    if rows % num_micro_batches:
        raise RuntimeError(
            f"batch size {rows} is not divisible by num_microbatches {num_micro_batches}: change one of them"
        )
    size = rows // num_micro_batches
    micro_batches: list[dict[str, Tensor]] = []
    for k in range(num_micro_batches):
        micro_batches.append({name: tensor.narrow(0, k * size, size) for name, tensor in batch.items()})
    return micro_batches


def loss_weights(micro_batches: Sequence[dict[str, Tensor]], weight_of: WeightFunction | None) -> list[float]:
    """Return the share of each micro-batch in the loss of the batch; their sum is 1.

    The mean of mean losses is the mean over the batch only if all micro-batches have equal numbers of labels.

    Args:
        micro_batches: inputs of each.
        weight_of: number of values that a micro-batch's loss is the mean of; default: equal numbers.

    Raises:
        ValueError: the labels show that the numbers are not equal, and ``weight_of`` is None.
    """
    if weight_of is not None:
        counts = [float(weight_of(each)) for each in micro_batches]
        return [count / sum(counts) for count in counts]
    for name, count in (("labels", _labels), ("loss_mask", _mask)):
        numbers = [count(each[name]) for each in micro_batches if name in each]
        if len(set(numbers)) > 1:
            raise ValueError(
                f"micro-batches have {numbers} trained labels by {name!r}, so the mean of their mean losses is not the "
                "mean over the batch: pass micro_batch_weight_fn, which returns the number of labels in the loss of a "
                "micro-batch, such as lambda batch: (batch['labels'][:, 1:] != -100).sum(), or use num_microbatches 1"
            )
    return [1 / len(micro_batches)] * len(micro_batches)


def _labels(labels: Tensor) -> int:
    return int((labels != _NOT_TRAINED).sum())


def _mask(mask: Tensor) -> float:
    return float(mask.to(torch.float64).sum())
