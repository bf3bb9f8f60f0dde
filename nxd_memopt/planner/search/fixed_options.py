"""Options of a run that the search for settings keeps, and the settings that they exclude."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nxd_memopt.config import MemoryConfig
from nxd_memopt.options import require_one_of
from nxd_memopt.planner.search.problem import PRECISIONS, Problem, Setting
from nxd_memopt.planner.sizes.states import STAGES
from nxd_memopt.planner.techniques.gpu_attention import implementations, limit_refusal
from nxd_memopt.planner.techniques.recomputation import Recomputation, keeps_inputs_alone

_EXCLUDING = {
    "parallel.sequence_parallel_enabled": ("sequence_parallel_enabled", "T that divides the sequence length"),
    "data_parallel.reshard_after_forward": ("reshard_after_forward", "sharding zero3, of GPUs and D above 1"),
    "optimizer.overlap_grad_reduce": ("overlap_grad_reduce", "sharding none"),
    "optimizer.in_backward": ("optimizer_in_backward", "sharding none and one micro-batch per step"),
    "parallel.expert_model_parallel_size": ("expert_model_parallel_size", "a divisor of D and of the experts"),
    "data_parallel.num_distributed_optimizer_instances": (
        "optimizer_instances",
        "sharding zero2 or zero3, of GPUs, and a divisor of D below D",
    ),
    "parallel.pipeline_model_parallel_layout": (
        "pipeline_model_parallel_layout",
        "P * V stages of at least 1 layer, with the model's layers together",
    ),
    "trainer.compile": ("compiles_layers", "full recompute of all layers"),
}
"""Option that excludes settings -> field of ``Setting`` or ``FixedOptions``, and what it needs."""


@dataclass(frozen=True)
class FixedOptions:
    """Options that every tried setting has; the defaults exclude nothing.

    Args:
        setting: options that the search does not choose: attention's implementation and the kind of loss of its
            ``memory``, and what the search leaves as it is. ``sequence_parallel_enabled`` True excludes every T
            above 1 that does not divide S.
        expert_model_parallel_size: EP; None tries every size.
        optimizer_instances: ``data_parallel.num_distributed_optimizer_instances``.
        compiles_layers: ``trainer.compile``.
        stated: fields of ``Setting`` that the search would choose, with the values that all settings have.
        stated_memory: the same of its ``memory``.
    """

    setting: Setting = field(default_factory=Setting)
    expert_model_parallel_size: int | None = None
    optimizer_instances: int | Literal["hosts"] = 1
    compiles_layers: bool = False
    stated: tuple[tuple[str, Any], ...] = ()
    stated_memory: tuple[tuple[str, Any], ...] = ()

    def tried(self, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the values of a field of ``Setting`` that are tried: the stated one instead of ``values``."""
        stated = dict(self.stated)
        if name in stated:
            return (stated[name],)
        return values

    def has_stated(self, setting: Setting) -> bool:
        """Return whether ``setting`` has the stated values."""
        return all(getattr(setting, name) == value for name, value in self.stated)

    def with_stated_memory(self, problem: Problem, tried: Iterable[MemoryConfig]) -> Iterator[MemoryConfig]:
        """Yield each of ``tried`` with the stated techniques, once, without those that exclude them.

        Args:
            problem: its device, of which only a GPU offloads, and its model, which may have too few layers.
            tried: memory techniques of the search.
        """
        found: set[MemoryConfig] = set()
        for memory in tried:
            try:
                changed = replace(memory, **dict(self.stated_memory))
                Recomputation.of(changed, problem.model.num_layers)
            except ValueError:
                continue
            if changed not in found and (problem.device.kind == "cuda" or not changed.offloads):
                found.add(changed)
                yield changed

    @property
    def stages(self) -> set[str]:
        """ZeRO stages with which the training program has the options."""
        allowed: set[str] = set(STAGES)
        # Both work on full gradients.
        if self.setting.overlap_grad_reduce or self.setting.optimizer_in_backward:
            allowed &= {"none"}
        # Stage 1 shards over all data-parallel ranks.
        if self.optimizer_instances != 1:
            allowed &= {"zero2", "zero3"}
        # Stage 3 alone gathers weights.
        if not self.setting.reshard_after_forward:
            allowed &= {"zero3"}
        return allowed

    @property
    def excludes_graphs(self) -> bool:
        """Whether an option runs host code in backward, or is not supported in a CUDA graph."""
        setting = self.setting
        return setting.overlap_grad_reduce or setting.optimizer_in_backward or self.compiles_layers

    def allows(self, memory: MemoryConfig) -> bool:
        """Return whether the memory techniques can be planned with the options.

        The compiler chooses what a compiled layer keeps for backward, unless a checkpoint around the layer keeps
        its input only.
        """
        return not self.compiles_layers or keeps_inputs_alone(memory)

    def at(self, problem: Problem, tensor_model_parallel_size: int, stages: int) -> Setting | None:
        """Return ``setting`` with T, P, sequence parallelism and the ranks of a shard; None if they exclude options."""
        setting = replace(
            self.setting,
            tensor_model_parallel_size=tensor_model_parallel_size,
            pipeline_model_parallel_size=stages,
        )
        if stages > 1 and (self.setting.optimizer_in_backward or self.compiles_layers):
            return None
        # One rank has all tokens already.
        if tensor_model_parallel_size == 1:
            setting = replace(setting, sequence_parallel_enabled=None)
        elif setting.sequence_parallel_enabled and problem.sequence_length % tensor_model_parallel_size:
            return None
        if self.optimizer_instances == 1:
            return setting
        instances = self.optimizer_instances
        replicas = problem.devices // setting.ranks_of_replica
        if instances == "hosts":
            host = min(problem.devices, problem.device.ranks_per_host)
            # A tensor-parallel group is on one host, and every host has as many ranks.
            if problem.devices % host or host % tensor_model_parallel_size:
                return None
            instances = problem.devices // host
        # An instance has several ranks, and all instances equally many.
        if replicas % instances or (instances > 1 and replicas == instances):
            return None
        return replace(setting, shard_ranks=replicas // instances)

    def expert_sizes(self, problem: Problem, setting: Setting, possible: list[int]) -> list[int]:
        """Return the expert-parallel sizes of ``possible`` that the options allow."""
        replicas = problem.devices // setting.ranks_of_replica
        # Shards of a part of the data-parallel ranks are of parameters that all of these have.
        if setting.shard_ranks not in (None, replicas):
            possible = [size for size in possible if size == 1]
        size = self.expert_model_parallel_size
        return [each for each in possible if size in (None, each)]

    def needs(self) -> list[str]:
        """Return each option that excludes settings, with what it needs."""
        found: list[str] = []
        for name, (field_name, need) in _EXCLUDING.items():
            owner = self
            if not hasattr(self, field_name):
                owner = self.setting
            value = getattr(owner, field_name)
            if value != getattr(type(owner), field_name):
                found.append(f"{name} {value} needs {need}")
        return [*found, *(f"{name} {value} is stated" for name, value in (*self.stated, *self.stated_memory))]


def require_possible(problem: Problem, fixed: FixedOptions) -> None:
    """Raise ``ValueError`` for options that the device or the model cannot have with any setting."""
    name = fixed.setting.memory.attention_backend
    if name != "auto":
        _require_attention(problem, name)
    if fixed.compiles_layers and problem.device.backend == "xla":
        raise ValueError(
            f"trainer.compile is not supported on {problem.device.name}, which compiles full steps: set it to null"
        )
    if fixed.compiles_layers and problem.model.has_experts:
        raise ValueError(
            "trainer.compile compiles layers of static shapes, and an expert's rows depend on the routing: set it to "
            "null"
        )


def _require_attention(problem: Problem, name: str) -> None:
    """Raise ``ValueError`` if the device has no attention ``name``, or none for the model and the precision."""
    device = problem.device
    if device.kind != "cuda":
        kernel = "nki" if device.backend == "xla" else "sdpa"
        require_one_of(f"memory.attention_backend on {device.name}", name, ("auto", kernel, "tiled", "math"))
        return
    known = implementations(int(device.compute_capability))
    require_one_of(f"memory.attention_backend on {device.name}", name, ("auto", *known))
    refusal = limit_refusal(
        name,
        dtype=PRECISIONS[problem.precision][0],
        head_dim=problem.model.head_dim,
        packed=problem.isolate_documents,
        dropout_p=problem.model.attention_dropout,
    )
    if refusal is not None:
        raise ValueError(f"memory.attention_backend {name!r} cannot be met: {refusal}; or use 'auto'")
