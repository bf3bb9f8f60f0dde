"""Reads the Hugging Face config of a directory, with transformers' errors as one line each."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_memopt._optional import require_installed, require_transformers
from nxd_memopt.checkpoint.files import find_gguf, read_json, require_directory
from nxd_memopt.checkpoint.huggingface.gguf_metadata import read_gguf_metadata, read_gguf_tensor_names
from nxd_memopt.lora_config import require_no_adapters

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def load_config(directory: str | Path) -> PretrainedConfig:
    """Return the Hugging Face config of a local directory, from ``config.json`` or from its GGUF
    file.

    Raises:
        ValueError: there is no config, or its model type is unknown.
        ImportError: transformers is missing or too old.
    """
    transformers = require_transformers("nxd_memopt.checkpoint.load_config")
    path = require_directory(directory)
    if not (path / "config.json").is_file():
        return _load_gguf_config(transformers.AutoConfig, path)
    # Check the model type here: the error then names the nearest known type.
    model_type = read_json(path / "config.json").get("model_type")
    known = transformers.CONFIG_MAPPING
    if model_type not in known:
        close = difflib.get_close_matches(str(model_type), list(known.keys()), n=1)
        hint = "set model_type to one that transformers knows"
        if close:
            hint = f"did you mean {close[0]!r}?"
        raise ValueError(f"{path / 'config.json'} has the unknown model_type {model_type!r}: {hint}")
    with config_errors(str(path / "config.json")):
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _load_gguf_config(auto_config: Any, path: Path) -> PretrainedConfig:
    """Return the config in the metadata of the only GGUF file of ``path``."""
    gguf = find_gguf(path)
    if gguf is None:
        require_no_adapters(path)
        raise ValueError(f"{path} has no config.json: copy it from where the weights came from")
    require_installed(f"reading {gguf}", "gguf", extra="gguf")
    _require_no_rope_scaling(gguf)
    try:
        return auto_config.from_pretrained(path, gguf_file=gguf.name, local_files_only=True)
    except Exception as error:  # a damaged file raises many types of errors
        raise ValueError(
            f"{gguf} has no readable config: {type(error).__name__}: {error}: download it again"
        ) from error


def _require_no_rope_scaling(gguf: Path) -> None:
    """Raise ``ValueError`` for scaled rotary frequencies, which transformers does not read from GGUF files."""
    metadata = read_gguf_metadata(gguf)
    scaling = metadata.get(f"{metadata.get('general.architecture')}.rope.scaling.type")
    # llama.cpp writes LLaMA 3.1's as a tensor of factors.
    if scaling in (None, "none") and "rope_freqs.weight" in read_gguf_tensor_names(gguf):
        scaling = "llama3"
    if scaling not in (None, "none"):
        raise ValueError(
            f"{gguf} has RoPE scaling {scaling!r}, without which the model would be read: put the model's config.json "
            f"into {gguf.parent}"
        )


@contextmanager
def config_errors(source: str) -> Iterator[None]:
    """Raise the errors of a config's construction as ``ValueError`` that names ``source``.

    transformers' own warnings are not shown inside the block: each would be a line next to the
    error.
    """
    logging = require_transformers("nxd_memopt.checkpoint").utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    # The types differ from check to check: StrictDataclassError, KeyError for the values of a RoPE
    # type, AttributeError for a dtype, ZeroDivisionError for 0 heads.
    try:
        yield
    except ImportError:
        raise
    except ZeroDivisionError as error:
        raise ValueError(f"{source}: num_attention_heads is 0: set it to at least 1") from error
    except Exception as error:
        raise ValueError(f"{source}: {_reason(error)}: correct the value") from error
    finally:
        logging.set_verbosity(verbosity)


def _reason(error: Exception) -> str:
    """Return the part of the message that names the value."""
    # A strict dataclass gives two lines, of which the second has the type and the text of the
    # cause; a union lists its members' errors after it.
    last = str(error).strip().splitlines()[-1].strip()
    name, _, text = last.partition(": ")
    if name.endswith("Error") and text:
        last = text
    return last.partition(". Errors:")[0].strip("\"'.") or type(error).__name__
