"""Reads a model's weights from neuronx-distributed's rank files, as full Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nxd_memopt.checkpoint.names import is_computed_buffer
from nxd_memopt.checkpoint.nxd.architectures import QKVForm, build_rules, find_form, kv_heads, require_sizes
from nxd_memopt.checkpoint.nxd.parts import KVOrder, Layout, Part, Rule, detect_kv_order
from nxd_memopt.checkpoint.pickled import BEGUN, DONE, MANIFEST
from nxd_memopt.parallel_layers.rank_files import RankFiles, find_rank_files
from nxd_memopt.parallel_layers.tensor_files import StoredTensor, read_stored, resolve
from nxd_memopt.parallel_layers.utils import bit_equal

_MODEL = "model"
"""Entry of the state dict in a file that contains more than the state dict."""

Shards = list[Tensor | StoredTensor]
"""Shards of one parameter by tensor-parallel rank.

A ``StoredTensor`` stays on disk until it is used.
"""


@dataclass(frozen=True)
class NxDWeights:
    """The parameters of a checkpoint by neuronx-distributed's names, all pipeline stages merged.

    Attributes:
        directory: directory of the rank files.
        shards: shards by name.
        extras: descriptions of the entries that are not parameters, such as a step counter.
        layout: layout of the shards.
        form: form of query, key and value.
    """

    directory: Path
    shards: dict[str, Shards]
    extras: dict[str, str]
    layout: Layout
    form: QKVForm

    def describe(self) -> str:
        """Return T, the KV replicas and the QKV stride, for messages."""
        text = f"tensor_model_parallel_size {self.layout.size}"
        if self.layout.kv_replicas > 1:
            text += f", {self.layout.kv_replicas} replicas of each KV head in {self.layout.kv_order} order"
        if self.layout.query_key_value_stride > 1:
            text += f", query_key_value of stride {self.layout.query_key_value_stride}"
        return text


@dataclass(frozen=True)
class LazyFullTensor:
    """One full Hugging Face tensor.

    Its shards are read when it is indexed; see ``resharding.LazySlice``.
    """

    rule: Rule
    part: Part
    shards: Shards
    layout: Layout
    directory: Path

    def get_shape(self) -> list[int]:
        """Return the shape of the full tensor."""
        return list(self.part.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.full()[index]

    def check(self) -> None:
        """Raise the errors of ``full`` without building the full tensor: check shapes, dtypes and
        replicas.
        """
        shards = self._matching_shards()
        # With ``accept_drift`` a replicated parameter cannot fail: ``full`` warns, once, when the
        # values are used.
        accepts_drift = self.part.kind == "replicated" and self.layout.accept_drift
        if not accepts_drift:
            self.rule.require_replicas(self.part, shards, self.layout)

    def full(self) -> Tensor:
        """Return the full tensor.

        Raises:
            ValueError: a shard has another shape than the config says, dtypes differ, or replicas
                differ.
        """
        return self.rule.merge(self.part, self._matching_shards(), self.layout)

    def _matching_shards(self) -> list[Tensor]:
        """Return the shards of all ranks after checking shapes and dtypes."""
        shards = [resolve(shard) for shard in self.shards]
        expected = self.rule.local_shape(self.layout)
        for rank, shard in enumerate(shards):
            if tuple(shard.shape) != expected or shard.dtype != shards[0].dtype:
                raise ValueError(
                    f"{self.directory}: {self.rule.name} of tensor-parallel rank {rank} is "
                    f"{list(shard.shape)} {shard.dtype}, expected {list(expected)} "
                    f"{shards[0].dtype} at tensor_model_parallel_size {self.layout.size}: a rank "
                    "file is missing or from another save, or config.json belongs to another model"
                )
        return shards


def model_directory(directory: str | Path) -> Path:
    """Return ``directory/model`` if it exists (the trainer's layout), else ``directory``.

    Raises:
        ValueError: the save of the tag was interrupted: the directory has the marker of a save
            that has begun, but neither the marker of a complete save nor this library's manifest.
            Directories without markers are accepted, because neuronx-distributed's converters
            write none.
    """
    path = Path(directory)
    model = path
    if (path / "model").is_dir():
        model = path / "model"
    # ``directory`` may itself be the ``model`` of a tag; the markers are in the tag.
    tag = path
    if model.name == "model":
        tag = model.parent
    if (tag / BEGUN).is_file() and not (tag / DONE).is_file() and not (tag / MANIFEST).is_file():
        raise ValueError(f"{tag} has the marker {BEGUN!r} and no {DONE!r}: its save was interrupted; read another tag")
    return model


def open_weights(
    directory: str | Path,
    config: Mapping[str, Any],
    *,
    kv_order: KVOrder | None = None,
    query_key_value_stride: int = 1,
    accept_drift: bool = False,
    tensor_model_parallel_size: int | None = None,
) -> NxDWeights:
    """Open the rank files of ``directory`` (a tag, its ``model``, or ``checkpointing.save``'s
    ``output_dir``).

    Args:
        directory: directory of the checkpoint.
        config: content of the model's Hugging Face ``config.json``.
        kv_order: order of KV replicas; None finds it by comparing the replicas.
        query_key_value_stride: 1 or 3, for GPT-NeoX; see docs/migrating_from_nxd.md.
        accept_drift: use rank 0's values of replicated parameters that differ between ranks, with
            a warning.
        tensor_model_parallel_size: expected T of the files; None accepts any.

    Raises:
        ValueError: files are missing or damaged, or the order of KV replicas contradicts
            ``kv_order`` or cannot be found.
    """
    files = find_rank_files(model_directory(directory))
    size = tensor_model_parallel_size or files.tensor_model_parallel_size
    if size != files.tensor_model_parallel_size:
        raise ValueError(f"{files.directory} was written with {files.sizes()}, not {size}: pass the files' size")
    # The files do not record form and replicas: the form follows from the names, the number of
    # replicas from the shapes, and the order from the values.
    shards, extras = read_state_dicts(files)
    form = find_form(shards)
    layout = Layout(size, query_key_value_stride=query_key_value_stride, accept_drift=accept_drift)
    layout = replace(layout, kv_replicas=_count_replicas(files, shards, config, size))
    if layout.kv_replicas > 1:
        order = _find_order(files, build_rules(config, layout, form), shards, layout, kv_order)
        layout = replace(layout, kv_order=order)
    return NxDWeights(files.directory, shards, extras, layout, form)


def read_state_dicts(files: RankFiles) -> tuple[dict[str, Shards], dict[str, str]]:
    """Return the parameters of all stages by name, and a description of each other entry.

    Raises:
        ValueError: ranks of one stage have different names, or a name has different values in two
            stages.
    """
    merged: dict[str, Shards] = {}
    extras: dict[str, str] = {}
    for stage in range(files.pipeline_model_parallel_size):
        # Every stage has T files with the same names; each name gets the list of its T shards.
        states = []
        for rank in range(files.tensor_model_parallel_size):
            states.append(_state_dict(files.file(rank, stage), extras))
        for rank, state in enumerate(states):
            if state.keys() != states[0].keys():
                different = sorted(state.keys() ^ states[0].keys())
                raise ValueError(
                    f"{files.file(rank, stage)} and {files.file(0, stage)} differ in their "
                    f"entries, {different[:5]}: they are not of one save"
                )
        for name in states[0]:
            shards = [state[name] for state in states]
            # A tied parameter is in the first and in the last stage, as two copies.
            if name in merged:
                _require_equal(files, name, merged[name], shards)
            merged[name] = shards
    return merged, extras


def _require_equal(files: RankFiles, name: str, first: Shards, second: Shards) -> None:
    """Raise ``ValueError`` if a parameter in the files of two pipeline stages (a tied one) has
    different values.
    """
    if any(not bit_equal(resolve(a), resolve(b)) for a, b in zip(first, second, strict=True)):
        raise ValueError(
            f"{files.directory}: {name} is in the files of two pipeline stages with different "
            "values: convert the stages' files one at a time, or save again"
        )


def _state_dict(path: Path, extras: dict[str, str]) -> dict[str, Tensor | StoredTensor]:
    """Return the tensors of one rank file, and add its other entries to ``extras``."""
    content = read_stored(path)
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a state dict: it is no checkpoint of a model")
    # The state dict is the content itself, or one of its entries, next to a step count and others.
    if isinstance(content.get(_MODEL), Mapping):
        extras.update({str(name): _describe(value) for name, value in content.items() if name != _MODEL})
        content = content[_MODEL]
    tensors: dict[str, Tensor | StoredTensor] = {}
    for name, value in content.items():
        if isinstance(value, Tensor | StoredTensor):
            tensors[name] = value
        else:
            extras[str(name)] = _describe(value)
    if not tensors:
        raise ValueError(f"{path} holds no tensors under its entry {_MODEL!r} or at its top: pass a model checkpoint")
    return tensors


def _describe(value: Any) -> str:
    """Return the type of an entry, with the value of a plain one."""
    kind = type(value).__name__
    if isinstance(value, bool | int | float | str):
        return f"{kind} {value}"
    return kind


# KV replicas


def _count_replicas(files: RankFiles, shards: dict[str, Shards], config: Mapping[str, Any], size: int) -> int:
    """Return m, the number of KV rows on all ranks divided by the rows of all KV heads."""
    if config.get("model_type") != "llama":
        return 1
    require_sizes(config)
    query = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // query
    # m = T * (KV rows of one rank) / (KV rows of the full projection). All layers have the same
    # m: the first parameter with replicas decides. Other forms have no replicas.
    kv_rows = kv_heads(config) * head_dim
    query_rows = query * head_dim
    for name, values in shards.items():
        if not name.endswith((".qkv_proj.weight_k", ".qkv_proj.weight_qkv")):
            continue
        rows = _rows(values[0])
        # A fused shard is [q, k, v] with q_rows / T + 2 kv_rows rows: remove the query rows.
        if name.endswith("weight_qkv"):
            rows = (rows - query_rows // size) // 2
        if rows <= 0 or rows * size % kv_rows:
            raise ValueError(
                f"{files.directory}: {name} has {rows} KV rows on each of {size} ranks, config.json says {kv_rows} in "
                "all: a rank file is missing, or config.json belongs to another model"
            )
        return rows * size // kv_rows
    return 1


def _rows(value: Tensor | StoredTensor) -> int:
    """Return the rows of a shard, from its metadata if they are recorded."""
    if isinstance(value, StoredTensor) and "shape" in value.info:
        return value.info["shape"][0]
    return resolve(value).size(0)


def _find_order(
    files: RankFiles, rules: list[Rule], shards: dict[str, Shards], layout: Layout, asked: KVOrder | None
) -> KVOrder:
    """Return the order in which the replicas are equal.

    Layers are compared until one distinguishes the two orders.
    """
    orders: set[KVOrder] = {"strided", "consecutive"}
    if layout.kv_replicas == layout.size:  # one KV shard: the orders are the same
        return asked or "consecutive"
    for rule, part in _kv_parts(rules):
        if rule.name not in shards:
            continue
        # Layers with equal KV heads (all zeros, for example) fit both orders: go on to the next
        # one. Usually the first layer decides, and only its T shards are read.
        orders &= detect_kv_order(rule, part, [resolve(shard) for shard in shards[rule.name]], layout.kv_replicas)
        if len(orders) < 2:
            break
    if not orders or (asked and asked not in orders):
        found = " or ".join(sorted(orders)) or "neither order"
        raise ValueError(
            f"{files.directory}: the replicas of KV heads are equal in {found}, not in {asked or 'any order'}: pass "
            "kv_order with the one that is found, or files of one save"
        )
    if len(orders) == 2 and asked is None:
        raise ValueError(
            f"{files.directory}: all KV heads are equal, so that the order of their {layout.kv_replicas} replicas "
            "cannot be found: pass kv_order strided (trn1) or consecutive (trn2)"
        )
    return asked or next(iter(orders))


def _kv_parts(rules: Sequence[Rule]) -> Iterator[tuple[Rule, Part]]:
    """Yield the key and value parts of all rules."""
    for rule in rules:
        for part in rule.parts:
            if part.kind == "kv":
                yield rule, part


# Hugging Face names


def as_hugging_face(weights: NxDWeights, config: Mapping[str, Any]) -> tuple[dict[str, LazyFullTensor], list[str]]:
    """Return the full tensors by Hugging Face name, and a line for each entry without a
    counterpart.

    Raises:
        ValueError: a parameter of the model is missing, or the files have unknown tensors.
    """
    # Rules without shards are missing parameters; shards without a rule are buffers or unknown
    # tensors.
    rules = {rule.name: rule for rule in build_rules(config, weights.layout, weights.form)}
    tied = bool(config.get("tie_word_embeddings"))
    head = next(reversed(rules))  # the rules begin with the embedding and end with the output head
    buffers = [name for name in weights.shards if name not in rules and is_computed_buffer(name)]
    unknown = [name for name in weights.shards if name not in rules and name not in buffers]
    missing = [name for name in rules if name not in weights.shards and not (tied and name == head)]
    if missing or unknown:
        raise ValueError(
            f"{weights.directory}: the files lack {len(missing)} parameters of the model, {missing[:5]}, and hold "
            f"{len(unknown)} unknown tensors, {unknown[:5]}: pass the config.json of the model that was trained"
        )
    full_tensors: dict[str, LazyFullTensor] = {}
    for name, rule in rules.items():
        if name not in weights.shards:  # the tied output head
            continue
        for part in rule.parts:
            full_tensors[part.name] = LazyFullTensor(
                rule, part, weights.shards[name], weights.layout, weights.directory
            )
    # A tied model is stored once: the sample's copy of the output head must equal the embedding.
    if tied and head in full_tensors:
        embedding = full_tensors[next(iter(rules))]
        if not bit_equal(embedding.full(), full_tensors.pop(head).full()):
            raise ValueError(
                f"{weights.directory}: config.json ties the output head to the embedding, and "
                f"{head} differs from it: set tie_word_embeddings to false in config.json"
            )
    report = [f"left out: {name}: a buffer that the model computes" for name in buffers]
    report += [f"left out: {name}: {kind}: no weight of the model" for name, kind in weights.extras.items()]
    return full_tensors, report
