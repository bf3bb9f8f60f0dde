"""Request and answer of the measuring process, exchanged as JSON files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nxd_memopt.certify.measure.measurement import Measurement
from nxd_memopt.certify.measure.survival import Survival
from nxd_memopt.config import MemoryConfig, ParallelConfig


@dataclass(frozen=True)
class Request:
    """One step to measure.

    Args:
        config: the Hugging Face config as plain data.
        parallel: ``ParallelConfig``'s fields.
        memory: ``MemoryConfig``'s fields.
        sequence_length: S.
        micro_batch_size: B.
        dtype: torch's name.
        backend: ``xla``, ``cpu``, ``cuda``, or ``compiled`` (torch.compile on the CPU).
        layer_counts: depths to measure.
    """

    config: dict[str, Any]
    parallel: dict[str, Any]
    memory: dict[str, Any]
    sequence_length: int
    micro_batch_size: int
    dtype: str
    backend: str
    layer_counts: tuple[int, ...]

    def parallel_config(self) -> ParallelConfig:
        return ParallelConfig(**self.parallel)

    def memory_config(self) -> MemoryConfig:
        modules = self.memory.get("recompute_modules")
        return MemoryConfig(**{**self.memory, "recompute_modules": None if modules is None else tuple(modules)})

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Request:
        return cls(**{**data, "layer_counts": tuple(data["layer_counts"])})


@dataclass(frozen=True)
class Answer:
    """What was measured.

    Args:
        survivals: by depth.
        fingerprints: of the shallowest model's graph, by rank.
        num_parameters: of one rank at full depth.
    """

    survivals: dict[int, Survival]
    fingerprints: tuple[str, ...]
    num_parameters: int

    def to_json(self) -> dict[str, Any]:
        pairs = {str(n): [s.recompute.to_json(), s.baseline.to_json()] for n, s in self.survivals.items()}
        return {"survivals": pairs, "fingerprints": self.fingerprints, "num_parameters": self.num_parameters}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Answer:
        survivals = {
            int(layers): Survival(*(Measurement.from_json(measured) for measured in pair))
            for layers, pair in data["survivals"].items()
        }
        return cls(survivals, tuple(data["fingerprints"]), data["num_parameters"])
