"""Which settings of a training run fit a device, how fast they are, and what to change if none fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul
from typing import Literal

from nxd_memopt.config import ParallelConfig, require_divisible
from nxd_memopt.planner.hardware import GIB
from nxd_memopt.planner.memory.activations import Activations, activations
from nxd_memopt.planner.memory.peak import StepMemory, step_memory
from nxd_memopt.planner.memory.pipeline_rank import Chunk, PipelineRank, fullest_ranks
from nxd_memopt.planner.search.candidates import NOTHING_FIXED, require_settings, settings
from nxd_memopt.planner.search.fixed_options import FixedOptions
from nxd_memopt.planner.search.problem import PRECISIONS, SDPA_MULTIPLE, Problem, Setting, Shortage, kernels_of
from nxd_memopt.planner.sizes.rank_model import ModelPart, RankModel, rank_model
from nxd_memopt.planner.sizes.rank_sizes import DTYPE_BYTES, rank_sizes
from nxd_memopt.planner.sizes.states import StateLayout
from nxd_memopt.planner.timing.step_time import StepTime, step_time


@dataclass(frozen=True)
class Plan:
    """A setting with its predicted memory and time.

    Args:
        setting: options.
        memory: bytes by term, at the peak.
        usable_bytes: bytes of a device that tensors and the allocator's margin can use.
        usable_host_bytes: bytes of host memory that a rank can use.
        time: seconds by term.
        tokens_per_s: over all devices.
    """

    setting: Setting
    memory: StepMemory
    usable_bytes: int
    usable_host_bytes: int
    time: StepTime
    tokens_per_s: float

    @property
    def least_tokens_per_s(self) -> float:
        """Tokens per second at the slow end of the range of time."""
        return self.tokens_per_s * self.time.step_s / self.time.most_s

    @property
    def shortages(self) -> list[Shortage]:
        """Device memory (with the allocator's margin) or host memory that is exceeded; empty if the setting fits."""
        device = Shortage("device", self.memory.reserved_bytes, self.usable_bytes)
        host = Shortage("host", self.memory.host_bytes, self.usable_host_bytes)
        return [each for each in (device, host) if each.missing_bytes > 0]

    @property
    def fits(self) -> bool:
        """Whether device and host memory are large enough."""
        return not self.shortages

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the memory of device and host is exceeded."""
        return sum(each.missing_bytes for each in self.shortages)


def plans(problem: Problem, fixed: FixedOptions = NOTHING_FIXED) -> list[Plan]:
    """Return the settings that fit with margin, the fastest one first; with equal speed the smallest one.

    Of a step whose time is a range, the slow end counts.

    Args:
        problem: model, device and batch.
        fixed: options that all settings have.

    Raises:
        ValueError: no setting has the fixed options, or divides the global batch.
    """
    require_settings(problem, fixed)
    found: list[Plan] = []
    fits_without_offload: set[Setting] = set()
    fewest_stages: dict[Setting, int] = {}
    too_large: set[Setting] = set()
    for setting in settings(problem, fixed):
        # States go to the host only where they do not fit otherwise: it never makes a step faster.
        if setting.optimizer_offload_fraction and _without_offload(setting) in fits_without_offload:
            continue
        # A longer pipeline waits longer, and rarely sends less. Several stages of a rank keep more micro-batches, but
        # with one group of them a step has no gradients yet when most are kept.
        stages = setting.pipeline_model_parallel_size
        single = replace(setting, virtual_pipeline_model_parallel_size=1)
        undivided = replace(single, pipeline_model_parallel_size=1)
        keeps_more = _accumulation_steps(problem, setting) > stages
        if stages > 2 * fewest_stages.get(undivided, stages) or (keeps_more and single in too_large):
            continue
        # Most settings of large problems do not fit, so their other ranks and their time are not computed.
        usable = _usable_bytes(problem, setting)
        memory = _memory(problem, setting, usable)
        fits_device = memory.reserved_bytes <= usable
        if fits_device and memory.host_bytes <= problem.usable_host_bytes:
            found.append(_timed(problem, setting, memory))
            fits_without_offload.add(replace(setting, cuda_graph=False))
            fewest_stages.setdefault(undivided, stages)
        elif stages > 1:
            too_large.add(setting)
    return sorted(found, key=lambda plan: (-plan.least_tokens_per_s, plan.memory.reserved_bytes))


def _without_offload(setting: Setting) -> Setting:
    """Return the setting with all optimizer states on the device."""
    return replace(
        setting, optimizer_offload_fraction=0.0, optimizer_update_in_forward=False, store_param_remainders=False
    )


def evaluate(problem: Problem, setting: Setting) -> Plan:
    """Return the memory and time of a setting.

    Args:
        problem: model, device and batch.
        setting: options of the run.

    Raises:
        ValueError: the setting does not fit the model or the number of devices.
    """
    return _timed(problem, setting, _memory(problem, setting))


def planned_activations(problem: Problem, setting: Setting, rank: int = 0) -> list[tuple[Activations, int]]:
    """Return what the forward of a micro-batch keeps, and for how many micro-batches when most is kept.

    Args:
        problem: as ``evaluate``, and errors too.
        setting: as ``evaluate``.
        rank: position in the pipeline; there is an entry for each of its chunks.
    """
    kernels = kernels_of(problem, setting.memory)
    if setting.pipeline_model_parallel_size == 1:
        return [(activations(_model(problem, setting).sizes, setting.memory, kernels), 1)]
    (of_rank,) = _pipeline_ranks(problem, setting, [rank])
    kept = [activations(chunk.model.sizes, chunk.memory, kernels) for chunk in of_rank.chunks]
    numbers: list[list[int]] = []
    for own, chunk in enumerate(of_rank.chunks):
        numbers += [[other + (index == own) for index, other in enumerate(each.counts)] for each in chunk.others]
    sizes = [each.device_bytes for each in kept]
    return list(zip(kept, max(numbers, key=lambda counts: sum(map(mul, counts, sizes))), strict=True))


def _memory(problem: Problem, setting: Setting, limit: int | None = None) -> StepMemory:
    """Return the memory of a setting; arguments and errors as ``evaluate``.

    Args:
        limit: of a pipeline, the memory of the first rank above it; None: of the fullest rank.
    """
    if setting.pipeline_model_parallel_size == 1:
        return _memory_of_rank(problem, setting, _model(problem, setting))
    found: list[StepMemory] = []
    for each in _pipeline_ranks(problem, setting):
        memory = _memory_of_rank(problem, setting, each.model, each.chunks)
        found.append(replace(memory, moment=f"{memory.moment} on rank {each.rank} of the pipeline"))
        if limit is not None and memory.reserved_bytes > limit:
            break
    return max(found, key=lambda memory: memory.reserved_bytes)


def memory_by_stage(problem: Problem, setting: Setting) -> list[StepMemory]:
    """Return the memory of each rank of a pipeline, or of the only kind of rank; arguments as ``evaluate``."""
    if setting.pipeline_model_parallel_size == 1:
        return [_memory(problem, setting)]
    ranks = range(setting.pipeline_model_parallel_size)
    found = _pipeline_ranks(problem, setting, ranks)
    return [_memory_of_rank(problem, setting, each.model, each.chunks) for each in found]


def _memory_of_rank(problem: Problem, setting: Setting, model: RankModel, chunks: Sequence[Chunk] = ()) -> StepMemory:
    return step_memory(
        model,
        setting.memory,
        kernels_of(problem, setting.memory),
        _layout(problem, setting),
        accumulation_steps=_accumulation_steps(problem, setting),
        cuda_graph=setting.cuda_graph,
        chunks=chunks,
    )


def _pipeline_ranks(problem: Problem, setting: Setting, ranks: Iterable[int] | None = None) -> Iterator[PipelineRank]:
    """Yield ranks of a pipeline; None: of which one has the highest peak, and one the slowest stages."""
    stages = setting.stages_of(problem.model)
    if ranks is None:
        ranks = fullest_ranks(stages)
    micro_batches = _accumulation_steps(problem, setting)
    for rank in ranks:
        yield PipelineRank.of(stages[rank], setting.memory, micro_batches, lambda part: _model(problem, setting, part))


def _usable_bytes(problem: Problem, setting: Setting) -> int:
    return problem.device.usable_bytes(communicators=_communicators(problem, setting))


def _timed(problem: Problem, setting: Setting, memory: StepMemory) -> Plan:
    """Return a setting whose memory is known with its time; arguments and errors as ``evaluate``."""
    accumulation = _accumulation_steps(problem, setting)
    stages = setting.pipeline_model_parallel_size
    shares = [_model(problem, setting)]
    if stages > 1:
        shares = [each.model for each in _pipeline_ranks(problem, setting)]
    times = [
        step_time(
            share,
            setting.memory,
            _layout(problem, setting),
            memory,
            problem.device,
            dtype=PRECISIONS[problem.precision][0],
            accumulation_steps=accumulation,
            ranks=problem.devices,
            cuda_graph=setting.cuda_graph,
            stages=stages,
            chunks=setting.virtual_pipeline_model_parallel_size,
        )
        for share in shares
    ]
    time = max(times, key=lambda each: each.step_s)
    # The tensor-parallel ranks of a group work on the same sequences: D replicas x A micro-batches x B sequences.
    sequences = setting.micro_batch_size * _data_parallel_size(problem, setting) * accumulation
    tokens_per_s = problem.sequence_length * sequences / time.step_s
    usable_bytes = _usable_bytes(problem, setting)
    return Plan(setting, memory, usable_bytes, problem.usable_host_bytes, time, tokens_per_s)


def _data_parallel_size(problem: Problem, setting: Setting) -> int:
    """Return D, the number of data-parallel ranks."""
    name = "tensor_model_parallel_size"
    if setting.pipeline_model_parallel_size > 1:
        name += " x pipeline_model_parallel_size"
    return require_divisible("devices", problem.devices, name, setting.ranks_of_replica)


def _accumulation_steps(problem: Problem, setting: Setting) -> int:
    """Return the micro-batches of a rank in an optimizer step."""
    # Without a global batch a step has one micro-batch.
    if problem.global_batch_size is None:
        return 1
    sequences = setting.micro_batch_size * _data_parallel_size(problem, setting)
    return require_divisible("global batch", problem.global_batch_size, "B x D", sequences)


def _layout(problem: Problem, setting: Setting) -> StateLayout:
    """Return how weights, gradients and states are stored."""
    dtype, masters = PRECISIONS[problem.precision]
    return StateLayout(
        DTYPE_BYTES[dtype],
        master_weights=masters,
        sharding=setting.sharding,
        data_parallel_size=setting.shard_ranks or _data_parallel_size(problem, setting),
        optimizer_offload_fraction=setting.optimizer_offload_fraction,
        in_backward=setting.optimizer_in_backward,
        grad_reduce_in_fp32=setting.grad_reduce_in_fp32,
        update_in_forward=setting.optimizer_update_in_forward,
        staging_bytes=int(setting.optimizer_staging_gib * GIB),
        param_remainders=setting.store_param_remainders,
        expert_ranks=setting.expert_model_parallel_size,
        keeps_gathered=not setting.reshard_after_forward,
        overlaps_reduction=setting.overlap_grad_reduce,
    )


def _communicators(problem: Problem, setting: Setting) -> int:
    """Return the number of process groups of several ranks that a rank uses."""
    tensor, experts = setting.tensor_model_parallel_size, setting.expert_model_parallel_size
    replicas = _data_parallel_size(problem, setting)
    # Groups of the same ranks share a communicator: a group of one rank has none.
    sizes = [tensor, replicas, setting.pipeline_model_parallel_size]
    kv_replicas = problem.model.kv_replicas(tensor)
    if kv_replicas < tensor:
        sizes.append(kv_replicas)
    # Experts are divided over one group, and reduced over another.
    if experts > 1:
        sizes += [experts, replicas // experts]
    # Hybrid sharding: shards within an instance, reductions across instances.
    if setting.shard_ranks is not None and setting.shard_ranks < replicas:
        sizes += [setting.shard_ranks, replicas // setting.shard_ranks]
    return sum(size > 1 for size in sizes)


def shards_sequences(problem: Problem, setting: Setting) -> bool:
    """Return whether sequence parallelism is on: as the setting says, otherwise where it is possible."""
    # It has no drawback, but needs T to divide S.
    if setting.sequence_parallel_enabled is not None:
        return setting.sequence_parallel_enabled
    size = setting.tensor_model_parallel_size
    return size > 1 and problem.sequence_length % size == 0


def _model(problem: Problem, setting: Setting, part: ModelPart | None = None) -> RankModel:
    """Return the share of one rank, of ``part`` of the layers."""
    parallel = _parallel_config(
        setting.tensor_model_parallel_size,
        setting.expert_model_parallel_size,
        setting.reduce_dtype,
        sequence_parallel_enabled=shards_sequences(problem, setting),
    )
    sizes = rank_sizes(
        problem.model,
        parallel,
        sequence_length=problem.sequence_length,
        micro_batch_size=setting.micro_batch_size,
        dtype=PRECISIONS[problem.precision][0],
        moe=problem.moe,
        lora=problem.lora,
        fp8=problem.fp8,
    )
    return rank_model(problem.model, sizes, part)


# A search asks for the same options with every memory technique, and checking them takes about 60 calls.
@lru_cache(maxsize=512)
def _parallel_config(
    tensor: int, experts: int, reduce_dtype: Literal["float32"] | None, *, sequence_parallel_enabled: bool
) -> ParallelConfig:
    return ParallelConfig(
        tensor,
        sequence_parallel_enabled=sequence_parallel_enabled,
        reduce_dtype=reduce_dtype,
        expert_model_parallel_size=experts,
    )


def closest_to_fitting(problem: Problem, fixed: FixedOptions = NOTHING_FIXED) -> Plan:
    """Return the setting that exceeds the memory of device and host by the fewest bytes."""
    return min(
        (evaluate(problem, setting) for setting in settings(problem, fixed)),
        key=lambda plan: plan.excess_bytes,
    )


def _fastest_lean(problem: Problem, fixed: FixedOptions) -> Plan | None:
    """Return the fastest plan that fits among those with one sequence and full recompute, or None."""
    found: list[Plan] = []
    for setting in settings(problem, fixed):
        is_lean = setting.micro_batch_size == 1 and setting.memory.recompute_granularity == "full"
        if is_lean and not setting.cuda_graph:
            plan = evaluate(problem, setting)
            if plan.fits:
                found.append(plan)
    return max(found, key=lambda plan: plan.least_tokens_per_s, default=None)


def remedies(problem: Problem, fixed: FixedOptions = NOTHING_FIXED) -> list[str]:
    """Return changes of the problem with which something fits, each with its fastest setting."""
    changes: list[tuple[str, Problem]] = []
    # From the smallest change of each kind to the largest.
    for factor in (2, 4, 8, 16):
        changes.append((f"--devices {problem.devices * factor}", replace(problem, devices=problem.devices * factor)))
    if problem.precision == "bf16-mixed":
        changes.append(("--trainer.precision bf16-true (no fp32 masters)", replace(problem, precision="bf16-true")))
    for divisor in (2, 4, 8):
        length = problem.sequence_length // divisor
        if length >= SDPA_MULTIPLE:
            changes.append((f"--seq-length {length}", replace(problem, sequence_length=length)))
    found: list[str] = []
    kinds: set[str] = set()
    for text, changed in changes:
        # The first one of each kind that helps is shown.
        kind = text.split()[0]
        if kind in kinds:
            continue
        try:
            lean = _fastest_lean(changed, fixed)
        except ValueError:
            continue
        if lean is not None:
            kinds.add(kind)
            found.append(f"{text}: {lean.setting.describe()}")
    return found
