"""Registry of modeling files: each is self-contained and imported when its class is requested."""

from __future__ import annotations

import importlib
from typing import Any

from nxd_memopt._optional import require_transformers
from nxd_memopt.config import require_one_of

# Every modeling file takes transformers' configs. Python imports this package before any of them, so this one check
# answers `import nxd_memopt.models` and `from nxd_memopt.models.llama import ...` alike.
require_transformers("nxd_memopt.models")

MODELS = {"gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM"), "llama": ("llama", "LlamaForCausalLM")}
"""Hugging Face's ``model_type`` to module and class."""


def require_supported(model_type: str) -> None:
    """Raise ``ValueError`` naming the supported types when ``model_type`` is none of them."""
    require_one_of("model_type", model_type, tuple(MODELS))


def model_class(model_type: str) -> Any:
    """The class for a Hugging Face ``model_type``.

    Raises:
        ValueError: for a type that is not supported.
    """
    require_supported(model_type)
    module, name = MODELS[model_type]
    return getattr(importlib.import_module(f"nxd_memopt.models.{module}"), name)
