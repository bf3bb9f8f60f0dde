"""Builds the model from a Hugging Face directory or a configuration alone, and loads its tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from nxd_memopt.architectures.config_options import option
from nxd_memopt.architectures.model_spec import shared_expert
from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import load_config, load_pretrained
from nxd_memopt.checkpoint.huggingface.tokenizers import load_tokenizer
from nxd_memopt.checkpoint.huggingface.upcycling import load_upcycled, upcycled_config
from nxd_memopt.config import require_divisible
from nxd_memopt.models import model_class, require_supported
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.modules.moe.hf_options import with_shared_expert
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.parallel_layers.utils import move_model_to_device
from nxd_memopt.training.config.data_parallel import SHARDS_GRADIENTS
from nxd_memopt.training.config.moe import MoEOptions, has_experts, resolve_options
from nxd_memopt.training.config.nemo.model import VOCABULARY_OF_TOKENIZER
from nxd_memopt.training.config.train_config import ModelConfig, TrainConfig
from nxd_memopt.training.data.tokenize.special_tokens import special_tokens
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary, rows_for
from nxd_memopt.training.hf_overrides import config_from_overrides, override_config
from nxd_memopt.training.runtime.distributed import ranks_per_host, world_size

DROPOUTS = ("attention_dropout", "hidden_dropout")  # the dropout options that our models read


def load_hf_config(config: ModelConfig, moe: MoEOptions | None = None) -> PretrainedConfig:
    """Return the Hugging Face configuration, updated with ``config_overrides``.

    With ``moe.num_moe_experts`` a dense model's is replaced by that of a model with experts. A model with
    experts gets a shared expert by ``moe.moe_shared_expert_intermediate_size``.

    Raises:
        ValueError: the directory does not exist, the model type is not supported, or cannot have
            experts.
    """
    hf_config = _own_hf_config(config)
    if moe is None:
        return hf_config
    if moe.num_moe_experts is not None and not has_experts(hf_config):
        top_k = MoEConfig.moe_router_topk if moe.moe_router_topk is None else moe.moe_router_topk
        hf_config = upcycled_config(hf_config, moe.num_moe_experts, top_k)
    width = moe.moe_shared_expert_intermediate_size
    if width is None or not has_experts(hf_config):
        return hf_config
    gate = moe.moe_shared_expert_gate
    if gate is None:
        _, gate = shared_expert(hf_config)
    return with_shared_expert(hf_config, width, gate=gate)


def _own_hf_config(config: ModelConfig) -> PretrainedConfig:
    """Return the configuration of the directory and the overrides, without added experts."""
    # The type is checked before transformers builds a configuration of it: transformers knows
    # hundreds of types, and the error must name the few that this library has.
    overrides = dict(config.config_overrides)
    if overrides.get("vocab_size") == VOCABULARY_OF_TOKENIZER:
        del overrides["vocab_size"]
        if config.pretrained is None:
            overrides["vocab_size"] = rows_for(_tokenizer(config))
    if config.pretrained is None:
        model_type = overrides.pop("model_type")
        require_supported(model_type)
        return _resized(config, config_from_overrides(model_type, overrides))
    hf_config = load_config(config.pretrained)
    require_supported(hf_config.model_type)
    # The class follows from the directory's type: another one would be ignored.
    model_type = overrides.pop("model_type", hf_config.model_type)
    if model_type != hf_config.model_type:
        raise ValueError(
            f"model.config_overrides has model_type {model_type!r} and {config.pretrained} has "
            f"{hf_config.model_type!r}: leave model_type out, or leave model.pretrained out"
        )
    return _resized(config, override_config(hf_config, overrides))


def _resized(config: ModelConfig, hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return ``hf_config`` with a row of the embedding for each token, with ``config.resize_embedding``."""
    if config.resize_embedding:
        rows = max(hf_config.vocab_size, rows_for(_tokenizer(config)))
        hf_config = override_config(hf_config, {"vocab_size": rows})
    return hf_config


def _tokenizer(config: ModelConfig) -> Any:
    """Return the run's tokenizer."""
    name = config.tokenizer or config.pretrained
    assert name is not None
    try:
        return load_tokenizer(name)
    except ValueError as error:
        raise ValueError(f"{error}: set model.tokenizer to a tokenizer's directory") from error


def require_executable(config: TrainConfig, hf_config: PretrainedConfig) -> None:
    """Raise ``ValueError`` if the backend does not support an option.

    The options are ``enable_cuda_graph: true``, ``compile``, ``allow_tf32: true``, fp16, ZeRO
    stages 2 and 3, and optimizer states on the host.

    Called before the model is built.
    """
    _require_sharding(config)
    _require_state_offload(config)
    conflict = cuda_graph_conflict(config, hf_config)
    if config.trainer.enable_cuda_graph is True and conflict is not None:
        raise ValueError(f"trainer.enable_cuda_graph is true, but {conflict}, or enable_cuda_graph to auto")
    refusal = backend.tf32_refusal()
    if config.trainer.allow_tf32 and refusal is not None:
        raise ValueError(f"trainer.allow_tf32 {refusal}: set it to false")
    refusal = backend.loss_scaling_refusal()
    if config.trainer.precision == "16-mixed" and refusal is not None:
        raise ValueError(f"trainer.precision 16-mixed {refusal}: use bf16-mixed")
    if config.trainer.compile and has_experts(hf_config):
        raise ValueError(
            f"trainer.compile {config.trainer.compile!r} compiles layers of static shapes, and an expert's rows depend "
            "on the routing: set it to null"
        )
    refusal = backend.compile_refusal()
    if config.trainer.compile and refusal is not None:
        raise ValueError(f"trainer.compile {config.trainer.compile!r} {refusal}; or set it to null")


def _require_sharding(config: TrainConfig) -> None:
    """Raise ``ValueError`` if the backend or the number of ranks does not support the ZeRO stage."""
    stage = config.data_parallel.stage
    if stage not in SHARDS_GRADIENTS:
        return
    refusal = backend.gradient_sharding_refusal()
    if refusal is not None:
        raise ValueError(f"data_parallel.sharding {stage} {refusal}")
    replicas = config.data_parallel_size(world_size())
    if stage == "zero3" and replicas == 1:
        raise ValueError(
            "data_parallel.sharding zero3 shards parameters over data-parallel ranks, and there is 1: use none, or "
            "start more ranks"
        )
    shard_ranks(config)  # called for its checks


def _require_state_offload(config: TrainConfig) -> None:
    """Raise ``ValueError`` if the optimizer's states cannot be on the host, or not be updated in forward."""
    if not config.optimizer.optimizer_cpu_offload:
        return
    if backend.host_transfers() is None:
        raise ValueError(
            "optimizer.optimizer_cpu_offload needs a device whose copies to the host overlap with its work, an "
            f"NVIDIA GPU; the backend is {backend.name}: set it to false"
        )
    is_sharded = config.data_parallel.stage == "zero1" and config.data_parallel_size(world_size()) > 1
    if config.optimizer.optimizer_update_in_forward and is_sharded:
        raise ValueError(
            "optimizer.optimizer_update_in_forward is true and data_parallel.sharding is zero1 over "
            f"{config.data_parallel_size(world_size())} ranks, which gathers all parameters at once after the update: "
            "set one of them to false and none"
        )


def shard_ranks(config: TrainConfig) -> int:
    """Return over how many consecutive data-parallel ranks zero2 and zero3 shard.

    Raises:
        ValueError: the instances of hybrid sharding do not divide the data-parallel ranks, or a
            host has a part of a tensor-parallel group.
    """
    replicas = config.data_parallel_size(world_size())
    if config.data_parallel.num_distributed_optimizer_instances == "hosts":
        # Global ranks count through the tensor-parallel groups first, host by host.
        size = config.parallel.tensor_model_parallel_size
        require_divisible("ranks per host", ranks_per_host(), "tensor_model_parallel_size", size)
    return config.data_parallel.ranks_per_instance(replicas, num_hosts=world_size() // ranks_per_host())


def cuda_graph_conflict(config: TrainConfig, hf_config: PretrainedConfig) -> str | None:
    """Return why a training step of this model cannot be a CUDA graph and how to change it, or None."""
    refusal = backend.capture_refusal()
    if refusal is not None:
        return f"a CUDA graph {refusal}: set enable_cuda_graph to false"
    return cuda_graph_option_conflict(config, hf_config)


def cuda_graph_option_conflict(config: TrainConfig, hf_config: PretrainedConfig) -> str | None:
    """Return which option or layer keeps a step from being a CUDA graph on any device and how to change it, or None."""
    # A graph returns one loss, and reads the numbers of rows of experts once, when it is captured.
    if has_experts(hf_config):
        return (
            f"a CUDA graph has a fixed routing, and {hf_config.model_type} has experts: set enable_cuda_graph to false"
        )
    # Checked here for a remedy that names options of the configuration; GraphedLoss itself
    # refuses to capture a forward that draws random numbers.
    values = {name: option(hf_config, name) for name in DROPOUTS}
    dropout = {name: value for name, value in values.items() if value}
    if dropout:
        return f"a CUDA graph needs dropout 0, got {dropout}: set them to 0 in model.config_overrides"
    return config.cuda_graph_conflict()


def uses_cuda_graph(config: TrainConfig, hf_config: PretrainedConfig) -> bool:
    """Return whether forward and backward run as a CUDA graph."""
    return bool(config.trainer.enable_cuda_graph) and cuda_graph_conflict(config, hf_config) is None


def load_vocabulary(config: ModelConfig, hf_config: PretrainedConfig, *, end_of_text: str | int = "auto") -> Vocabulary:
    """Return the tokenizer, checked against the model.

    Args:
        config: names the tokenizer and the model.
        hf_config: the model's configuration.
        end_of_text: ``data.end_of_text``.

    Raises:
        ValueError: no tokenizer can be loaded, it has no end-of-text token or another one than
            the model, or it has other tokens than added ones beyond the model's vocabulary.
    """
    tokenizer = _tokenizer(config)
    special = special_tokens(config, hf_config, tokenizer, end_of_text)
    return Vocabulary(tokenizer, hf_config.vocab_size, special.end_of_text, special)


def build_model(config: TrainConfig, hf_config: PretrainedConfig) -> ParallelCausalLM:
    """Build this rank's shard of the model on the backend's device, and load pretrained weights.

    With ``use_cpu_initialization`` the shard is initialized and loaded on the host in two cases. On
    XLA it is copied afterwards: initializing or loading it on the device, slice by slice, would
    compile another graph. At zero3 it stays there until ``shard_model`` copies one layer at a time,
    because the device need not have room for the model without its data-parallel sharding.
    """
    is_sharded_later = config.data_parallel.stage == "zero3"
    on_host = config.parallel.use_cpu_initialization and (backend.name == "xla" or is_sharded_later)
    device = torch.device("cpu") if on_host else backend.device
    model: ParallelCausalLM = model_class(hf_config.model_type)(
        hf_config,
        parallel=config.parallel,
        memory=config.memory,
        dtype=getattr(torch, config.model.dtype),
        device=device,
        **expert_options(config, hf_config),
    )
    if config.model.pretrained is not None and not config.model.random_init:
        resizes = config.model.resize_embedding
        if is_upcycled(config, hf_config):
            load_upcycled(model, config.model.pretrained, seed=config.trainer.seed, resize_embedding=resizes)
        else:
            load_pretrained(model, config.model.pretrained, resize_embedding=resizes)
    if on_host and not is_sharded_later:
        move_model_to_device(model, backend.device)
    # On XLA the graph of initialization and loading ends here, or it would become part of the
    # first micro-batch's graph.
    backend.mark_step()
    return model


def expert_options(config: TrainConfig, hf_config: PretrainedConfig) -> dict[str, MoEConfig]:
    """Return the argument ``moe`` of a model with experts; none for a dense model.

    Raises:
        ValueError: options of the ``moe`` section contradict each other or the model.
    """
    moe = resolve_options(config.moe, hf_config)
    return {} if moe is None else {"moe": moe}


def is_upcycled(config: TrainConfig, hf_config: PretrainedConfig) -> bool:
    """Return whether the model starts from one without experts, or without its shared expert."""
    own = _own_hf_config(config.model)
    adds_experts = has_experts(hf_config) and not has_experts(own)
    return adds_experts or shared_expert(hf_config)[0] != shared_expert(own)[0]


def require_fp16_range(model: ParallelCausalLM) -> None:
    """Raise ``ValueError`` on every rank if a weight of an fp16 model has become infinite or NaN."""
    if model.embedding_weight().dtype != torch.float16:
        return
    # Only the rank with the weight sees it; the other ranks would wait for it in the first step.
    with raise_together("loading the weights"):
        for name, parameter in model.named_parameters():
            if not bool(parameter.detach().isfinite().all()):
                raise ValueError(
                    f"{name} has a value that is not finite in fp16, whose largest number is 65504: "
                    "use trainer.precision bf16-mixed"
                )
