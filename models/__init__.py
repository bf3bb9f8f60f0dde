"""Registry of modeling files: each is self-contained and imported when its class is requested."""

from __future__ import annotations

import importlib
from typing import Any

from nxd_memopt._optional import require_transformers
from nxd_memopt.options import require_one_of

# Every modeling file needs transformers' configs. Python imports this package first, so one check
# covers `import nxd_memopt.models` and `from nxd_memopt.models.llama import ...`.
require_transformers("nxd_memopt.models")

MODELS = {
    "gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""Maps Hugging Face's ``model_type`` to module and class."""

# Types of configs that this library makes from others, as ``checkpoint.huggingface.upcycling`` does: no file has them.
_OWN_TYPES = {"gpt_neox_moe": ("gpt_neox_moe", "GPTNeoXMoEForCausalLM")}


def require_supported(model_type: str) -> None:
    """Raise ValueError with the supported types if ``model_type`` is not one of them."""
    require_one_of("model_type", model_type, tuple(MODELS))


def model_class(model_type: str) -> Any:
    """Return the class for a Hugging Face ``model_type``.

    Raises:
        ValueError: the type is not supported.
    """
    if model_type not in _OWN_TYPES:
        require_supported(model_type)
    module, name = {**MODELS, **_OWN_TYPES}[model_type]
    return getattr(importlib.import_module(f"nxd_memopt.models.{module}"), name)
