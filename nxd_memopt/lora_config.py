"""Options of low-rank adapters (LoRA), and PEFT's file with them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nxd_memopt.config import require_positive_integer
from nxd_memopt.options import require_one_of

# PEFT's default: query and value (arXiv:2106.09685, section 4.2).
DEFAULT_TARGETS = {"gpt_neox": ("query_key_value",), "phi3": ("qkv_proj",)}
QUERY_AND_VALUE = ("q_proj", "v_proj")
ADAPTER_CONFIG = "adapter_config.json"


def require_no_adapters(directory: Path) -> None:
    """Raise ``ValueError`` that names the base if ``directory``, which is no model, has adapters in PEFT's format."""
    file = directory / ADAPTER_CONFIG
    if file.is_file():
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
        raise ValueError(
            f"{directory} has adapters (LoRA) of {base or 'a model that it does not name'}, and no model: pass a model "
            "with the adapters merged, such as the export of the run that trained them"
        )


def default_targets(model_type: str) -> tuple[str, ...]:
    """Return the layers that have adapters if none are named."""
    return DEFAULT_TARGETS.get(model_type, QUERY_AND_VALUE)


def is_target(name: str, targets: Sequence[str]) -> bool:
    """Return whether one of ``targets`` names the module ``name``: by its name in the model, or its last parts."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of linear layers (arXiv:2106.09685). Names and defaults follow neuronx-distributed.

    A layer computes ``W x + scale * B A x``, where A is ``[r, input_size]`` and B
    ``[output_size, r]``. Only A and B are trained.

    Args:
        lora_rank: r.
        lora_alpha: the scale is ``lora_alpha / r``.
        lora_dropout: probability of dropping an element of the adapter's input.
        target_modules: names of the layers with adapters, such as ``q_proj``: the last part of a
            module's name, or several last parts. None takes query and value projections.
        bias: which biases are trained; only ``"none"`` is supported.
        use_rslora: the scale is ``lora_alpha / sqrt(r)`` (arXiv:2312.03732).
        init_lora_weights: initial values of A: ``"default"`` is that of ``torch.nn.Linear``,
            ``"gaussian"`` a normal distribution with standard deviation ``1 / r``. B is 0.

    Raises:
        ValueError: an option is out of range or not supported.
    """

    lora_rank: int = 16
    lora_alpha: int = 8
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | None = None
    bias: Literal["none"] = "none"
    use_rslora: bool = False
    init_lora_weights: Literal["default", "gaussian"] = "default"

    def __post_init__(self) -> None:
        require_positive_integer("lora_rank", self.lora_rank)
        require_positive_integer("lora_alpha", self.lora_alpha)
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout must be at least 0 and below 1, got {self.lora_dropout}")
        require_one_of("bias", self.bias, ("none",))
        require_one_of("init_lora_weights", self.init_lora_weights, ("default", "gaussian"))
        if isinstance(self.target_modules, str):
            raise ValueError(f"target_modules {self.target_modules!r} is a text: write a list of names of layers")
        if self.target_modules is not None:
            # Lists come from YAML and from neuronx-distributed's scripts.
            object.__setattr__(self, "target_modules", tuple(self.target_modules))
            if not self.target_modules:
                raise ValueError("target_modules is empty: name layers such as q_proj, or leave it out")

    @property
    def scale(self) -> float:
        """Factor of the adapters' output."""
        divisor = math.sqrt(self.lora_rank) if self.use_rslora else self.lora_rank
        return self.lora_alpha / divisor
