"""Request and answer of the measuring process, exchanged as JSON files; ``request_of`` makes one of a run's options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.architectures.stages import all_stages
from nxd_memopt.certify.measure.measurement import Measurement
from nxd_memopt.certify.measure.survival import Survival
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.planner.hardware import TRAINIUM

if TYPE_CHECKING:
    from nxd_memopt.training.config.train_config import TrainConfig

MEASURED: dict[tuple[str, str], tuple[Any, ...]] = {
    ("trainer", "compile"): (None,),
    ("trainer", "fp8"): (None,),
    ("optimizer", "optimizer_offload_fraction"): (0.0,),
    ("optimizer", "overlap_grad_reduce"): (False,),
    ("optimizer", "in_backward"): (False,),
    ("data_parallel", "sharding"): ("none", "zero1"),
    ("parallel", "pipeline_model_parallel_size"): (1,),
    ("data_parallel", "grad_reduce_in_fp32"): (None, True),
    ("lora", "lora_rank"): (None,),
    ("memory", "cpu_offloading_num_layers"): (0,),
    ("memory", "cpu_offloading_activations"): (False,),
    ("memory", "cpu_offloading_weights"): (False,),
    ("memory", "mlp_tile_tokens"): (None,),
    ("memory", "attention_head_groups"): (None,),
    ("memory", "fused_linear_cross_entropy"): (True,),
    ("memory", "recompute_keep_core_attn"): (False, "all"),
}
"""Options that change a step's memory or collectives -> values with which a simulated rank measures the step.

Other values are planned: the step is measured with the last value, and the certificate names the option."""
_CPU_ATTENTION = ("auto", "sdpa", "tiled", "math")


@dataclass(frozen=True)
class Request:
    """Training step to measure.

    Args:
        config: Hugging Face model configuration as plain data.
        parallel: tensor, sequence and expert parallelism.
        memory: memory techniques.
        sequence_length: S, tokens per sequence.
        micro_batch_size: B, sequences per micro-batch.
        dtype: name of a torch dtype.
        backend: ``xla``, ``cpu`` or ``cuda``.
        layer_counts: numbers of decoder layers to measure.
        isolate_documents: rows contain several documents, which do not attend to each other.
        moe: options of a model with experts; None for a dense model.
        planned: what the run has and the measured step does not have; its memory is planned.
    """

    config: dict[str, Any]
    parallel: ParallelConfig
    memory: MemoryConfig
    sequence_length: int
    micro_batch_size: int
    dtype: str
    backend: str
    layer_counts: tuple[int, ...]
    isolate_documents: bool = False
    moe: MoEConfig | None = None
    planned: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Request:
        """Return the request of plain data from ``dataclasses.asdict``, in which JSON has turned tuples into lists."""
        modules, moe = data["memory"]["recompute_modules"], data["moe"]
        parsed: dict[str, Any] = {"layer_counts": tuple(data["layer_counts"]), "planned": tuple(data["planned"])}
        parsed["parallel"] = ParallelConfig(**data["parallel"])
        parsed["memory"] = MemoryConfig(**data["memory"] | {"recompute_modules": modules and tuple(modules)})
        if moe is not None:
            frequency = moe["moe_layer_freq"]
            if isinstance(frequency, list):
                frequency = tuple(frequency)
            parsed["moe"] = MoEConfig(**moe | {"moe_layer_freq": frequency})
        return cls(**data | parsed)


def request_of(
    config: TrainConfig,
    model: dict[str, Any],
    *,
    backend: str,
    device: str,
    layer_counts: Sequence[int] | None,
    plan_refusal: str | None = None,
) -> Request:
    """Return what to measure for one micro-batch of a run on one rank.

    Args:
        config: options of the run.
        model: its model's complete config.
        backend: see ``Request``.
        device: name of the device that the certificate is for.
        layer_counts: the depths that are measured; None chooses them.
        plan_refusal: why the memory of the run is not planned; None if it is.

    Raises:
        ValueError: the step is neither measured nor planned, or an option contradicts another one.
    """
    if config.auto_memory:
        raise ValueError(
            "memory: auto is chosen on the device when the run starts: nxd-memopt plan --write FILE chooses it now, "
            "for a certificate"
        )
    memory, planned = _measured_memory(config, backend, is_planned=plan_refusal is None)
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size > 1:
        # As many layers as the rank with the most has, with embedding and head.
        layers = max(len(each.layers) for each in all_stages(model_spec(model), parallel))
        model = {**model, "num_hidden_layers": layers}
        parallel = replace(
            parallel,
            pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=None,
            pipeline_model_parallel_layout=None,
        )
    moe = _experts(config, model)
    if moe is not None and not moe.moe_pad_expert_input_to_capacity and moe.moe_expert_block_size is None:
        moe = _static_form(moe, device)
        planned.append("rows of experts that depend on the routing (measured padded to capacities)")
    # On Trainium isolation selects tiled attention, and an eager measurement has no values to take the bounds from.
    # Kernels of GPUs take the bounds of documents: the step has the same activations without them.
    is_isolated = config.data.isolate_documents
    if is_isolated and backend != "xla" and device in TRAINIUM:
        planned.append("data.isolate_documents true")
    # A certificate of another step than the one that runs would be worse than none. An eager step on the CPU has the
    # CPU's attention and temporaries; other devices have their own.
    unmeasured = list(planned)
    if backend != "xla" and device != "cpu":
        unmeasured.append(f"the memory of {device}")
    # Only the plan knows whether the device's attention is one operator, whose results can be kept.
    if memory.recompute_keep_core_attn:
        unmeasured.append("memory.recompute_keep_core_attn")
    if unmeasured and plan_refusal is not None:
        raise ValueError(f"no simulated rank measures {'; '.join(unmeasured)}, and it is not planned: {plan_refusal}")
    # XLA:CPU widens bf16 to fp32, which would double the measured bytes. fp16 has the same size
    # and stays fp16.
    dtype = config.dtype
    if backend == "xla" and dtype == "bfloat16":
        dtype = "float16"
    return Request(
        config=model,
        parallel=parallel,
        memory=memory,
        sequence_length=config.data.seq_length,
        micro_batch_size=config.data.micro_batch_size,
        dtype=dtype,
        backend=backend,
        layer_counts=_depths(memory, model["num_hidden_layers"], layer_counts),
        isolate_documents=is_isolated and backend == "xla",
        moe=moe,
        planned=tuple(planned),
    )


def _measured_memory(config: TrainConfig, backend: str, *, is_planned: bool) -> tuple[MemoryConfig, list[str]]:
    """Return the memory techniques of the measured step, and the options of the run that it does not have."""
    planned: list[str] = []
    replaced: dict[str, Any] = {}
    for (section, name), measured in MEASURED.items():
        value = getattr(getattr(config, section), name)
        if value in measured:
            continue
        planned.append(f"{section}.{name} {str(value).lower()}")
        if section == "memory":
            replaced[name] = measured[-1]
    memory = config.memory
    if backend != "xla" and memory.attention_backend not in _CPU_ATTENTION:
        planned.append(f"memory.attention_backend {memory.attention_backend}")
        replaced["attention_backend"] = "auto"
    # XLA chains the collectives of both recomputations, which no formula counts.
    if backend == "xla" and memory.recompute_method == "nested":
        planned.append("memory.recompute_method nested")
        replaced |= {"recompute_method": None, "recompute_num_layers": None}
    # With planned memory one recomputed layer next to others shows as much as twenty, in a tenth of the time.
    if backend != "xla" and is_planned and memory.recompute_method == "block":
        replaced["recompute_num_layers"] = 1
    return replace(memory, **replaced), planned


def _experts(config: TrainConfig, model: dict[str, Any]) -> MoEConfig | None:
    """Return the options of a model with experts, None for a dense model.

    Raises:
        ValueError: the options contradict the model, or certify measures no such model.
    """
    from nxd_memopt.architectures.model_spec import moe_layers

    if not any(moe_layers(model)):
        for name in config.moe.given():
            raise ValueError(
                f"moe.{name} needs a model with experts, and model_type is {model['model_type']}: leave it out"
            )
        return None
    # Imports torch, which certificates of dense models do without in this process.
    from nxd_memopt.modules.moe.gpt_neox_config import config_of
    from nxd_memopt.training.config.moe import resolve_options

    moe = resolve_options(config.moe, config_of(model))
    assert moe is not None
    if moe.moe_layer_freq != 1:
        raise ValueError(
            f"moe_layer_freq {moe.moe_layer_freq} mixes dense layers and layers with experts, which need "
            "different memory: certify measures models whose layers all have experts"
        )
    return moe


def _static_form(moe: MoEConfig, device: str) -> MoEConfig:
    """Return the options of experts of fixed shapes, which are measured for rows that depend on the routing.

    Raises:
        ValueError: ``device`` is Trainium, which compiles fixed shapes.
    """
    if device in TRAINIUM:
        raise ValueError(
            f"the rows of an expert depend on the routing, and {device} compiles fixed shapes: set "
            "moe.moe_expert_block_size to 128, or moe.moe_expert_capacity_factor to 1.25 and "
            "moe.moe_pad_expert_input_to_capacity to true"
        )
    # Capacities of factor 1 are the rows of a balanced routing, with the same dispatcher.
    factor = moe.moe_expert_capacity_factor or 1.0
    return replace(moe, moe_expert_capacity_factor=factor, moe_pad_expert_input_to_capacity=True)


def _depths(memory: MemoryConfig, depth: int, given: Sequence[int] | None) -> tuple[int, int]:
    """Return the two depths that are measured, 2 and 4 unless the model or its recomputed layers demand others.

    Raises:
        ValueError: the model has too few layers, or the given depths are of no use.
    """
    # A line through two depths gives the bytes per layer. One layer is not representative: its
    # peak may be in the embedding or in the loss. Every measured model has the layers that are
    # recomputed together or alone (block): with chunks of n layers, models of n and of 2n layers.
    number = memory.recompute_num_layers or 1
    chunk = number if memory.recompute_method == "uniform" else 1
    if given is not None:
        few, many = given
        if not max(2, number) <= few < many <= depth:
            raise ValueError(
                f"--measure-layers {few} {many} must be two depths, the first at least {max(2, number)} (2, or "
                f"memory.recompute_num_layers) and the second at most {depth}, the model's: change them"
            )
        if few % chunk or many % chunk:
            raise ValueError(
                f"--measure-layers {few} {many} must be multiples of memory.recompute_num_layers {chunk}, as "
                "recompute_method uniform recomputes whole chunks: change them"
            )
        return few, many
    few, many = max(2, number), 4
    if number > 2:
        many = 2 * number if memory.recompute_method == "uniform" else number + 1
    if memory.recompute_method != "uniform" or number == 1:
        many = max(few + 1, min(many, depth))
    if many > depth:
        remedy = "certify a model of more layers"
        if number > 2 and depth > 2:
            remedy = f"set memory.recompute_num_layers {number} to 1 with recompute_method uniform, or {remedy}"
        raise ValueError(f"certify measures models of {few} and {many} layers, and this one has {depth}: {remedy}")
    return few, many


@dataclass(frozen=True)
class Answer:
    """Measurements of a step.

    Args:
        survivals: number of layers -> measurements with and without recomputation.
        fingerprints: fingerprint of the shallowest model's graph on each rank.
        num_parameters: number of parameters of one rank at full depth.
        num_expert_parameters: how many of them belong to experts.
    """

    survivals: dict[int, Survival]
    fingerprints: tuple[str, ...]
    num_parameters: int
    num_expert_parameters: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON; ``from_json`` is the inverse."""
        # The keys of a JSON object are text, so the numbers of layers are converted both ways.
        pairs = {
            str(layers): [survival.recompute.to_json(), survival.baseline.to_json()]
            for layers, survival in self.survivals.items()
        }
        return vars(self) | {"survivals": pairs}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Answer:
        """Return the answer of plain data from ``to_json``."""
        survivals = {
            int(layers): Survival(*(Measurement.from_json(measured) for measured in pair))
            for layers, pair in data["survivals"].items()
        }
        return cls(**data | {"survivals": survivals, "fingerprints": tuple(data["fingerprints"])})
