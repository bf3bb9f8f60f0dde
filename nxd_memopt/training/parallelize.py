"""Applies memory techniques, data parallelism and CUDA graphs to a model, in the required order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.data_parallel import shard_model
from nxd_memopt.memory import GraphedLoss, apply_memory
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.modules.moe.causal_lm import MoECausalLM
from nxd_memopt.optimizer import LossScaler
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.training.config.data_parallel import SHARDS_GRADIENTS
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.isolation import describe_isolation
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.device_support import cuda_graph_conflict, shard_ranks, uses_cuda_graph
from nxd_memopt.training.host_memory import new_host_pool, reserve_activations
from nxd_memopt.training.optimizer import MasterWeightOptimizer, reduction_dtype
from nxd_memopt.training.parameter_groups import trained_parameters
from nxd_memopt.training.pipeline import PipelinedForwardBackward, describe_pipeline
from nxd_memopt.training.routers import ExpertForwardBackward
from nxd_memopt.training.runtime.distributed import world_size

SHARDED = {
    "zero1": "master weights and optimizer states",
    "zero2": "master weights, optimizer states and gradients",
    "zero3": "parameters, optimizer states and gradients",
}

COMPILED_LAYERS = "kernels are the compiler's, collectives run between them; a new batch shape compiles again"

ForwardBackward = Callable[[MicroBatch], Tensor]
"""Function that runs forward and backward of a micro-batch.

Returns the micro-batch's share of the step's loss, 0-dim, and accumulates gradients.
"""


def parallelize(
    model: ParallelCausalLM, config: TrainConfig, *, pool: HostPool | None = None
) -> tuple[MasterWeightOptimizer, ForwardBackward | PipelinedForwardBackward]:
    """Apply memory techniques, data parallelism and CUDA graphs to ``model``.

    The model is already built with tensor and sequence parallelism. The order of the rest:

    1. Recompute, offload and compile replace the forward of layers, in the order documented in
       ``apply_memory``.
    2. zero3 shards the parameters: its units are the layers whose forward was replaced.
    3. Data parallelism registers hooks on the parameters' gradients, so the parameters must be
       final. Updates in forward are outside of everything that replaced a layer's forward.
    4. A CUDA graph comes last: it captures everything that runs between a micro-batch and its
       gradients.

    Args:
        model: this rank's shard of the model.
        config: configuration of the run.
        pool: host memory of the run; default ``new_host_pool``.

    Returns:
        The optimizer, which reduces the gradients, and the function that runs forward and
        backward.
    """
    pool = pool or new_host_pool(config)
    # The model's options, not the run's: a model adds what its own options ask for.
    apply_memory(model, model.memory, compile=config.trainer.compile, pool=pool)
    reserve_activations(pool, model, config)
    stage = config.data_parallel.sharding
    ranks = None
    if stage in SHARDS_GRADIENTS:
        ranks = shard_ranks(config)
    if stage == "zero3":
        _shard_parameters(model, config, ranks)
    # A rank whose host lacks memory for the states raises here: the others must not go on alone.
    with raise_together("creating the optimizer"):
        optimizer = MasterWeightOptimizer(
            trained_parameters(model),
            config.optimizer,
            config.data_parallel,
            master_weights=config.master_weights,
            shard_ranks=ranks,
            pool=pool,
        )
    optimizer.pace_backward(model.decoder_layers())
    if config.optimizer.optimizer_update_in_forward:
        optimizer.update_in_forward(model)
    return optimizer, _forward_backward(model, config, optimizer.loss_scaler)


def _shard_parameters(model: ParallelCausalLM, config: TrainConfig, ranks: int | None) -> None:
    """Shard the parameters of ``model`` over data-parallel ranks, as masters of the configured dtype."""
    master_dtype = getattr(torch, config.dtype)
    if config.master_weights:
        master_dtype = torch.float32
    shard_model(
        model,
        master_dtype=master_dtype,
        reduce_dtype=reduction_dtype(config.master_weights, config.data_parallel),
        reshard_after_forward=config.data_parallel.reshard_after_forward,
        ranks_per_replica=ranks,
    )


def eager_forward_backward(model: ParallelCausalLM, scaler: LossScaler | None) -> ForwardBackward:
    """Return the forward and backward of a dense model's micro-batch, operation by operation.

    Gradients are multiplied by the scale of ``scaler``, the loss is not.
    """

    def forward_backward(micro_batch: MicroBatch) -> Tensor:
        loss = _loss_of(model, scaler, micro_batch)
        loss.backward()
        return loss.detach()

    return forward_backward


def _loss_of(model: ParallelCausalLM, scaler: LossScaler | None, micro_batch: MicroBatch) -> Tensor:
    """Return the micro-batch's share of the step's loss."""
    # Each micro-batch's loss is a sum divided by the full step's trained tokens, so the gradients
    # accumulated over micro-batches are the mean over the tokens, not over micro-batches.
    loss = micro_batch.loss(model)
    if scaler is not None:
        loss = scaler.scale_gradients_of(loss)
    return loss


def _forward_backward(
    model: ParallelCausalLM, config: TrainConfig, scaler: LossScaler | None
) -> ForwardBackward | PipelinedForwardBackward:
    """Return the forward and backward of a micro-batch, eager or as a CUDA graph.

    A graph reads the scale of ``scaler`` from the device in each replay.
    """
    experts = None
    if isinstance(model, MoECausalLM):
        experts = ExpertForwardBackward(model, config.accumulation_steps(world_size()), scaler)
    if not model.stages.is_whole:
        return PipelinedForwardBackward(model, scaler, experts)
    if experts is not None:
        return experts
    if not uses_cuda_graph(config, model.config):
        return eager_forward_backward(model, scaler)

    # The first two calls run eagerly, then a micro-batch is captured; later calls copy it into
    # the graph's inputs, which are all its tensors. Gradients stay allocated, because the graph
    # accumulates into their memory. Frozen weights are passed too, to notice one that moves.
    def loss_of_tensors(*tensors: Tensor) -> Tensor:
        return _loss_of(model, scaler, MicroBatch.from_tensors(*tensors))

    graphed = GraphedLoss(model.parameters(), loss_of_tensors)

    def replay(micro_batch: MicroBatch) -> Tensor:
        try:
            return graphed(*micro_batch.tensors())
        except torch.OutOfMemoryError as error:
            error.add_note("a CUDA graph keeps the memory of gradients: trainer.enable_cuda_graph false needs less")
            raise

    return replay


def describe_step(model: ParallelCausalLM, config: TrainConfig) -> list[str]:
    """Return one line for each choice that was made for this model and device, with its reason."""
    conflict = cuda_graph_conflict(config, model.config)
    if uses_cuda_graph(config, model.config):
        graph = "on"
    elif conflict is None:
        graph = "off (trainer.enable_cuda_graph is false)"
    else:
        graph = f"off ({conflict})"
    lines: list[str] = []
    kept = backend.keep_kernels()
    if kept is not None:
        lines.append(f"compiled kernels: {kept}")
    if config.trainer.compile:
        lines.append(f"compile {config.trainer.compile}: {COMPILED_LAYERS}")
    if config.trainer.allow_tf32:
        lines.append("TF32: on, the inputs of fp32 matmuls are rounded to 11 significant bits")
    return [
        *describe_pipeline(model, config.accumulation_steps(world_size())),
        *describe_sharding(config),
        *describe_experts(model),
        *describe_optimizer(config),
        f"CUDA graph: {graph}",
        describe_isolation(model, config),
        *lines,
        *describe_fusions(model),
    ]


def describe_fusions(model: ParallelCausalLM) -> list[str]:
    """Return the lines about fused paths, of stages those of each rank of the first pipeline. Every rank calls."""
    lines = model.fusions.describe()
    if model.stages.is_whole:
        return lines
    texts = share_texts("\n".join(lines))
    pipeline = parallel_state.get_pipeline_model_parallel_replica_groups()[0]
    ranks_of: dict[str, list[str]] = {}
    for rank in pipeline:
        for line in texts[rank].split("\n"):
            ranks_of.setdefault(line, []).append(str(rank))
    return [
        line if len(ranks) == len(pipeline) else f"{line}; stages of rank {', '.join(ranks)}"
        for line, ranks in ranks_of.items()
    ]


def describe_sharding(config: TrainConfig) -> list[str]:
    """Return a line about what the data-parallel ranks share; empty if it is nothing."""
    stage = config.data_parallel.sharding
    size = parallel_state.get_data_parallel_size()
    if stage == "none":
        return []
    instances = ""
    if stage in SHARDS_GRADIENTS and shard_ranks(config) < size:
        instances = f", in {size // shard_ranks(config)} instances of {shard_ranks(config)}"
    return [f"data-parallel sharding: {SHARDED[stage]} ({stage}) over {size} data-parallel ranks{instances}"]


def describe_experts(model: ParallelCausalLM) -> list[str]:
    """Return two lines about a model with experts; none about a dense model."""
    if not isinstance(model, MoECausalLM):
        return []
    moe = model.moe
    size = parallel_state.get_expert_model_parallel_size()
    where = "all of them on every rank"
    if size > 1:
        per_rank = moe.num_moe_experts // size
        where = f"{per_rank} on each of {size} expert-parallel ranks, dispatched by {moe.moe_token_dispatcher_type}"
    capacity = "no token is dropped"
    if moe.moe_expert_capacity_factor is not None:
        capacity = f"capacity factor {moe.moe_expert_capacity_factor}, dropping by {moe.moe_token_drop_policy}"
    balancing = "no balancing loss (moe_aux_loss_coeff is 0)"
    if moe.has_aux_loss:
        balancing = f"{moe.moe_router_load_balancing_type}, coefficient {moe.moe_aux_loss_coeff:g}"
    if moe.moe_z_loss_coeff:
        balancing += f"; z-loss, coefficient {moe.moe_z_loss_coeff:g}"
    layers = f"{sum(model.spec.moe_layers)} of {model.spec.num_layers} layers"
    return [
        f"experts: {moe.num_moe_experts} in {layers}, {moe.moe_router_topk} for each token; {where}; {capacity}",
        f"balance of experts: {balancing}",
    ]


def describe_optimizer(config: TrainConfig) -> list[str]:
    """Return a line about updates in backward, or about optimizer states in host memory; empty without both."""
    optimizer = config.optimizer
    if optimizer.in_backward:
        return ["optimizer: each parameter is updated in backward, and its gradient freed; gradients are not clipped"]
    if not optimizer.offloads_states:
        return []
    where, masters = "after backward", "masters"
    if optimizer.optimizer_update_in_forward:
        where = "in the next forward"
    if optimizer.store_param_remainders:
        masters = "remainders of masters"
    fraction = optimizer.optimizer_offload_fraction
    return [f"optimizer states: {fraction:.0%} of {masters} and moments in host memory, updated {where}"]
