"""Decides whether recomputation is still present in what runs, and whether it saves memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nxd_memopt.backends import backend
from nxd_memopt.certify.measure.baseline import without_recompute
from nxd_memopt.certify.measure.measurement import Measurement
from nxd_memopt.planner.hardware import GIB


@dataclass(frozen=True)
class Survival:
    """Comparison of a step with recomputation to the same step without.

    Args:
        recompute: measurement of the step as configured.
        baseline: measurement of the step with every activation kept.
    """

    recompute: Measurement
    baseline: Measurement

    @property
    def traced_extra_matmuls(self) -> int:
        """Matmuls that recomputation adds before the compiler's optimizations."""
        return self.recompute.traced_matmuls - self.baseline.traced_matmuls

    @property
    def extra_matmuls(self) -> int:
        """Matmuls that recomputation adds to the executed step."""
        return self.recompute.matmuls - self.baseline.matmuls

    @property
    def ratio(self) -> float:
        """Bytes saved for backward as a fraction of the baseline's, or 1 if those are 0."""
        if self.baseline.held_bytes == 0:
            return 1.0
        return self.recompute.held_bytes / self.baseline.held_bytes

    def failure(self, max_temp_ratio: float | None = None) -> str | None:
        """Return why recomputation does not survive, with the figures, or None if it does.

        Args:
            max_temp_ratio: largest allowed ``ratio``; with ``None`` any saving passes.
        """
        # Four cases, in order: nothing is recomputed; the compiler removed recomputed matmuls; the
        # saving is below the required one; recomputation saves no memory at all. In the first case
        # the bytes are compared too, because recomputation of a norm or activation has no matmul.
        if not self.traced_extra_matmuls and self.recompute.held_bytes == self.baseline.held_bytes:
            return "the step recomputes nothing: it is the same with and without recomputation"
        # Common-subexpression elimination merges a recomputed matmul with the one in forward, and the
        # activation is saved again: fewer extra matmuls are executed than were traced.
        if self.extra_matmuls < self.traced_extra_matmuls:
            return (
                f"recomputation does not survive: it adds {self.traced_extra_matmuls} matmuls to "
                f"the traced step, {self.extra_matmuls} are left after the compiler's optimisations ({self.figures()})"
            )
        if max_temp_ratio is not None and self.ratio > max_temp_ratio:
            return f"recomputation saves too little: more than {max_temp_ratio} of the baseline ({self.figures()})"
        if self.ratio >= 1:
            return f"recomputation saves no memory ({self.figures()})"
        return None

    def figures(self) -> str:
        """Return matmuls and saved bytes of both variants as text."""
        recompute_gib = self.recompute.held_bytes / GIB
        baseline_gib = self.baseline.held_bytes / GIB
        return (
            f"with recomputation {self.recompute.matmuls} matmuls and {recompute_gib:.4f} GiB held "
            f"for backward, without {self.baseline.matmuls} and {baseline_gib:.4f} GiB, "
            f"ratio {self.ratio:.3f}"
        )


def assert_recompute_survives(step: Callable[[], Any], *, max_temp_ratio: float | None = None) -> Survival:
    """Assert that the executed step still has its recomputation, and that it saves memory.

    Args:
        step: runs one forward and one backward pass, starting without gradients; it is called
            twice. On XLA it is compiled and run, and the figures are those of XLA:CPU with
            optimization barriers kept, not of neuronx-cc.
        max_temp_ratio: maximum of (bytes saved for backward) / (the same without recomputation);
            with ``None`` any saving passes.

    Returns:
        The measurements with and without recomputation.

    Raises:
        AssertionError: recomputation does not survive; the message has the figures.
        RuntimeError: on XLA, without the ``XLA_FLAGS`` that dump the compiled step; the message has
            the required flags.

    Example::

        def step():
            model.zero_grad(set_to_none=True)
            model(ids, labels=ids).loss.backward()

        assert_recompute_survives(step, max_temp_ratio=0.4)
    """
    # Imported here: each needs packages that the other does not need.
    if backend.name == "xla":
        from nxd_memopt.certify.measure.xla import measure_step as measure
    else:
        from nxd_memopt.certify.measure.eager import measure_eager as measure
    recompute = measure(step)
    with without_recompute():
        survival = Survival(recompute, measure(step))
    failure = survival.failure(max_temp_ratio)
    if failure is not None:
        raise AssertionError(failure)
    return survival
