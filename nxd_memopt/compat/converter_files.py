"""The files of ``CheckpointConverterBase``: full state dicts and rank files under all names of NxD's releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from nxd_memopt.checkpoint.files import open_weights
from nxd_memopt.parallel_layers.tensor_files import read_tensors, write_tensors, write_xser


def load_full(args: Any) -> dict[str, Tensor]:
    """Return the full state dict of ``args.input_dir``.

    ``args.input_dir`` is a file of ``torch.save``, or a Hugging Face directory.

    Raises:
        ValueError: it is missing, damaged, or not a state dict.
    """
    if not args.input_dir:
        raise ValueError("--input_dir is needed: a file with the full state dict, or a Hugging Face directory")
    # open_weights reads safetensors and .bin files with their index; "source[...]" reads a full
    # tensor from its file.
    path = Path(args.input_dir)
    if path.is_dir():
        with open_weights(path) as sources:
            return {name: source[...] for name, source in sources.items()}
    return read_partial(path)


def find_input(directory: str, tp_rank: int, pp_rank: int, ep_rank: int, *, xser: bool) -> str:
    """Return the path of a rank's file, under the name that any NxD release gave it.

    Raises:
        ValueError: no such file exists.
    """
    short = f"tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:02d}"
    expert = f"ep_rank_{ep_rank:02d}"
    # The oldest: a folder per rank, or with xser (torch_xla's
    # format of one file per tensor) the file of that name; then files named by
    # data-parallel rank, without and with the expert rank.
    folder = Path(directory)
    oldest = folder / short
    if not xser:
        oldest = oldest / "checkpoint.pt"
    candidates = [oldest, folder / f"dp_rank_00_{short}.pt", folder / f"dp_rank_00_{expert}_{short}.pt"]
    for path in candidates:
        if path.is_file():
            return str(path)
    names = [str(path) for path in candidates]
    raise ValueError(f"none of {names} exists: check --input_dir, --tp_size, --pp_size and --load_xser")


def output_file(args: Any, tp_rank: int, pp_rank: int, ep_rank: int) -> str:
    """Return the path of a rank's weights as ``nxd.load_checkpoint`` expects it."""
    # The expert rank is part of the name only if there are several.
    expert = ""
    if args.ep_size > 1:
        expert = f"ep_rank_{ep_rank:02d}_"
    name = f"dp_rank_00_{expert}tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:02d}.pt"
    return str(Path(args.output_dir) / "model" / name)


def read_partial(path: Path) -> dict[str, Any]:
    """Return the state dict of a file of one rank or of the full model, in the xser or the single-file format."""
    content = read_tensors(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a state dict: name a file of one")
    return content


def write_partial(path: Path, state: dict[str, Any], *, xser: bool) -> None:
    """Write one rank's state dict, with ``xser`` as one file per tensor."""
    print(f"writing {path}")
    if xser:
        write_xser(path, state, info=True)
    else:
        write_tensors(path, state)
