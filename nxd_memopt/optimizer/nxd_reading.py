"""Reads ZeRO-1 states from the rank files of any tensor-, pipeline- and data-parallel sizes.

The concatenated flat shards of a sharding group are the flat parameter followed by padding.
This is true for torch_xla's layout (see ``nxd_layout``) and for this library's; only the length of
a shard differs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.optimizer.nxd_layout import has_elements, number_parameters
from nxd_memopt.optimizer.sharding import flat_shard
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.rank_files import RankFiles
from nxd_memopt.parallel_layers.resharding import local_slice, merge_shards, require_mergeable
from nxd_memopt.parallel_layers.tensor_files import StoredTensor, read_stored, resolve
from nxd_memopt.parallel_layers.utils import is_sharded, padded_size

_ENTRIES = {
    *("state", "base_state", "param_groups", "shape_info", "sharded_master_weights", "sharding"),
    *("dp_rank", "tp_rank"),
}
OPTIONS_OF_THE_DEVICE = ("foreach", "fused", "capturable", "differentiable")
"""Options of a parameter group that select how a device computes a step.

A resumed run keeps its own.
"""


@dataclass(frozen=True)
class Target:
    """The optimizer that the reader builds a state for.

    Attributes:
        param_groups: the optimizer's groups, frozen parameters included.
        options: groups with the options that the optimizer class needs; their ``params`` are not read.
        sharding: ``[rank, D]``.
        stages: [stage of the files][group][number in the group] -> position among the parameters, None for one of
            another rank; needed if this run has another number of stages.
    """

    param_groups: Sequence[Mapping[str, Any]]
    options: Sequence[Mapping[str, Any]]
    sharding: Sequence[int]
    stages: Sequence[Sequence[Sequence[int | None]]] = ()

    @property
    def params(self) -> list[Tensor]:
        return [param for options in self.param_groups for param in options["params"]]


class OptimizerFiles:
    """The optimizer states of all ranks of a run. Each file is opened at the first access.

    Args:
        files: the rank files.
    """

    def __init__(self, files: RankFiles) -> None:
        self.files = files
        self._opened: dict[tuple[int, int, int], dict[str, Any]] = {}
        self._shards: dict[tuple[int, int], list[int]] = {}

    def content(self, tensor_rank: int, stage: int = 0, data_rank: int = 0) -> dict[str, Any]:
        """Return one rank's state dict; tensors of the xser format are not read yet.

        Raises:
            ValueError: the file is damaged or is not an optimizer state.
        """
        # All parameters share the files: open each file once.
        ranks = (data_rank, tensor_rank, stage)
        if ranks not in self._opened:
            path = self.files.file(tensor_rank, stage, data_rank)
            content = read_stored(path)
            if not isinstance(content, dict) or "param_groups" not in content:
                raise ValueError(f"{path} has no param_groups: it is not the state of an optimizer")
            if "ep_param_id_offset" in content:
                raise ValueError(f"{path} is of NeuronEPZero1Optimizer: expert parallelism is not supported")
            self._opened[ranks] = content
        return self._opened[ranks]

    def shards(self, tensor_rank: int, stage: int = 0) -> list[int]:
        """Return the data-parallel ranks whose files are the shards of one replica, in the order of the shards.

        A file of this library says which shard of how many it is: with ``sharding_groups`` smaller than the
        data-parallel group, files of several ranks are the same shard. Without that, as in
        neuronx-distributed's files, the shards are the files of all ranks.

        Raises:
            ValueError: the file of a shard is missing, or files are of different numbers of shards.
        """
        key = (tensor_rank, stage)
        if key not in self._shards:
            self._shards[key] = self._find_shards(tensor_rank, stage)
        return self._shards[key]

    def _find_shards(self, tensor_rank: int, stage: int) -> list[int]:
        ranks = range(self.files.data_parallel_size)
        sharding = self.content(tensor_rank, stage).get("sharding")
        if sharding is None or sharding[1] == len(ranks):
            return list(ranks)
        number = sharding[1]
        found: dict[int, int] = {}
        for data_rank in ranks:
            shard, shards = self.content(tensor_rank, stage, data_rank).get("sharding", (None, None))
            if shards != number:
                raise ValueError(
                    f"{self.files.file(tensor_rank, stage, data_rank)} is one of {shards} shards, the file of "
                    f"data-parallel rank 0 one of {number}: they are from different saves"
                )
            found.setdefault(shard, data_rank)
            if len(found) == number:
                return [found[shard] for shard in range(number)]
        raise ValueError(
            f"{self.files.directory} has {len(found)} of the {number} shards of tensor-parallel rank {tensor_rank}: "
            "a rank file is missing"
        )

    def values(self, number: int, tensor_rank: int, stage: int, data_rank: int) -> dict[str, Any]:
        """Return one parameter's states by name, its master as ``master``; empty for a frozen
        parameter.
        """
        content = self.content(tensor_rank, stage, data_rank)
        values = dict(states_of(content).get(number, {}))
        if number in content.get("sharded_master_weights", {}):
            values["master"] = content["sharded_master_weights"][number]
        return values


def states_of(content: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
    """Return the states by parameter, in torch_xla's layout or in this library's."""
    if "base_state" in content:
        return content["base_state"]
    return content["state"]


def read_state(source: OptimizerFiles, target: Target) -> dict[str, Any]:
    """Return the input of ``NeuronZero1Optimizer.load_state_dict`` for this rank.

    The files may be of any T and D. With the files' own T and D every value equals the file's bit
    for bit. Otherwise the shards are concatenated and cut again. Only files that store elements of
    this rank are read.

    Raises:
        ValueError: files are damaged, belong to another model, or have KV replicas for another T.
    """
    files = source.files
    locations = _locations(source, target)
    trained = [i for i, param in enumerate(target.params) if param.requires_grad]
    state: dict[int, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    shape_info: dict[int, list[int]] = {}
    for new_number, i in enumerate(trained):
        # ``number`` counts within the stage's files; ``new_number`` counts the trained parameters,
        # as in ``load_state_dict``.
        param = target.params[i]
        stage, number = locations[i]
        tensor_ranks = _tensor_ranks(files, param)
        _require_shape(source, param, number, stage, tensor_ranks[0])
        resharded = not _has_own_size(files) and is_sharded(param)
        reader = _ParameterReader(source, param, number, stage, tensor_ranks, resharded)
        values = {name: reader.shard(name, value, target.sharding) for name, value in reader.first.items()}
        if "master" in values:
            masters[new_number] = cast(Tensor, values.pop("master"))
        if values:
            state[new_number] = values
        shape_info[new_number] = list(param.shape)
    _warn_of_unknown(source)
    # the options are the same in all files: those of one rank are enough
    groups = _groups(source.content(_own_rank(files), 0)["param_groups"], target, trained)
    return {
        "state": state,
        "param_groups": groups,
        "sharded_master_weights": masters,
        "shape_info": shape_info,
        "sharding": list(target.sharding),
    }


def _own_rank(files: RankFiles) -> int:
    """Return a tensor-parallel rank that has files: this rank's, or 0 if the files have a smaller
    T.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    if rank < files.tensor_model_parallel_size:
        return rank
    return 0


def _has_own_size(files: RankFiles) -> bool:
    """Return whether the files are of this run's tensor-parallel size."""
    return files.tensor_model_parallel_size == parallel_state.get_tensor_model_parallel_size()


def _tensor_ranks(files: RankFiles, param: Tensor) -> list[int]:
    """Return the tensor-parallel ranks whose files this rank reads for ``param``.

    With the same T these are only the files of this rank. With another T they are all files of a
    sharded parameter, and the files of rank 0 for a replicated one.
    """
    if _has_own_size(files):
        return [parallel_state.get_tensor_model_parallel_rank()]
    if is_sharded(param):
        return list(range(files.tensor_model_parallel_size))
    return [0]


@dataclass
class _ParameterReader:
    """Reads one parameter's values from all files that store parts of it."""

    source: OptimizerFiles
    param: Tensor
    number: int
    stage: int
    tensor_ranks: Sequence[int]
    resharded: bool

    @property
    def first(self) -> dict[str, Any]:
        """The values in the first of the files; the names are the same in all of them."""
        return self.source.values(self.number, self.tensor_ranks[0], self.stage, 0)

    def shard(self, name: str, value: Any, sharding: Sequence[int]) -> Any:
        """Return this rank's flat shard of the state ``name``.

        ``value`` itself is returned if it is not one value per element, as a step counter.
        """
        if isinstance(value, StoredTensor):
            value = resolve(value)
        if not has_elements(value, name, self.param):
            # a copy, which does not keep the memory map of the file open
            if isinstance(value, Tensor):
                return value.clone()
            return value
        rank, size = sharding
        # Same T: assemble only this rank's range of the flat parameter. Another T: assemble every
        # tensor-parallel shard, join them to the full tensor, and cut this rank's part again.
        if not self.resharded:
            length = padded_size(self.param.numel(), size) // size
            elements = (rank * length, (rank + 1) * length)
            shape = tuple(self.param.shape)
            shard = self._elements(name, self.tensor_ranks[0], shape, elements)
            # an optimizer without sharding has states in the shape of the parameter
            if size == 1:
                return shard.view(self.param.shape)
            return shard
        # Full tensor [.., n, ..] from T_old shards, then this rank's slice for T_new, then its flat
        # chunk for D_new.
        # The host has the full state of one parameter at a time.
        shards = [self._full_shard(name, tensor_rank) for tensor_rank in self.tensor_ranks]
        local = local_slice(merge_shards(shards, self.param), self.param, dtype=shards[0].dtype)
        return flat_shard(local, rank, size)

    def _full_shard(self, name: str, tensor_rank: int) -> Tensor:
        """Return one tensor-parallel rank's complete state in the shape that its files record."""
        shape = tuple(self.source.content(tensor_rank, self.stage)["shape_info"][self.number])
        return self._elements(name, tensor_rank, shape, (0, math.prod(shape))).view(shape)

    def _elements(self, name: str, tensor_rank: int, shape: tuple[int, ...], elements: tuple[int, int]) -> Tensor:
        """Return ``elements`` = (start, stop) of a tensor-parallel shard of ``shape``, 1-D.

        Elements past the end of the shard are zeros. Only the overlapping files of the D ranks are
        read.
        """
        start, stop = elements
        chunks: list[Tensor] = []
        first = 0
        length = self._length(shape, tensor_rank)
        for data_rank in self.source.shards(tensor_rank, self.stage):
            # Shard d is [d length, (d + 1) length); take the intersection with [start, stop),
            # without padding.
            low = max(start, first)
            high = min(stop, first + length, math.prod(shape))
            if low < high:
                stored = self._flat(name, tensor_rank, data_rank, length)
                chunks.append(stored[low - first : high - first])
            first += length
        # No chunk overlaps if the full range is padding (a parameter with fewer than D elements).
        if not chunks:
            chunks.append(resolve(self.first[name]).new_zeros(0))
        flat = torch.cat(chunks)
        return F.pad(flat, (0, stop - start - flat.numel()))

    def _length(self, shape: tuple[int, ...], tensor_rank: int) -> int:
        """Return the number of elements in the file of each shard.

        It is R n_1 n_2 ... in torch_xla's layout, and ceil(n / D) otherwise.
        """
        size = len(self.source.shards(tensor_rank, self.stage))
        if "base_state" in self.source.content(tensor_rank, self.stage):
            rows = shape[0] if shape else 1  # a 0-dim parameter's files are those of shape [1]
            return padded_size(rows, size) // size * math.prod(shape[1:])
        return padded_size(math.prod(shape), size) // size

    def _flat(self, name: str, tensor_rank: int, data_rank: int, length: int) -> Tensor:
        """Return one file's tensor, 1-D.

        Raises:
            ValueError: the file lacks the tensor, or it has another number of elements.
        """
        values = self.source.values(self.number, tensor_rank, self.stage, data_rank)
        path = self.source.files.file(tensor_rank, self.stage, data_rank)
        if name not in values:
            raise ValueError(f"{path} has no {name!r} of parameter {self.number}, other ranks have it: copy it again")
        flat = resolve(values[name]).reshape(-1)
        if flat.numel() != length:
            raise ValueError(
                f"{path}: {name!r} of parameter {self.number} has {flat.numel()} elements, its "
                f"shape over {len(self.source.shards(tensor_rank, self.stage))} shards gives {length}: "
                "a rank file is missing, or from another save"
            )
        return flat


def read_tensor_parallel_shard(
    source: OptimizerFiles, location: tuple[int, int], tensor_rank: int, name: str, shape: tuple[int, ...]
) -> Tensor:
    """Return one tensor-parallel rank's state or master ``name``.

    It is concatenated over the files of the data-parallel ranks.

    Args:
        source: the files.
        location: pipeline stage and number of the parameter.
        tensor_rank: the tensor-parallel rank.
        name: name of the state, or ``master``.
        shape: shape of the shard.

    Raises:
        ValueError: a file is missing or damaged, or stores another number of elements.
    """
    stage, number = location
    meta = torch.empty(shape, device="meta")
    reader = _ParameterReader(source, meta, number, stage, [tensor_rank], resharded=False)
    return reader._elements(name, tensor_rank, shape, (0, math.prod(shape))).view(shape)


def _require_shape(source: OptimizerFiles, param: Tensor, number: int, stage: int, tensor_rank: int) -> None:
    """Raise ``ValueError`` if a parameter's shape in the files does not fit the optimizer's."""
    files = source.files
    stored = source.content(tensor_rank, stage).get("shape_info", {}).get(number)
    if stored is None and _has_own_size(files):
        return  # a run without ZeRO records no shapes; the number of elements is checked
    path = files.file(tensor_rank, stage)
    if stored is None:
        raise ValueError(f"{path} has no shape_info: it can only be loaded at the size of {files.sizes()}")
    expected = list(param.shape)
    if not _has_own_size(files) and is_sharded(param):
        # With another T, only the sharded dimension may differ, and its full length must fit.
        dim = cast(Any, param).partition_dim % param.dim()
        if dim < len(stored):
            expected[dim] = stored[dim]
        if list(stored) == expected:
            try:
                require_mergeable(stored[dim], files.tensor_model_parallel_size, param)
            except ValueError as error:
                raise ValueError(f"{files.directory}: parameter {number}: {error}") from None
    if list(stored) != expected:
        raise ValueError(
            f"{path}: parameter {number} has shape {list(stored)}, the optimizer's is {expected}: "
            "build the same model with the same parameter groups in the same order"
        )


def _locations(source: OptimizerFiles, target: Target) -> list[tuple[int, int]]:
    """Return (stage, number in the files of the stage) for each parameter of ``target``."""
    num_stages = source.files.pipeline_model_parallel_size
    stages = target.stages
    if num_stages == 1 and not stages:
        stages = [number_parameters(target.param_groups)]
    if len(stages) != num_stages:
        raise ValueError(
            f"{source.files.directory} was written with {source.files.sizes()}: "
            "merging the stages needs the parameters' names: load the model and the optimizer together"
        )
    # Each stage's files number only the parameters of the stage, group by group, in the model's
    # order. A parameter of several stages (tied embeddings) is read from the first one.
    locations: dict[int, tuple[int, int]] = {}
    for stage, groups in enumerate(stages):
        stored = source.content(_own_rank(source.files), stage)["param_groups"]
        for group, local in enumerate(groups):
            saved = stored[group]["params"] if group < len(stored) else []
            if len(stored) != len(groups) or len(saved) != len(local):
                raise ValueError(
                    f"{source.files.file(_own_rank(source.files), stage)} has parameter groups of "
                    f"{[len(options['params']) for options in stored]} parameters, the optimizer's group {group} of "
                    f"{len(groups)} has {len(local)} of that stage: build the same parameter groups"
                )
            for i, number in zip(local, saved, strict=True):
                if i is not None:
                    locations.setdefault(i, (stage, number))
    missing = [i for i, param in enumerate(target.params) if param.requires_grad and i not in locations]
    if missing:
        raise ValueError(
            f"{source.files.directory} has no state of {len(missing)} parameters, the first is {missing[0]}"
        )
    # frozen parameters have no state: their location is never read
    return [locations.get(i, (0, -1)) for i in range(len(target.params))]


def _groups(stored: Sequence[Mapping[str, Any]], target: Target, trained: Sequence[int]) -> list[dict[str, Any]]:
    """Return the options in the files, completed by the optimizer's own options.

    The optimizer's own value is used if the files have none, or if the option depends on the
    device.
    """
    # Position among all parameters -> number among the trained ones.
    new_number = {i: number for number, i in enumerate(trained)}
    groups = []
    numbers = number_parameters(target.param_groups)
    for options, defaults, positions in zip(stored, target.options, numbers, strict=True):
        # Later entries win: own defaults < options in the files < device options of this run.
        device_options = {name: value for name, value in defaults.items() if name in OPTIONS_OF_THE_DEVICE}
        params = [new_number[i] for i in positions if i in new_number]
        groups.append({**defaults, **options, **device_options, "params": params})
    return groups


def _warn_of_unknown(source: OptimizerFiles) -> None:
    """Warn about entries of the files that are not loaded."""
    content = source.content(_own_rank(source.files))
    unknown = sorted(str(name) for name in content if name not in _ENTRIES)
    if "base_state" in content and content.get("state"):
        unknown.append("state (base_state holds the optimizer's)")
    if unknown:
        warnings.warn(f"{source.files.directory}: entries that are not loaded: {unknown}", stacklevel=2)
