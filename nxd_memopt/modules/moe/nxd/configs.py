"""neuronx-distributed's configuration of routers and kernels, and its check of a training config."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 512
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class RouterConfig:
    """Activation and dtype of a router.

    Args:
        act_fn: activation of the logits.
        dtype: dtype of the weight, or its name, such as ``"bfloat16"``.

    Raises:
        ValueError: unknown name of a dtype.
    """

    def __init__(self, act_fn: str = "softmax", dtype: torch.dtype | str = torch.float32) -> None:
        if isinstance(dtype, str):
            if dtype not in _DTYPES:
                raise ValueError(f"dtype {dtype!r} of a router is none of {', '.join(_DTYPES)}: choose one")
            dtype = _DTYPES[dtype]
        self.act_fn = act_fn
        self.dtype = dtype

    @staticmethod
    def from_kwargs(**kwargs: Any) -> RouterConfig:
        """Return the config of ``router_act_fn`` and ``router_dtype``; other names are ignored, as in NxD."""
        return RouterConfig(kwargs.get("router_act_fn", "softmax"), kwargs.get("router_dtype", torch.float32))


class BlockwiseMatmulConfig:
    """Choice between neuronx-distributed's kernels; it has no effect, because no result depends on it.

    Args:
        options: kept as attributes.
    """

    def __init__(self, **options: Any) -> None:
        self.block_size = DEFAULT_BLOCK_SIZE
        self.__dict__.update(options)

    @staticmethod
    def from_kwargs(**kwargs: Any) -> BlockwiseMatmulConfig:
        """Return the config with these options."""
        return BlockwiseMatmulConfig(**kwargs)

    @staticmethod
    def default() -> BlockwiseMatmulConfig:
        """Return the config without options."""
        return BlockwiseMatmulConfig()


class MoeConfigValidator:
    """Checks ``cfg.model.moe`` of a training config: ``dropless``, ``capacity_factor`` and ``glu_mlp``.

    The rules are neuronx-distributed's, so that a config that passes here runs there too. The experts
    of this library are also dropless with other activations and without a gate.

    Args:
        cfg: with ``model_source`` (``"hf"`` or ``"megatron"``) and ``model``: ``moe``, and
            ``model_config``, the path of a ``config.json``, or ``activation``.
    """

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.hf_model_config: Mapping[str, Any] = {}

    def _load_hf_config(self) -> Mapping[str, Any]:
        """Return the content of the ``config.json``."""
        return json.loads(Path(self.cfg.model.model_config).read_text(encoding="utf-8"))

    def validate_moe_config(self) -> None:
        """Set ``capacity_factor`` to 0 if ``dropless`` is set.

        Raises:
            AttributeError: there is no ``cfg.model.moe``.
            ValueError: the options contradict each other.
        """
        if not hasattr(self.cfg.model, "moe"):
            raise AttributeError("MoE configuration is missing in model config: add cfg.model.moe")
        moe = self.cfg.model.moe
        factor = moe.capacity_factor
        dropless = getattr(moe, "dropless", False)
        if self.cfg.model_source == "hf":
            self.hf_model_config = self._load_hf_config()
        if not dropless:
            if factor is not None and factor <= 0:
                raise ValueError(
                    f"Dropping requires a capacity factor greater than 0.0, got {factor}: raise it, leave it out for "
                    "all tokens, or set dropless"
                )
            return
        self._require_activation()
        if not getattr(moe, "glu_mlp", True):
            raise ValueError("Dropless mode requires GLU_MLP to be True, got False: set glu_mlp")
        if factor is None or factor > 0:
            logger.warning(
                "Dropless mode expects a capacity_factor set to 0.0. Current value: %s. "
                "Setting capacity_factor to 0.0.",
                factor,
            )
            moe.capacity_factor = 0.0

    def _require_activation(self) -> None:
        """Raise ``ValueError`` unless neuronx-distributed's kernel has the activation."""
        config = self.hf_model_config
        source, allowed = "", "SiLU activation function"
        found = config.get("hidden_act")
        if self.cfg.model_source == "megatron":
            source, allowed = "For Megatron models, d", "SiLU or SwiGLU activation functions"
            found = getattr(self.cfg.model, "activation", None)
        elif self.cfg.model_source != "hf":
            return
        elif config.get("model_type") == "dbrx":
            source = "For DBRX models, d"
            found = config.get("ffn_config", {}).get("ffn_act_fn", {}).get("name")
        if found == "silu" or (found == "swiglu" and self.cfg.model_source == "megatron"):
            return
        raise ValueError(f"{source or 'D'}ropless mode is only supported with {allowed}, got {found}: change it")
