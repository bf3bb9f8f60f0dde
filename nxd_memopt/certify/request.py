"""Request and answer of the measuring process, exchanged as JSON files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nxd_memopt.certify.measure.measurement import Measurement
from nxd_memopt.certify.measure.survival import Survival
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.moe_config import MoEConfig


@dataclass(frozen=True)
class Request:
    """Training step to measure.

    Args:
        config: Hugging Face model configuration as plain data.
        parallel: fields of ``ParallelConfig``.
        memory: fields of ``MemoryConfig``.
        sequence_length: S, tokens per sequence.
        micro_batch_size: B, sequences per micro-batch.
        dtype: name of a torch dtype.
        backend: ``xla``, ``cpu``, ``cuda``, or ``compiled`` (torch.compile on the CPU).
        layer_counts: numbers of decoder layers to measure.
        isolate_documents: rows contain several documents, which do not attend to each other.
        moe: fields of ``MoEConfig`` of a model with experts; None for a dense model.
    """

    config: dict[str, Any]
    parallel: dict[str, Any]
    memory: dict[str, Any]
    sequence_length: int
    micro_batch_size: int
    dtype: str
    backend: str
    layer_counts: tuple[int, ...]
    isolate_documents: bool = False
    moe: dict[str, Any] | None = None

    def moe_config(self) -> MoEConfig | None:
        """Return the options of experts; JSON has turned a tuple of layers into a list."""
        if self.moe is None:
            return None
        frequency = self.moe["moe_layer_freq"]
        return MoEConfig(
            **{**self.moe, "moe_layer_freq": frequency if isinstance(frequency, int) else tuple(frequency)}
        )

    def parallel_config(self) -> ParallelConfig:
        """Return the configuration of parallelism."""
        return ParallelConfig(**self.parallel)

    def memory_config(self) -> MemoryConfig:
        """Return the memory configuration; JSON has turned its tuple into a list."""
        fields = dict(self.memory)
        modules = fields.get("recompute_modules")
        if modules is not None:
            fields["recompute_modules"] = tuple(modules)
        return MemoryConfig(**fields)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Request:
        """Return the request of plain data from ``dataclasses.asdict``."""
        return cls(**{**data, "layer_counts": tuple(data["layer_counts"])})


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
        return {
            "survivals": pairs,
            "fingerprints": self.fingerprints,
            "num_parameters": self.num_parameters,
            "num_expert_parameters": self.num_expert_parameters,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Answer:
        """Return the answer of plain data from ``to_json``."""
        survivals = {
            int(layers): Survival(*(Measurement.from_json(measured) for measured in pair))
            for layers, pair in data["survivals"].items()
        }
        return cls(
            survivals,
            tuple(data["fingerprints"]),
            num_parameters=data["num_parameters"],
            num_expert_parameters=data["num_expert_parameters"],
        )
