"""The library layer: one drawn model, trained on real ranks and by the reference, and what may differ."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.dist import pool
from tests.fuzz import library_runs, reference
from tests.fuzz.draws import Spec
from tests.fuzz.outcomes import FAILED, PASSED, REFUSED, Outcome

TIMEOUT_S = 120.0
FLOAT64 = 1e-9  # float64 has 1e-16; measured: 1e-14 at most, with sums of some thousand terms in another order
FLOAT32_NORM = 1e-6  # norms, and so the factors of clipping, are fp32, which has 6e-8
PEER = 4.0
"""In fp32 and bf16: how many times transformers' own distance from float64 ours may be.

Both round equally often, in another order, so their distances are random numbers of one scale.
"""
FLOORS = {"float32": 1e-5, "bfloat16": 1e-2}
"""Allowed in addition: the peer may be exact by chance. Some hundred roundings of the dtype."""
SMALL = 1e-2
"""A tensor below this share of the full gradient, or of the update that AdamW's bound allows, counts as that large.

It may be 0 but for rounding.
"""
ROUNDED = 1e-4
"""Gradients of a smaller norm are compared by their absolute difference: all of them may be 0 but for rounding.

Adapters of ``k_proj`` alone have no gradient if every document is one token, whose only attention weight is 1.
"""


def run(spec: Spec) -> Outcome:
    """Train the drawn model on ranks and by the reference; compare."""
    try:
        expected = reference.train(spec, torch.float64)
        peer = None
        if spec["dtype"] != "float64":
            peer = reference.train(spec, getattr(torch, spec["dtype"]))
    except Exception as error:
        return Outcome(FAILED, f"the reference: {type(error).__name__}: {error}")
    add_scales(expected, spec)
    with tempfile.TemporaryDirectory() as directory:
        if spec["files"]:
            save(spec, directory)
        source = directory if spec["files"] else None
        try:
            reports = pool.run_on_ranks(library_runs.run, spec["ranks"], spec, expected, source, timeout_s=TIMEOUT_S)
        except pool.RankError as error:
            return Outcome(FAILED, f"{str(error).strip().splitlines()[-1]}\n{error}")
        refused = [report["refused"] for report in reports if "refused" in report]
        if len(refused) == len(reports):
            return Outcome(REFUSED, refused[0])
        if refused:
            return Outcome(FAILED, f"refused on {len(refused)} of {len(reports)} ranks: {refused[0]}")
        differences = compare(reports, expected, tolerances(spec, expected, peer))
        if spec["files"] and not spec["lora"]:
            differences += compare_export(Path(directory) / "saved", expected, tolerances(spec, expected, peer))
    return Outcome(FAILED, "; ".join(differences)) if differences else Outcome(PASSED)


def save(spec: Spec, directory: str) -> None:
    """Write the initial weights as a Hugging Face directory."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model: Any = reference.build(spec)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(directory)


def add_scales(expected: dict[str, Any], spec: Spec) -> None:
    """Add what differences of gradients and weights are divided by: the size of the gradient and of the update."""
    gradients: dict[str, Tensor] = expected["gradients"]
    total = torch.cat([grad.flatten() for grad in gradients.values()]).norm().item()
    expected["gradient_scales"] = {
        name: max(grad.norm().item(), SMALL * total, ROUNDED) for name, grad in gradients.items()
    }
    lr = sum(reference.learning_rate(spec, step) for step in range(spec["steps"]))
    expected["weight_scales"] = {
        name: max((weight - expected["initial"][name]).norm().item(), SMALL * lr * weight.numel() ** 0.5)
        for name, weight in expected["weights"].items()
    }


def tolerances(spec: Spec, expected: dict[str, Any], peer: dict[str, Any] | None) -> dict[str, float]:
    """Return the allowed relative difference of losses, norms, gradients and weights."""
    if peer is None:
        clips = spec["optimizer"]["clip"] is not None
        # Losses of later steps follow clipped gradients; a pipeline adds up losses in fp32.
        rounds_losses = clips or "stages" in spec
        return {
            "losses": FLOAT32_NORM if rounds_losses else FLOAT64,
            "norms": FLOAT32_NORM,
            "gradients": FLOAT64,
            "weights": FLOAT32_NORM if clips else FLOAT64,
        }
    floor = FLOORS[spec["dtype"]]
    measured = {
        "losses": _largest(peer["losses"], expected["losses"]),
        "norms": _largest(peer["norms"], expected["norms"]),
        "gradients": _errors(peer["gradients"], expected["gradients"], expected["gradient_scales"]),
        "weights": _errors(peer["weights"], expected["weights"], expected["weight_scales"]),
    }
    return {name: floor + PEER * error for name, error in measured.items()}


def _largest(found: list[float], expected: list[float]) -> float:
    errors = [abs(a - b) / max(abs(b), 1e-3) for a, b in zip(found, expected, strict=True)]
    return math.inf if any(map(math.isnan, errors)) else max(errors)  # max() may lose NaN


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor], scales: dict[str, float]) -> float:
    return max((found[name].double() - expected[name]).norm().item() / scales[name] for name in expected)


def compare(reports: list[dict[str, Any]], expected: dict[str, Any], allowed: dict[str, float]) -> list[str]:
    """Return what differs by more than is allowed on some rank."""
    differences: list[str] = []
    for rank, report in enumerate(reports):
        for name in ("losses", "norms"):
            error = _largest(report[name], expected[name])
            if not error <= allowed[name]:
                differences.append(f"{name} of rank {rank}: {report[name]}, expected {expected[name]} ({error:.1e})")
        for name in ("gradients", "weights"):
            error, parameter = report[name]
            if not error <= allowed[name]:
                differences.append(f"{name} of rank {rank}: {parameter} differs by {error:.1e}")
        if differences:
            return [f"{each}, allowed {allowed[each.split()[0]]:.1e}" for each in differences]
    return []


def compare_export(directory: Path, expected: dict[str, Any], allowed: dict[str, float]) -> list[str]:
    """Return what differs in the weights that transformers reads from an exported directory."""
    from transformers import AutoModelForCausalLM

    found = dict(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).named_parameters())
    differences: list[str] = []
    for name, weight in expected["weights"].items():
        error = (found[name].detach().double() - weight).norm().item() / expected["weight_scales"][name]
        if not error <= allowed["weights"]:
            differences.append(f"the export's {name} differs by {error:.1e}, allowed {allowed['weights']:.1e}")
    return differences
