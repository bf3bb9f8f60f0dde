"""Which settings of a training run fit a device, how fast they are, and what to change if none fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nxd_memopt.config import MemoryConfig, ParallelConfig, require_divisible
from nxd_memopt.planner.candidates import require_batch, settings
from nxd_memopt.planner.fragments import fragment_bytes
from nxd_memopt.planner.hardware import GIB
from nxd_memopt.planner.peak import StepMemory, step_memory
from nxd_memopt.planner.problem import PRECISIONS, SDPA_MULTIPLE, Problem, Setting, kernels_of
from nxd_memopt.planner.rank_model import RankModel, rank_model
from nxd_memopt.planner.rank_sizes import DTYPE_BYTES
from nxd_memopt.planner.states import StateLayout
from nxd_memopt.planner.step_time import StepTime, step_time


@dataclass(frozen=True)
class Plan:
    """A setting with its predicted memory and time.

    Args:
        setting: options.
        memory: bytes by term, at the peak.
        time: seconds by term.
        tokens_per_s: over all devices.
        usable_bytes: bytes of a device that tensors can use.
        usable_host_bytes: bytes of host memory that a rank can use.
    """

    setting: Setting
    memory: StepMemory
    time: StepTime
    tokens_per_s: float
    usable_bytes: int
    usable_host_bytes: int

    @property
    def fits(self) -> bool:
        """Whether device and host memory are large enough."""
        return self.memory.device_bytes <= self.usable_bytes and self.memory.host_bytes <= self.usable_host_bytes


Models = dict[tuple[int, int, int, bool | None, str | None], RankModel]
"""Shares of one rank by tensor- and expert-parallel size, micro-batch size, sequence parallelism and dtype of sums."""


def plans(problem: Problem) -> list[Plan]:
    """Return the settings that fit, the fastest one first; with equal speed the smallest one."""
    require_batch(problem)
    models: Models = {}
    found: list[Plan] = []
    resident: set[Setting] = set()
    too_large: set[Setting] = set()
    for setting in settings(problem):
        # Micro-batches come in ascending order: what is too large with one is so with all larger ones.
        if replace(setting, micro_batch_size=1) in too_large:
            continue
        # States go to the host only where they do not fit otherwise: it never makes a step faster.
        without = replace(
            setting, optimizer_offload_fraction=0.0, optimizer_update_in_forward=False, store_param_remainders=False
        )
        if setting.optimizer_offload_fraction and without in resident:
            continue
        plan = evaluate(problem, setting, models)
        if plan.fits:
            found.append(plan)
            resident.add(replace(setting, cuda_graph=False))
        else:
            too_large.add(replace(setting, micro_batch_size=1))
    return sorted(found, key=lambda plan: (-plan.tokens_per_s, plan.memory.device_bytes))


def evaluate(problem: Problem, setting: Setting, models: Models | None = None) -> Plan:
    """Return the memory and time of a setting.

    Args:
        problem: model, device and batch.
        setting: options of the run.
        models: shares of the model that other settings of the same problem have computed.

    Raises:
        ValueError: the setting does not fit the model or the number of devices.
    """
    size = setting.tensor_model_parallel_size
    replicas = require_divisible("devices", problem.devices, "tensor_model_parallel_size", size)
    dtype, masters = PRECISIONS[problem.precision]
    sequences = setting.micro_batch_size * replicas
    accumulation = 1
    if problem.global_batch_size is not None:
        accumulation = require_divisible("global batch", problem.global_batch_size, "B x D", sequences)
    layout = StateLayout(
        DTYPE_BYTES[dtype],
        master_weights=masters,
        sharding=setting.sharding,
        data_parallel_size=setting.shard_ranks or replicas,
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
    experts = setting.expert_model_parallel_size
    key = (size, experts, setting.micro_batch_size, setting.sequence_parallel_enabled, setting.reduce_dtype)
    models = {} if models is None else models
    if key not in models:
        models[key] = _model(problem, setting, dtype)
    model = models[key]
    device = problem.placed_device
    kernels = kernels_of(problem, setting.memory)
    used = step_memory(
        model,
        setting.memory,
        kernels,
        layout,
        accumulation_steps=accumulation,
        cuda_graph=setting.cuda_graph,
    )
    time = step_time(
        model,
        setting.memory,
        layout,
        used,
        device,
        dtype=dtype,
        accumulation_steps=accumulation,
        ranks=problem.devices,
        cuda_graph=setting.cuda_graph,
    )
    tokens = problem.sequence_length * sequences * accumulation
    return Plan(setting, used, time, tokens / time.step_s, _usable_bytes(problem, used), problem.usable_host_bytes)


def _usable_bytes(problem: Problem, used: StepMemory) -> int:
    """Return the bytes that tensors can use: fewer where the allocator's pages have more holes than usual."""
    device = problem.placed_device
    # What does not fit anyway is compared with what others can use.
    if device.kind != "cuda" or used.device_bytes > problem.usable_bytes:
        return problem.usable_bytes
    usual = fragment_bytes(device.memory_bytes, MemoryConfig())
    return problem.usable_bytes - max(0, used.fragment_bytes - usual)


def _model(problem: Problem, setting: Setting, dtype: str) -> RankModel:
    size = setting.tensor_model_parallel_size
    # Sequence parallelism has no drawback, but needs T to divide S.
    sharded = setting.sequence_parallel_enabled
    if sharded is None:
        sharded = size > 1 and problem.sequence_length % size == 0
    return rank_model(
        problem.config,
        ParallelConfig(
            size,
            sequence_parallel_enabled=sharded,
            reduce_dtype=setting.reduce_dtype,
            expert_model_parallel_size=setting.expert_model_parallel_size,
        ),
        sequence_length=problem.sequence_length,
        micro_batch_size=setting.micro_batch_size,
        dtype=dtype,
        moe=problem.moe,
        lora=problem.lora,
    )


def smallest(problem: Problem) -> Plan:
    """Return the setting that exceeds the memory of device and host by the fewest bytes."""

    def excess(plan: Plan) -> int:
        return max(0, plan.memory.device_bytes - plan.usable_bytes) + max(
            0, plan.memory.host_bytes - plan.usable_host_bytes
        )

    models: Models = {}
    return min((evaluate(problem, setting, models) for setting in settings(problem)), key=excess)


def _leanest(problem: Problem) -> Plan | None:
    """Return the fastest plan that fits among those with one sequence and full recompute, or None."""
    models: Models = {}
    found: list[Plan] = []
    for setting in settings(problem):
        is_lean = setting.micro_batch_size == 1 and setting.memory.recompute_granularity == "full"
        if is_lean and not setting.cuda_graph:
            plan = evaluate(problem, setting, models)
            if plan.fits:
                found.append(plan)
    return max(found, key=lambda plan: plan.tokens_per_s, default=None)


def remedies(problem: Problem) -> list[str]:
    """Return changes of the problem with which something fits, each with its fastest setting."""
    changes: list[tuple[str, Problem]] = []
    for factor in (2, 4, 8, 16):
        changes.append((f"--devices {problem.devices * factor}", replace(problem, devices=problem.devices * factor)))
    if problem.precision == "bf16-mixed":
        changes.append(("--precision bf16-true (no fp32 masters)", replace(problem, precision="bf16-true")))
    for divisor in (2, 4, 8):
        length = problem.sequence_length // divisor
        if length >= SDPA_MULTIPLE:
            changes.append((f"--seq-length {length}", replace(problem, sequence_length=length)))
    found: list[str] = []
    kinds: set[str] = set()
    for text, changed in changes:
        # The smallest change of each kind that helps.
        kind = text.split()[0]
        if kind in kinds:
            continue
        try:
            leanest = _leanest(changed)
        except ValueError:
            continue
        if leanest is not None:
            kinds.add(kind)
            found.append(f"{text}: {leanest.setting.describe()}")
    return found
