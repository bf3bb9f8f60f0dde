"""Writes a model's weights as neuronx-distributed's rank files, from full Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nxd_memopt.checkpoint.directories import flush_to_disk, new_version, restore_interrupted
from nxd_memopt.checkpoint.files import Sources
from nxd_memopt.checkpoint.names import OUTPUT_HEADS, is_computed_buffer
from nxd_memopt.checkpoint.nxd.architectures import QKVForm, build_rules, is_first_stage, layer_index
from nxd_memopt.checkpoint.nxd.parts import Layout, Rule
from nxd_memopt.checkpoint.pickled import BEGUN, DONE, write_flushed
from nxd_memopt.checkpoint.stream import WRITER
from nxd_memopt.parallel_layers.resharding import stored_shape

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """Layout and form of the files to write.

    Attributes:
        layout: layout of the shards.
        form: form of query, key and value.
        pipeline_model_parallel_size: number of stages; the layers are divided evenly, the last
            stages take the remainder.
        xser: write torch_xla's format of one file per tensor.
    """

    layout: Layout
    form: QKVForm = "separate"
    pipeline_model_parallel_size: int = 1
    xser: bool = False


def write_weights(
    sources: Sources, config: Mapping[str, Any], directory: str | Path, target: Target, progress: Progress = print
) -> None:
    """Write ``directory/model/dp_rank_00_tp_rank_XX_pp_rank_XX.pt``, which
    ``nxd.load_checkpoint`` reads by its tag.

    The tag is the name of the directory. The files are written next to ``directory``, which is
    replaced when all files are complete. An existing ``directory`` must be empty or written by this
    function. The host stores the shards of one rank at a time.

    Args:
        sources: full tensors by Hugging Face name.
        config: content of the model's Hugging Face ``config.json``.
        directory: directory to write.
        target: layout and form of the files.
        progress: receives a line for each file.

    Raises:
        ValueError: a tensor of the model is missing, unknown, or of another shape than ``config``
            says, or the directory contains something else.
    """
    path = Path(directory).resolve()
    rules = build_rules(config, target.layout, target.form)
    stages = assign_stages(rules, config["num_hidden_layers"], target.pipeline_model_parallel_size)
    found = _match_sources(rules, sources, config)
    _require_checkpoint(path)
    restore_interrupted(path)
    with new_version(path) as incomplete:
        (incomplete / "model").mkdir()
        (incomplete / BEGUN).write_text("1")
        total = target.layout.size * target.pipeline_model_parallel_size
        for stage in range(target.pipeline_model_parallel_size):
            chosen = [rule for rule in rules if stages[rule.name] == stage]
            for rank in range(target.layout.size):
                # Only the tensors of this stage are read; they are read again for every rank,
                # which bounds the host memory.
                state = {rule.name: _cut(rule, found, target.layout, rank) for rule in chosen}
                file = incomplete / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
                write_flushed(file, state, use_xser=target.xser)
                progress(f"{stage * target.layout.size + rank + 1} of {total}: {file.name}")
        # The marker of a complete save comes last, and all of it is on the disk before the rename:
        # a crash of the host leaves the earlier checkpoint or the complete new one.
        # neuronx-distributed does not read its content, which says here who wrote the directory.
        (incomplete / DONE).write_text(WRITER)
        flush_to_disk(incomplete / DONE)
        flush_to_disk(incomplete)


def assign_stages(rules: list[Rule], num_layers: int, num_stages: int) -> dict[str, int]:
    """Return the pipeline stage of each parameter, with neuronx-distributed's division of the
    layers.

    Raises:
        ValueError: there are more stages than layers.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"pipeline_model_parallel_size {num_stages} must be at least 1 and at most the "
            f"{num_layers} layers: use fewer stages"
        )
    # Every stage gets ``per_stage`` layers, and each of the last ``remainder`` stages one more:
    # 10 layers over 4 stages are 2, 2, 3, 3.
    per_stage, remainder = divmod(num_layers, num_stages)
    stage_of_layer: list[int] = []
    for stage in range(num_stages):
        length = per_stage + (stage >= num_stages - remainder)
        stage_of_layer += [stage] * length
    stages = {}
    for rule in rules:
        layer = layer_index(rule.name)
        if layer is not None:
            stages[rule.name] = stage_of_layer[layer]
        elif is_first_stage(rule.name):
            stages[rule.name] = 0
        else:
            stages[rule.name] = num_stages - 1
    return stages


def _match_sources(rules: list[Rule], sources: Sources, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sources by the rules' Hugging Face names, after checking names and shapes."""
    found: dict[str, Any] = {}
    known: set[str] = set()
    head = rules[-1].parts[0].name
    for part in [part for rule in rules for part in rule.parts]:
        # The head has two names on disk; with tied embeddings it may be absent and equals the
        # embedding.
        names = OUTPUT_HEADS if part.name == head else (part.name,)
        stored = next((name for name in names if name in sources), None)
        if stored is None and part.name == head and config.get("tie_word_embeddings"):
            stored = rules[0].parts[0].name
        if stored is None or stored not in sources:
            raise ValueError(f"the checkpoint has no {part.name}: pass a complete one, with its own config.json")
        source = sources[stored]
        shape = stored_shape(source)
        if shape != part.shape:
            raise ValueError(
                f"{stored} has shape {list(shape)}, config.json says {list(part.shape)}: "
                "pass the checkpoint's own config"
            )
        found[part.name] = source
        known.add(stored)
    unknown = [name for name in sources if name not in known and not is_computed_buffer(name)]
    if unknown:
        raise ValueError(
            f"the checkpoint holds {len(unknown)} tensors that neuronx-distributed's sample has "
            f"no place for, {unknown[:5]}: remove them, or pass another model"
        )
    return found


def _cut(rule: Rule, sources: dict[str, Any], layout: Layout, rank: int) -> Tensor:
    """Return one rank's shard, reading the full tensors of the rule."""
    return rule.cut({part.name: sources[part.name][...] for part in rule.parts}, layout, rank)


def _require_checkpoint(path: Path) -> None:
    """Raise ``ValueError`` unless ``path`` is absent, empty, or a checkpoint of weights that this function wrote."""
    if path.is_file():
        raise ValueError(f"{path} is a file: pass a directory")
    content = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    done = path / DONE
    is_own = done.is_file() and done.read_text(errors="replace") == WRITER
    if content and (content - {"model", BEGUN, DONE} or not is_own):
        raise ValueError(
            f"{path} exists and holds {sorted(content)[:5]}, not only a checkpoint of weights of nxd_memopt: "
            "choose another directory, or move this one away"
        )
