"""The ``lora`` section: low-rank adapters, which are trained instead of the model's weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.options import Resume, check_options, option

Section = TypeVar("Section")


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters (arXiv:2106.09685); the options have the names of neuronx-distributed.

    The model's own weights stay as they are and have no gradients and no optimizer states.

    Args:
        lora_rank: r, rank of the adapters; ``None`` trains the model's weights without adapters.
        lora_alpha: the adapters' output is multiplied by ``lora_alpha / lora_rank``; ``None`` is twice the rank.
        lora_dropout: probability of dropping an element of an adapter's input.
        target_modules: names of the layers with adapters, such as ``[q_proj, v_proj]``, which ``None`` means.
        use_rslora: multiply by ``lora_alpha / sqrt(lora_rank)`` instead.
        base_dtype: ``fp8`` stores the frozen weights of the decoder layers' linear layers in float8, a byte each, with
            a scale for each matmul; it needs ``trainer.fp8``. The run exports the adapters alone.
    """

    # Rank and targets decide the shapes, and alpha the function that was trained: another value is refused at a resume.
    # Dropout acts in training only, and may change if asked.
    lora_rank: int | None = option(None, resume=Resume.REFUSED)
    lora_alpha: int | None = option(None, resume=Resume.REFUSED)
    lora_dropout: float = option(0.0, resume=Resume.WHEN_ASKED)
    target_modules: tuple[str, ...] | None = option(None, resume=Resume.REFUSED)
    use_rslora: bool = option(False, resume=Resume.REFUSED)
    base_dtype: Literal["fp8"] | None = option(None, resume=Resume.WHEN_ASKED)

    def __post_init__(self) -> None:
        check_options(self, "lora")
        if self.lora_rank is None:
            for field in dataclasses.fields(self):
                if getattr(self, field.name) != field.default:
                    raise ValueError(
                        f"lora.{field.name} {getattr(self, field.name)!r} needs adapters: set lora.lora_rank, or leave "
                        "it out"
                    )
        # Resolved here, so that a checkpoint records the value: twice the rank is what PEFT's users set. neuronx-
        # distributed's default, 8 at any rank, would scale adapters of rank 16 by a half, and those of rank 64 by 1/8.
        elif self.lora_alpha is None:
            object.__setattr__(self, "lora_alpha", 2 * self.lora_rank)
        self.config()  # raises if an option is out of range

    def config(self) -> LoraConfig | None:
        """Return the configuration of the adapters; None without.

        Raises:
            ValueError: an option is out of range.
        """
        if self.lora_rank is None:
            return None
        try:
            options = dataclasses.asdict(self)
            del options["base_dtype"]
            return LoraConfig(**options)
        except ValueError as error:
            raise ValueError(f"lora: {error}") from error


def recorded_section(cls: type[Section], section: str, options: Mapping[str, Any]) -> Section:
    """Return a section, of class ``cls``, of the options that a checkpoint records; others have their defaults."""
    names = [field.name for field in dataclasses.fields(cast(Any, cls))]
    return cls(**{name: options[f"{section}.{name}"] for name in names if f"{section}.{name}" in options})


def recorded_lora(options: Mapping[str, Any]) -> LoraConfig | None:
    """Return the configuration of the adapters of a checkpoint that records ``options``; None without adapters."""
    return recorded_section(LoraOptions, "lora", options).config()
