"""Model FLOPs utilization (MFU): the part of the devices' matmul rate that a run's speed amounts to."""

from __future__ import annotations

from transformers import PretrainedConfig

from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.backends import backend
from nxd_memopt.config import ParallelConfig
from nxd_memopt.planner.hardware import Device, device_named, gpu_named
from nxd_memopt.planner.sizes.rank_sizes import rank_sizes
from nxd_memopt.planner.timing.step_work import model_flops
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.runtime.distributed import world_size


def utilization_per_token(config: TrainConfig, hf_config: PretrainedConfig) -> float | None:
    """Return the MFU of one token per second over all ranks; None if the device's rate or the work is not known.

    The work is the model's (``planner.timing.step_time.model_flops``): without recomputation, with the
    experts that a token uses. The attention of isolated documents depends on their lengths and is
    left out, so that the MFU is a lower bound there. The rate is the published dense one of the
    dtype of the weights (``planner/hardware.py``), also with ``fp8``, whose matmuls may exceed it: the
    MFU then is comparable with a bf16 run's. CPUs have no published rate, TF32 is not in the
    table, and LoRA computes no gradients of most weights.
    """
    device = _device()
    if device is None or config.trainer.allow_tf32 or config.lora.lora_rank is not None:
        return None
    try:
        sizes = rank_sizes(
            model_spec(hf_config),
            ParallelConfig(),
            sequence_length=config.data.seq_length,
            micro_batch_size=1,
            dtype=config.dtype,
        )
    except ValueError:  # a model that the planner does not have, such as GPT-NeoX with experts
        return None
    flops = model_flops(sizes, attention=not config.data.isolate_documents) / config.data.seq_length
    return flops / (device.matmul_flops[config.dtype] * world_size())


def _device() -> Device | None:
    """Return the device of each rank, or None if its rates are not known."""
    if backend.device.type == "cuda":
        return gpu_named(backend.hardware_name())
    if backend.device.type == "cpu" or getattr(backend, "is_simulated", False):
        return None
    return device_named(backend.hardware_name())
