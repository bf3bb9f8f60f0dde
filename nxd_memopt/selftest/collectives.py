"""Compares the backend's collectives with their definitions, on every group of ranks of each T."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.selftest.check import AbsentError, Check, CheckError

_SIZE = 512  # rows and columns; T divides it
# 32 MiB in bf16, above the size from which GPUs of one host read each other's memory.
_LARGE_SIZE = 4096
_CHUNKS = " in chunks"
_UNEVEN = "all-to-all of uneven rows"
_VALUES = 5
"""Values are whole numbers below this one: sums of up to 51 ranks are exact in bf16, so that results are bit-equal."""

Ranks = list[int]
Collective = Callable[[Tensor, ProcessGroup | None], Tensor]
Definition = Callable[[list[Tensor], int], Tensor]
"""Tensors of all ranks of the group, and this rank in the group -> the result."""


def values(rank: int, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """Return the tensor of global rank ``rank`` on the CPU, ``[rows, columns]``."""
    base = torch.arange(rows).unsqueeze(1) * 3 + torch.arange(_SIZE) + 2 * rank
    return (base % _VALUES).to(dtype).repeat(1, columns // _SIZE)


def _chunk(tensor: Tensor, index: int, size: int) -> Tensor:
    return tensor.chunk(size, dim=0)[index]


def _gathered_chunks(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return an all-gather whose rows are used as they arrive."""
    gathering = backend.start_all_gather(tensor, group, materialize=False)
    parts = {start: rows.clone() for start, rows in gathering.chunks()}
    return torch.cat([parts[start] for start in sorted(parts)])


def _reduced_chunks(tensor: Tensor, group: ProcessGroup | None, *, scattered: bool) -> Tensor:
    """Return a sum over ranks whose rows are handed over in chunks."""
    reduction = backend.start_reduction(tensor.shape, tensor.dtype, group, scattered=scattered)
    for start, stop in reduction.chunks:
        reduction.put(start, tensor[start:stop])
    return reduction.wait()


def _in_lists(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the mean over ranks, scattered and gathered in lists of tensors, as ZeRO-1 does."""
    first, second = tensor[:64].reshape(-1), tensor[64:192].reshape(-1)
    chunks = backend.reduce_scatter_mean_list([first, second], group)
    return torch.cat(list(backend.all_gather_list(chunks, group))).view(192, -1)


def _uneven_all_to_all(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Send ``1 + i`` rows to rank i of the group."""
    size, rank = backend.group_size(group), backend.group_rank(group)
    sent = [1 + index for index in range(size)]
    return backend.all_to_all_rows(tensor[: sum(sent)], sent, [1 + rank] * size, group)


def _uneven_definition(tensors: list[Tensor], rank: int) -> Tensor:
    first = sum(1 + index for index in range(rank))
    return torch.cat([tensor[first : first + 1 + rank] for tensor in tensors])


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


_SHARDS = "parallel.sequence_parallel_enabled: false (it takes all-reduces instead)"
_PEERS = "NXD_MEMOPT_PEER_MEMORY=0 (GPUs), or parallel.sequence_parallel_enabled: false"
COLLECTIVES: dict[str, tuple[Collective, Definition, str]] = {
    "all-reduce": (
        lambda tensor, group: backend.all_reduce(tensor, group),
        lambda tensors, rank: _sum(tensors),
        "parallel.tensor_model_parallel_size: 1",
    ),
    "all-reduce of maxima": (
        lambda tensor, group: backend.all_reduce(tensor, group, op="max"),
        lambda tensors, rank: torch.stack(tensors).amax(0),
        "parallel.tensor_model_parallel_size: 1",
    ),
    "all-gather": (
        lambda tensor, group: backend.all_gather(tensor, group),
        lambda tensors, rank: torch.cat(tensors),
        _SHARDS,
    ),
    "reduce-scatter": (
        lambda tensor, group: backend.reduce_scatter(tensor, group),
        lambda tensors, rank: _chunk(_sum(tensors), rank, len(tensors)),
        _SHARDS,
    ),
    "all-to-all": (
        lambda tensor, group: backend.all_to_all(tensor, group),
        lambda tensors, rank: torch.cat([_chunk(tensor, rank, len(tensors)) for tensor in tensors]),
        "moe.moe_token_dispatcher_type: allgather",
    ),
    _UNEVEN: (
        _uneven_all_to_all,
        _uneven_definition,
        "moe.moe_token_dispatcher_type: allgather",
    ),
    "all-gather in chunks": (_gathered_chunks, lambda tensors, rank: torch.cat(tensors), _PEERS),
    "reduce-scatter in chunks": (
        partial(_reduced_chunks, scattered=True),
        lambda tensors, rank: _chunk(_sum(tensors), rank, len(tensors)),
        _PEERS,
    ),
    "all-reduce in chunks": (
        partial(_reduced_chunks, scattered=False),
        lambda tensors, rank: _sum(tensors),
        "NXD_MEMOPT_PEER_MEMORY=0 (GPUs), or parallel.tensor_model_parallel_size: 1",
    ),
    "ZeRO-1's lists": (
        _in_lists,
        lambda tensors, rank: _sum([tensor[:192] for tensor in tensors]) / len(tensors),
        "data_parallel.sharding: none",
    ),
}


def compare(name: str) -> str:
    """Return which groups were compared: the tensor-parallel and the data-parallel one, if they have several ranks.

    Raises:
        CheckError: a value differs.
    """
    collective, definition, _ = COLLECTIVES[name]
    size, dtypes = _SIZE, (torch.float32, torch.bfloat16)
    if name.endswith(_CHUNKS):
        size, dtypes = _LARGE_SIZE, (torch.bfloat16,)
    # On XLA all calls are one graph: a compilation takes seconds.
    found: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for kind, group, partition in _groups():
        ranks = next(ranks for ranks in partition if parallel_state.get_global_rank() in ranks)
        if len(ranks) == 1:
            continue
        own = ranks.index(parallel_state.get_global_rank())
        for dtype in dtypes:
            tensors = [values(rank, dtype, size // len(ranks) * len(ranks), size) for rank in ranks]
            case = f"{len(ranks)} {kind} ranks in {str(dtype).removeprefix('torch.')}"
            found[case] = collective(tensors[own].to(backend.device), group)
            wanted[case] = definition(tensors, own)
    backend.mark_step()
    # Every rank has run all calls: the others wait for it.
    wrong: list[str] = []
    for case, result in found.items():
        part = _differing(result.cpu(), wanted[case])
        if part:
            wrong.append(f"{part:.2%} of the values over {case} are wrong")
    if wrong:
        raise CheckError("; ".join(wrong))
    return f"exact over {', '.join(found)}"


def _differing(found: Tensor, wanted: Tensor) -> float:
    """Return the part of the values that differ."""
    if found.shape != wanted.shape:
        return 1.0
    return float((found != wanted).double().mean())


def _groups() -> list[tuple[str, ProcessGroup | None, list[Ranks]]]:
    """Return the kinds of groups, this rank's group of each, and the partition of the world."""
    tensor, data = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()
    return [
        ("tensor-parallel", tensor, parallel_state.get_tensor_model_parallel_replica_groups()),  # pyright: ignore[reportReturnType]
        ("data-parallel", data, parallel_state.get_data_parallel_replica_groups()),  # pyright: ignore[reportReturnType]
    ]


def _require_ranks() -> str:
    raise AbsentError("there is one rank: pass --nproc")


def checks(sizes: list[int]) -> list[Check]:
    """Return a check of each collective at each T."""
    if parallel_state.get_world_size() == 1:
        return [Check("collectives", _require_ranks, "")]
    found: list[Check] = []
    for size in sizes:
        for name, (_, _, instead) in COLLECTIVES.items():
            # Uneven rows depend on values; chunks are of tensor-parallel layers.
            if (name == _UNEVEN and backend.shapes_are_static) or (name.endswith(_CHUNKS) and size == 1):
                continue
            found.append(Check(f"collective: {name}", partial(compare, name), instead, size))
    return found
