"""The certificate: checks of measurements, each passed or failed with its figures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_memopt.certify.measure.measurement import LiveTensor, Measurement, collectives_to_json, is_logits, is_square_in
from nxd_memopt.certify.measure.survival import Survival
from nxd_memopt.certify.memory_terms import MemoryTerms
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.hardware import GIB
from nxd_memopt.planner.timing.collectives import Collective, StepShape, expected_collectives


@dataclass(frozen=True)
class Check:
    """One line of the certificate.

    Args:
        name: name of the check.
        passed: verdict; ``None`` if the check only reports.
        detail: figures.
    """

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class Certificate:
    """Checks and figures of a training step.

    Args:
        checks: checks in the order in which they are shown.
        survivals: number of layers -> measurements with and without recomputation.
        collectives: collectives of a step at the model's full depth, from the formulas.
        per_layer: collectives of the last decoder layer without recomputation, from the formulas.
        memory: memory of one rank at full depth, by purpose.
        baseline_bytes: bytes of activations and temporaries at full depth without recomputation.
        notes: what the figures assume, and what they do not show.
    """

    checks: tuple[Check, ...]
    survivals: Mapping[int, Survival]
    collectives: Counter[Collective]
    per_layer: Counter[Collective]
    memory: MemoryTerms
    baseline_bytes: int
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed; checks that only report do not fail."""
        return all(check.passed is not False for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return all figures as plain data; sizes are in bytes."""
        return {
            "passed": self.passed,
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "measured": {
                str(layers): {
                    "recompute": survival.recompute.to_json(),
                    "baseline": survival.baseline.to_json(),
                    "held_ratio": survival.ratio,
                }
                for layers, survival in self.survivals.items()
            },
            "collectives_per_step": collectives_to_json(self.collectives),
            "collectives_per_layer": collectives_to_json(self.per_layer),
            "memory_bytes": {**self.memory.terms, "total": self.memory.total_bytes},
            "activation_bytes_without_recompute": self.baseline_bytes,
            "capacity_bytes": self.memory.capacity_bytes,
            "host_bytes": self.memory.host_bytes,
            "notes": list(self.notes),
        }


def check_survival(memory: MemoryConfig, survivals: Mapping[int, Survival], max_temp_ratio: float | None) -> Check:
    """Check that recomputation survives in the deepest of the measured models."""
    # The deepest model is closest to the full one: the embedding and the loss, which recomputation
    # does not change, have the smallest part in its bytes.
    layers = max(survivals)
    survival = survivals[layers]
    if memory.recompute_granularity is None:
        detail = f"no recomputation is configured ({survival.figures()})"
        return Check("recompute survives", None, detail)
    failure = survival.failure(max_temp_ratio)
    left = f"{survival.extra_matmuls} of {survival.traced_extra_matmuls} recomputed matmuls left"
    detail = failure or f"{layers} layers: {left}; {survival.figures()}"
    return Check("recompute survives", failure is None, detail)


def check_ranks(fingerprints: Sequence[str]) -> Check:
    """Check that every rank has the same graph; otherwise each rank compiles another one."""
    # A rank number, or an offset computed from it, that is traced as a constant gives each rank its
    # own graph: T compilations instead of one that all ranks load from the cache.
    num_graphs = len(set(fingerprints))
    ranks = f"over ranks 0 to {len(fingerprints) - 1}"
    if num_graphs == 1:
        return Check("same graph on every rank", True, f"1 graph {ranks}")
    odd = [rank for rank, found in enumerate(fingerprints) if found != fingerprints[0]]
    detail = (
        f"{num_graphs} graphs {ranks}: ranks {odd[:8]} differ from rank 0; a rank must not be a constant of the graph"
    )
    return Check("same graph on every rank", False, detail)


def check_collectives(
    shapes: Mapping[int, StepShape], survivals: Mapping[int, Survival], memory: MemoryConfig, *, stops_early: bool
) -> Check:
    """Check that collectives equal the formulas of ``planner.timing.collectives`` exactly.

    Both variants, with and without recomputation, are compared at each measured depth.
    """
    for layers, survival in survivals.items():
        # Two depths tell an error in a layer, which grows with depth, from one outside the layers.
        # The baseline is the step under an empty MemoryConfig, which recomputes nothing.
        variants = ((survival.recompute, memory), (survival.baseline, MemoryConfig()))
        for measured, applied in variants:
            expected = expected_collectives(shapes[layers], applied, stops_early=stops_early)
            if measured.collectives != expected:
                variant = f"{layers} layers, recompute {applied.recompute_granularity}"
                difference = _difference(measured.collectives, expected)
                return Check("collectives", False, f"{variant}: {difference}")
    totals = ", ".join(
        f"{survival.recompute.collectives.total()} at {layers} layers" for layers, survival in survivals.items()
    )
    detail = f"as many, of the same kinds and bytes, as the formulas say: {totals}"
    return Check("collectives", True, detail)


def _difference(found: Counter[Collective], expected: Counter[Collective]) -> str:
    """Return missing and surplus collectives as text."""
    # Subtraction of Counters keeps positive counts only.
    missing = expected - found
    surplus = found - expected
    return f"missing {_listed(missing) or 'none'}; beyond the formulas {_listed(surplus) or 'none'}"


def _listed(collectives: Counter[Collective]) -> str:
    """Return collectives as a comma-separated list."""
    return ", ".join(
        f"{count} {c.kind} of {c.full_bytes} bytes over {c.group_size}" for c, count in sorted(collectives.items())
    )


def check_large_tensors(measured: Measurement, shape: StepShape, vocabulary_sizes: Iterable[int]) -> Check:
    """Report the largest tensors, and whether S x S scores or full logits are among them."""
    # A note and no verdict: core attention without a flash kernel has S x S scores by choice. Both
    # are much larger than an activation [S, B, H]: they grow with S^2, and with V instead of H.
    squares = [t for t in measured.largest if is_square_in(t, shape.sizes.sequence_length)]
    logits = [t for t in measured.largest if is_logits(t, shape.sizes.tokens, vocabulary_sizes)]
    parts = []
    if squares:
        parts.append(f"S x S alive: {_named(squares)}")
    if logits:
        # With as many tokens as H, gradients of the embedding and of the head have this shape too.
        others = " or gradients of vocabulary weights" if shape.sizes.tokens == shape.sizes.hidden else ""
        parts.append(f"logits of all tokens{others} alive: {_named(logits)}")
    if not parts:
        parts.append("no S x S, no logits of all tokens")
    parts.append(f"largest: {_named(measured.largest)}")
    return Check("large tensors", None, "; ".join(parts))


def _named(tensors: Iterable[LiveTensor]) -> str:
    """Return tensors with size and source as a comma-separated list."""
    return ", ".join(f"{tensor} {tensor.nbytes / GIB:.3f} GiB ({tensor.source})" for tensor in tensors)


def check_fit(memory: MemoryTerms) -> Check:
    """Check that one rank's memory fits the device."""
    # An upper bound: parameters, gradients and states are allocated throughout, and activations and
    # temporaries count with their peak.
    total = memory.total_bytes / GIB
    capacity = memory.capacity_bytes / GIB
    verb = "fits" if total <= capacity else "does not fit"
    detail = f"{total:.2f} GiB {verb} {capacity:g} GiB per device"
    if memory.host_bytes:
        detail += f"; {memory.host_bytes / GIB:.2f} of {memory.usable_host_bytes / GIB:.2f} GiB of host memory per rank"
    return Check("memory", memory.fits, detail)
