"""Low-rank adapters (LoRA) of the parallel linear layers, with neuronx-distributed's names."""

from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.modules.lora.adapters import (
    adapted_layers,
    add_adapters,
    get_lora_model,
    is_adapter,
    merged_adapters,
    model_type_of,
    require_called_layers,
    whole_model,
)
from nxd_memopt.modules.lora.layers import LoraColumnParallelLinear, LoraRowParallelLinear

__all__ = [
    "LoraColumnParallelLinear",
    "LoraConfig",
    "LoraRowParallelLinear",
    "adapted_layers",
    "add_adapters",
    "get_lora_model",
    "is_adapter",
    "merged_adapters",
    "model_type_of",
    "require_called_layers",
    "whole_model",
]
