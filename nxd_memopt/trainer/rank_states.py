"""Loads a module and an optimizer from the rank files of a tag, written at any parallel sizes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.checkpoint.nxd.reading import read_state_dicts
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.optimizer.nxd_reading import OptimizerFiles, Target, read_state
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.checkpointing import load_into
from nxd_memopt.parallel_layers.coordination import raise_together, turns
from nxd_memopt.parallel_layers.rank_files import RankFiles, find_rank_files
from nxd_memopt.parallel_layers.resharding import local_slice, merge_shards
from nxd_memopt.parallel_layers.tensor_files import StoredTensor, read_stored, read_tensors, resolve
from nxd_memopt.parallel_layers.utils import bit_equal, is_sharded, shard_ranges
from nxd_memopt.trainer.optimizer import NxDOptimizer
from nxd_memopt.trainer.stage_files import StageParameters, parameters_of_stages


def own_file_name(*, data_rank: int) -> str:
    """Return the file name of this rank for the given data-parallel rank."""
    tensor = parallel_state.get_tensor_model_parallel_rank()
    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    return f"dp_rank_{data_rank:02d}_tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}.pt"


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer inside an ``NxDOptimizer``, or ``optimizer`` itself."""
    if isinstance(optimizer, NxDOptimizer):
        return optimizer.optimizer
    return optimizer


def is_sharded_optimizer(optimizer: Any) -> bool:
    """Return whether data-parallel ranks have different states."""
    inner = unwrap(optimizer)
    return isinstance(inner, NeuronZero1Optimizer) and len(inner.sharding_groups[0]) > 1


# The model


def load_model(
    source: Path, model: nn.Module | dict[str, Any], optimizer: Any, *, num_workers: int, strict: bool
) -> None:
    """Load ``model`` from ``source/model``. Every rank calls.

    Raises:
        ValueError: on every rank, if files are missing, damaged, or do not fit.
    """
    for is_my_turn in turns(num_workers):
        with raise_together(f"loading {source}"):
            # Also in rounds of other ranks, every rank reaches the end of ``raise_together``.
            if not is_my_turn:
                continue
            files = _model_files(source)
            if isinstance(model, dict):
                _require_own_sizes(files)
                model.update(read_tensors(files.file(parallel_state.get_tensor_model_parallel_rank())))
            elif _has_no_weights(files):
                _require_masters(source, model, optimizer)
            else:
                load_into(model, _local_state(files, model), strict=strict)


def _model_files(source: Path) -> RankFiles:
    """Return the model's files: this rank's stage, or all stages if this run has another number of them."""
    files = find_rank_files(source / "model")
    if files.pipeline_model_parallel_size != parallel_state.get_pipeline_model_parallel_size():
        return files
    return _of_own_stage(files)


def _of_own_stage(files: RankFiles) -> RankFiles:
    """Return the files of this rank's stage; all files in a run of one stage."""
    size = parallel_state.get_pipeline_model_parallel_size()
    return files.of_stage(parallel_state.get_pipeline_model_parallel_rank(), size)


def _require_own_sizes(files: RankFiles) -> None:
    """Raise ``ValueError`` if the files have other parallel sizes than this run."""
    if not _has_own_sizes(files):
        raise ValueError(
            f"{files.directory} was written with {files.sizes()}, this run has "
            f"tensor_model_parallel_size {parallel_state.get_tensor_model_parallel_size()}: pass a "
            "module, whose parameters say how they are sharded, or use the checkpoint's size"
        )


def _has_own_sizes(files: RankFiles) -> bool:
    """Return whether the files have this run's tensor-parallel size, and are of this rank's stage."""
    is_same = files.tensor_model_parallel_size == parallel_state.get_tensor_model_parallel_size()
    return is_same and files.pipeline_model_parallel_size == 1


def _local_state(files: RankFiles, model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's state dict: the content of its own file, or, at other sizes, slices of
    the full tensors.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    tensor_size = parallel_state.get_tensor_model_parallel_size()
    params = model.state_dict(keep_vars=True)
    if _has_own_sizes(files):
        _require_replica_order(files, params)
        return read_tensors(files.file(rank))
    # Same T, several stages: merge the stages of this rank. Another T: join the shards and cut
    # them again, one parameter at a time.
    shards, extras = read_state_dicts(files)
    if extras:
        warnings.warn(f"{files.directory}: entries that are not loaded: {extras}", stacklevel=2)
    if files.tensor_model_parallel_size == tensor_size:
        _require_replica_order(files, params)
        return {name: resolve(values[rank]) for name, values in shards.items()}
    local: dict[str, Tensor] = {}
    for name, values in shards.items():
        # Unknown names are passed on: ``load_into`` reports them, or ignores them if not strict.
        param = params.get(name)
        if param is None or not is_sharded(param):
            local[name] = resolve(values[0])
            continue
        try:
            full = merge_shards([resolve(value) for value in values], param)
        except ValueError as error:
            raise ValueError(f"{files.directory}: {name}: {error}") from None
        local[name] = local_slice(full, param, dtype=full.dtype)
    return local


def _require_replica_order(files: RankFiles, params: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` if the KV replicas in the files are ordered differently over ranks:
    trn1 and trn2 differ.

    One layer is enough to distinguish the orders. Only rank 0 reads the files of other ranks.
    """
    # Ranks that hold the same KV heads in this run must have equal values in the files. In the
    # order of the other platform their values are those of different heads.
    names = [name for name, param in params.items() if _has_replicas(param)]
    if not names or not parallel_state.is_global_rank_zero():
        return
    for stage in range(files.pipeline_model_parallel_size):
        paths = [files.file(rank, stage) for rank in range(files.tensor_model_parallel_size)]
        contents = [read_stored(path) for path in paths]
        for name in names:
            stored: list[Any] = [content.get(name) for content in contents]
            if all(isinstance(value, Tensor | StoredTensor) for value in stored):
                _require_equal_replicas(files, name, params[name], [resolve(value) for value in stored])
                return
    # No layer has its shards in all files: load_state_dict will report the missing names.


def _require_equal_replicas(files: RankFiles, name: str, param: Tensor, stored: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` if ranks with the same KV heads in this run have different values in
    the files.
    """
    # Rows of the full parameter -> the first rank that stores them, and its values. Later ranks must have the same.
    owners: dict[tuple[int, int], tuple[int, Tensor]] = {}
    for rank, shard in enumerate(stored):
        offset = 0
        for start, stop in shard_ranges(param, rank=rank):
            rows = shard[offset : offset + stop - start]
            offset += stop - start
            earlier, values = owners.setdefault((start, stop), (rank, rows))
            if earlier != rank and not bit_equal(rows, values):
                raise ValueError(
                    f"{files.directory}: {name} of tensor-parallel ranks {earlier} and {rank} differ, and these ranks "
                    "hold the same KV heads in this run: the checkpoint's KV replicas are in the order of the other "
                    "platform (trn1 strided, trn2 consecutive): convert it with nxd-memopt convert"
                )


def _has_replicas(param: Tensor) -> bool:
    """Return whether other ranks store rows of the parameter too."""
    blocks = getattr(param, "blocks", None)
    if blocks:
        return any(block.replicas > 1 for block in blocks)
    return is_sharded(param) and getattr(param, "replicas", 1) > 1


def _has_no_weights(files: RankFiles) -> bool:
    """Return whether the weights are missing because of
    avoid_saving_lower_precision_weights=True.

    Only the optimizer's masters contain the weights then.
    """
    # With this option neuronx-distributed writes the references of the xser format and no tensor
    # files, so a reference without a file is no sign of damage if all files are absent.
    content = read_stored(files.file(0))
    stored = [value for value in content.values() if isinstance(value, StoredTensor)]
    return bool(stored) and not any(value.file.exists() for value in stored)


def _require_masters(source: Path, model: nn.Module, optimizer: Any) -> None:
    """Raise ``ValueError`` unless the optimizer, which is loaded next, has masters of all
    parameters of the model.
    """
    inner = unwrap(optimizer)
    # Parameters without a master would keep their initial values.
    covered: set[int] = set()
    if isinstance(inner, NeuronZero1Optimizer):
        files = OptimizerFiles(find_rank_files(source / "optim", "optim"))
        if files.content(0).get("sharded_master_weights"):
            params = [param for group in inner.param_groups for param in group["params"]]
            covered = {id(param) for param in params if param.requires_grad}
    uncovered = [name for name, param in model.named_parameters() if id(param) not in covered]
    if uncovered:
        raise ValueError(
            f"{source} holds no weights, it was written with avoid_saving_lower_precision_weights=True, and there are "
            f"no masters of {uncovered[:5]}: load the model with a NeuronZero1Optimizer of all its parameters, or "
            "another checkpoint"
        )
    # All names of tied parameters count: the state dict has them all.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = [name for name in model.state_dict() if name not in parameters]
    if buffers:
        warnings.warn(f"{source}: these buffers are not stored and stay as they are: {buffers[:5]}", stacklevel=2)


# The optimizer


def load_optimizer(source: Path, optimizer: Any, model: Any, *, num_workers: int) -> None:
    """Load ``optimizer``, an optimizer or a dict to fill, from ``source/optim``.

    Every rank calls, after the model.

    Raises:
        ValueError: on every rank, if files are missing, damaged, or do not fit.
    """
    inner = unwrap(optimizer)
    stages: StageParameters = []
    if not isinstance(inner, dict):
        stages = parameters_of_stages(source, inner, model)
    if isinstance(inner, NeuronZero1Optimizer):
        # Not inside raise_together: loading all-gathers the parameters.
        inner.load_rank_files(source / "optim", num_workers, stages=stages)
        return
    for is_my_turn in turns(num_workers):
        with raise_together(f"loading {source}"):
            if is_my_turn:
                _load_unsharded(source, inner, stages)


def _load_unsharded(source: Path, optimizer: Any, stages: StageParameters) -> None:
    """Load an optimizer whose full state every data-parallel rank has, or fill a dict."""
    files = find_rank_files(source / "optim", "optim")
    if not stages:
        files = _of_own_stage(files)
    rank = parallel_state.get_tensor_model_parallel_rank()
    if isinstance(optimizer, dict):
        _require_own_sizes(files)
        # A dict is filled with this rank's file as it is: states cannot be cut for another D.
        data_size = parallel_state.get_data_parallel_size()
        if files.data_parallel_size not in (1, data_size):
            raise ValueError(
                f"{files.directory} was written with {files.sizes()}, this run has {data_size} data-parallel ranks: "
                "pass the optimizer instead of a dict, or use the checkpoint's size"
            )
        data_rank = parallel_state.get_data_parallel_rank() if files.data_parallel_size > 1 else 0
        own = files.file(rank, 0, data_rank)
        optimizer.update(read_tensors(own, mmap=False))
        return
    _require_unsharded(files, optimizer)
    # Same sizes: torch's own loading. Other sizes: states are merged and cut per parameter.
    if not stages and _has_own_sizes(files):
        load_into(optimizer, read_tensors(files.file(rank), mmap=False))
        return
    # (0, 1): the only chunk of one, because this optimizer's states are not sharded over
    # data-parallel ranks.
    target = Target(optimizer.param_groups, optimizer.param_groups, (0, 1), stages)
    state = read_state(OptimizerFiles(files), target)
    load_into(optimizer, {name: state[name] for name in ("state", "param_groups")})


def _require_unsharded(files: RankFiles, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ValueError`` for files of a ZeRO-1 optimizer.

    ``torch.optim`` would load a shard as the full state. ``NeuronZero1Optimizer`` checks its
    state itself.
    """
    path = files.file(0)
    content = OptimizerFiles(files).content(0)
    if "base_state" in content or "sharding" in content:
        raise ValueError(
            f"{path} comes from an optimizer with ZeRO-1 or master weights, {type(optimizer).__name__} has neither: "
            "resume with the optimizer_config and mixed_precision_config of the run that wrote it"
        )
