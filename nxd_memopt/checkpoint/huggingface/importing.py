"""Loads Hugging Face directories: each rank reads its own slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint.files import Sources, open_weights
from nxd_memopt.checkpoint.huggingface.experts import stack_experts, with_zero_biases
from nxd_memopt.checkpoint.huggingface.fused_layers import split_layers
from nxd_memopt.checkpoint.huggingface.gguf import weights_directory
from nxd_memopt.checkpoint.names import is_vocabulary_table, match_names, stored_copies, with_backbone_prefix
from nxd_memopt.modules.lora import whole_model
from nxd_memopt.modules.packed_weights import pack_weights
from nxd_memopt.ops.fp8 import FORWARD_DTYPE, Fp8Recipe, as_rows, magnitudes
from nxd_memopt.ops.parts import split_sizes
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.parallel_layers.data_shards import (
    is_data_sharded,
    local_rows,
    model_dtype,
    require_replicated,
    row_range,
)
from nxd_memopt.parallel_layers.resharding import LazySlice, full_shape, local_slice, require_full_shape, stored_shape
from nxd_memopt.parallel_layers.utils import bit_equal

MEAN_ROWS = 8192  # rows of a table that are read at a time for their mean


def load_pretrained(
    model: torch.nn.Module,
    directory: str | Path,
    *,
    resize_embedding: bool = False,
    in_float8: Sequence[Sequence[Tensor]] = (),
) -> None:
    """Load ``model`` from a Hugging Face directory. Every rank calls and reads only its own
    slices.

    Supported are ``model.safetensors``, ``pytorch_model.bin``, their sharded forms, and a single
    ``*.gguf`` file (converted once by rank 0, see ``gguf.weights_directory``). Names may lack the
    prefix of the backbone, as in files of transformers' base models. Parameters on the meta device
    are created on the backend's device. Tied parameters stay tied. Values are cast to the dtype of
    the parameter. The host stores one shard of one parameter at a time.

    Args:
        model: the model to fill.
        directory: the Hugging Face directory.
        resize_embedding: if the model has more tokens than the files, the rows of the embedding and
            of the head that the files lack are the mean of the stored rows.
        in_float8: groups of parameters on the meta device that are created as float8 with one scale for a group
            (``modules.fp8.float8_groups``). No more than a group exists in the files' dtype.

    Raises:
        ValueError: on every rank, before any parameter changes, if files are missing or damaged,
            if names or shapes differ from the model's, or if weights are integers.
        ImportError: a GGUF file needs transformers, which is missing or too old; all other
            formats work without it.
    """
    with opened_weights(directory, f"loading {directory}") as sources:
        load_sources(model, sources, Path(directory), resize_embedding=resize_embedding, in_float8=in_float8)


@contextmanager
def opened_weights(directory: str | Path, task: str) -> Iterator[Sources]:
    """Open the weights of a Hugging Face directory or of a GGUF file; yield full tensors by name. Every rank calls.

    An error of one rank inside the block is raised on every rank, with ``task`` in its message.
    """
    with (
        weights_directory(Path(directory)) as location,
        raise_together(task),
        open_weights(location) as sources,
    ):
        yield sources


def model_sources(model: torch.nn.Module, sources: Sources) -> Sources:
    """Return the full tensors of files under the names that ``model`` has for them."""
    sources = split_layers(model, stack_experts(model, with_backbone_prefix(model, sources)))
    return with_zero_biases(model, sources)


def load_sources(
    model: torch.nn.Module,
    sources: Sources,
    directory: Path,
    *,
    resize_embedding: bool = False,
    in_float8: Sequence[Sequence[Tensor]] = (),
) -> None:
    """Load ``model`` from full tensors by name. Each rank reads its own slices.

    Args:
        model: the model to fill.
        sources: full tensors, or lazy slices of them, by name.
        directory: named in error messages.
        resize_embedding: as for ``load_pretrained``.
        in_float8: as for ``load_pretrained``.

    Raises:
        ValueError: before any parameter changes, if names or shapes differ from the model's, or if
            weights are integers.
    """
    # A ValueError below names tensors; the directory is added here.
    try:
        # Names and shapes are checked for all tensors before the first parameter changes.
        sources = model_sources(whole_model(model), sources)
        targets = match_names(model, sources.keys())
        if resize_embedding:
            sources = _with_rows_of_tokens(sources, targets)
        for name, param in targets.items():
            require_full_shape(name, sources[name], param)
            _require_unquantized(name, sources[name], param)
        _require_equal_copies(model, sources)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    # Meta tensors are replaced after the loop, all at once: until then ``targets`` refers to the
    # old ones.
    created: dict[int, Tensor] = {}
    groups = _Float8Groups(in_float8)
    for name in sources:  # sequential reads: the order of the files
        if name in targets:
            local = local_slice(sources[name], targets[name], dtype=model_dtype(targets[name]))
            for param, values in groups.complete(targets[name], local):
                _fill(param, values, created)
    _replace_tensors(model, created)
    # New tensors have memory of their own. On GPUs, layers with one input keep their weights
    # adjacent in memory for a single matmul: restore this.
    pack_weights(model)


class _Float8Groups:
    """Rounds the parameters of a group together, as soon as all of them are read.

    Args:
        groups: parameters on the meta device, equal in their last dimension.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._group_of = {id(param): group for group in groups for param in group}
        self._read: dict[int, Tensor] = {}

    def complete(self, param: Tensor, local: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters whose values are known now that ``param`` has ``local``, with these values."""
        group = self._group_of.get(id(param))
        if group is None:
            return [(param, local)]
        self._read[id(param)] = local
        if any(id(each) not in self._read for each in group):
            return []
        values = torch.cat([self._read.pop(id(each)) for each in group]).to(backend.device)
        data, scale = as_rows(values, magnitudes(values, Fp8Recipe()), FORWARD_DTYPE)
        for each in group:
            # an attribute: the parameter that takes the place of this one gets all attributes
            each.scale = scale  # pyright: ignore[reportAttributeAccessIssue]
        return list(zip(group, split_sizes(data, [each.size(0) for each in group]), strict=True))


def require_weights_of(model: torch.nn.Module, directory: str | Path) -> None:
    """Raise ``ValueError`` unless ``load_pretrained`` would load the weights that ``model`` has, bit by bit.

    Adapters (LoRA) are left out. Every rank calls, and reads only its own slices.
    """
    backend.mark_step()  # torch_xla may return wrong values when pending results are read one by one
    with opened_weights(directory, f"comparing with {directory}") as sources:
        sources = model_sources(whole_model(model), sources)
        for name, param in match_names(model, sources.keys(), without=lambda entry: entry.is_adapter).items():
            require_full_shape(name, sources[name], param)
            stored = _own_rows(local_slice(sources[name], param, dtype=model_dtype(param)), param)
            if not bit_equal(stored, local_rows(param).detach().cpu()):
                raise ValueError(f"{name} differs from the one in {directory}")


def _own_rows(local: Tensor, param: Tensor) -> Tensor:
    """Return this rank's rows of a tensor-parallel shard of ``param``."""
    if not is_data_sharded(param):
        return local
    start, stop = row_range(param)
    return local[start:stop]


class _MeanRows:
    """A lazy matrix that has the rows of another one, and then their mean, up to a number of rows."""

    def __init__(self, source: Tensor | LazySlice, rows: int) -> None:
        self._source = source
        self._rows = rows

    def get_shape(self) -> list[int]:
        """Return ``[rows, H]``."""
        return [self._rows, *stored_shape(self._source)[1:]]

    def __getitem__(self, index: Any) -> Tensor:
        """Return a range of rows; ``index`` is ``...``, a slice, or a tuple of one slice."""
        (rows,) = index if isinstance(index, tuple) else (index,)
        start, stop, _ = (slice(None) if rows is Ellipsis else rows).indices(self._rows)
        stored = stored_shape(self._source)[0]
        read = self._source[min(start, stored) : min(stop, stored)]
        if stop <= stored:
            return read
        # The sum in fp64, of one chunk of rows at a time: the table may be as large as the memory for it.
        chunks = (self._source[first : first + MEAN_ROWS] for first in range(0, stored, MEAN_ROWS))
        mean = torch.stack([chunk.double().sum(0) for chunk in chunks]).sum(0) / stored
        return torch.cat([read, mean.to(read.dtype).expand(stop - max(start, stored), -1)])


def _with_rows_of_tokens(sources: Sources, targets: Mapping[str, Tensor]) -> Sources:
    """Return ``sources`` with as many rows of the embedding and the head as the model has, if they are fewer."""
    resized: Sources = {}
    for name, param in targets.items():
        if is_vocabulary_table(name) and stored_shape(sources[name])[0] < (rows := full_shape(param)[0]):
            resized[name] = _MeanRows(sources[name], rows)
    return {**sources, **resized}


def _require_equal_copies(model: torch.nn.Module, sources: Sources) -> None:
    """Raise ``ValueError`` if the stored copies of one tensor, such as a tied head, differ."""
    for first, *others in stored_copies(model, sources.keys()):
        for other in others:
            if not bit_equal(sources[first][...], sources[other][...]):
                raise ValueError(
                    f"{first} and {other} differ, and are one tensor of the model: set tie_word_embeddings to false in "
                    "its config.json, or remove the one that is not used"
                )


def _require_unquantized(name: str, source: Tensor | LazySlice, param: Tensor) -> None:
    """Raise ``ValueError`` if ``source`` has integers or 8-bit numbers for a parameter of floating-point numbers."""
    # Quantized weights are integers that mean nothing without their scales. An empty slice tells
    # the dtype without reading the tensor.
    stored = source[:0].dtype if param.dim() else source[...].dtype
    if param.is_floating_point() and (not stored.is_floating_point or stored.itemsize == 1):
        raise ValueError(
            f"{name} has dtype {stored} in the checkpoint, and the model's is {param.dtype}: the weights are "
            "quantized; take the checkpoint that they were made from, or dequantize them and save them again"
        )


def _fill(param: Tensor, local: Tensor, created: dict[int, Tensor]) -> None:
    """Copy ``local`` into ``param``.

    For a meta tensor store a new tensor in ``created``, by the id of ``param``.
    """
    if not param.is_meta:
        with torch.no_grad():
            local_rows(param).copy_(_own_rows(local, param))
        return
    require_replicated([param], "loading a model on the meta device", "load it before shard_model")
    # A meta tensor has no storage to copy into. The new tensor takes over the type and all
    # attributes, so that the model is sharded and trained as it was built.
    replacement = local.to(backend.device)
    if isinstance(param, torch.nn.Parameter):
        replacement = torch.nn.Parameter(replacement, requires_grad=param.requires_grad)
    for name, value in vars(param).items():  # sharding attributes and user attributes
        setattr(replacement, name, value)
    created[id(param)] = replacement


def _replace_tensors(model: torch.nn.Module, created: dict[int, Tensor]) -> None:
    """Replace meta tensors in all modules. Tied names share an id, so they stay tied."""
    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if id(tensor) in created:
                    setattr(module, name, created[id(tensor)])
