"""The settings that the planner tries: parallel sizes, micro-batches, ZeRO stages and memory techniques."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nxd_memopt.architectures.parameters import require_shardable
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.memory.layer_tensors import SINGLE_KERNELS
from nxd_memopt.planner.search.fixed_options import FixedOptions, require_possible
from nxd_memopt.planner.search.problem import Problem, Setting, kernels_of
from nxd_memopt.planner.sizes.rank_sizes import require_fp8_sizes
from nxd_memopt.planner.techniques.recomputation import require_layers
from nxd_memopt.planner.techniques.tiling import head_group_counts

TENSOR_PARALLEL_SIZES = {"trn1": (1, 2, 8, 32), "trn1n": (1, 2, 8, 32), "trn1-2xlarge": (1, 2)}
"""Sizes of tensor-parallel groups that a device allows; powers of two elsewhere."""
MICRO_BATCHES = (1, 2, 4, 8)
PIPELINES = (2, 4, 8, 16)
_HEAD_GROUPS = 4
NOTHING_FIXED = FixedOptions()
"""The search chooses every option that it can."""
NO_TECHNIQUES = MemoryConfig()


def settings(problem: Problem, fixed: FixedOptions = NOTHING_FIXED) -> Iterator[Setting]:
    """Yield the settings that are tried.

    Args:
        problem: model, device and batch.
        fixed: options that all of them have.
    """
    for size in tensor_parallel_sizes(problem):
        for stages, chunks in pipeline_sizes(problem, size, fixed):
            base = fixed.at(problem, size, stages)
            if base is not None:
                yield from _settings(problem, fixed, replace(base, virtual_pipeline_model_parallel_size=chunks))


def _settings(problem: Problem, fixed: FixedOptions, base: Setting) -> Iterator[Setting]:
    """Yield the settings that are tried with the parallel sizes of ``base``."""
    replicas = problem.devices // base.ranks_of_replica
    experts = fixed.expert_sizes(problem, base, expert_parallel_sizes(problem, replicas))
    for batch in micro_batches(problem, replicas, fixed):
        if not _fills_pipeline(problem, base, batch * replicas):
            continue
        tried = memories_with_stages(problem, base)
        for memory in fixed.with_stated_memory(problem, tried):
            if not fixed.allows(memory) or not _suits_stages(problem, base, memory):
                continue
            for stage in _stages(problem, base, replicas, fixed):
                setting = replace(
                    base,
                    sharding=stage,
                    micro_batch_size=batch,
                    memory=memory,
                    grad_reduce_in_fp32=problem.grad_reduce_in_fp32,
                )
                for count in experts:
                    variants = _variants(problem, replace(setting, expert_model_parallel_size=count), fixed)
                    yield from filter(fixed.has_stated, variants)


def require_settings(problem: Problem, fixed: FixedOptions = NOTHING_FIXED) -> None:
    """Raise ``ValueError`` if there is no setting to try; the message names the options that exclude settings."""
    require_batch(problem)
    require_possible(problem, fixed)
    if next(settings(problem, fixed), None) is not None:
        return
    where = f"which no setting of this model on {problem.devices} x {problem.device.name} has"
    remedy = "leave an option out, or use other --devices or another --data.global-batch-size"
    raise ValueError(f"{'; '.join(fixed.needs())}, {where}: {remedy}")


def _fills_pipeline(problem: Problem, setting: Setting, sequences: int) -> bool:
    """Return whether a step has enough micro-batches for the stages, of ``sequences`` each over all ranks."""
    stages = setting.pipeline_model_parallel_size
    if stages == 1:
        return True
    count = (problem.global_batch_size or sequences) // sequences
    # With fewer, ranks wait for half of the step or more. Several stages of a rank run P micro-batches in turn.
    return count >= stages and (setting.virtual_pipeline_model_parallel_size == 1 or count % stages == 0)


def _stages(problem: Problem, base: Setting, replicas: int, fixed: FixedOptions) -> tuple[str, ...]:
    """Return the ZeRO stages that are tried with D data-parallel ranks."""
    tried = fixed.tried("sharding", problem.stages)
    if replicas == 1:
        tried = ("none",)
    allowed = fixed.stages
    if problem.device.kind != "cuda" or base.pipeline_model_parallel_size > 1:
        allowed &= {"none", "zero1"}
    return tuple(stage for stage in tried if stage in allowed)


def tensor_parallel_sizes(problem: Problem) -> list[int]:
    """Return the tensor-parallel sizes of the model, the device and the number of devices.

    Raises:
        ValueError: no size fits; the message has the reason of the smallest one.
    """
    allowed = TENSOR_PARALLEL_SIZES.get(problem.device.name)
    found: list[int] = []
    reason = f"devices {problem.devices} has no divisor that the model can be split by"
    for size in range(1, problem.devices + 1):
        # A tensor-parallel group is on one host: its collectives are in every layer.
        if problem.devices % size or size > problem.device.ranks_per_host:
            continue
        if allowed is not None and size not in allowed:
            continue
        try:
            require_shardable(problem.model, size)
            if problem.fp8 is not None:
                require_fp8_sizes(problem.model, size)
            found.append(size)
        except ValueError as error:
            reason = str(error)
    if not found:
        raise ValueError(reason)
    size = problem.tensor_model_parallel_size
    if size is None:
        return found
    if size not in found:
        message = (
            f"tensor_model_parallel_size {size} is not possible for this model on {problem.devices} x "
            f"{problem.device.name}: use one of {found}, or leave it out"
        )
        if size > problem.device.ranks_per_host and problem.device.measured:
            ranks = problem.device.ranks_per_host
            message += f"; calibrated with {ranks} of a host's ranks: calibrate under torchrun for more"
        raise ValueError(message)
    return [size]


def pipeline_sizes(problem: Problem, size: int, fixed: FixedOptions = NOTHING_FIXED) -> list[tuple[int, int]]:
    """Return the numbers of ranks and of stages of each rank, P and V, that are tried with T of ``size``."""
    depth = problem.model.num_layers
    ranks = problem.devices // size
    layout = fixed.setting.pipeline_model_parallel_layout
    found: list[tuple[int, int]] = []
    for stages in fixed.tried("pipeline_model_parallel_size", (1, *PIPELINES)):
        # A step of one micro-batch has nothing to run in turn.
        if ranks % stages or (stages > 1 and problem.global_batch_size is None):
            continue
        # Chunks of a rank need sends that torch_xla does not have, and end their backwards one after the other.
        needs_one = stages == 1 or problem.device.backend == "xla" or fixed.setting.overlap_grad_reduce
        for chunks in fixed.tried("virtual_pipeline_model_parallel_size", (1, 2)):
            fits = stages * chunks <= depth if layout is None else stages * chunks == len(layout)
            if fits and (chunks == 1 or not needs_one):
                found.append((stages, chunks))
    return found


def expert_parallel_sizes(problem: Problem, replicas: int) -> list[int]:
    """Return the expert-parallel sizes of the model and of ``replicas`` data-parallel ranks."""
    spec = problem.model
    if spec.experts is None or not spec.has_experts:
        return [1]
    moe = problem.moe
    # The static bound of an exchange is every token to every rank, which is an all-gather.
    if moe is not None and moe.moe_expert_block_size is not None and moe.moe_token_dispatcher_type != "allgather":
        return [1]
    experts = spec.experts.num_experts
    return [size for size in range(1, replicas + 1) if replicas % size == 0 and experts % size == 0]


def require_batch(problem: Problem) -> None:
    """Raise ``ValueError`` if no data-parallel size divides the global batch."""
    replicas = [
        problem.devices // (size * stages)
        for size in tensor_parallel_sizes(problem)
        for stages, _ in pipeline_sizes(problem, size)
    ]
    if not any(micro_batches(problem, count) for count in replicas):
        raise ValueError(
            f"global batch {problem.global_batch_size} is not divisible by any data-parallel size of "
            f"{problem.devices} devices, {sorted(set(replicas))}: use a multiple of one of them, or other --devices"
        )


def micro_batches(problem: Problem, replicas: int, fixed: FixedOptions = NOTHING_FIXED) -> list[int]:
    """Return the micro-batch sizes that divide the global batch over the replicas."""
    # One sequence per rank, so that a step of every setting has the same kind of batch.
    if problem.global_batch_size is None:
        return [1]
    # Updates in backward need all sequences of a step in one micro-batch.
    if fixed.setting.optimizer_in_backward:
        if problem.global_batch_size % replicas:
            return []
        return [problem.global_batch_size // replicas]
    sizes = fixed.tried("micro_batch_size", MICRO_BATCHES)
    return [size for size in sizes if problem.global_batch_size % (size * replicas) == 0]


def _variants(problem: Problem, setting: Setting, fixed: FixedOptions) -> Iterator[Setting]:
    """Yield the setting, as a CUDA graph where that is possible, and with its states on the host."""
    if problem.device.kind != "cuda":
        yield setting
        return
    has_stages = setting.pipeline_model_parallel_size > 1
    # A graph has no host code and draws no random numbers. The routing of experts is not fixed
    # (``EXCLUDED_BY_GRAPHS`` in ``training/config/combinations.py``).
    spec = problem.model
    drops = spec.attention_dropout or spec.hidden_dropout or (problem.lora is not None and problem.lora.lora_dropout)
    is_supported = not (spec.has_experts or drops or fixed.excludes_graphs)
    if not has_stages and not setting.memory.offloads and is_supported and setting.sharding in ("none", "zero1"):
        yield replace(setting, cuda_graph=True)
    yield setting
    if setting.optimizer_in_backward:
        return
    # Masters and moments are fp32 only with mixed precision.
    if problem.offloads_optimizer and problem.precision == "bf16-mixed" and setting.sharding in ("none", "zero1"):
        # The stated fraction may be 0, which the setting above has.
        (remainders,) = fixed.tried("store_param_remainders", (True,))
        # With stages only a stated fraction, because the search has many sizes of the pipeline to try.
        fractions = () if has_stages else (0.5, 1.0)
        for fraction in filter(None, fixed.tried("optimizer_offload_fraction", fractions)):
            offloaded = replace(setting, optimizer_offload_fraction=fraction, store_param_remainders=remainders)
            yield offloaded
            # Sharded parameters are gathered all at once, and so cannot be updated layer by layer. Stages begin their
            # forwards at different times.
            if setting.sharding == "none" and not has_stages:
                yield replace(offloaded, optimizer_update_in_forward=True)


def memories_with_stages(problem: Problem, setting: Setting) -> Iterator[MemoryConfig]:
    """Yield the memory techniques that are tried with the stages of ``setting``; of one stage as ``memories``.

    Of several stages those of all layers: the search has many parallel sizes to try already.
    """
    is_divided = setting.pipeline_model_parallel_size > 1
    for memory in memories(problem, setting.memory):
        if not is_divided or (memory.recompute_num_layers is None and _suits_stages(problem, setting, memory)):
            yield memory


def _suits_stages(problem: Problem, setting: Setting, memory: MemoryConfig) -> bool:
    """Return whether every rank of the pipeline of ``setting``, if there is one, can have the memory techniques."""
    stages, chunks = setting.pipeline_model_parallel_size, setting.virtual_pipeline_model_parallel_size
    if stages == 1:
        return True
    if memory.offloads:
        return False
    try:
        for each in setting.stages_of(problem.model):
            require_layers(memory, len(each.layers), chunks)
    except ValueError:
        return False
    return True


def memories(problem: Problem, given: MemoryConfig = NO_TECHNIQUES) -> Iterator[MemoryConfig]:
    """Yield the memory techniques that are tried, without those that cannot help on the device.

    Args:
        problem: model, device and batch.
        given: attention's implementation and the kind of loss, which all of them have.
    """
    same = MemoryConfig(
        attention_backend=given.attention_backend, fused_linear_cross_entropy=given.fused_linear_cross_entropy
    )
    spec = problem.model
    depth = spec.num_layers
    is_gpu = problem.device.kind == "cuda"
    full: dict[str, Any] = {"recompute_granularity": "full"}
    yield same
    modules = ("norm", "mlp")
    if spec.has_experts:
        modules = ("norm", "moe")
    selective: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": modules}
    # All layers, and the first quarter, half and three quarters.
    for granularity in (selective, full):
        yield replace(same, **granularity)
        for layers in sorted({depth // 4, depth // 2, depth * 3 // 4} - {0}):
            yield replace(same, **granularity, recompute_method="block", recompute_num_layers=layers)
    # A model with windows is built with tiles, also if the sequence fits its windows.
    is_kernel = kernels_of(problem, same).attention in SINGLE_KERNELS and not spec.has_windows
    if is_kernel and is_gpu and not spec.attention_dropout:
        yield replace(same, **full, recompute_keep_core_attn=True)
    # Chunks of fewer layers keep as many inputs as without chunks.
    if depth > 3:
        yield replace(same, **full, recompute_method="nested")
    if not is_gpu:
        return
    for layers in sorted({depth // 4, depth // 2} - {0}):
        yield replace(same, cpu_offloading_num_layers=layers)
    yield replace(same, **full, cpu_offloading_activations=True)
    # Matmuls of tiles of 32,768 tokens are as fast as matmuls of the full sequence.
    # Tiles compute layers without their adapters, and in bf16.
    is_plain = problem.lora is None and problem.fp8 is None
    if problem.sequence_length > 32768 and not spec.has_experts and is_plain:
        yield replace(same, **full, mlp_tile_tokens="auto")
        yield replace(same, **full, mlp_tile_tokens="auto", cpu_offloading_activations=True)
        if _has_head_groups(problem):
            yield replace(
                same,
                **full,
                mlp_tile_tokens="auto",
                cpu_offloading_activations=True,
                attention_head_groups=_HEAD_GROUPS,
            )


def _has_head_groups(problem: Problem) -> bool:
    """Return whether the heads of every tensor-parallel size can be computed in groups."""
    ranks = tensor_parallel_sizes(problem)[-1]
    queries = problem.model.num_heads // ranks
    groups = max(1, problem.model.num_kv_heads // ranks)
    return _HEAD_GROUPS in head_group_counts((queries, groups))
