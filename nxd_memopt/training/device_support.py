"""Which options a device and its ranks support, of a run that starts or of one that is certified for another device."""

from __future__ import annotations

from transformers import PretrainedConfig

from nxd_memopt.architectures.config_options import option
from nxd_memopt.backends import Backend, backend
from nxd_memopt.config import require_divisible
from nxd_memopt.memory.apply import require_device
from nxd_memopt.training.config.combinations import conflict_with_graphs, value_of, yaml_text
from nxd_memopt.training.config.data_parallel import SHARDS_GRADIENTS
from nxd_memopt.training.config.moe import has_experts
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.runtime.distributed import ranks_per_host, world_size

DROPOUTS = ("attention_dropout", "hidden_dropout")  # the dropout options that our models read


def require_executable(
    config: TrainConfig,
    hf_config: PretrainedConfig,
    *,
    device: Backend = backend,
    ranks: int | None = None,
    host_ranks: int | None = None,
) -> None:
    """Raise ``ValueError`` if a device does not support an option of a run.

    The options are ``enable_cuda_graph: true``, ``compile``, ``allow_tf32: true``, fp16, ZeRO
    stages 2 and 3, optimizer states on the host, and techniques of the memory section.

    Called before the model is built.

    Args:
        config: configuration of the run.
        hf_config: the model's configuration.
        device: backend of the device, by default the one that runs here.
        ranks: number of ranks, by default the ranks of this run.
        host_ranks: number of ranks of a host, by default the ranks of this host.
    """
    ranks, host_ranks = ranks or world_size(), host_ranks or ranks_per_host()
    _require_sharding(config, device, ranks, host_ranks)
    _require_state_offload(config, device, ranks)
    require_device(config.memory, device)
    refusal, chunks = device.interleaving_refusal(), config.parallel.num_chunks
    if chunks > 1 and refusal is not None:
        raise ValueError(f"parallel.virtual_pipeline_model_parallel_size {chunks} {refusal}: leave it out")
    trainer = config.trainer
    conflict = cuda_graph_conflict(config, hf_config, device)
    if trainer.enable_cuda_graph is True and conflict is not None:
        raise ValueError(f"trainer.enable_cuda_graph is true, but {conflict}; set enable_cuda_graph to auto")
    if trainer.compile and has_experts(hf_config):
        raise ValueError(
            f"trainer.compile {trainer.compile} compiles layers of static shapes, and an expert's rows depend on the "
            "routing: set it to null"
        )
    # Option, whether the run has it, why the backend refuses it, and the remedy. Functions: the refusal of compile
    # imports torch._dynamo.
    refusals = (
        ("trainer.allow_tf32", trainer.allow_tf32, device.tf32_refusal, "set it to false"),
        ("trainer.fp8", trainer.fp8 is not None, device.fp8_refusal, "set it to null"),
        ("trainer.precision", trainer.precision == "16-mixed", device.loss_scaling_refusal, "use bf16-mixed"),
        ("trainer.compile", trainer.compile is not None, device.compile_refusal, "set it to null"),
    )
    for name, is_set, refusal, remedy in refusals:
        if is_set and refusal() is not None:
            raise ValueError(f"{name} {yaml_text(value_of(config, name))} {refusal()}; {remedy}")


def _require_sharding(config: TrainConfig, device: Backend, ranks: int, host_ranks: int) -> None:
    """Raise ``ValueError`` if the device or the number of ranks does not support the ZeRO stage."""
    stage = config.data_parallel.sharding
    if stage not in SHARDS_GRADIENTS:
        return
    refusal = device.gradient_sharding_refusal()
    if refusal is not None:
        raise ValueError(f"data_parallel.sharding {stage} {refusal}")
    replicas = config.data_parallel_size(ranks)
    if stage == "zero3" and replicas == 1:
        raise ValueError(
            "data_parallel.sharding zero3 shards parameters over data-parallel ranks, and there is 1: use none, or "
            "start more ranks"
        )
    shard_ranks(config, ranks=ranks, host_ranks=host_ranks)  # called for its checks


def _require_state_offload(config: TrainConfig, device: Backend, ranks: int) -> None:
    """Raise ``ValueError`` if the optimizer's states cannot be on the host, or not be updated in forward."""
    if not config.optimizer.offloads_states:
        return
    refusal = device.host_transfers_refusal()
    if refusal is not None:
        raise ValueError(f"optimizer.optimizer_offload_fraction {refusal}: set it to 0")
    replicas = config.data_parallel_size(ranks)
    is_sharded = config.data_parallel.sharding == "zero1" and replicas > 1
    if config.optimizer.optimizer_update_in_forward and is_sharded:
        raise ValueError(
            "optimizer.optimizer_update_in_forward is true and data_parallel.sharding is zero1 over "
            f"{replicas} ranks, which gathers all parameters at once after the update: "
            "set one of them to false and none"
        )


def shard_ranks(config: TrainConfig, *, ranks: int | None = None, host_ranks: int | None = None) -> int:
    """Return over how many consecutive data-parallel ranks zero2 and zero3 shard; arguments as ``require_executable``.

    Raises:
        ValueError: the instances of hybrid sharding do not divide the data-parallel ranks, or a
            host has a part of a tensor-parallel group.
    """
    ranks, host_ranks = ranks or world_size(), host_ranks or ranks_per_host()
    if config.data_parallel.num_distributed_optimizer_instances == "hosts":
        # Global ranks count through the tensor-parallel groups first, host by host.
        size = config.parallel.tensor_model_parallel_size
        require_divisible("ranks per host", host_ranks, "tensor_model_parallel_size", size)
    return config.data_parallel.ranks_per_instance(config.data_parallel_size(ranks), num_hosts=-(-ranks // host_ranks))


def cuda_graph_conflict(config: TrainConfig, hf_config: PretrainedConfig, device: Backend = backend) -> str | None:
    """Return why a training step of this model cannot be a CUDA graph on a device or None."""
    refusal = device.capture_refusal()
    if refusal is not None:
        return f"a CUDA graph {refusal}"
    return cuda_graph_option_conflict(config, hf_config)


def cuda_graph_option_conflict(config: TrainConfig, hf_config: PretrainedConfig) -> str | None:
    """Return which option or layer keeps a step from being a CUDA graph on any device or None."""
    # A graph returns one loss, and reads the numbers of rows of experts once, when it is captured.
    if has_experts(hf_config):
        return f"a CUDA graph has a fixed routing, and {hf_config.model_type} has experts"
    # Checked here for a remedy that names options of the configuration; GraphedLoss itself
    # refuses to capture a forward that draws random numbers.
    values = {name: option(hf_config, name) for name in DROPOUTS}
    dropout = {name: value for name, value in values.items() if value}
    if dropout:
        return f"a CUDA graph needs dropout 0, got {dropout} (options of model.config_overrides)"
    return conflict_with_graphs(config)


def uses_cuda_graph(config: TrainConfig, hf_config: PretrainedConfig) -> bool:
    """Return whether forward and backward run as a CUDA graph."""
    return bool(config.trainer.enable_cuda_graph) and cuda_graph_conflict(config, hf_config) is None
