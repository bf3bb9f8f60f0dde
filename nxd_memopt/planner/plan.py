"""Which settings of a training run fit a device, how fast they are, and what to change if none fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nxd_memopt.config import MemoryConfig, ParallelConfig, require_divisible, require_one_of
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.planner.architectures import attention_windows, moe_layers, require_shardable, sizes
from nxd_memopt.planner.hardware import GIB, Device
from nxd_memopt.planner.layer_tensors import SINGLE_KERNELS, WINDOWED_KERNELS, Kernels
from nxd_memopt.planner.peak import RankModel, StepMemory, rank_model, step_memory
from nxd_memopt.planner.rank_sizes import DTYPE_BYTES
from nxd_memopt.planner.states import STAGING_BYTES, StateLayout
from nxd_memopt.planner.step_time import StepTime, step_time

PRECISIONS = {
    "32-true": ("float32", False),
    "bf16-true": ("bfloat16", False),
    "bf16-mixed": ("bfloat16", True),
    "16-mixed": ("float16", True),
}
"""``trainer.precision`` -> dtype of the parameters, and whether there are fp32 masters."""
TENSOR_PARALLEL_SIZES = {"trn1": (1, 2, 8, 32), "trn1n": (1, 2, 8, 32)}
"""Sizes of tensor-parallel groups that a device allows; powers of two elsewhere."""
MICRO_BATCHES = (1, 2, 4, 8)
_NKI_MULTIPLE = 2048
_SDPA_MULTIPLE = 512
_LARGEST_FLASH_HEAD = 128
_HEAD_GROUPS = 4


@dataclass(frozen=True)
class Problem:
    """What is to be trained, and where.

    Args:
        config: the model's config, complete (``model_configs.with_defaults``).
        device: one rank's device.
        devices: number of ranks.
        sequence_length: S.
        global_batch_size: sequences per optimizer step; None: one micro-batch per rank.
        precision: ``trainer.precision``.
        isolate_documents: attention restarts at each document of a sequence.
        stages: ZeRO stages that the training program offers.
        offloads_optimizer: the training program offers ``optimizer_cpu_offload``.
        grad_reduce_in_fp32: ``data_parallel.grad_reduce_in_fp32``; False rounds sums of gradients.
        device_gib: memory of the device in GiB, instead of the table's.
        host_gib: host memory of a rank in GiB, instead of the table's.
        moe: options of experts; None: those of ``config``.
        tensor_model_parallel_size: T of all settings; None tries every size.

    Raises:
        ValueError: a number is below 1, or the precision is unknown.
    """

    config: dict[str, Any]
    device: Device
    devices: int
    sequence_length: int
    global_batch_size: int | None = None
    precision: str = "bf16-mixed"
    isolate_documents: bool = False
    stages: tuple[str, ...] = ("none", "zero1")
    offloads_optimizer: bool = False
    grad_reduce_in_fp32: bool = True
    device_gib: float | None = None
    host_gib: float | None = None
    moe: MoEConfig | None = None
    tensor_model_parallel_size: int | None = None

    def __post_init__(self) -> None:
        require_one_of("precision", self.precision, tuple(PRECISIONS))
        for name in ("devices", "sequence_length", "global_batch_size", "tensor_model_parallel_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2, got {self.sequence_length}: labels are next tokens")
        for name in ("device_gib", "host_gib"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if self.precision == "16-mixed" and self.device.kind == "neuron":
            raise ValueError("precision 16-mixed scales the loss, which Trainium does not need: use bf16-mixed")

    @property
    def placed_device(self) -> Device:
        """The device, with the memory that was given."""
        device = self.device
        if self.device_gib is not None:
            device = replace(device, memory_gib=self.device_gib)
        if self.host_gib is not None:
            device = replace(device, host_memory_gib=self.host_gib)
        return device

    @property
    def usable_bytes(self) -> int:
        """Bytes of the device that tensors can use."""
        return self.placed_device.usable_bytes(ranks=self.devices)

    @property
    def usable_host_bytes(self) -> int:
        """Bytes of host memory for offloading: nine tenths of a rank's share."""
        return int(self.placed_device.host_memory_gib * GIB * 0.9)


@dataclass(frozen=True)
class Setting:
    """Options of a run that the planner chooses.

    Args:
        tensor_model_parallel_size: T; sequence parallelism is on above 1 if T divides S.
        sharding: ZeRO stage.
        micro_batch_size: B.
        memory: memory techniques.
        cuda_graph: forward and backward as one CUDA graph.
        optimizer_offload_fraction: part of the optimizer's states in host memory.
        sequence_parallel_enabled: None: where it is possible.
        shard_ranks: data-parallel ranks over which ``sharding`` splits; None: all of them.
        grad_reduce_in_fp32: sums of gradients with master weights are fp32.
        optimizer_update_in_forward: offloaded states are updated in the next forward.
        optimizer_staging_gib: device memory for offloaded states on their way.
        optimizer_in_backward: each parameter is updated in backward, which frees its gradient.
        expert_model_parallel_size: EP, of the data-parallel ranks.
        reduce_dtype: ``parallel.reduce_dtype``, of reductions over tensor-parallel ranks.
        reshard_after_forward: zero3 frees gathered weights between forward and backward.
        overlap_grad_reduce: without sharding, gradients are averaged during backward.
    """

    tensor_model_parallel_size: int = 1
    sharding: str = "none"
    micro_batch_size: int = 1
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    cuda_graph: bool = False
    optimizer_offload_fraction: float = 0.0
    sequence_parallel_enabled: bool | None = None
    shard_ranks: int | None = None
    grad_reduce_in_fp32: bool = True
    optimizer_update_in_forward: bool = False
    optimizer_staging_gib: float = STAGING_BYTES / GIB
    optimizer_in_backward: bool = False
    expert_model_parallel_size: int = 1
    reduce_dtype: Literal["float32"] | None = None
    reshard_after_forward: bool = True
    overlap_grad_reduce: bool = False

    def describe(self) -> str:
        """Return the setting in words."""
        parts = [f"T={self.tensor_model_parallel_size}", f"B={self.micro_batch_size}"]
        if self.expert_model_parallel_size > 1:
            parts.append(f"EP={self.expert_model_parallel_size}")
        if self.sharding != "none":
            parts.append(self.sharding)
        parts.append(_describe_recompute(self.memory))
        if self.memory.mlp_tile_tokens is not None:
            parts.append("MLP tiles")
        if self.memory.attention_head_groups is not None:
            parts.append(f"{self.memory.attention_head_groups} groups of heads")
        if self.optimizer_offload_fraction:
            where = ", updated in forward" if self.optimizer_update_in_forward else ""
            parts.append(f"optimizer offload {self.optimizer_offload_fraction:.0%}{where}")
        if self.optimizer_in_backward:
            parts.append("optimizer in backward")
        if self.cuda_graph:
            parts.append("CUDA graph")
        return ", ".join(parts)


def _describe_recompute(memory: MemoryConfig) -> str:
    parts = ["no recompute"]
    if memory.recompute_granularity == "selective":
        where = ""
        if memory.recompute_num_layers is not None:
            where = f" of {memory.recompute_num_layers} layers"
        parts = [f"recompute {'+'.join(memory.recompute_modules or ())}{where}"]
    elif memory.recompute_granularity == "full":
        method = ""
        if memory.recompute_method is not None:
            method = f" {memory.recompute_method} {memory.recompute_num_layers or ''}".rstrip()
        parts = [f"recompute full{method}"]
    if memory.recompute_keep_core_attn:
        number = memory.recompute_keep_core_attn_num_layers
        parts.append("attention kept" if number is None else f"attention of {number} layers kept")
    if memory.cpu_offloading_weights:
        parts.append(f"weights of {memory.cpu_offloading_num_layers} layers on the host")
    if memory.cpu_offloading_activations:
        parts.append("checkpoints on the host")
    elif memory.cpu_offloading_num_layers and not memory.cpu_offloading_weights:
        parts.append(f"{memory.cpu_offloading_num_layers} layers on the host")
    return ", ".join(parts)


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
        without = replace(setting, optimizer_offload_fraction=0.0, optimizer_update_in_forward=False)
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
    return Plan(setting, used, time, tokens / time.step_s, problem.usable_bytes, problem.usable_host_bytes)


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
    )


def kernels_of(problem: Problem, memory: MemoryConfig) -> Kernels:
    """Return the kernels that the training program will use on the device.

    CPUs: plain operations and PyTorch's SDPA. GPUs: the Triton kernels, and a flash kernel. trn1:
    NKI's flash kernel, trn2 and trn3: the one of PyTorch's SDPA, which need certain lengths and take
    no bounds of documents; else tiles.
    """
    fused = problem.device.kind == "cuda"
    if memory.attention_backend != "auto":
        if _has_windows(problem) and memory.attention_backend not in WINDOWED_KERNELS:
            raise ValueError(
                f"attention_backend {memory.attention_backend!r} has no attention windows, and the model's are below "
                f"the sequence length {problem.sequence_length}: use one of {['auto', *WINDOWED_KERNELS]}, or set "
                "sliding_window to null"
            )
        return Kernels(fused, memory.attention_backend, compiles_steps=problem.device.kind == "neuron")
    if fused:
        if PRECISIONS[problem.precision][0] == "float32":
            return Kernels(fused, "efficient")
        return Kernels(fused, "flash4")
    if problem.device.kind == "cpu":
        return Kernels(fused, "sdpa")
    head_dim = sizes(problem.config)["d"]
    name, multiple = ("nki", _NKI_MULTIPLE) if problem.device.name.startswith("trn1") else ("sdpa", _SDPA_MULTIPLE)
    suits = problem.sequence_length % multiple == 0 and head_dim <= _LARGEST_FLASH_HEAD
    # On TorchNeuron too: with compiled layers, and because no device was there to measure.
    return Kernels(fused, name if suits and not problem.isolate_documents else "tiled", compiles_steps=True)


def _has_windows(problem: Problem) -> bool:
    """Return whether a query of some layer sees fewer keys than the sequence has."""
    return any(each is not None and each < problem.sequence_length for each in attention_windows(problem.config))


def settings(problem: Problem) -> Iterator[Setting]:
    """Yield the settings that are tried."""
    is_gpu = problem.device.kind == "cuda"
    for size in tensor_parallel_sizes(problem):
        replicas = problem.devices // size
        stages = problem.stages if replicas > 1 else ("none",)
        if not is_gpu:
            stages = tuple(stage for stage in stages if stage in ("none", "zero1"))
        for batch in micro_batches(problem, replicas):
            for memory in memories(problem):
                for stage in stages:
                    setting = Setting(size, stage, batch, memory, grad_reduce_in_fp32=problem.grad_reduce_in_fp32)
                    for experts in expert_parallel_sizes(problem, replicas):
                        yield from _variants(problem, replace(setting, expert_model_parallel_size=experts))


def tensor_parallel_sizes(problem: Problem) -> list[int]:
    """Return the tensor-parallel sizes of the model, the device and the number of devices.

    Raises:
        ValueError: no size fits; the message has the reason of the smallest one.
    """
    allowed = TENSOR_PARALLEL_SIZES.get(problem.device.name)
    found: list[int] = []
    reason = f"devices {problem.devices} has no divisor that the model can be split by"
    for size in range(1, problem.devices + 1):
        if problem.devices % size or size > problem.device.ranks_per_host:
            continue
        if allowed is not None and size not in allowed:
            continue
        try:
            require_shardable(problem.config, size)
            groups = sizes(problem.config)["g"]
            if max(size, groups) % min(size, groups) == 0:
                found.append(size)
        except ValueError as error:
            reason = str(error)
    if not found:
        raise ValueError(reason)
    size = problem.tensor_model_parallel_size
    if size is None:
        return found
    if size not in found:
        raise ValueError(
            f"tensor_model_parallel_size {size} is not possible for this model on {problem.devices} x "
            f"{problem.device.name}: use one of {found}, or leave it out"
        )
    return [size]


def expert_parallel_sizes(problem: Problem, replicas: int) -> list[int]:
    """Return the expert-parallel sizes of the model and of ``replicas`` data-parallel ranks."""
    if not any(moe_layers(problem.config)):
        return [1]
    experts = sizes(problem.config)["E"]
    return [size for size in range(1, replicas + 1) if replicas % size == 0 and experts % size == 0]


def require_batch(problem: Problem) -> None:
    """Raise ``ValueError`` if no data-parallel size divides the global batch."""
    replicas = [problem.devices // size for size in tensor_parallel_sizes(problem)]
    if not any(micro_batches(problem, count) for count in replicas):
        raise ValueError(
            f"global batch {problem.global_batch_size} is not divisible by any data-parallel size of "
            f"{problem.devices} devices, {sorted(set(replicas))}: use a multiple of one of them, or other --devices"
        )


def micro_batches(problem: Problem, replicas: int) -> list[int]:
    """Return the micro-batch sizes that divide the global batch over the replicas."""
    if problem.global_batch_size is None:
        return [1]
    return [size for size in MICRO_BATCHES if problem.global_batch_size % (size * replicas) == 0]


def _variants(problem: Problem, setting: Setting) -> Iterator[Setting]:
    """Yield the setting, as a CUDA graph where that is possible, and with its states on the host."""
    if problem.device.kind != "cuda":
        yield setting
        return
    memory = setting.memory
    offloads = memory.cpu_offloading_num_layers > 0 or memory.cpu_offloading_activations
    # A graph has a fixed routing and no host code.
    has_experts = any(moe_layers(problem.config))
    if not offloads and not has_experts and setting.sharding in ("none", "zero1"):
        yield replace(setting, cuda_graph=True)
    yield setting
    # Masters and moments are fp32 only with mixed precision.
    if problem.offloads_optimizer and problem.precision == "bf16-mixed" and setting.sharding in ("none", "zero1"):
        for fraction in (0.5, 1.0):
            yield replace(setting, optimizer_offload_fraction=fraction)
            # Sharded parameters are gathered all at once, and so cannot be updated layer by layer.
            if setting.sharding == "none":
                yield replace(setting, optimizer_offload_fraction=fraction, optimizer_update_in_forward=True)


def memories(problem: Problem) -> Iterator[MemoryConfig]:
    """Yield the memory techniques that are tried, without those that cannot help on the device."""
    depth = problem.config["num_hidden_layers"]
    is_gpu = problem.device.kind == "cuda"
    full: dict[str, Any] = {"recompute_granularity": "full"}
    yield MemoryConfig()
    has_experts = any(moe_layers(problem.config))
    modules = ("norm", "moe") if has_experts else ("norm", "mlp")
    selective: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": modules}
    for granularity in (selective, full):
        yield MemoryConfig(**granularity)
        for layers in sorted({depth // 4, depth // 2, depth * 3 // 4} - {0}):
            yield MemoryConfig(**granularity, recompute_method="block", recompute_num_layers=layers)
    is_kernel = kernels_of(problem, MemoryConfig()).attention in SINGLE_KERNELS and not _has_windows(problem)
    if is_kernel and is_gpu:
        yield MemoryConfig(**full, recompute_keep_core_attn=True)
    if depth > 3:
        yield MemoryConfig(**full, recompute_method="nested")
    if not is_gpu:
        return
    for layers in sorted({depth // 4, depth // 2} - {0}):
        yield MemoryConfig(cpu_offloading_num_layers=layers)
    yield MemoryConfig(**full, cpu_offloading_activations=True)
    # Matmuls of tiles of 32,768 tokens are as fast as those of the full sequence.
    if problem.sequence_length > 32768 and not has_experts:
        yield MemoryConfig(**full, mlp_tile_tokens="auto")
        yield MemoryConfig(**full, mlp_tile_tokens="auto", cpu_offloading_activations=True)
        if _has_head_groups(problem):
            yield MemoryConfig(
                **full, mlp_tile_tokens="auto", cpu_offloading_activations=True, attention_head_groups=_HEAD_GROUPS
            )


def _has_head_groups(problem: Problem) -> bool:
    """Return whether the heads of every tensor-parallel size can be computed in groups."""
    letters = sizes(problem.config)
    ranks = tensor_parallel_sizes(problem)[-1]
    queries = letters["h"] // ranks
    groups = max(1, letters["g"] // ranks)
    return queries % _HEAD_GROUPS == 0 and (groups % _HEAD_GROUPS == 0 or _HEAD_GROUPS % groups == 0)


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
        if length >= _SDPA_MULTIPLE:
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
