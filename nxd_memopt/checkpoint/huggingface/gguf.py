"""Converts a GGUF file to a temporary directory of safetensors."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nxd_memopt._optional import require_transformers
from nxd_memopt.checkpoint.files import WEIGHTS, find_gguf, require_directory, write_safetensors
from nxd_memopt.checkpoint.huggingface.gguf_metadata import read_gguf_tensor_names
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts


@contextmanager
def weights_directory(directory: Path) -> Iterator[Path]:
    """Yield a directory with safetensors or PyTorch weights: ``directory``, or a conversion of
    its GGUF file.

    Every rank calls. Global rank 0 converts to fp32 in a temporary directory (``TMPDIR``), which
    all ranks must see: they run on one host, or ``TMPDIR`` is shared. The block must end with
    ``raise_together``: after it no rank reads the conversion, and rank 0 removes it.
    """
    with ExitStack() as stack:
        # Only rank 0 searches and converts; the other ranks learn the location from rank 0.
        location = directory
        with raise_together(f"reading {directory}"):
            gguf: Path | None = None
            if parallel_state.is_global_rank_zero():
                gguf = find_gguf(require_directory(directory))
            if gguf is not None:
                temporary = tempfile.TemporaryDirectory(prefix="nxd_memopt_gguf_")
                location = Path(stack.enter_context(temporary))
                _convert(gguf, location)
        yield Path(share_texts(str(location))[0])


def _convert(gguf: Path, target: Path) -> None:
    """Write the dequantized weights of ``gguf`` to ``target``, in the format of safetensors."""
    auto_model = require_transformers(f"reading {gguf}", extra="gguf").AutoModelForCausalLM
    names = read_gguf_tensor_names(gguf)  # raises for a file that is cut short, before it is converted
    try:
        model, loaded = auto_model.from_pretrained(
            gguf.parent, gguf_file=gguf.name, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # a damaged file raises many types of errors
        size = gguf.stat().st_size
        raise ValueError(
            f"{gguf} ({size} bytes) cannot be converted: {type(error).__name__}: {error}: "
            "download it again, or use a model type and quantization that transformers can dequantize"
        ) from error
    _require_complete(gguf, names, model, sorted(loaded["missing_keys"]))
    # Parameters only: transformers registers tied weights once, and the model computes its
    # buffers.
    parameters = {name: param.detach().contiguous() for name, param in model.named_parameters()}
    write_safetensors(target / WEIGHTS, parameters)


def _require_complete(gguf: Path, names: list[str], model: Any, missing: list[str]) -> None:
    """Raise ``ValueError`` if the model has random weights, or if biases of the file have no place in it."""
    kind = model.config.model_type
    if missing:
        raise ValueError(
            f"{gguf} lacks {len(missing)} tensors of a {kind}, such as {missing[0]}: download it again, or use a model "
            "type that transformers reads from GGUF files"
        )
    biases = [name for name in names if name.endswith(".bias")]
    if biases and not any(name.endswith("bias") for name, _ in model.named_parameters()):
        raise ValueError(
            f"{gguf} has {len(biases)} biases that a {kind} of its metadata lacks, such as {biases[0]}: use the "
            "model's safetensors"
        )
