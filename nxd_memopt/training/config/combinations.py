"""Says which options of the training program exclude each other, in two tables, and refuses them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from nxd_memopt.options import default_of

Sections = Any
"""A ``TrainConfig``, read by the names of its sections and options: ``train_config`` imports this file."""
NOT_DEFAULT: tuple[Any, ...] = ()
"""Stands for all values of an option but its default."""


@dataclass(frozen=True)
class Excluded:
    """Values of two options that exclude each other.

    Args:
        option: dotted name of an option.
        values: values of it that are excluded, or ``NOT_DEFAULT``.
        other: dotted name of another option.
        other_values: values of that option with which they are excluded, or ``NOT_DEFAULT``.
        reason: what would be wrong, for the message.
    """

    option: str
    values: tuple[Any, ...]
    other: str
    other_values: tuple[Any, ...]
    reason: str

    def conflict(self, config: Sections) -> str | None:
        """Return a message if both options have excluded values, else None."""
        if not (_matches(config, self.option, self.values) and _matches(config, self.other, self.other_values)):
            return None
        first, second = yaml_text(value_of(config, self.option)), yaml_text(value_of(config, self.other))
        return f"{self.option} is {first} and {self.other} is {second}: {self.reason}; change one of the two"


OFFLOAD = "optimizer.optimizer_offload_fraction"
SHARDING = "data_parallel.sharding"
INSTANCES = "data_parallel.num_distributed_optimizer_instances"
PRECISION = "trainer.precision"
FP8 = "trainer.fp8"
OFFLOADED_WEIGHTS = "memory.cpu_offloading_weights"
IN_BACKWARD = "optimizer.in_backward"
IN_FORWARD = "optimizer.optimizer_update_in_forward"
RANK = "lora.lora_rank"
BASE = "lora.base_dtype"
KEEP_BEST = "trainer.keep_best"

EXCLUDED = (
    Excluded(
        "optimizer.overlap_grad_reduce",
        (True,),
        SHARDING,
        ("zero1", "zero2", "zero3"),
        "the stage scatters gradients itself and would reduce them a second time",
    ),
    Excluded(INSTANCES, NOT_DEFAULT, SHARDING, ("none", "zero1"), "only zero2 and zero3 have instances"),
    Excluded(
        "data_parallel.reshard_after_forward",
        (False,),
        SHARDING,
        ("none", "zero1", "zero2"),
        "only zero3 shards parameters",
    ),
    Excluded(
        OFFLOADED_WEIGHTS,
        (True,),
        SHARDING,
        ("zero3",),
        "zero3 frees weights after their use already",
    ),
    Excluded(
        OFFLOADED_WEIGHTS, (True,), "trainer.async_save", (True,), "a save copies weights that the next steps free"
    ),
    Excluded(OFFLOADED_WEIGHTS, (True,), IN_FORWARD, (True,), "the update needs the weights on the device"),
    # With 32-true and bf16-true only null is left.
    Excluded(
        "data_parallel.grad_reduce_in_fp32",
        (True, False),
        PRECISION,
        ("32-true", "bf16-true"),
        "gradients have the dtype of the parameters, in which they are summed",
    ),
    Excluded("data_parallel.grad_reduce_in_fp32", (False,), PRECISION, ("16-mixed",), "sums exceed the range of fp16"),
    Excluded(OFFLOAD, NOT_DEFAULT, SHARDING, ("zero2", "zero3"), "the stage's states stay on the device"),
    Excluded(
        OFFLOAD,
        NOT_DEFAULT,
        PRECISION,
        ("bf16-true", "16-mixed"),
        "offload needs fp32 master weights (not bf16-true) and gradients without a loss scale (not 16-mixed)",
    ),
    Excluded(
        "optimizer.store_param_remainders",
        (True,),
        PRECISION,
        ("32-true", "bf16-true", "16-mixed"),
        "remainders are what fp32 master weights have beyond bf16 parameters",
    ),
    Excluded(
        IN_BACKWARD,
        (True,),
        SHARDING,
        ("zero1", "zero2", "zero3"),
        "the stage reduces gradients in buckets of many parameters",
    ),
    Excluded(
        IN_BACKWARD,
        (True,),
        PRECISION,
        ("bf16-mixed", "16-mixed"),
        "gradients are added up in fp32, and master weights are updated after backward",
    ),
    Excluded(FP8, NOT_DEFAULT, PRECISION, ("32-true", "16-mixed"), "float8 matmuls have bf16 results"),
    Excluded(FP8, NOT_DEFAULT, "memory.mlp_tile_tokens", NOT_DEFAULT, "tiles multiply in bf16"),
    Excluded(FP8, NOT_DEFAULT, "memory.attention_head_groups", NOT_DEFAULT, "groups multiply in bf16"),
    Excluded(FP8, NOT_DEFAULT, "trainer.compile", NOT_DEFAULT, "the kernels of casts are not compiled"),
    Excluded(BASE, ("fp8",), FP8, (None,), "weights in float8 are multiplied in float8"),
    Excluded(BASE, ("fp8",), "trainer.fp8_recipe", ("rowwise",), "weights in float8 have one scale for a matmul"),
    Excluded(BASE, ("fp8",), SHARDING, ("zero3",), "the stage shards weights in the dtype of the model"),
    Excluded(BASE, ("fp8",), "model.random_init", (True,), "the weights of model.pretrained are rounded"),
    Excluded(BASE, ("fp8",), "model.warm_start", NOT_DEFAULT, "the weights of model.pretrained are rounded"),
    Excluded(BASE, ("fp8",), "moe.num_moe_experts", NOT_DEFAULT, "the weights of model.pretrained are rounded"),
    Excluded(BASE, ("fp8",), "trainer.export", ("verify",), "the run exports its adapters alone"),
    Excluded(FP8, (None,), "trainer.fp8_recipe", NOT_DEFAULT, "without fp8 nothing is rounded"),
    Excluded(FP8, (None,), "trainer.first_last_layers_bf16", NOT_DEFAULT, "without fp8 all layers are in bf16"),
    Excluded(RANK, NOT_DEFAULT, "memory.mlp_tile_tokens", NOT_DEFAULT, "tiles compute the MLP without adapters"),
    Excluded(RANK, NOT_DEFAULT, "memory.attention_head_groups", NOT_DEFAULT, "groups compute without adapters"),
    Excluded(RANK, NOT_DEFAULT, OFFLOADED_WEIGHTS, (True,), "adapters read the weights outside their layers"),
    Excluded(RANK, NOT_DEFAULT, "trainer.compile", NOT_DEFAULT, "compiled layers have no adapters"),
    Excluded(
        RANK,
        NOT_DEFAULT,
        "model.resize_embedding",
        (True,),
        "adapters neither train nor store the new rows; first export the resized model with trainer.max_steps 0",
    ),
    Excluded(
        KEEP_BEST, (True,), "data.eval_sequences", (0,), "the best checkpoint is the one of the lowest held-out loss"
    ),
    Excluded(KEEP_BEST, (True,), "trainer.val_check_interval", (0,), "only the last step would be evaluated"),
    Excluded(KEEP_BEST, (True,), "trainer.save_interval", ("never",), "the best checkpoint is saved"),
    Excluded("trainer.export", ("verify",), "data.eval_sequences", (0,), "the check compares held-out losses"),
    Excluded(
        "trainer.resume_from",
        NOT_DEFAULT,
        "model.warm_start",
        NOT_DEFAULT,
        "resume_from continues a run, warm_start takes its weights only",
    ),
    Excluded(
        "trainer.max_epochs",
        NOT_DEFAULT,
        "data.mixture",
        NOT_DEFAULT,
        "the datasets of a mixture end at different steps, and trainer.max_steps ends the run",
    ),
)

PIPELINE = "parallel.pipeline_model_parallel_size"
# Excluded with more than one stage: option, values and reason.
_EXCLUDED_BY_STAGES: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        SHARDING,
        ("zero2", "zero3"),
        "the stage reduces gradients in each backward",
    ),
    (IN_BACKWARD, (True,), "backward would update weights that micro-batches in flight still need"),
    (IN_FORWARD, (True,), "the update would wait for forwards that other ranks begin"),
    ("memory.cpu_offloading_num_layers", NOT_DEFAULT, "offload of several micro-batches in flight is not supported"),
    ("memory.cpu_offloading_activations", (True,), "offload of several micro-batches in flight is not supported"),
    (OFFLOADED_WEIGHTS, (True,), "weights on the host serve one forward and its backward"),
    ("trainer.compile", NOT_DEFAULT, "compiled layers are not supported with stages"),
    ("parallel.use_cpu_initialization", (False,), "stages would draw the same weights"),
)
EXCLUDED += tuple(Excluded(PIPELINE, NOT_DEFAULT, *each) for each in _EXCLUDED_BY_STAGES)
VIRTUAL = "parallel.virtual_pipeline_model_parallel_size"
EXCLUDED += (
    Excluded(VIRTUAL, NOT_DEFAULT, "optimizer.overlap_grad_reduce", (True,), "each chunk has a last backward"),
)

# A graph replays forward and backward as one launch, without Python in between: what runs Python
# code between kernels (hooks, copies to the host) cannot be combined with it.
EXCLUDED_BY_GRAPHS = (
    ("optimizer.overlap_grad_reduce", (True,), "a graph computes all gradients before any is reduced"),
    (SHARDING, ("zero2", "zero3"), "the host reduces and frees gradients between kernels"),
    (IN_FORWARD, (True,), "the host starts the updates between the kernels of layers"),
    (IN_BACKWARD, (True,), "a graph computes all gradients before any is used"),
    ("memory.cpu_offloading_activations", (True,), "the host starts copies between kernels"),
    ("memory.cpu_offloading_num_layers", NOT_DEFAULT, "the host starts copies between kernels"),
    ("lora.lora_dropout", NOT_DEFAULT, "the host seeds the random numbers of dropout"),
    (PIPELINE, NOT_DEFAULT, "forwards and backwards of different micro-batches alternate"),
    ("trainer.compile", NOT_DEFAULT, "graphs of compiled layers are not supported"),
)


def require_compatible(config: Sections) -> None:
    """Raise ``ValueError`` for the first combination of ``EXCLUDED`` that ``config`` has."""
    for excluded in EXCLUDED:
        conflict = excluded.conflict(config)
        if conflict is not None:
            raise ValueError(conflict)


def conflict_with_graphs(config: Sections) -> str | None:
    """Return which option excludes CUDA graphs and why, or None."""
    for option, values, reason in EXCLUDED_BY_GRAPHS:
        if _matches(config, option, values):
            return f"{option} is {yaml_text(value_of(config, option))}: {reason}"
    return None


def value_of(config: Sections, option: str) -> Any:
    """Return the value of the option ``SECTION.NAME``."""
    section, _, name = option.partition(".")
    return getattr(getattr(config, section), name)


def yaml_text(value: Any) -> str:
    """Return a value of an option as a YAML file has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _matches(config: Sections, option: str, values: tuple[Any, ...]) -> bool:
    """Return whether an option has one of ``values``; with ``NOT_DEFAULT``, another value than its default."""
    value = value_of(config, option)
    if values:
        # 1 and True are equal.
        return any(value == each and type(value) is type(each) for each in values)
    section, _, name = option.partition(".")
    defaults = {field.name: default_of(field) for field in fields(getattr(config, section))}
    return value != defaults[name]
