"""Dynamic loss scaling for fp16 gradients: scaling, the overflow check over all ranks, and the scale's schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.ops.autograd import first_derivative_only
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.summed_gradients import keep_sums

GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
# The scale is an fp32 number. Growth stops here, so that neither the scale nor its reciprocal
# leaves the normal range of fp32, for example if all gradients are 0 for a long time.
MAX_SCALE = 2.0**96
MAX_SKIPS_AT_MIN_SCALE = 20


class LossScaler:
    """Dynamic loss scale with the rules and defaults of Megatron-LM.

    The smallest fp16 number is 6e-8, so small gradients would be 0 in fp16. The gradients are
    therefore computed for the loss times a scale, and divided by the scale in fp32. A scale that is
    too large makes gradients infinite: that step is skipped, and the scale is lowered.

    - After ``hysteresis`` steps with overflow, that step and each further one halve the scale.
      Steps without overflow in between do not reset the count; doubling the scale does.
    - After ``growth_interval`` consecutive steps without overflow the scale is doubled.

    The decision to skip is the same on all tensor-parallel and data-parallel ranks: a step that one
    rank skips and another takes would leave the ranks with different weights. Reading the decision
    makes the host wait for the device once a step.

    Pass the scaler to ``NeuronZero1Optimizer``, which unscales the gradients in fp32 before it clips
    them, and skips steps.

    Args:
        initial_scale: first scale; powers of 2 scale without rounding.
        min_scale: the scale is not lowered below this.
        growth_interval: consecutive steps without overflow after which the scale is doubled.
        hysteresis: overflows before the scale is lowered, at least 1.

    Attributes:
        scale: the current scale, 0-dim fp32, on the device; updated in place.
        last_scale: the scale with which the gradients of the last step were computed.
        skipped_last: whether the last step was skipped.
        skipped_steps: the number of skipped steps since the start of the training.

    Raises:
        ValueError: a value is outside its range.

    Example::

        scaler = LossScaler()
        optimizer = NeuronZero1Optimizer(model.parameters(), AdamW, use_grad_acc_hook=True, loss_scaler=scaler)
        scaler.scale_gradients_of(model(ids, labels=ids).loss).backward()
        optimizer.step()  # or skips the step
    """

    def __init__(
        self,
        *,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        if not 0 < min_scale <= initial_scale <= MAX_SCALE:
            raise ValueError(
                f"min_scale {min_scale} and initial_scale {initial_scale} must be above 0 and at most "
                f"{MAX_SCALE:.0e}, and initial_scale not below min_scale"
            )
        if growth_interval < 1 or hysteresis < 1:
            raise ValueError(f"growth_interval {growth_interval} and hysteresis {hysteresis} must be at least 1")
        self.min_scale = min_scale
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self._value = float(initial_scale)
        self._steps_without_overflow = 0
        self._remaining_overflows = hysteresis
        self._skips_at_min_scale = 0
        self.skipped_steps = 0
        self.last_scale = self._value
        self.skipped_last = False
        # Written in place only: a CUDA graph reads this memory in each replay.
        self.scale = torch.full((), self._value, device=backend.device)
        self._found_inf: Tensor | None = None

    def scale_gradients_of(self, loss: Tensor) -> Tensor:
        """Return ``loss`` with its value; its backward computes gradients times the scale."""
        return cast(Tensor, _ScaleGradient.apply(loss, self.scale))

    @torch.no_grad()
    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide ``gradients`` by the scale in place, and check on all ranks whether all are finite.

        Every rank calls, once a step, after the gradients are reduced and before they are clipped.

        Args:
            gradients: this rank's gradients, or shards of them; fp32 or wider.
        """
        # 1 if a gradient is infinite or NaN. One kernel reads and writes each gradient once.
        found_inf = torch.zeros((), device=self.scale.device)
        inverse = self.scale.double().reciprocal().float()
        if gradients:
            # Unscaling is linear: a summed sequence-parallel gradient stays a sum.
            with keep_sums(gradients):
                torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateImportUsage]
                    [gradient.detach() for gradient in gradients], found_inf, inverse
                )
        # Data-parallel ranks differ with ZeRO-1, where each has other elements.
        self._found_inf = _maximum_over_ranks(found_inf)

    def any_rank_has(self, flag: Tensor) -> bool:
        """Return whether the 0-dim bool ``flag`` is set on any rank. Every rank calls; waits for the device."""
        return _maximum_over_ranks(flag.float()).item() > 0

    def update(self) -> bool:
        """Adapt the scale; return whether the step must be skipped. Call it once after ``unscale``.

        Raises:
            RuntimeError: ``unscale`` was not called since the last update.
            ValueError: ``MAX_SKIPS_AT_MIN_SCALE`` consecutive steps overflowed at the smallest
                scale, on all ranks.
        """
        if self._found_inf is None:
            raise RuntimeError("update() without gradients: call unscale() first, once a step")
        overflow = self._found_inf.item() > 0
        self._found_inf = None
        self.last_scale = self._value
        self.skipped_last = overflow
        if overflow:
            self._after_overflow()
        else:
            self._after_finite_step()
        self.scale.fill_(self._value)
        return overflow

    def _after_overflow(self) -> None:
        self.skipped_steps += 1
        self._steps_without_overflow = 0
        if self._value <= self.min_scale:
            self._skips_at_min_scale += 1
        if self._skips_at_min_scale >= MAX_SKIPS_AT_MIN_SCALE:
            raise ValueError(
                f"{MAX_SKIPS_AT_MIN_SCALE} consecutive steps had infinite or NaN gradients at the smallest loss "
                f"scale {self.min_scale:g}: fp16's range is too small for this model or its training diverges; "
                "use precision bf16-mixed, or a lower learning rate from an earlier checkpoint"
            )
        # The count stays at 0 until the scale is doubled: each further overflow lowers the scale.
        self._remaining_overflows = max(self._remaining_overflows - 1, 0)
        if self._remaining_overflows == 0:
            self._value = max(self._value * BACKOFF_FACTOR, self.min_scale)

    def _after_finite_step(self) -> None:
        self._skips_at_min_scale = 0
        self._steps_without_overflow += 1
        # Above it after a resume with a shorter interval.
        if self._steps_without_overflow >= self.growth_interval:
            self._steps_without_overflow = 0
            self._remaining_overflows = self.hysteresis
            self._value = min(self._value * GROWTH_FACTOR, MAX_SCALE)

    def state_dict(self) -> dict[str, float | int]:
        """Return everything that changes from step to step, equal on all ranks; plain numbers."""
        return {
            "scale": self._value,
            "steps_without_overflow": self._steps_without_overflow,
            "remaining_overflows": self._remaining_overflows,
            "skips_at_min_scale": self._skips_at_min_scale,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of ``state_dict``, with this scaler's options.

        The options may differ from those of the scaler that saved: a larger ``min_scale`` raises the
        scale, and a smaller ``hysteresis`` is the most overflows that are left before it is lowered.

        Raises:
            ValueError: its scale is not a positive number.
        """
        scale = float(state["scale"])
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"the loss scaler's state has scale {scale}: it must be a positive number")
        # A scale below the minimum would be raised to it by an overflow.
        self._value = max(scale, self.min_scale)
        self._steps_without_overflow = int(state["steps_without_overflow"])
        self._remaining_overflows = min(int(state["remaining_overflows"]), self.hysteresis)
        self._skips_at_min_scale = int(state["skips_at_min_scale"])
        self.skipped_steps = int(state["skipped_steps"])
        self.scale.fill_(self._value)


def _maximum_over_ranks(value: Tensor) -> Tensor:
    """Return the maximum of a 0-dim tensor over all tensor-parallel, data-parallel and pipeline-parallel ranks."""
    # The ranks are a T x D x P grid: the maximum over the three groups is the maximum over all ranks.
    tensor_group = cast("ProcessGroup | None", parallel_state.get_tensor_model_parallel_group())
    data_group = cast("ProcessGroup | None", parallel_state.get_data_parallel_group())
    value = backend.all_reduce(value, tensor_group, op="max")
    value = backend.all_reduce(value, data_group, op="max")
    return backend.all_reduce(value, parallel_state.get_pipeline_model_parallel_group(), op="max")


class _ScaleGradient(torch.autograd.Function):
    """Identity in forward; multiplication of the gradient by a 0-dim ``scale`` in backward."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return loss.view_as(loss)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad_loss * scale, None
