"""The ``lora`` section: low-rank adapters, which are trained instead of the model's weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nxd_memopt.config import MemoryConfig
from nxd_memopt.lora_config import LoraConfig

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

    from nxd_memopt.modules.causal_lm import ParallelCausalLM
    from nxd_memopt.training.config import TrainConfig
    from nxd_memopt.training.state import Training

ADAPTER = "adapter"
# Options without effect on the values of the exported model: dropout is of training alone, and the row of
# pad_token_id is frozen like the others.
NOT_FUNCTION = ("attention_dropout", "hidden_dropout", "pad_token_id")
# Types of RoPE whose frequencies do not depend on max_position_embeddings.
LENGTH_INDEPENDENT = ("default", "linear", "llama3")


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters (arXiv:2106.09685), with neuronx-distributed's names.

    The model's own weights stay as they are and have no gradients and no optimizer states.

    Args:
        lora_rank: r, rank of the adapters; ``None`` trains the model's weights without adapters.
        lora_alpha: the adapters' output is multiplied by ``lora_alpha / lora_rank``.
        lora_dropout: probability of dropping an element of an adapter's input.
        target_modules: names of the layers with adapters, such as ``[q_proj, v_proj]``, the default.
        use_rslora: multiply by ``lora_alpha / sqrt(lora_rank)`` instead.
        init_lora_weights: initial values of A: ``default``, as a linear layer's, or ``gaussian``.
    """

    lora_rank: int | None = None
    lora_alpha: int = 8
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | None = None
    use_rslora: bool = False
    init_lora_weights: Literal["default", "gaussian"] = "default"

    def __post_init__(self) -> None:
        if self.lora_rank is None:
            for field in dataclasses.fields(self):
                if getattr(self, field.name) != field.default:
                    raise ValueError(
                        f"lora.{field.name} {getattr(self, field.name)!r} needs adapters: set lora.lora_rank, or leave "
                        "it out"
                    )
        self.config()

    def config(self) -> LoraConfig | None:
        """Return the configuration of the adapters; None without.

        Raises:
            ValueError: an option is out of range.
        """
        if self.lora_rank is None:
            return None
        try:
            return LoraConfig(**dataclasses.asdict(self))
        except ValueError as error:
            raise ValueError(f"lora: {error}") from error


def require_trainable_adapters(options: LoraOptions, memory: MemoryConfig, compile: str | None) -> None:
    """Raise ``ValueError`` for options that adapters cannot be combined with."""
    if options.lora_rank is None:
        return
    conflicts = {
        "memory.mlp_tile_tokens": (memory.mlp_tile_tokens, None, "null"),
        "memory.attention_head_groups": (memory.attention_head_groups, None, "null"),
        "memory.cpu_offloading_weights": (memory.cpu_offloading_weights, False, "false"),
        "trainer.compile": (compile, None, "null"),
    }
    for name, (value, without_effect, remedy) in conflicts.items():
        if value != without_effect:
            raise ValueError(f"{name} {value!r} is not supported with lora.lora_rank: set it to {remedy}")


def apply_lora(model: ParallelCausalLM, config: TrainConfig) -> list[str]:
    """Add the adapters of the configuration; return the start report's line about them. Every rank calls."""
    from nxd_memopt.modules.lora import add_adapters
    from nxd_memopt.parallel_layers.resharding import full_shape

    lora = config.lora.config()
    if lora is None:
        return []
    layers = add_adapters(model, lora)
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += math.prod(full_shape(parameter))
    total = sum(sizes.values())
    return [
        f"LoRA: rank {lora.lora_rank}, scale {lora.scale:g}, in {len(layers)} layers; {sizes[True]:,} of {total:,} "
        f"parameters are trained ({sizes[True] / total:.2%})"
    ]


def recorded_lora(options: Mapping[str, Any]) -> LoraConfig | None:
    """Return the configuration of the adapters of a checkpoint that records ``options``; None without adapters."""
    names = [field.name for field in dataclasses.fields(LoraOptions)]
    return LoraOptions(**{name: options[f"lora.{name}"] for name in names if f"lora.{name}" in options}).config()


def find_adapter_base(training: Training, hf_config: PretrainedConfig) -> list[str]:
    """Set ``training.adapter_base``; return the start report's line if there is none. Every rank calls.

    The base is ``model.pretrained`` if its configuration and its weights are the model's. Weights that were
    not just loaded from there are compared with its files, bit by bit.
    """
    from nxd_memopt.checkpoint.importing import require_weights_of

    config = training.plan.config
    directory = config.model.pretrained
    if config.lora.lora_rank is None or not config.trainer.export:
        return []
    try:
        if directory is None:
            raise ValueError("model.pretrained is not set")
        _require_function_of(directory, hf_config)
        is_from_checkpoint = training.plan.stored is not None or training.plan.warm_start is not None
        if is_from_checkpoint or config.model.random_init:
            require_weights_of(training.model, directory)
    except ValueError as error:
        return [
            "LoRA: the export has the adapters merged; none are written for PEFT, because model.pretrained is not "
            f"their base: {error}"
        ]
    # Absolute: PEFT takes a relative path that does not exist for a name on the hub.
    training.adapter_base = str(Path(directory).resolve())
    return []


def _require_function_of(directory: str, hf_config: PretrainedConfig) -> None:
    """Raise ``ValueError`` if the model with ``hf_config`` computes something else than the model of ``directory``."""
    from nxd_memopt.checkpoint import load_config
    from nxd_memopt.training.option_changes import architecture

    before, after = architecture(load_config(directory)), architecture(hf_config)
    ignored: set[str] = {*NOT_FUNCTION}
    rope = getattr(hf_config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in LENGTH_INDEPENDENT:
        ignored.add("max_position_embeddings")
    for name in ("model_type", *sorted({*before, *after} - ignored)):
        old, new = before.get(name), after.get(name)
        if old != new:
            raise ValueError(f"{name} is {old!r} in {directory}, and {new!r} in this model")


def write_adapters(model: nn.Module, config: TrainConfig, base: str | None) -> None:
    """Write the adapters in PEFT's format to ``output_dir/adapter``; nothing without. Every rank calls.

    Without a ``base`` the adapters of an earlier end of the run are removed: its export has others.
    """
    from nxd_memopt.checkpoint.adapters import remove_adapters, save_adapters

    lora = config.lora.config()
    if lora is None:
        return
    target = Path(config.trainer.output_dir) / ADAPTER
    if base is None:
        remove_adapters(target)
    else:
        save_adapters(model, target, lora, base_model=base)
