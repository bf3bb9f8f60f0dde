"""Checks, at the start of a run, all that can be known before text is tokenized and weights are loaded."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from nxd_memopt._optional import require_installed
from nxd_memopt.architectures.config_options import option
from nxd_memopt.architectures.model_spec import model_spec, require_positions, rope_options
from nxd_memopt.architectures.parameters import require_shardable, require_supported_values
from nxd_memopt.architectures.stages import RankStages, all_stages
from nxd_memopt.backends import BACKENDS
from nxd_memopt.checkpoint.files import find_gguf, open_weights
from nxd_memopt.checkpoint.huggingface.adapters import require_replaceable_adapters
from nxd_memopt.checkpoint.huggingface.exporting import require_replaceable
from nxd_memopt.checkpoint.huggingface.gguf_metadata import read_gguf_tensor_names
from nxd_memopt.checkpoint.sharded.steps import complete_steps
from nxd_memopt.config import require_divisible
from nxd_memopt.memory import apply_memory
from nxd_memopt.memory.apply import require_weight_offload
from nxd_memopt.models import model_class
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.modules.lora import whole_model
from nxd_memopt.modules.moe.hf_options import trained_only, transformers_type
from nxd_memopt.ops.rope import RotaryEmbedding
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.planner.hardware import Device
from nxd_memopt.planner.techniques.recomputation import require_layers
from nxd_memopt.training.config.train_config import SHORT_WARMUP, TrainConfig
from nxd_memopt.training.data.isolation import require_attention
from nxd_memopt.training.device_support import require_executable
from nxd_memopt.training.lora import ADAPTER
from nxd_memopt.training.model import expert_options
from nxd_memopt.training.parameter_groups import require_matches, trained_parameters
from nxd_memopt.training.reporting.records import require_readable_records
from nxd_memopt.training.runtime.distributed import is_rank_zero

OVERRIDES = "model.config_overrides"
# Entries of an output directory besides the lock and the export, which have checks of their own.
DIRECTORIES = ("tokens", "checkpoints", "tensorboard")
# AdamW's update of a weight is about lr, and weights are near 0.02.
LARGE_LR = 0.1
ELSEWHERE = "rename it or choose another trainer.output_dir"


def require_trainable(config: TrainConfig, hf_config: PretrainedConfig) -> None:
    """Check model, weight files and export directory before the first expensive step. Every rank calls.

    Raises:
        MissingDependencyError: a package that the data needs is not installed.
        ValueError: on every rank, if the sizes do not fit each other, T or ``data.seq_length``, if
            weight files are missing or cut short, or if the export would have to replace files
            that are not an export.
    """
    for name in config.data.sources:
        if name != "stdlib":
            require_installed(f"dataset {name}", "datasets", extra="train")
    _require_model(config, hf_config)
    # Rank 0 alone reads the files' headers: 1,000 ranks would read the same bytes.
    with raise_together("checking the files of the run"):
        if is_rank_zero():
            _require_intact_checkpoints(config)
            _require_weights(config)
            _require_export_target(config)


def require_startable(config: TrainConfig, hf_config: PretrainedConfig, device: Device, ranks: int) -> None:
    """Raise ``ValueError`` if training would refuse a run on a device, which this machine may lack.

    Files are not read.

    Args:
        config: configuration of the run.
        hf_config: the model's configuration.
        device: what each rank has.
        ranks: number of ranks in all.
    """
    config.accumulation_steps(ranks)  # called for its checks
    config.require_expert_ranks(ranks)
    _require_model(config, hf_config)
    host_ranks = min(ranks, device.ranks_per_host)
    facts = BACKENDS[device.backend].of_device(device.compute_capability)
    require_executable(config, hf_config, device=facts, ranks=ranks, host_ranks=host_ranks)


def _require_model(config: TrainConfig, hf_config: PretrainedConfig) -> None:
    """Raise ``ValueError`` if the model's sizes, values, positions or experts do not fit the options of the run."""
    _require_sizes(hf_config)
    require_shardable(model_spec(hf_config), config.parallel.tensor_model_parallel_size)
    require_supported_values(hf_config, OVERRIDES)
    for stages in all_stages(model_spec(hf_config), config.parallel):
        _require_layers(config, stages)
    config.fp8_layers(hf_config.num_hidden_layers)  # called for its checks
    _require_positions(config, hf_config)
    _require_experts(config, hf_config)


def _require_layers(config: TrainConfig, stages: RankStages) -> None:
    """Raise ``ValueError`` if the recompute options do not suit the layers of a rank of the pipeline."""
    try:
        require_layers(config.memory, len(stages.layers), len(stages.chunks))
    except ValueError as error:
        if config.parallel.pipeline_model_parallel_size == 1:
            raise
        raise ValueError(f"rank {stages.rank} of the pipeline: {error}") from error


def require_applicable_memory(config: TrainConfig, hf_config: PretrainedConfig) -> None:
    """Raise ``ValueError`` if the model or the device cannot have the memory section's techniques.

    Call it after ``require_executable``. The techniques are applied to a model on the meta device,
    without memory and weights, because the model and ``apply_memory`` have the checks themselves.
    """
    memory = config.memory
    # Weights without memory cannot go to the host.
    if memory.cpu_offloading_weights:
        num_layers = hf_config.num_hidden_layers
        require_weight_offload(memory, num_layers)
        offloaded = memory.num_offloaded_layers(num_layers)
        memory = replace(memory, cpu_offloading_weights=False, cpu_offloading_num_layers=offloaded)
    model: ParallelCausalLM = model_class(hf_config.model_type)(
        hf_config,
        parallel=config.parallel,
        memory=memory,
        dtype=getattr(torch, config.dtype),
        device="meta",
        **expert_options(config, hf_config),
    )
    if config.trainer.compile is not None:
        apply_memory(model, model.memory, compile=config.trainer.compile)
    require_attention(model, config)
    # With LoRA the trained parameters are the adapters', which this model does not have.
    if config.lora.lora_rank is None:
        require_matches(trained_parameters(whole_model(model)), config.optimizer)


def require_usable_output(config: TrainConfig) -> None:
    """Check the entries of the output directory that the run will write to. Every rank calls, under the lock.

    Raises:
        ValueError: on every rank, if a file is where the run keeps a directory, if a directory is
            not writable, or if the records of earlier steps cannot be continued.
    """
    # Otherwise found late: the first checkpoint is written up to 10 minutes after the start.
    directory = Path(config.trainer.output_dir)
    with raise_together(f"checking {directory}"):
        if is_rank_zero():
            for path in [directory / name for name in DIRECTORIES]:
                if path.is_symlink() or path.exists():
                    _require_directory(path)
            require_readable_records(directory)


def _require_directory(path: Path) -> None:
    """Raise ``ValueError`` if ``path`` is not a directory that this process can write to."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory, and a run keeps one of this name: {ELSEWHERE}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"{path} is not writable: change its permissions or choose another trainer.output_dir")


def with_schedule_of_run(config: TrainConfig) -> TrainConfig:
    """Return ``config`` with the warm-up that the run has; rank 0 says what differs or is unusual in one line each.

    Call it before the options are compared with a checkpoint's: a run with other steps, and so another
    warm-up, does not resume silently.
    """
    lr, given, steps = config.optimizer.lr, config.optimizer.warmup_steps, config.trainer.max_steps
    warmup = config.warmup_steps if steps else given
    if is_rank_zero() and lr > LARGE_LR:
        print(
            f"warning: optimizer.lr {lr:g} is large for AdamW, which moves each weight by about lr a step (usual are "
            "1e-5 to 1e-3): the loss may diverge",
            flush=True,
        )
    if is_rank_zero() and warmup != given:
        print(
            f"optimizer.warmup_steps {given} does not fit trainer.max_steps {steps}: the warm-up of this run is "
            f"{SHORT_WARMUP:.0%} of its steps, {warmup}; for the start of a longer schedule set optimizer.decay_steps",
            flush=True,
        )
    return replace(config, optimizer=replace(config.optimizer, warmup_steps=warmup))


def require_finite_weights(loss: float | None, config: TrainConfig) -> None:
    """Raise ``ValueError`` if the held-out loss before training is not finite."""
    if loss is None or math.isfinite(loss):
        return
    source = "the initial weights"
    if config.model.pretrained is not None and not config.model.random_init:
        source = f"the weights of {config.model.pretrained}"
    raise ValueError(
        f"the held-out loss before training is {loss}: {source} have values that are not finite or too large for "
        f"{config.dtype}: take other weights, or set trainer.precision to 32-true"
    )


def _require_sizes(hf_config: PretrainedConfig) -> None:
    """Raise ``ValueError`` for a model without layers, or a width that the heads do not divide."""
    layers = hf_config.num_hidden_layers
    if layers < 1:
        raise ValueError(f"num_hidden_layers must be at least 1, got {layers}: set it in {OVERRIDES}")
    if not option(hf_config, "head_dim"):
        remedy = f"choose another num_attention_heads in {OVERRIDES}, or set head_dim"
        heads = hf_config.num_attention_heads
        require_divisible("hidden_size", hf_config.hidden_size, "num_attention_heads", heads, remedy)


def _require_positions(config: TrainConfig, hf_config: PretrainedConfig) -> None:
    """Raise ``ValueError`` if RoPE has no values, or a sequence has more positions than the model was made for."""
    length = config.data.seq_length
    rope = RotaryEmbedding(model_spec(hf_config).rotary_dim, rope_options(hf_config), hf_config.max_position_embeddings)
    rope.require_one_length(length, packed=config.data.isolate_documents)
    require_positions(hf_config, length)


def _require_experts(config: TrainConfig, hf_config: PretrainedConfig) -> None:
    """Raise ``ValueError`` if the options of experts fit neither the model, nor the ranks, nor the memory options."""
    options = expert_options(config, hf_config)
    size = config.parallel.expert_model_parallel_size
    if not options:
        if size > 1:
            raise ValueError(
                f"parallel.expert_model_parallel_size {size} needs a model with experts, and model_type is "
                f"{hf_config.model_type}: set it to 1"
            )
        return
    unknown = trained_only(options["moe"], hf_config.model_type)
    if unknown is not None and config.trainer.export:
        raise ValueError(
            f"moe.{unknown[0]} {unknown[1]!r} is unknown to transformers' {transformers_type(hf_config)}, and "
            "trainer.export is true: set it to false, or leave the option out"
        )


def _require_intact_checkpoints(config: TrainConfig) -> None:
    """Raise ``ValueError`` for a checkpoint without its index, which a resume would pass over."""
    directory = config.trainer.checkpoint_directory
    complete = complete_steps(directory)
    # A directory gets its final name after its index: without one, the index was removed.
    for path in sorted(directory.glob("step_*")):
        if path.name[len("step_") :].isdigit() and path not in complete.values():
            others = [step for step in complete if step < int(path.name[len("step_") :])]
            remedy = f"to resume from step {others[-1]}" if others else "to start again"
            raise ValueError(
                f"checkpoint {path} has no index.json: it was removed, or another program wrote the directory; "
                f"copy it again, or delete {path} {remedy}"
            )


def _require_weights(config: TrainConfig) -> None:
    """Raise ``ValueError`` if the weight files of ``model.pretrained`` are missing or cut short."""
    if config.model.pretrained is None or config.model.random_init:
        return
    directory = Path(config.model.pretrained)
    gguf = find_gguf(directory)
    if gguf is not None:
        read_gguf_tensor_names(gguf)
        return
    # .bin files have no header that could be read alone.
    if any(directory.glob("*.safetensors*")):
        with open_weights(directory):
            pass


def _require_export_target(config: TrainConfig) -> None:
    """Raise ``ValueError`` if the export's directory cannot be replaced, or has the weights to load."""
    if not config.trainer.export:
        return
    target = config.trainer.export_directory
    try:
        require_replaceable(target)
        if config.lora.lora_rank is not None:
            require_replaceable_adapters(Path(config.trainer.output_dir) / ADAPTER)
    except ValueError as error:
        raise ValueError(f"trainer.export: {error}, or set trainer.export to false") from error
    sources = {"model.pretrained": config.model.pretrained, "model.tokenizer": config.model.tokenizer}
    for name, source in sources.items():
        # realpath, because Path.resolve raises RuntimeError for links that lead to each other.
        if source is not None and os.path.realpath(source) == os.path.realpath(target):
            raise ValueError(
                f"{name} {source} is the directory that the export of this run would replace: choose another "
                "trainer.output_dir"
            )
