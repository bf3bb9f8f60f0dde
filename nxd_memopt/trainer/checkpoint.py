"""Owns training checkpoints under tags, in neuronx-distributed's layout: complete or absent, the newest found first.

``directory/tag/{model,optim}/dp_rank_XX_tp_rank_XX_pp_rank_XX.pt``, ``scheduler.pt``, ``user_content.pt``, and
``manifest.json``, which is written last and counts the saves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nxd_memopt.checkpoint.directories import (
    incomplete_path,
    remove_directory,
    replace_directory,
    restore_interrupted,
)
from nxd_memopt.checkpoint.files import read_json
from nxd_memopt.checkpoint.pickled import MANIFEST, require_kv_order, write_into, write_manifest
from nxd_memopt.checkpoint.plain import require_plain
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.checkpointing import is_model_replica_zero, load_into, read_tensors
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts, turns
from nxd_memopt.trainer.background import TagSave, finish_saves
from nxd_memopt.trainer.optimizer import NxDOptimizer

_REPLACED = re.compile(r"\.(.+)\.replaced")


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
    """Write ``checkpoint_dir_str/tag``; a checkpoint of the same tag is replaced once the new one is complete.

    Every rank calls. A kill at any moment leaves the earlier checkpoints.

    Args:
        checkpoint_dir_str: created if needed; all ranks must see the same directory.
        tag: name of the checkpoint, one directory name.
        model: a module or its state dict, written by data-parallel rank 0.
        optimizer: an optimizer or its state dict; with ZeRO-1 every rank writes.
        scheduler: has ``state_dict()``, equal on all ranks.
        user_content: nested plain values and tensors, equal on all ranks.
        num_workers: ranks of one host that copy their state to it at the same time.
        use_xser: all ranks at the same time, whatever ``num_workers`` says.
        num_kept_ckpts: newest complete checkpoints to leave; ``None`` or -1 leaves all.
        async_save: return when the state is copied to the host's memory; a thread then writes it while training goes
            on. One save at a time: the next one waits. An error of the save is raised by the next ``optimizer.step()``
            of an ``NxDOptimizer``, ``save_checkpoint`` or ``finalize_checkpoint``, on every rank. Call
            ``finalize_checkpoint`` before the program ends.
        zero1_optimizer: a state dict passed as ``optimizer`` is sharded over data-parallel ranks.
        use_zero1_dcp: only False.
        avoid_saving_lower_precision_weights: only False.

    Raises:
        ValueError, OSError: on every rank, when one cannot write.
    """
    _refuse(use_zero1_dcp=use_zero1_dcp)
    _refuse(avoid_saving_lower_precision_weights=avoid_saving_lower_precision_weights)
    directory, target = Path(checkpoint_dir_str), _tag_directory(checkpoint_dir_str, tag)
    incomplete = incomplete_path(target)
    finish_saves()
    with raise_together(f"saving {target}"):
        _require_valid(num_kept_ckpts)
        if parallel_state.is_global_rank_zero():
            restore_interrupted(target)
            incomplete.mkdir(parents=True)
    if async_save:
        with raise_together(f"saving {target}"):
            states = _own_states(model, optimizer, zero1_optimizer)
            if parallel_state.is_global_rank_zero():
                states |= _shared_states(scheduler, user_content)
            for name, state in states.items():
                require_plain(state, Path(name).stem)
        save = TagSave(
            target,
            incomplete,
            states,
            lambda name, state: write_into(incomplete, name, state),
            lambda: _complete_save(directory, target, num_kept_ckpts),
        )
        parallel_state.SAVES_UNDER_WAY.append(save)
        return
    for is_my_turn in turns(parallel_state.get_world_size() if use_xser else num_workers):
        with raise_together(f"saving {target}"):
            if is_my_turn:
                _write(incomplete, _own_states(model, optimizer, zero1_optimizer))
    with raise_together(f"saving {target}"):
        if parallel_state.is_global_rank_zero():
            _write(incomplete, _shared_states(scheduler, user_content))
            _complete_save(directory, target, num_kept_ckpts)


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
    """Load what is passed from ``path/tag``; return its ``user_content``, or ``None``. Every rank calls.

    Args:
        tag: default the newest complete checkpoint.
        model: a module, or a dict to fill; likewise ``optimizer``.
        num_workers: ranks of one host that read at the same time.
        strict: parameter names must match exactly.
        use_zero1_dcp: only False.

    Raises:
        ValueError: on every rank, when there is none, or a file is missing, damaged or does not fit.
    """
    _refuse(use_zero1_dcp=use_zero1_dcp)
    finish_saves()
    source = _find(Path(path), tag)
    with raise_together(f"loading {source}"):
        require_kv_order(source)
    for is_my_turn in turns(num_workers):
        with raise_together(f"loading {source}"):
            if is_my_turn and model is not None:
                _put(model, read_tensors(source / "model" / _file_name(data_rank=0)), strict=strict)
    if optimizer is not None:
        _load_optimizer(source, optimizer, num_workers)
    with raise_together(f"loading {source}"):
        if scheduler is not None:
            scheduler.load_state_dict(read_tensors(source / "scheduler.pt"))
        content = source / "user_content.pt"
        return read_tensors(content, mmap=False)["user_content"] if content.is_file() else None


def has_checkpoint(checkpoint_dir_str: str | Path) -> bool:
    """Whether the directory holds a complete checkpoint."""
    return bool(_complete(Path(checkpoint_dir_str)))


def finalize_checkpoint() -> None:
    """Wait until every rank has finished its saves. Every rank calls.

    Raises:
        ValueError, OSError: on every rank, when a save with ``async_save`` failed on one.
    """
    finish_saves()
    share_texts("")


def _refuse(**options: bool) -> None:
    for name, asked in options.items():
        if asked:
            raise ValueError(
                f"{name}=True is not offered: saves are complete on return, with all weights: leave it out"
            )


def _tag_directory(directory: str | Path, tag: str) -> Path:
    if not str(tag) or Path(str(tag)).name != str(tag) or str(tag).startswith("."):
        raise ValueError(f"tag {tag!r} must be a directory's name, without a separator or a leading dot")
    return Path(directory) / str(tag)


def _file_name(*, data_rank: int) -> str:
    tensor = parallel_state.get_tensor_model_parallel_rank()
    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    return f"dp_rank_{data_rank:02d}_tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}.pt"


# Writing


def _own_states(model: Any, optimizer: Any, zero1_optimizer: bool) -> dict[str, Any]:
    """Return what this rank writes, by file name."""
    states = {}
    if model is not None and is_model_replica_zero():
        states[f"model/{_file_name(data_rank=0)}"] = _state(model)
    sharded = zero1_optimizer or _is_sharded(optimizer)
    if optimizer is not None and (sharded or is_model_replica_zero()):
        data_rank = parallel_state.get_data_parallel_rank() if sharded else 0
        states[f"optim/{_file_name(data_rank=data_rank)}"] = _state(optimizer)
    return states


def _shared_states(scheduler: Any, user_content: Any) -> dict[str, Any]:
    """Return what rank 0 writes for all, by file name."""
    states = {} if scheduler is None else {"scheduler.pt": _state(scheduler)}
    return states if user_content is None else states | {"user_content.pt": {"user_content": user_content}}


def _write(directory: Path, states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        require_plain(state, Path(name).stem)
        write_into(directory, name, state)


def _complete_save(directory: Path, target: Path, num_kept_ckpts: int | None) -> None:
    """Declare the checkpoint complete, put it in its place, and remove old ones. Rank 0 calls."""
    number = 1 + max(_numbers(directory).values(), default=0)
    write_manifest(incomplete_path(target), {"number": number})
    replace_directory(incomplete_path(target), target)
    _prune(directory, num_kept_ckpts)


def _state(source: Any) -> Any:
    return source if isinstance(source, Mapping) else source.state_dict()


def _is_sharded(optimizer: Any) -> bool:
    inner = optimizer.optimizer if isinstance(optimizer, NxDOptimizer) else optimizer
    return isinstance(inner, NeuronZero1Optimizer) and len(inner.sharding_groups[0]) > 1


def _require_valid(num_kept_ckpts: int | None) -> None:
    if num_kept_ckpts is not None and num_kept_ckpts != -1 and num_kept_ckpts < 1:
        raise ValueError(f"num_kept_ckpts must be at least 1, or None or -1 for all, got {num_kept_ckpts}")


def _prune(directory: Path, num_kept_ckpts: int | None) -> None:
    if num_kept_ckpts in (None, -1):
        return
    for path in list(_complete(directory).values())[:-num_kept_ckpts]:
        (path / MANIFEST).unlink()  # no longer complete
        remove_directory(path)


# Reading


def _complete(directory: Path) -> dict[str, Path]:
    """Complete checkpoints by tag, in the order of their saves; of a killed replacement, the predecessor."""
    numbers = _numbers(directory)
    replaced = {match[1]: path for path in numbers if (match := _REPLACED.fullmatch(path.name))}
    renamed = {path.name: path for path in numbers if not path.name.startswith(".")}
    return dict(sorted((replaced | renamed).items(), key=lambda item: numbers[item[1]]))


def _numbers(directory: Path) -> dict[Path, int]:
    """The number of each directory's save; those without a manifest of ours are none."""
    paths = directory.iterdir() if directory.is_dir() else ()
    manifests = {path: read_json(path / MANIFEST) for path in paths if (path / MANIFEST).is_file()}
    return {path: manifest["number"] for path, manifest in manifests.items() if "number" in manifest}


def _find(directory: Path, tag: str | None) -> Path:
    """The same checkpoint on every rank: the one that rank 0 sees."""
    found = ""
    with raise_together(f"searching {directory}"):
        if parallel_state.is_global_rank_zero():
            complete = _complete(directory)
            wanted = str(tag) if tag is not None else next(reversed(complete), "")
            if wanted not in complete:
                missing = "no complete checkpoint" if tag is None else f"no complete checkpoint {tag!r}"
                raise ValueError(f"{directory} has {missing}, only {list(complete)}: check the directory and the tag")
            found = complete[wanted].name
    return directory / share_texts(found)[0]


def _load_optimizer(source: Path, optimizer: Any, num_workers: int) -> None:
    own = source / "optim" / _file_name(data_rank=parallel_state.get_data_parallel_rank())
    if not (_is_sharded(optimizer) or (isinstance(optimizer, dict) and own.is_file())):
        own = own.with_name(_file_name(data_rank=0))
    state: dict[str, Any] = {}
    for is_my_turn in turns(num_workers):
        with raise_together(f"loading {source}"):
            if is_my_turn:
                state = read_tensors(own, mmap=False)
                _require_kind(optimizer, state, own)
    _put(optimizer, state)


def _require_kind(optimizer: Any, state: Mapping[str, Any], path: Path) -> None:
    """``torch.optim`` would take a shard's state for a whole one; the sharded optimizer checks what it is given."""
    inner = optimizer.optimizer if isinstance(optimizer, NxDOptimizer) else optimizer
    if "sharding" in state and not isinstance(inner, NeuronZero1Optimizer | dict):
        raise ValueError(
            f"{path} comes from an optimizer with ZeRO-1 or master weights, and {type(inner).__name__} has neither: "
            "resume with the optimizer_config and mixed_precision_config of the run that wrote it"
        )


def _put(target: Any, state: Any, *, strict: bool = True) -> None:
    if isinstance(target, dict):
        target.update(state)
    else:
        load_into(target, state, strict=strict)
