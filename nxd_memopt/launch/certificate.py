"""Puts a training configuration to ``nxd-memopt certify``, which needs no hardware."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from nxd_memopt.config import MemoryConfig
from nxd_memopt.training.config.data_parallel import SHARDS_GRADIENTS
from nxd_memopt.training.config.train_config import TrainConfig

# certify measures a step on a backend that runs without hardware: torch_xla traces trn1's path on
# any host. The step of trn2 and trn3, which use TorchNeuron, is measured on the CPU backend, and
# its peak is compared with their memory.
DEVICES = {
    "trn1": ("xla", "trn1"),
    "trn1-2xlarge": ("xla", "trn1-2xlarge"),
    "xla_cpu": ("xla", "trn1"),
    "trn2": ("cpu", "trn2"),
    "trn2-lnc1": ("cpu", "trn2-lnc1"),
    "trn2-3xlarge": ("cpu", "trn2"),
    "trn3": ("cpu", "trn3"),
}
"""Platform -> (backend on which certify measures the step, device whose memory must fit it)."""


def certify_command(
    config: TrainConfig,
    platform: str,
    *,
    world_size: int,
    device_memory_gib: float | None,
    directory: Path,
) -> list[str]:
    """Return the ``nxd-memopt certify`` command for one micro-batch of the run on one rank.

    Args:
        config: configuration of the run.
        platform: a name from ``PLATFORMS``.
        world_size: number of ranks on all hosts.
        device_memory_gib: memory of one rank in GiB; ``None`` takes the platform's.
        directory: existing directory for the model's config.json, which is written if the
            configuration has no ``model.pretrained``.

    Raises:
        ValueError: the memory of one rank is not known, the command is not installed, or certify
            cannot measure an option of the configuration.
    """
    backend, device = DEVICES.get(platform, ("cpu", None))
    if device is None and device_memory_gib is None:
        raise ValueError(f"--platform {platform} has devices of many sizes: pass --device-memory-gib for one rank's")
    # The command next to this interpreter comes first: the environment may not be activated.
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    program = shutil.which("nxd-memopt", path=search_path)
    if program is None:
        raise ValueError("nxd-memopt is not installed for this Python: run pip install -e '.[train]' in the checkout")
    command = [program, "certify", *_model(config, directory), "--backend", backend]
    if device is not None:
        command += ["--device", device]
    if device_memory_gib is not None:
        command += ["--device-memory-gib", str(device_memory_gib)]
    _require_measured(config)
    options = [*_step(config), *_memory(config), *_optimizer(config, world_size)]
    return [*command, *options, *_isolation(config, platform, backend)]


def _model(config: TrainConfig, directory: Path) -> list[str]:
    """Return the options for the model; write a config.json if there is no pretrained directory."""
    overrides = config.model.config_overrides
    file = directory / "config.json"
    adds_experts = config.moe.num_moe_experts is not None or config.moe.moe_shared_expert_intermediate_size is not None
    if adds_experts or config.model.resize_embedding:
        # certify needs the config with the added experts or rows, and no file has it yet.
        from nxd_memopt.training.model import load_hf_config

        content = load_hf_config(config.model, config.moe).to_dict()
        file.write_text(json.dumps(content, default=str), encoding="utf-8")
        return ["--model", str(file)]
    if config.model.pretrained is None:
        file.write_text(json.dumps(overrides), encoding="utf-8")
        return ["--model", str(file)]
    options = ["--model", config.model.pretrained]
    if overrides:
        # certify parses each value as JSON, so None, booleans and strings keep their types.
        changes = [f"{name}={json.dumps(value)}" for name, value in overrides.items()]
        options += ["--override", *changes]
    return options


MEASURED = {
    ("trainer", "compile"): (None,),
    ("optimizer", "optimizer_cpu_offload"): (False,),
    ("optimizer", "overlap_grad_reduce"): (False,),
    ("optimizer", "in_backward"): (False,),
    ("data_parallel", "grad_reduce_in_fp32"): (None, True),
    ("lora", "lora_rank"): (None,),
}
"""Options that change a step and are no option of certify -> values with which the step is the measured one."""


def _require_measured(config: TrainConfig) -> None:
    """Raise ``ValueError`` for an option that would change the step without changing the certificate."""
    for (section, name), measured in MEASURED.items():
        value = getattr(getattr(config, section), name)
        if value not in measured:
            raise ValueError(
                f"certify has no option for {section}.{name} {value}: set it to "
                f"{'null' if measured[0] is None else str(measured[0]).lower()} for the dry run"
            )


def _step(config: TrainConfig) -> list[str]:
    """Return the options for parallelism, S, B, dtype and experts."""
    parallel = config.parallel
    options = ["--tensor-model-parallel-size", str(parallel.tensor_model_parallel_size)]
    if parallel.expert_model_parallel_size > 1:
        options += ["--expert-model-parallel-size", str(parallel.expert_model_parallel_size)]
    if parallel.sequence_parallel_enabled:
        options += ["--sequence-parallel-enabled"]
    if parallel.reduce_dtype is not None:
        options += ["--reduce-dtype", parallel.reduce_dtype]
    options += ["--seq-length", str(config.data.seq_length)]
    options += ["--micro-batch-size", str(config.data.micro_batch_size)]
    moe = config.moe.given()
    if moe:
        options += ["--moe", *(f"{name}={json.dumps(value)}" for name, value in moe.items())]
    return [*options, "--dtype", config.model.dtype]


def _memory(config: TrainConfig) -> list[str]:
    """Return the options for recompute and attention.

    Raises:
        ValueError: certify cannot measure one of the techniques, so its certificate would be of
            another step.
    """
    memory = config.memory
    if config.trainer.auto_memory:
        raise ValueError(
            "memory: auto is chosen on the device when the run starts: nxd-memopt plan --write FILE chooses it now, "
            "for a certificate"
        )
    # certify measures these techniques at their defaults only. Another value would change the
    # peak memory without changing the certificate, so the dry run is refused.
    for name in (
        "cpu_offloading_num_layers",
        "cpu_offloading_activations",
        "cpu_offloading_weights",
        "mlp_tile_tokens",
        "attention_head_groups",
        "fused_linear_cross_entropy",
        "recompute_keep_core_attn_num_layers",
    ):
        value = getattr(memory, name)
        default = getattr(MemoryConfig(), name)
        if value != default:
            raise ValueError(f"certify has no option for memory.{name} {value}: set {default} for the dry run")
    if memory.recompute_method == "nested":
        raise ValueError("certify has no option for memory.recompute_method 'nested': set 'uniform' for the dry run")
    values = {
        "--recompute-granularity": memory.recompute_granularity,
        "--recompute-method": memory.recompute_method,
        "--recompute-num-layers": memory.recompute_num_layers,
        "--attention-backend": memory.attention_backend,
    }
    options = []
    for option, value in values.items():
        if value is not None:
            options += [option, str(value)]
    options += _depths(config)
    if memory.recompute_keep_core_attn:
        options += ["--recompute-keep-core-attn"]
    if memory.recompute_modules:
        options += ["--recompute-modules", *memory.recompute_modules]
    return options


def _depths(config: TrainConfig) -> list[str]:
    """Return the option for the two depths that are measured; none for certify's own, 2 and 4.

    Raises:
        ValueError: the model has too few layers for two depths.
    """
    memory = config.memory
    number = memory.recompute_num_layers or 1
    few, many = max(2, number), 4
    if number > 2:
        many = 2 * number if memory.recompute_method == "uniform" else number + 1
    # Of a pretrained model, certify reads the number itself.
    depth = config.model.config_overrides.get("num_hidden_layers", many)
    # With chunks of n layers, models of n and of 2n layers are measured.
    if memory.recompute_method != "uniform" or number == 1:
        many = max(few + 1, min(many, depth))
    if many > depth:
        remedy = "certify a model of more layers"
        if number > 2 and depth > 2:
            remedy = f"set memory.recompute_num_layers {number} to 1 with recompute_method uniform, or {remedy}"
        raise ValueError(f"certify measures models of {few} and {many} layers, and this one has {depth}: {remedy}")
    return [] if (few, many) == (2, 4) else ["--measure-layers", str(few), str(many)]


def _isolation(config: TrainConfig, platform: str, backend: str) -> list[str]:
    """Return the options for isolated documents.

    Raises:
        ValueError: isolation selects another attention on the platform than in the measurement.
    """
    if not config.data.isolate_documents:
        return []
    if backend == "xla":
        return ["--isolate-documents"]
    # Kernels of GPUs take the bounds of documents: the step has the same activations without them.
    # On trn2 and trn3 isolation selects tiled attention; the CPU backend's attention is another.
    if platform in DEVICES:
        raise ValueError(
            f"certify cannot measure data.isolate_documents on platform {platform}: set it to false for the dry run, "
            "or measure with nxd-memopt certify --backend xla --isolate-documents"
        )
    return []


def _optimizer(config: TrainConfig, world_size: int) -> list[str]:
    """Return the options for the memory of AdamW's states, which certify adds by arithmetic."""
    # fp32 parameters are their own master weights. D matters for ZeRO-1 only, which shards
    # states.
    has_masters = config.model.dtype != "float32" and config.optimizer.master_weights
    replicas = config.data_parallel_size(world_size)
    options = []
    if has_masters:
        options += ["--master-weights"]
    stage = config.data_parallel.stage
    if stage in SHARDS_GRADIENTS:
        raise ValueError(
            f"certify has no option for data_parallel.sharding {stage}, which Trainium does not support: set zero1"
        )
    if stage == "zero1":
        options += ["--zero1", "--data-parallel-size", str(replicas)]
    return options
