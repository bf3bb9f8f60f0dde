"""What is to be trained and where, the options of a setting, and the kernels that run there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nxd_memopt.architectures.model_spec import ModelSpec
from nxd_memopt.architectures.stages import RankStages, all_stages
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.options import require_one_of
from nxd_memopt.planner.hardware import GIB, Device
from nxd_memopt.planner.memory.layer_tensors import WINDOWED_KERNELS, Kernels
from nxd_memopt.planner.sizes.fp8_layers import LEAST_CAPABILITY, Fp8Layers
from nxd_memopt.planner.sizes.states import STAGING_BYTES
from nxd_memopt.planner.techniques.gpu_attention import PACKAGES, supported

PRECISIONS = {
    "32-true": ("float32", False),
    "bf16-true": ("bfloat16", False),
    "bf16-mixed": ("bfloat16", True),
    "16-mixed": ("float16", True),
}
"""``trainer.precision`` -> dtype of the parameters, and whether there are fp32 masters."""
NKI_MULTIPLE = 2048
SDPA_MULTIPLE = 512
_LARGEST_FLASH_HEAD = 128


def require_size(name: str, value: int | None, *, is_length: bool = False) -> None:
    """Raise ``ValueError`` if a number is below 1, or a sequence length below 2."""
    least, reason = 1, ""
    if is_length:
        least, reason = 2, ": labels are next tokens"
    if value is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}{reason}")


_LARGEST_GIB = 1_000_000


def require_memory(name: str, gib: float | None) -> None:
    """Raise ``ValueError`` if a size of memory is not above 0, or above the memory of any machine."""
    if gib is not None and not 0 < gib <= _LARGEST_GIB:
        raise ValueError(f"{name} must be above 0 and at most {_LARGEST_GIB:,}, got {gib}")


@dataclass(frozen=True)
class Problem:
    """What is to be trained, and where.

    Args:
        model: the model.
        device: one rank's device.
        devices: number of ranks.
        sequence_length: S.
        global_batch_size: sequences per optimizer step; None: one micro-batch per rank.
        precision: ``trainer.precision``.
        isolate_documents: attention restarts at each document of a sequence.
        stages: ZeRO stages that the training program offers.
        offloads_optimizer: the training program offers ``optimizer_offload_fraction``.
        grad_reduce_in_fp32: ``data_parallel.grad_reduce_in_fp32``; False rounds sums of gradients.
        moe: options of experts; None: the options of the model's config.
        lora: options of adapters, which are trained instead of the weights; None trains the weights.
        tensor_model_parallel_size: T of all settings; None tries every size.
        attention: implementation that ``attention_backend: auto`` takes in this process; None: the first of the
            device's that supports the model.
        fp8: decoder layers whose linear layers multiply in float8; None: none.

    Raises:
        ValueError: a number is below 1, the precision is unknown, or the device has no float8 matmuls.
    """

    model: ModelSpec
    device: Device
    devices: int
    sequence_length: int
    global_batch_size: int | None = None
    precision: str = "bf16-mixed"
    isolate_documents: bool = False
    stages: tuple[str, ...] = ("none", "zero1")
    offloads_optimizer: bool = False
    grad_reduce_in_fp32: bool = True
    moe: MoEConfig | None = None
    lora: LoraConfig | None = None
    tensor_model_parallel_size: int | None = None
    attention: str | None = None
    fp8: Fp8Layers | None = None

    def __post_init__(self) -> None:
        require_one_of("precision", self.precision, tuple(PRECISIONS))
        for name in ("devices", "global_batch_size", "tensor_model_parallel_size"):
            require_size(name, getattr(self, name))
        require_size("sequence_length", self.sequence_length, is_length=True)
        require_memory("memory_gib", self.device.memory_gib)
        if self.precision == "16-mixed" and self.device.kind == "neuron":
            raise ValueError("precision 16-mixed scales the loss, which Trainium does not need: use bf16-mixed")
        if self.fp8 is not None and self.device.compute_capability < LEAST_CAPABILITY:
            raise ValueError(
                f"trainer.fp8 needs an NVIDIA GPU of compute capability {LEAST_CAPABILITY} or higher, which "
                f"{self.device.name} is not: set it to null, or use h100, h200 or b200"
            )

    @property
    def usable_bytes(self) -> int:
        """Bytes of the device that tensors can use, if all ranks are in one tensor- or data-parallel group."""
        return self.device.usable_bytes(communicators=min(1, self.devices - 1))

    @property
    def usable_host_bytes(self) -> int:
        """Bytes of host memory for offloading: nine tenths of a rank's share."""
        return int(self.device.host_memory_gib * GIB * 0.9)


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
        store_param_remainders: offloaded masters are what they have beyond the bf16 parameters.
        optimizer_in_backward: each parameter is updated in backward, which frees its gradient.
        expert_model_parallel_size: EP, of the data-parallel ranks.
        reduce_dtype: ``parallel.reduce_dtype``, of reductions over tensor-parallel ranks.
        reshard_after_forward: zero3 frees gathered weights between forward and backward.
        overlap_grad_reduce: without sharding, gradients are averaged during backward.
        pipeline_model_parallel_size: P, ranks that share the stack of layers.
        virtual_pipeline_model_parallel_size: V, stages of each of them.
        pipeline_model_parallel_layout: layers of each stage; None: balanced.
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
    store_param_remainders: bool = False
    optimizer_in_backward: bool = False
    expert_model_parallel_size: int = 1
    reduce_dtype: Literal["float32"] | None = None
    reshard_after_forward: bool = True
    overlap_grad_reduce: bool = False
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    pipeline_model_parallel_layout: tuple[int, ...] | None = None

    @property
    def ranks_of_replica(self) -> int:
        """T * P, the ranks that have one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    def stages_of(self, model: ModelSpec) -> tuple[RankStages, ...]:
        """Return the layers of each rank of the pipeline."""
        parallel = ParallelConfig(
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size,
            pipeline_model_parallel_layout=self.pipeline_model_parallel_layout,
        )
        return all_stages(model, parallel)

    def describe(self) -> str:
        """Return the setting in words."""
        parts = [f"T={self.tensor_model_parallel_size}"]
        if self.pipeline_model_parallel_size > 1:
            parts.append(f"P={self.pipeline_model_parallel_size}")
            if self.virtual_pipeline_model_parallel_size > 1:
                parts.append(f"V={self.virtual_pipeline_model_parallel_size}")
        parts.append(f"B={self.micro_batch_size}")
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
            parts.append(f"optimizer offload {self.optimizer_offload_fraction:.0%}")
            if self.optimizer_update_in_forward:
                parts.append("updated in forward")
            if self.store_param_remainders:
                parts.append("remainders")
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
        number = memory.recompute_keep_core_attn
        kept = "attention kept"
        if number != "all":
            kept = f"attention of {number} layers kept"
        parts.append(kept)
    if memory.cpu_offloading_weights:
        parts.append(f"weights of {memory.cpu_offloading_num_layers} layers on the host")
    # Weights in host memory have a part of their own.
    if memory.cpu_offloading_activations:
        parts.append("checkpoints on the host")
    elif memory.cpu_offloading_num_layers and not memory.cpu_offloading_weights:
        parts.append(f"{memory.cpu_offloading_num_layers} layers on the host")
    return ", ".join(parts)


def kernels_of(problem: Problem, memory: MemoryConfig) -> Kernels:
    """Return the kernels that the training program will use on the device.

    CPUs: plain operations and PyTorch's SDPA. GPUs: the Triton kernels, and the first attention of
    ``gpu_attention`` that supports the model. trn1: NKI's flash kernel, trn2 and trn3: the one of PyTorch's
    SDPA, which need certain lengths and take no bounds of documents; else tiles.

    Raises:
        ValueError: the named attention has no windows, or windows and dropout occur together on a GPU.
    """
    kind = problem.device.kind
    name = memory.attention_backend
    masks_windows = kind == "cpu" and name == "sdpa"
    if name != "auto":
        # Models refuse it when they are built, whatever the length is.
        if problem.model.has_windows and name not in WINDOWED_KERNELS and not masks_windows:
            raise ValueError(
                f"attention_backend {name!r} has no attention windows, and the model has some: use one of "
                f"{['auto', *WINDOWED_KERNELS]}, or set sliding_window to null"
            )
    elif problem.attention is not None:
        name = problem.attention
    elif kind == "cuda":
        name = _gpu_kernels(problem)[0]
    elif kind == "cpu":
        name = "sdpa"
    else:
        name = _neuron_kernel(problem)
    # A layer with a window is built with tiles, also if the sequence fits the window, or with the CPU's named sdpa.
    keeping = memory.layers_keeping_attention(len(problem.model.windows))
    if not masks_windows and any(problem.model.windows[layer] is not None for layer in keeping):
        raise ValueError(
            "recompute_keep_core_attn needs attention by one operator, and layers with attention windows are built "
            "with tiles, whatever the length: leave it out, or set sliding_window to null"
        )
    # Tiles have windows and no dropout, kernels dropout and no windows.
    if kind == "cuda" and name != "math" and has_windows(problem) and problem.model.attention_dropout > 0:
        raise ValueError(
            f"attention_dropout {problem.model.attention_dropout} with attention windows is planned with "
            "attention_backend 'math' only, the one implementation of both: name it, or set attention_dropout to 0"
        )
    # On TorchNeuron too: with compiled layers, and because no device was there to measure.
    return Kernels(
        kind == "cuda",
        name,
        compiles_steps=kind == "neuron",
        in_graphs=problem.device.backend == "xla",
        masks_windows=masks_windows,
    )


def _gpu_kernels(problem: Problem) -> list[str]:
    """Return the attention implementations of the GPU that support the model, in order of preference."""
    return supported(
        int(problem.device.compute_capability),
        dtype=PRECISIONS[problem.precision][0],
        head_dim=problem.model.head_dim,
        packed=problem.isolate_documents,
        dropout_p=problem.model.attention_dropout,
    )


def _neuron_kernel(problem: Problem) -> str:
    """Return the attention implementation of a NeuronCore."""
    name, multiple = "sdpa", SDPA_MULTIPLE
    if problem.device.backend == "xla":
        name, multiple = "nki", NKI_MULTIPLE
    suits = problem.sequence_length % multiple == 0 and problem.model.head_dim <= _LARGEST_FLASH_HEAD
    # The flash kernels take no bounds of documents.
    if not suits or problem.isolate_documents:
        return "tiled"
    return name


def attention_notes(problem: Problem, setting: Setting) -> list[str]:
    """Return what a plan assumes about a GPU's attention, and the temporary tensors that it does not count."""
    if problem.device.kind != "cuda":
        return []
    found: list[str] = []
    name = kernels_of(problem, setting.memory).attention
    if setting.memory.attention_backend == "auto" and problem.attention is None and name in PACKAGES:
        instead = next(each for each in _gpu_kernels(problem) if each not in PACKAGES)
        found.append(
            f"attention is planned as {name}, of the package {PACKAGES[name]}; where it is not installed, {instead} "
            "runs, with other temporary tensors"
        )
    if name == "tiled" or (has_windows(problem) and name != "math"):
        found.append("the tiles of attention have temporary tensors that the plan does not count on GPUs")
    return found


def has_windows(problem: Problem) -> bool:
    """Return whether a query of some layer sees fewer keys than the sequence has."""
    return any(each is not None and each < problem.sequence_length for each in problem.model.windows)


@dataclass(frozen=True)
class Shortage:
    """Memory that a plan needs beyond what there is.

    Args:
        place: ``device`` or ``host``.
        planned_bytes: what the plan needs there.
        usable_bytes: what a rank can use there.
    """

    place: Literal["device", "host"]
    planned_bytes: int
    usable_bytes: int

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the plan exceeds the memory."""
        return self.planned_bytes - self.usable_bytes

    def describe(self) -> str:
        """Return both figures in words."""
        what = "of host memory for each rank"
        if self.place == "device":
            what = "that tensors can use on each device"
        return f"{self.planned_bytes / GIB:.2f} GiB of {self.usable_bytes / GIB:.2f} GiB {what}"
