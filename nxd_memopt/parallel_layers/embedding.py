"""The parallel embedding: a lookup in a table sharded over the vocabulary or over the hidden size."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import mappings
from nxd_memopt.parallel_layers.initialization import InitMethod, initialize_sharded_
from nxd_memopt.parallel_layers.utils import (
    ShardedModule,
    check_sequence_dimension,
    describe_shard,
    partition_size,
    set_tensor_model_parallel_attributes,
)


class ParallelEmbedding(ShardedModule):
    """Embedding with a table ``[V, H]`` sharded over V or over H.

    ``[B, S] -> [B, S, H]``. Sharded over V, each rank looks up the rows it holds, and the partial
    results are summed. With sequence parallelism the output is ``[s, B, H]``, or ``[B, s, H]`` for
    ``sequence_dimension=1``, and the sum is a reduce-scatter instead of an all-reduce. The sum is
    exact in any dtype because only one rank contributes a nonzero row.

    Args:
        num_embeddings: V.
        embedding_dim: H.
        padding_idx: row that receives no gradient.
        init_method: initializes the full table in place; default standard normal with row
            ``padding_idx`` zero.
        device: device of the table; ``"meta"`` skips the initialization.
        dtype: dtype of the table.
        shard_across_embedding: shard H instead of V.
        pad: allow a V (or H) that T does not divide; padding is zero and never looked up.
        sequence_parallel_enabled: return a shard along the sequence.
        sequence_dimension: dimension of the output that is the sequence, 0 (default) or 1.
        tensor_model_parallel_group: process group; default the tensor-parallel group.
        collect_output: False returns this rank's partial sum, or this rank's columns.

    Raises:
        ValueError: T does not divide the sharded size and ``pad`` is False; on the CPU also an
            index outside ``[0, V)``, which on other devices fails the device's index check.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        init_method: InitMethod | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        collect_output: bool = True,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx {padding_idx} is outside num_embeddings {num_embeddings}: "
                "resize the vocabulary or unset pad_token_id"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        # As in torch.nn.Embedding, a negative index counts from the end.
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.shard_across_embedding = shard_across_embedding
        self.collect_output = collect_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = check_sequence_dimension(sequence_dimension)
        self.init_method = init_method or self._default_init
        self.tensor_parallel_group = mappings.resolve_group(tensor_model_parallel_group)
        # The local table is [V/T, H] or [V, H/T], after padding the sharded size to a multiple of
        # T. ``full_shape`` stays unpadded: checkpoints store tensors of that shape.
        size = backend.group_size(self.tensor_parallel_group)
        dim = 1 if shard_across_embedding else 0
        full_shape = (num_embeddings, embedding_dim)
        shape = list(full_shape)
        shape[dim] = partition_size(("num_embeddings", "embedding_dim")[dim], full_shape[dim], size, pad=pad)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        set_tensor_model_parallel_attributes(
            self.weight,
            True,
            dim,
            num_partitions=size,
            full_shape=full_shape,
            rank=backend.group_rank(self.tensor_parallel_group),
        )
        self.init_weight_cpu()

    def extra_repr(self) -> str:
        """Return the full sizes as ``nn.Embedding`` shows them, and the shape of this rank's table."""
        padding = "" if self.padding_idx is None else f"padding_idx={self.padding_idx}, "
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, {padding}"
            f"{describe_shard(self.weight, backend.group_size(self.tensor_parallel_group))}, "
            f"sequence_parallel_enabled={self.sequence_parallel_enabled}"
        )

    def _default_init(self, table: Tensor) -> None:
        nn.init.normal_(table)
        if self.padding_idx is not None:
            table[self.padding_idx].zero_()

    def init_weight_cpu(self) -> None:
        """Initialize the table on the CPU; all tensor-parallel ranks call it in the same order."""
        initialize_sharded_(self.weight, self.init_method)

    def forward(self, input: Tensor) -> Tensor:
        # On the CPU the check costs two reductions; on a device it would wait for the stream.
        if input.device.type == "cpu":
            self._check_range(input)
        # Ids [S, B] give rows [S, B, H]: the reduce-scatter then splits dim 0 without a
        # transpose.
        sequence_first = self.sequence_parallel_enabled and self.sequence_dimension == 0
        ids = input.t() if sequence_first else input
        if self.shard_across_embedding:
            rows = self._detach_padding(F.embedding(ids, self.weight), ids)
        else:
            rows = self._detach_padding(self._local_rows(ids), ids)
        if not self.collect_output:
            return rows
        if self.shard_across_embedding:
            return self._gather_columns(rows)
        if self.sequence_parallel_enabled:
            return mappings.reduce_scatter_to_sequence_parallel_region(
                rows, self.sequence_dimension, self.tensor_parallel_group
            )
        return mappings.functional_reduce_from_tensor_model_parallel_region(rows, self.tensor_parallel_group)

    def _check_range(self, ids: Tensor) -> None:
        if not ids.numel():
            return
        for index in (int(ids.min()), int(ids.max())):
            if 0 <= index < self.num_embeddings:
                continue
            raise ValueError(
                f"index {index} is outside the embedding's [0, {self.num_embeddings}): "
                "check that the tokenizer belongs to the model"
            )

    def _local_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of this rank's shard, and zeros for other indices in the vocabulary.

        An index outside ``[0, V)`` stays outside the local table, so that the lookup fails.
        """
        if backend.group_size(self.tensor_parallel_group) == 1:
            return F.embedding(ids, self.weight)
        per_partition = self.weight.size(0)
        local = ids - backend.group_rank_in_graph(self.tensor_parallel_group) * per_partition
        is_local = (local >= 0) & (local < per_partition)
        in_vocabulary = (ids >= 0) & (ids < self.num_embeddings)
        # Indices of other ranks look up row 0 and are masked. Index per_partition is out of
        # range.
        local = torch.where(is_local, local, torch.where(in_vocabulary, 0, per_partition))
        return F.embedding(local, self.weight).masked_fill(~is_local.unsqueeze(-1), 0.0)

    def _detach_padding(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Stop the gradient of row ``padding_idx``."""
        if self.padding_idx is None:
            return rows
        # F.embedding's padding_idx counts rows of the local table, and its shard may lack the
        # row: a mask on the looked-up rows is the same on every rank.
        return torch.where((ids == self.padding_idx).unsqueeze(-1), rows.detach(), rows)

    def _gather_columns(self, rows: Tensor) -> Tensor:
        """Gather the columns ``[..., H/T] -> [..., H]`` and scatter the sequence if enabled."""
        group = self.tensor_parallel_group
        # Padding columns are last: they are cut off.
        rows = mappings.gather_from_tensor_model_parallel_region(rows, group)
        rows = rows[..., : self.embedding_dim]
        if self.sequence_parallel_enabled:
            return mappings.scatter_to_sequence_parallel_region(rows, self.sequence_dimension, group)
        return rows
