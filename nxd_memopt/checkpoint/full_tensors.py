"""Gathers the full tensors of a model on the rank that writes its files."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint.names import named_tensors
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.modules.lora import whole_model
from nxd_memopt.modules.staged_model import is_staged, rank_of_parameter
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.checkpointing import is_model_replica_zero
from nxd_memopt.parallel_layers.data_shards import gather_rows
from nxd_memopt.parallel_layers.resharding import full_shape, gather_experts, gather_full_tensor


def is_writer() -> bool:
    """Return whether this rank writes files: the first tensor-parallel rank of the first stage and replica."""
    is_first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_pipeline_model_parallel_rank() == 0
    return is_first and is_model_replica_zero()


class FullTensors:
    """The full tensors of a model by name, gathered one at a time.

    Args:
        model: a model, or this rank's stages of one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = whole_model(model)
        self._staged = cast(ParallelCausalLM, model) if is_staged(model) else None
        self._own = {entry.names[0]: entry.tensor for entry in named_tensors(model)}

    def gather(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return a full tensor on the host of the writer, None on other ranks. Every rank calls.

        Every device of the first replica needs memory for it.

        Args:
            name: the tensor's first name in ``model``.
            tensor: the tensor in ``model``, for its shape.
            dtype: dtype of the result.
        """
        full: Tensor | None = None
        own = self._own.get(name)
        if own is not None:
            # Rows that are sharded over data-parallel ranks (zero3), and the experts of expert-parallel ranks, need
            # the ranks of all replicas; all else the tensor-parallel ranks of the first one.
            rows = gather_experts(gather_rows(own))
            if is_model_replica_zero():
                full = gather_full_tensor(rows, dtype=dtype)
        if self._staged is not None and is_model_replica_zero():
            full = self._to_first_stage(rank_of_parameter(self._staged, name), tensor, full, dtype)
        return full

    def _to_first_stage(self, source: int, tensor: Tensor, full: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Send ``full`` of the first tensor-parallel rank of stage ``source`` to the writer."""
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return None
        stage = parallel_state.get_pipeline_model_parallel_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        # From neighbor to neighbor, which every device can.
        for sender in range(source, 0, -1):
            if stage == sender:
                assert full is not None
                backend.exchange([(full.to(backend.device), sender - 1)], [], group)
            elif stage == sender - 1:
                buffer = torch.empty(full_shape(tensor), dtype=dtype, device=backend.device)
                (full,) = backend.exchange([], [(buffer, sender)], group)
        return full.cpu() if stage == 0 and full is not None else None
