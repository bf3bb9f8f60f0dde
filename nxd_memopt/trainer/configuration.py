"""``neuronx_distributed_config``: the options of a run as neuronx-distributed's nested dict, validated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from nxd_memopt.options import require_one_of
from nxd_memopt.parallel_layers import parallel_state

_OPTIMIZER = {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0}
_MODEL_INIT = {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None}


def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    context_parallel_size: int = 1,
    pipeline_config: Mapping[str, Any] | None = None,
    optimizer_config: Mapping[str, Any] | None = None,
    activation_checkpoint_config: Any = None,
    pad_model: bool = False,
    sequence_parallel: bool = False,
    model_init_config: Mapping[str, Any] | None = None,
    lora_config: Any = None,
    mixed_precision_config: Mapping[str, Any] | None = None,
    sequential_move_factor: int = 11,
    lnc_size: int = 1,
) -> dict[str, Any]:
    """Return the validated configuration.

    If torch.distributed is initialized, create the model-parallel groups.

    ``context_parallel_size`` and ``lnc_size`` must be 1.

    Args:
        tensor_parallel_size: T, the number of ranks that share one layer.
        pipeline_parallel_size: P, the number of ranks that share the stack of layers. Above 1 the model is traced and
            cut (``nxd_memopt.compat``).
        expert_parallel_size: number of ranks that share the experts of a layer.
        context_parallel_size: must be 1.
        pipeline_config: options of ``NxDPPModel``; a single stage uses ``output_loss_value_spec`` alone.
        optimizer_config: ``zero_one_enabled`` (default False), ``grad_clipping`` (True),
            ``max_grad_norm`` (1.0).
        activation_checkpoint_config: modules to recompute in backward: ``"full"`` for every
            transformer layer, a module class, or a list of classes.
        pad_model: pad the attention heads of a Hugging Face model to a multiple of T.
        sequence_parallel: recorded for the caller. Optimizers always sum the gradients that the
            layers have tagged.
        model_init_config: ``sequential_move_factor``; ``meta_device_init`` (False) and the
            function it needs, ``param_init_fn`` of a module and a device.
        lora_config: adapters that ``initialize_parallel_model`` adds; see ``modules.lora.LoraConfig``.
        mixed_precision_config: ``use_master_weights`` (fp32 masters; ZeRO-1 always has masters)
            and ``use_fp32_grad_acc`` default to ``zero_one_enabled``.
            ``use_master_weights_in_ckpt`` defaults to ``use_master_weights``, which makes resumes
            exact.
        sequential_move_factor: ranks of one host that move their model to the device at the same
            time.
        lnc_size: must be 1.

    Raises:
        ValueError: an option is not supported, or a key is unknown; the message names the
            supported ones.
    """
    sizes = {
        "pipeline_parallel_size": pipeline_parallel_size,
        "expert_parallel_size": expert_parallel_size,
        "context_parallel_size": context_parallel_size,
        "lnc_size": lnc_size,
    }
    _require_supported_sizes(sizes)
    optimizer = _with_defaults("optimizer_config", optimizer_config, _OPTIMIZER)
    config = {
        "tensor_parallel_size": tensor_parallel_size,
        **sizes,
        "pipeline_config": pipeline_config,
        "lora_config": lora_config,
        "optimizer_config": optimizer,
        "activation_checkpoint_config": activation_checkpoint_config,
        "pad_model": pad_model,
        "sequence_parallel": sequence_parallel,
        "model_init_config": _model_init(model_init_config, sequential_move_factor),
        "mixed_precision_config": _mixed_precision(mixed_precision_config, optimizer["zero_one_enabled"]),
    }
    if dist.is_initialized():
        initialize_parallel_state(config)
    return config


def _require_supported_sizes(sizes: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a parallel size that is not supported differs from 1."""
    for name in ("context_parallel_size", "lnc_size"):
        if sizes[name] != 1:
            raise ValueError(
                f"{name} {sizes[name]} is not offered: use 1, and tensor_parallel_size or data parallelism"
            )


def initialize_parallel_state(config: Mapping[str, Any]) -> None:
    """Create the process groups of ``config``, unless they exist with the same sizes.

    Raises:
        ValueError: a size is not supported, or the groups exist with another tensor-, pipeline- or
            expert-parallel size.
    """
    _require_supported_sizes(config)
    tensor = config["tensor_parallel_size"]
    pipeline = config["pipeline_parallel_size"]
    expert = config["expert_parallel_size"]
    # A script may have created the groups itself.
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=expert)
    existing = {
        "tensor": (tensor, parallel_state.get_tensor_model_parallel_size()),
        "pipeline": (pipeline, parallel_state.get_pipeline_model_parallel_size()),
        "expert": (expert, parallel_state.get_expert_model_parallel_size()),
    }
    for name, (asked, size) in existing.items():
        if asked != size:
            raise ValueError(
                f"{name}_parallel_size {asked} differs from the initialized {name}_model_parallel_size {size}: "
                "use one, or call parallel_state.destroy_model_parallel() between"
            )


def _with_defaults(section: str, options: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``defaults`` updated with ``options``, or raise ``ValueError`` for an unknown key."""
    for key in options or {}:
        require_one_of(f"{section} key", key, tuple(defaults))
    return {**defaults, **(options or {})}


def _mixed_precision(options: Mapping[str, Any] | None, zero_one_enabled: bool) -> dict[str, Any]:
    """Return ``mixed_precision_config`` with defaults, which follow ``zero_one_enabled``."""
    # Defaults depend on each other: ZeRO-1 implies masters, and masters are saved.
    masters = (options or {}).get("use_master_weights", zero_one_enabled)
    defaults = {
        "use_master_weights": masters,
        "use_fp32_grad_acc": zero_one_enabled,
        "use_master_weights_in_ckpt": masters,
    }
    filled = _with_defaults("mixed_precision_config", options, defaults)
    if filled["use_master_weights_in_ckpt"] and not masters:
        raise ValueError("use_master_weights_in_ckpt=True needs use_master_weights=True: set both or neither")
    return filled


def _model_init(options: Mapping[str, Any] | None, sequential_move_factor: int) -> dict[str, Any]:
    """Return ``model_init_config`` with defaults."""
    # The argument is the default of the entry with the same name.
    defaults = {**_MODEL_INIT, "sequential_move_factor": sequential_move_factor}
    filled = _with_defaults("model_init_config", options, defaults)
    if filled["meta_device_init"] and filled["param_init_fn"] is None:
        raise ValueError("meta_device_init=True needs param_init_fn, a function of (module, device): pass it")
    return filled
