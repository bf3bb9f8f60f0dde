"""Checkpoints of one file per rank: neuronx-distributed's save and load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.parallel_layers.data_shards import require_replicated
from nxd_memopt.parallel_layers.output_projection import describe_output_projections
from nxd_memopt.parallel_layers.rank_files import find_rank_files
from nxd_memopt.parallel_layers.resharding import local_slice, require_full_shape
from nxd_memopt.parallel_layers.tensor_files import read_tensors, write_tensors, write_xser
from nxd_memopt.parallel_layers.utils import is_sharded, map_distinct_tensors, map_tensors


def get_sharded_model_dict(model: torch.nn.Module, model_state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Slice a full state dict for this rank, by the shard attributes of ``model``'s parameters.

    Entries that are not sharded parameters are returned unchanged.

    Args:
        model: model with this rank's shards.
        model_state_dict: full tensors by parameter name.

    Raises:
        ValueError: the shape of an entry differs from the full shape of the parameter.
    """
    describe_output_projections(model)
    params = dict(model.named_parameters(remove_duplicate=False))
    sharded = {}
    for name, full in model_state_dict.items():
        if name in params and is_sharded(params[name]):
            require_full_shape(name, full, params[name])
            full = local_slice(full, params[name])
        sharded[name] = full
    return sharded


def to_host(value: Any, *, down_cast_bf16: bool = False) -> Any:
    """Copy all tensors in nested dicts, lists and tuples to the host, each with its own storage.

    Tied tensors stay one tensor, which a file stores once.

    Args:
        value: nested containers with tensors and plain values.
        down_cast_bf16: convert fp32 tensors to bf16.
    """

    def copied(tensor: Tensor) -> Tensor:
        tensor = _require_replicated(tensor).detach().cpu()
        if down_cast_bf16:
            tensor = _as_bf16(tensor)
        # A view would be saved with the full storage of its base.
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            return tensor.clone()
        return tensor

    return map_distinct_tensors(value, copied)


def rank_name(*, with_data_rank: bool = False) -> str:
    """Return this rank's ``tp_rank_XX_pp_rank_XX``, optionally with ``_dp_rank_XX``."""
    tensor = parallel_state.get_tensor_model_parallel_rank()
    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    name = f"tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}"
    if not with_data_rank:
        return name
    return f"{name}_dp_rank_{parallel_state.get_data_parallel_rank():02d}"


def is_model_replica_zero() -> bool:
    """Return whether this rank is in the model replica that writes: data and context rank 0."""
    data_rank = parallel_state.get_data_parallel_rank()
    return data_rank == parallel_state.get_context_model_parallel_rank() == 0


def save(
    checkpoint: Mapping[str, Any],
    output_dir: str | Path,
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """Write this rank's ``checkpoint`` to ``output_dir/tp_rank_XX_pp_rank_XX/checkpoint.pt``.

    Every rank calls this function.

    Args:
        checkpoint: nested dict of tensors and plain values, usually
            ``{"model": model.state_dict(), ...}``.
        output_dir: directory, created if needed. A file of an earlier save is replaced when the new
            one is complete.
        save_serially: write one tensor-parallel rank at a time, so a host copies one shard at a
            time. False is faster.
        save_xser: write torch_xla's format: the file ``tp_rank_XX_pp_rank_XX`` and one file per
            tensor in ``tp_rank_XX_pp_rank_XX.tensors``. All ranks write at the same time, each
            copying one tensor at a time.
        down_cast_bf16: write fp32 tensors as bf16.
        master_dp_only: write from data-parallel rank 0 only. False: every rank writes, to a name
            with ``_dp_rank_XX``.

    Raises:
        ValueError, OSError: on every rank, if one rank cannot write.
    """
    require_no_expert_ranks("saving")
    backend.mark_step()  # torch_xla may return wrong values if pending results are read one by one
    writes = is_model_replica_zero() or not master_dp_only
    path = Path(output_dir) / rank_name(with_data_rank=not master_dp_only)
    rank = parallel_state.get_tensor_model_parallel_rank()
    # xser copies one tensor at a time to the host, which bounds the memory without turns.
    serially = save_serially and not save_xser
    rounds = 1
    if serially:
        rounds = parallel_state.get_tensor_model_parallel_size()
    # Every rank enters ``raise_together`` once a round, whether it writes or not: it is the
    # barrier between rounds, and it passes one rank's failure to all of them.
    for turn in range(rounds):
        with raise_together(f"saving {output_dir}"):
            if not writes or (serially and turn != rank):
                continue
            if save_xser:
                map_tensors(checkpoint, _require_replicated)
                _require_other_kind(path, path.is_dir())
                write_xser(path, map_tensors(checkpoint, _as_bf16) if down_cast_bf16 else checkpoint)
            else:
                _require_other_kind(path, path.is_file())
                content = to_host(checkpoint, down_cast_bf16=down_cast_bf16)
                write_tensors(path / "checkpoint.pt", content)


def require_no_expert_ranks(what: str) -> None:
    """Raise ValueError under expert parallelism: data-parallel rank 0 has some of the experts only."""
    size = parallel_state.get_expert_model_parallel_size()
    if size > 1:
        raise ValueError(
            f"{what} one file per tensor-parallel rank would lose experts, expert_model_parallel_size is {size}: "
            f"{_SAVE_BOXES}"
        )


_SAVE_BOXES = "use nxd_memopt.checkpoint.save_training_state or save_pretrained"


def _require_replicated(tensor: Tensor) -> Tensor:
    require_replicated([tensor], "saving one file per rank", _SAVE_BOXES)
    return tensor


def _as_bf16(tensor: Tensor) -> Tensor:
    """Return an fp32 tensor as bf16 on its device, and any other one as it is."""
    if tensor.dtype != torch.float32:
        return tensor
    return tensor.detach().to(torch.bfloat16)


def _require_other_kind(path: Path, exists: bool) -> None:
    """Raise ValueError if ``exists``: the two formats use one name, for a file and a directory."""
    if exists:
        raise ValueError(
            f"{path} is from a save with the other value of save_xser: remove it, or choose another directory"
        )


def load(
    chkpt_path: str | Path,
    model: torch.nn.Module | None = None,
    model_or_optimizer: torch.nn.Module | torch.optim.Optimizer | None = None,
    model_key: str | None = "model",
    load_xser: bool = False,
    sharded: bool = True,
    strict: bool = True,
    master_dp_only: bool = True,
    weights_only: bool = True,
) -> Any:
    """Read and return a checkpoint; load ``model_or_optimizer`` if given. Every rank calls.

    Args:
        chkpt_path: the ``output_dir`` of ``save``, or, with ``sharded=False``, a file with a full
            state dict.
        model: same as ``model_or_optimizer``; has precedence.
        model_or_optimizer: module or optimizer that loads the entry ``model_key``.
        model_key: key of the state dict, or None if the file is the state dict.
        load_xser: read the format of ``save_xser=True``.
        sharded: False slices a full state dict for this rank's parameters.
        strict: for modules, names must match exactly.
        master_dp_only: False reads this rank's file of ``master_dp_only=False``.
        weights_only: ignored; files are always read without unpickling code.

    Raises:
        ValueError: on every rank, if a file is missing, damaged, does not fit, has another format
            than ``load_xser`` or was written for another tensor-parallel size.
    """
    del weights_only
    if sharded:
        require_no_expert_ranks("loading")
    target = model_or_optimizer if model is None else model
    with raise_together(f"loading {chkpt_path}"):
        path = Path(chkpt_path)
        if sharded:
            path = _sharded_file(path, load_xser, master_dp_only)
        checkpoint = read_tensors(path)
        if target is not None:
            state = _entry(checkpoint, model_key, path)
            load_into(target, state, sharded=sharded, strict=strict)
    return checkpoint


def _sharded_file(directory: Path, load_xser: bool, master_dp_only: bool) -> Path:
    """Return this rank's file, after a check of the checkpoint's parallel sizes and format."""
    path = directory / rank_name(with_data_rank=not master_dp_only)
    if path.exists() and path.is_dir() == load_xser:
        found_kind = "directory" if load_xser else "file"
        raise ValueError(
            f"{path} is a {found_kind}, it was saved with save_xser={not load_xser}: pass load_xser={not load_xser}"
        )
    # The sizes follow from the ranks in the file names. With another tensor-parallel size T this rank's file may exist
    # and even have loadable shapes (replicated parameters), but it is another part of the model.
    sizes = (parallel_state.get_tensor_model_parallel_size(), parallel_state.get_pipeline_model_parallel_size())
    if master_dp_only and directory.is_dir() and any(directory.iterdir()):
        found = find_rank_files(directory)
        if (found.tensor_model_parallel_size, found.pipeline_model_parallel_size) != sizes:
            raise ValueError(
                f"{directory} was written with {found.sizes()}, this run has tensor_model_parallel_size {sizes[0]}: "
                "use that size, or convert the checkpoint with nxd-memopt convert"
            )
    if load_xser:
        return path
    return path / "checkpoint.pt"


def _entry(checkpoint: Mapping[str, Any], key: str | None, path: Path) -> Any:
    """Return the entry ``key`` of ``checkpoint``, or all of it if the key is None."""
    if key is None:
        return checkpoint
    if key not in checkpoint:
        raise ValueError(f"{path} has no entry {key!r}: pass model_key as one of {sorted(checkpoint)[:10]} or None")
    return checkpoint[key]


def load_into(
    target: torch.nn.Module | torch.optim.Optimizer, state: Any, *, sharded: bool = True, strict: bool = True
) -> None:
    """Call ``target.load_state_dict(state)``; see ``load`` for the arguments.

    Raises:
        ValueError: ``state`` does not fit a module.
    """
    if not isinstance(target, torch.nn.Module):
        target.load_state_dict(state)
        return
    if not sharded:
        state = get_sharded_model_dict(target, state)
    try:
        target.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint does not fit the model: {error}") from error
