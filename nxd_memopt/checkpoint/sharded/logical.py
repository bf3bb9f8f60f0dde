"""Names the full tensors of a model and its optimizer, and the boxes of them that this rank stores.

Names are ``model.<parameter>`` with the model's (Hugging Face's) parameter names,
``optimizer.master.<parameter>`` for master weights of another dtype than their parameter,
``optimizer.param_remainder.<parameter>`` for what a master has beyond its bf16 parameter, and
``optimizer.<state>.<parameter>`` for states such as ``exp_avg`` and ``step``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.checkpoint.layout import Part, Shape, choose_data_rank, parts_of, split_part
from nxd_memopt.checkpoint.names import named_tensors
from nxd_memopt.checkpoint.plain import encode
from nxd_memopt.checkpoint.sharded.stored_optimizer import MASTER, StoredOptimizer
from nxd_memopt.checkpoint.stream import dtype_name
from nxd_memopt.ops.param_remainders import REMAINDER
from nxd_memopt.optimizer.sharded_parameters import StoredParameter
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.data_shards import local_rows, model_dtype, replica_ranks
from nxd_memopt.parallel_layers.resharding import full_shape

MAX_BOX_BYTES = 256 << 20
"""Upper bound of a box, 256 MiB. A reader must read a complete box to verify its checksum."""


@dataclass(frozen=True)
class TrainingState:
    """The content of a training checkpoint.

    Args:
        model: its parameters and persistent buffers are saved.
        optimizer: an optimizer of the model's parameters, or None: a torch optimizer,
            ``NeuronZero1Optimizer``, or a wrapper with one of them as attribute ``optimizer``,
            such as ``NxDOptimizer``. States are numbers, or tensors of dimension 0 or of their
            parameter's shape.
        shared: nested plain values and tensors that are equal on all ranks, such as the position
            in the data.
        per_rank: nested plain values and tensors of this rank, such as random states. They are
            only restored if T and D are those of the run that wrote them.
        base: says where the parameters are that are not trained (``huggingface.base.describe_base``); the
            checkpoint then leaves them out. None stores all parameters.
        files: directory of files that rank 0 copies into the checkpoint, such as the tokenizer's; None
            copies none.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    shared: Mapping[str, Any] = field(default_factory=dict)
    per_rank: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] | None = None
    files: Path | None = None


@dataclass(frozen=True)
class FullTensorShard:
    """A full tensor and the part of it that this rank stores.

    Attributes:
        name: name in the checkpoint.
        shape: shape of the full tensor.
        stored: this rank's tensor.
        parts: the boxes that ``stored`` consists of.
        holders: data-parallel ranks that store the same elements.
        is_updated_by_optimizer: whether ``stored`` changes only in ``optimizer.step()``.
        is_copy: whether the first stage of a pipeline has the same tensor and writes it.
        written_with: name of the tensor whose boxes the same ranks write; empty for any. A remainder belongs
            to the bits of its parameter, and replicas of both may differ.
    """

    name: str
    shape: Shape
    stored: Tensor
    parts: list[Part]
    holders: tuple[int, ...]
    is_updated_by_optimizer: bool = True
    is_copy: bool = False
    written_with: str = ""

    @property
    def dtype(self) -> str:
        """Name of the dtype in the index."""
        return dtype_name(self.stored.dtype, self.name)


def model_tensors(model: nn.Module, *, frozen: bool = True) -> Iterator[FullTensorShard]:
    """Yield the model's parameters, without ``frozen`` only those that are trained, and its persistent buffers.

    Tied ones appear once, under their first name.
    """
    for entry in named_tensors(model):
        if entry.is_frozen and not frozen:
            continue
        # Buffers may change in forward: a snapshot must copy them at once.
        # Rows that are sharded over data-parallel ranks (zero3) may be masters: the model's weights
        # are those rows, rounded. The copy exists until it is written.
        yield FullTensorShard(
            f"model.{entry.names[0]}",
            full_shape(entry.tensor),
            local_rows(entry.tensor).detach().to(model_dtype(entry.tensor)),
            parts_of(entry.tensor),
            replica_ranks(entry.tensor, parallel_state.get_data_parallel_size()),
            isinstance(entry.tensor, nn.Parameter),
            is_stage_copy(entry.tensor),
        )


def is_stage_copy(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is the copy of a tied weight on a later stage of a pipeline."""
    return getattr(tensor, "shared", False)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the name of each tensor of the model, by ``id``."""
    return {id(entry.tensor): entry.names[0] for entry in named_tensors(model)}


def name_of(param: Tensor, names: Mapping[int, str]) -> str:
    """Return the name of an optimizer's parameter in the model.

    Raises:
        ValueError: the parameter is not in the model.
    """
    if id(param) not in names:
        raise ValueError(
            f"the optimizer holds a parameter of shape {list(param.shape)} that is not the "
            "model's: build the optimizer from the parameters of this model"
        )
    return names[id(param)]


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[FullTensorShard]:
    """Yield master weights and all states that are tensors.

    Raises:
        ValueError: a state of a sharded parameter has neither the parameter's shape nor dimension
            0, a name cannot be stored, or a list, tuple or dict contains a tensor.
    """
    stored = StoredOptimizer(optimizer)
    stored.require_all_states()
    for each in stored.parameters:
        name = name_of(each.param, names)
        # Master and states of a parameter are sharded identically: one list of boxes for all of
        # them.
        parts = parts_of(each.param, rank=each.rank, size=each.size)
        # A master in the parameter's dtype equals the parameter and is not stored: loading cuts
        # it from the parameter, without a loss.
        if stored.has_master(each):
            yield _like_parameter(MASTER, name, each, each.stored.detach(), parts)
        for key, value in stored.states_of(each).items():
            if key == REMAINDER:
                if stored.saves_masters:
                    shard = _state_tensor(key, name, each, value.detach(), parts)
                    yield replace(shard, written_with=f"model.{name}")
            elif isinstance(value, Tensor):
                _require_state_name(key, name)
                yield _state_tensor(key, name, each, value.detach(), parts)
            else:
                encode(value, partial(_refuse_tensor, f"optimizer state {key!r} of {name}"))


def _require_state_name(key: Any, name: str) -> None:
    """Raise ``ValueError`` for a state name that cannot be stored.

    Names are stored as ``optimizer.<key>.<parameter>``. A reader takes the text up to the second
    dot as the key.
    """
    if not isinstance(key, str) or not key or "." in key or key == MASTER:
        raise ValueError(
            f"optimizer state {key!r} of {name} is a tensor: its name must be a string without "
            f"dots other than {MASTER!r}: rename it in the optimizer"
        )


def _refuse_tensor(where: str, tensor: Tensor) -> str:
    """Raise ``ValueError`` for a tensor in a state that is stored once for all ranks: all would load rank 0's shard."""
    raise ValueError(
        f"{where} has a tensor of shape {list(tensor.shape)} in a list, tuple or dict: keep it as a state with a name"
    )


def _state_tensor(key: str, name: str, each: StoredParameter, value: Tensor, parts: list[Part]) -> FullTensorShard:
    """Return the shard of a state: like its parameter, or equal on all ranks (step counters)."""
    if value.shape == each.stored.shape:
        return _like_parameter(key, name, each, value, parts)
    # Any shape can be stored if the parameter is not sharded at all.
    is_replicated = each.size == 1 and full_shape(each.param) == tuple(each.param.shape)
    if value.dim() and not is_replicated:
        raise ValueError(
            f"optimizer state {key!r} of {name} has shape {list(value.shape)}, its parameter "
            f"{list(each.stored.shape)} on this rank: only states of the parameter's shape or "
            "with one element and no dimension can be stored independently of the number of ranks"
        )
    full_name = f"optimizer.{key}.{name}"
    data_ranks = tuple(range(parallel_state.get_data_parallel_size()))
    is_copy = is_stage_copy(each.param)
    return FullTensorShard(full_name, tuple(value.shape), value, parts_of(value), data_ranks, is_copy=is_copy)


def _like_parameter(key: str, name: str, each: StoredParameter, value: Tensor, parts: list[Part]) -> FullTensorShard:
    """Return a shard that is sharded like its parameter."""
    is_copy = is_stage_copy(each.param)
    return FullTensorShard(
        f"optimizer.{key}.{name}", full_shape(each.param), value, parts, each.holders, is_copy=is_copy
    )


def optimizer_numbers(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the states that are not tensors, by parameter name and state."""
    stored = StoredOptimizer(optimizer)
    numbers = {}
    for each in stored.parameters:
        states = stored.states_of(each)
        plain = {key: value for key, value in states.items() if not isinstance(value, Tensor)}
        if plain:
            numbers[name_of(each.param, names)] = plain
    return numbers


def optimizer_groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the parameter groups: names of the trained parameters, and options such as the
    learning rate.
    """
    groups = []
    for group in optimizer.param_groups:
        trained = [param for param in group["params"] if param.requires_grad]
        options = {name: value for name, value in group.items() if name != "params"}
        groups.append({"parameters": [name_of(param, names) for param in trained], "options": options})
    return groups


def owned_parts(logicals: list[FullTensorShard]) -> list[tuple[FullTensorShard, list[Part]]]:
    """Return the boxes that this rank writes.

    Each box of a full tensor is written by exactly one rank. Stages of a pipeline have different tensors.

    Tensor-parallel ranks that store the same box take turns. Of the data-parallel ranks the one
    with the fewest bytes so far writes. Every rank computes the same answer, because all ranks
    of a stage list the same tensors in the same order.
    """
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    data_rank = parallel_state.get_data_parallel_rank()
    # Bytes that each data-parallel rank of this tensor-parallel rank writes so far.
    load_bytes = [0] * parallel_state.get_data_parallel_size()
    owned = []
    # Tensor -> its turn, and box of a tensor -> the data-parallel rank that writes it.
    turns: dict[str, int] = {}
    writers: dict[tuple[str, Shape, Shape], int] = {}
    for position, logical in enumerate(logicals):
        # ``turn`` is the position of the tensor in the list: consecutive tensors go to different
        # holders.
        turn = turns[logical.name] = turns.get(logical.written_with, position)
        own_parts: list[Part] = []
        element_size = logical.stored.element_size()
        for part in logical.parts:
            # Replicated boxes (norms, KV replicas) are written by one tensor-parallel rank per
            # tensor.
            if part.holders[turn % len(part.holders)] != tensor_rank:
                continue
            # Also called for boxes that another rank writes: ``load_bytes`` must stay equal on
            # all data-parallel ranks.
            size_bytes = part.elements * element_size
            box = (part.offset, part.size)
            writer = writers.get((logical.written_with, *box))
            if writer is None or writer not in logical.holders:
                writer = choose_data_rank(load_bytes, logical.holders, size_bytes, turn)
            writers[logical.name, *box] = writer
            if writer == data_rank and not logical.is_copy:
                own_parts += split_part(part, max(1, MAX_BOX_BYTES // element_size))
        owned.append((logical, own_parts))
    return owned
