"""Options of the fused head and loss, and the check of its arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.ops.cross_entropy import LossTerms
from nxd_memopt.options import require_one_of

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options that are the same for every chunk.

    Args:
        group: process group that shards the vocabulary and, under sequence parallelism, the tokens.
        sequence_parallel: the rows of the input are this rank's sequence shard.
        ignore_index: label of tokens without loss.
        reduction: ``"mean"`` over the tokens with a loss, ``"sum"`` or ``"none"``.
        logits_bytes: memory for the logits of a chunk.
        accumulate_dtype: dtype of dW while chunks are added, or None for the weight's dtype.
        reduce_dtype: dtype of the reduction of dX, or None for the dtype of dX.
        terms: terms of a token's loss.
        num_items: divisor of ``"mean"``, of one element, or None for the tokens with a loss.
    """

    group: ProcessGroup | None
    sequence_parallel: bool
    ignore_index: int
    reduction: str
    logits_bytes: int
    accumulate_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    terms: LossTerms
    num_items: Tensor | None = None

    @property
    def gathered(self) -> int:
        """Number of ranks whose rows are gathered into a chunk."""
        return backend.group_size(self.group) if self.sequence_parallel else 1


def check_arguments(hidden: Tensor, weight: Tensor, target: Tensor, options: LossOptions) -> None:
    """Raise ValueError for arguments of ``fused_linear_cross_entropy`` that would give a wrong loss."""
    # Weights of another shape or dtype fail in the first matmul.
    if target.is_floating_point():
        raise ValueError(f"target must hold integer labels, got {target.dtype}")
    if hidden.numel() // hidden.size(-1) * options.gathered != target.numel():
        raise ValueError(
            f"hidden has shape {list(hidden.shape)} on each of {options.gathered} ranks, target {list(target.shape)}: "
            "target must have a label for each token of the full sequence"
        )
    require_one_of("reduction", options.reduction, REDUCTIONS)
    num_items = options.num_items
    if num_items is not None and (options.reduction != "mean" or num_items.numel() != 1):
        raise ValueError(
            f"num_items_in_batch has shape {list(num_items.shape)} with reduction {options.reduction!r}: "
            "must be one number, and is the divisor of 'mean' only"
        )
    # A narrower sum would lose bits of every chunk.
    accumulate_dtype = options.accumulate_dtype
    if accumulate_dtype is not None and accumulate_dtype.itemsize < weight.dtype.itemsize:
        raise ValueError(
            f"accumulate_dtype {accumulate_dtype} is narrower than the weight's {weight.dtype}: "
            "leave it out, or use torch.float32"
        )
    terms = options.terms
    if not 0 <= terms.label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be within [0, 1], got {terms.label_smoothing}")
    if terms.softcap is not None and terms.softcap <= 0:
        raise ValueError(f"softcap must be above 0, got {terms.softcap}: leave it out for none")
    columns = weight.size(0) * backend.group_size(options.group)
    if not 0 < terms.vocab_size <= columns:
        raise ValueError(f"vocab_size must be within (0, {columns}], the rows of all ranks, got {terms.vocab_size}")
