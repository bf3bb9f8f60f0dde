"""Saves and loads training checkpoints under tags, in neuronx-distributed's layout; complete or
absent.

The files are ``directory/tag/{model,optim}/dp_rank_XX_tp_rank_XX_pp_rank_XX.pt``,
``scheduler.pt``, ``user_content.pt``, neuronx-distributed's markers ``checkpoint`` and ``done``,
and ``manifest.json``, which is written last and counts the saves. Each library loads checkpoints
of the other one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint.directories import incomplete_path, replace_directory, require_visible, restore_interrupted
from nxd_memopt.checkpoint.pickled import require_kv_order, write_flushed, write_manifest
from nxd_memopt.checkpoint.plain import require_plain
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.checkpointing import is_model_replica_zero, require_no_expert_ranks
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts, turns
from nxd_memopt.parallel_layers.tensor_files import read_tensors
from nxd_memopt.trainer.background import TagSave, finish_saves
from nxd_memopt.trainer.rank_states import is_sharded_optimizer, load_model, load_optimizer, own_file_name, unwrap
from nxd_memopt.trainer.tags import (
    begin_writing,
    complete_tags,
    end_writing,
    find_tag,
    local_directory,
    prune_tags,
    require_replaceable_tag,
    saved_numbers,
    tag_directory,
)

_LAYOUT = 2
"""Version of the files, stored in the manifest."""

States = Mapping[str, Callable[[], Any]]
"""Functions that return the states of files, by file name."""


def save_checkpoint(
    checkpoint_dir_str: str | Path,
    tag: str,
    model: nn.Module | Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | Mapping[str, Any] | None = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    use_zero1_dcp: bool = False,
    avoid_saving_lower_precision_weights: bool = False,
) -> None:
    """Write ``checkpoint_dir_str/tag``.

    A checkpoint of the same tag is replaced when the new one is complete.

    Every rank calls. A kill at any moment leaves the earlier checkpoints.

    Args:
        checkpoint_dir_str: created if needed; all ranks must see the same directory.
        tag: name of the checkpoint, a single directory name.
        model: a module or its state dict, written by data-parallel rank 0.
        optimizer: an optimizer or its state dict; with ZeRO-1 every rank writes.
        scheduler: an object with ``state_dict()``, equal on all ranks.
        user_content: nested plain values and tensors, equal on all ranks.
        num_workers: ranks of one host that copy their state to the host at the same time.
        use_xser: write one file per tensor, in torch_xla's format. All ranks write at the same
            time, independent of ``num_workers``; each copies one tensor at a time to its host.
        num_kept_ckpts: number of complete checkpoints to keep; None or -1 keeps all.
        async_save: return when the state is copied to host memory; a thread then writes it while
            training goes on. One save runs at a time: the next one waits. An error of the save is
            raised on every rank by the next ``optimizer.step()`` of an ``NxDOptimizer``,
            ``save_checkpoint`` or ``finalize_checkpoint``. Call ``finalize_checkpoint`` before
            the program ends.
        zero1_optimizer: the state dict passed as ``optimizer`` is sharded over data-parallel
            ranks.
        use_zero1_dcp: must be False.
        avoid_saving_lower_precision_weights: must be False.

    Raises:
        ValueError: with a model or an optimizer under expert parallelism, whose ranks have different experts.
        ValueError, OSError: on every rank, if one cannot write.
    """
    _refuse(use_zero1_dcp=use_zero1_dcp, avoid_saving_lower_precision_weights=avoid_saving_lower_precision_weights)
    if model is not None or optimizer is not None:
        require_no_expert_ranks("saving")
    directory = local_directory(checkpoint_dir_str)
    target = tag_directory(directory, tag)
    incomplete = incomplete_path(target)
    # One save at a time: the previous asynchronous save may write the same tag, and needs host
    # memory for its copies.
    finish_saves()
    with raise_together(f"saving {target}"):
        _require_valid(num_kept_ckpts)
        if parallel_state.is_global_rank_zero():
            restore_interrupted(target)
            require_replaceable_tag(target)
            begin_writing(incomplete)
    with backend.outside_step():  # torch_xla may return wrong values when pending results are read one by one
        own = _own_states(model, optimizer, zero1_optimizer=zero1_optimizer)
    shared: dict[str, Callable[[], Any]] = {}
    if parallel_state.is_global_rank_zero():
        shared = _shared_states(scheduler, user_content)
    complete = functools.partial(_complete_save, directory, target, num_kept_ckpts)
    if async_save:
        # The thread of this save writes the files and completes the checkpoint.
        _begin_async_save(target, own, shared, complete, use_xser=use_xser)
    else:
        _save(target, own, shared, complete, num_workers=num_workers, use_xser=use_xser)


def load_checkpoint(
    path: str | Path,
    tag: str | None = None,
    model: nn.Module | dict[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | dict[str, Any] | None = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,
) -> Any:
    """Load the given objects from ``path/tag``.

    Return its ``user_content``, or None. Every rank calls.

    Reads checkpoints of ``save_checkpoint`` of this library and of neuronx-distributed, xser or
    not. A module and an optimizer may have other tensor- and data-parallel sizes than the run
    that wrote it. Pipeline stages are merged.

    Args:
        path: directory of all tags.
        tag: default the newest complete checkpoint.
        model: a module, or a dict to fill.
        optimizer: an optimizer, or a dict to fill.
        scheduler: an object with ``load_state_dict()``.
        num_workers: ranks of one host that read at the same time.
        strict: parameter names must match exactly.
        use_zero1_dcp: must be False.

    Raises:
        ValueError: on every rank, if there is no checkpoint, or a file is missing, damaged or
            does not fit; with a model or an optimizer under expert parallelism.
    """
    _refuse(use_zero1_dcp=use_zero1_dcp)
    if model is not None or optimizer is not None:
        require_no_expert_ranks("loading")
    # A running asynchronous save may still write the checkpoint that is loaded.
    finish_saves()
    source = find_tag(local_directory(path), tag)
    with raise_together(f"loading {source}"):
        require_kv_order(source)
    if model is not None:
        load_model(source, model, optimizer, num_workers=num_workers, strict=strict)
    if optimizer is not None:
        load_optimizer(source, optimizer, model, num_workers=num_workers)
    with raise_together(f"loading {source}"):
        if scheduler is not None:
            scheduler.load_state_dict(read_tensors(source / "scheduler.pt", mmap=False))
        return _read_user_content(source)


def has_checkpoint(checkpoint_dir_str: str | Path) -> bool:
    """Return whether the directory has a complete checkpoint."""
    return bool(complete_tags(local_directory(checkpoint_dir_str)))


def finalize_checkpoint() -> None:
    """Wait until every rank has finished its saves. Every rank calls.

    Raises:
        ValueError, OSError: on every rank, if a save with ``async_save`` failed on one.
    """
    finish_saves()
    # A barrier, also if no save is running.
    share_texts("")


def _refuse(**options: bool) -> None:
    """Raise ``ValueError`` for an option of neuronx-distributed that is set but not supported."""
    for name, asked in options.items():
        if asked:
            raise ValueError(
                f"{name}=True is not offered: saves are complete on return, with all weights: leave it out"
            )


# Writing


def _own_states(model: Any, optimizer: Any, *, zero1_optimizer: bool) -> dict[str, Callable[[], Any]]:
    """Return functions that return the states of this rank's files, by file name. Every rank
    calls.

    ZeRO-1 states are converted to neuronx-distributed's layout here, because this takes
    collectives.
    """
    states: dict[str, Callable[[], Any]] = {}
    if model is not None and is_model_replica_zero():
        states[f"model/{own_file_name(data_rank=0)}"] = functools.partial(_state, model)
    inner = unwrap(optimizer)
    # Called on every rank, also on ranks that write nothing: it may all-gather.
    source = optimizer
    if isinstance(inner, NeuronZero1Optimizer):
        source = inner.nxd_state_dict()
    # Sharded states: every data-parallel rank writes its own file. Otherwise the first replica
    # writes.
    is_sharded = zero1_optimizer or is_sharded_optimizer(optimizer)
    if optimizer is not None and (is_sharded or is_model_replica_zero()):
        data_rank = parallel_state.get_data_parallel_rank() if is_sharded else 0
        name = f"optim/{own_file_name(data_rank=data_rank)}"
        states[name] = functools.partial(_state, source)
    return states


def _shared_states(scheduler: Any, user_content: Any) -> dict[str, Callable[[], Any]]:
    """Return functions that return the states of the files that rank 0 writes for all ranks, by
    file name.
    """
    states: dict[str, Callable[[], Any]] = {}
    if scheduler is not None:
        states["scheduler.pt"] = functools.partial(_state, scheduler)
    if user_content is not None:
        states["user_content.pt"] = lambda: user_content
    return states


def _save(
    target: Path, own: States, shared: States, complete: Callable[[], None], *, num_workers: int, use_xser: bool
) -> None:
    """Write the files and complete the checkpoint. Every rank calls."""
    incomplete = incomplete_path(target)
    # torch.save needs the rank's complete state on the host: take turns to bound the host memory.
    # xser copies one tensor at a time, so all ranks can write at once.
    ranks_at_once = parallel_state.get_world_size() if use_xser else num_workers
    for is_my_turn in turns(ranks_at_once):
        with raise_together(f"saving {target}"):
            if is_my_turn:
                for name, state_of in own.items():
                    _write(incomplete, name, state_of(), use_xser=use_xser)
    # ``raise_together`` above is a barrier: the files of all ranks are on the disk before rank 0
    # declares the checkpoint complete.
    with raise_together(f"saving {target}"):
        if parallel_state.is_global_rank_zero():
            for name, state_of in shared.items():
                _write(incomplete, name, state_of())
            complete()


def _begin_async_save(
    target: Path, own: States, shared: States, complete: Callable[[], None], *, use_xser: bool
) -> None:
    """Copy the states to host memory and start the thread that writes them. Every rank calls."""
    incomplete = incomplete_path(target)
    with raise_together(f"saving {target}"):
        states = {name: state_of() for name, state_of in {**own, **shared}.items()}
        # Check in the main thread: an error in the writer's thread would be reported a step
        # later.
        for name, state in states.items():
            require_plain(state, Path(name).stem)

    def write(name: str, state: Any) -> None:
        _write(incomplete, name, state, use_xser=use_xser and name in own)

    parallel_state.UNFINISHED_SAVES.append(TagSave(target, incomplete, states, write, complete))


def _complete_save(directory: Path, target: Path, num_kept_ckpts: int | None) -> None:
    """Mark the checkpoint complete, rename it to its final name, and remove old ones.

    Rank 0 calls.
    """
    # neuronx-distributed's marker, this library's manifest, the rename: a kill between two of
    # these steps leaves the directory under its incomplete name.
    incomplete = incomplete_path(target)
    end_writing(incomplete)
    # The number orders the tags by save, independent of file times.
    number = 1 + max(saved_numbers(directory).values(), default=0)
    write_manifest(incomplete, {"number": number, "layout": _LAYOUT})
    replace_directory(incomplete, target)
    prune_tags(directory, num_kept_ckpts)


def _write(directory: Path, name: str, state: Any, *, use_xser: bool = False) -> None:
    """Check that ``state`` is plain and that rank 0's directory is visible here, and write it."""
    require_plain(state, Path(name).stem)
    require_visible(directory)
    write_flushed(directory / name, state, use_xser=use_xser)


def _state(source: Any) -> Any:
    """Return a state dict, of ``source`` or ``source`` itself."""
    if isinstance(source, Mapping):
        return source
    return source.state_dict()


def _require_valid(num_kept_ckpts: int | None) -> None:
    """Raise ``ValueError`` for an invalid number of checkpoints to keep."""
    if num_kept_ckpts is not None and num_kept_ckpts != -1 and num_kept_ckpts < 1:
        raise ValueError(f"num_kept_ckpts must be at least 1, or None or -1 for all, got {num_kept_ckpts}")


# Reading


def _read_user_content(source: Path) -> Any:
    """Return the content of ``user_content.pt``, or None if there is no such file."""
    path = source / "user_content.pt"
    if not path.is_file():
        return None
    try:
        return read_tensors(path, mmap=False)
    except ValueError as error:
        raise ValueError(f"{error}; rename the file to load the checkpoint without it") from error
