"""Owns forward and backward as one CUDA graph: the host gives the device a whole pass in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nxd_memopt.backends import Capture, backend
from nxd_memopt.parallel_layers.random import get_rng_tracker

WARM_UP_CALLS = 2  # run as they are: kernels are compiled and chosen, and memory between ranks is mapped
_Shapes = tuple[tuple[torch.Size, torch.dtype], ...]


class _Recording(NamedTuple):
    """One pass on the device: what it reads, what it leaves, and how to run it."""

    inputs: tuple[Tensor, ...]
    loss: Tensor
    work: Capture


class GraphedLoss:
    """A loss and its backward, recorded once for each shape of the inputs and replayed from then on.

    A rank's share of a pass under tensor parallelism is thousands of kernels, each of which the host takes as long to
    launch as the device to run. Gradients come into ``.grad`` as by ``backward()``: they add to what is there. The
    first two calls for a shape run as they are. The memory of the recordings, gradients with it, is kept as long as
    this object lives.

    Example::

        step = GraphedLoss(model.parameters(), lambda ids: model(ids, labels=ids).loss)
        loss = step(input_ids)  # backward included
        optimizer.step()
        optimizer.zero_grad()

    Args:
        parameters: those that the loss gives gradients.
        loss_of: maps tensors to a scalar loss. Nothing else that it reads may change between calls; it asks the device
            for no value and draws no random numbers. Hooks run while it is recorded only.

    Raises:
        ValueError: the device records nothing.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], loss_of: Callable[..., Tensor]) -> None:
        refusal = backend.capture_refusal()
        if refusal is not None:
            raise ValueError(refusal)
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._loss_of = loss_of
        self._grads: list[Tensor | None] = []  # where all recordings leave them
        self._writing: dict[_Shapes, _Recording] = {}  # of the shapes that came first: gradients are not added to zeros
        self._adding: dict[_Shapes, _Recording] = {}
        self._calls: dict[_Shapes, int] = {}
        self._last: Capture | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The loss, detached; the parameters' ``.grad`` are there.

        Raises:
            RuntimeError: the loss draws random numbers, or cannot be recorded.
        """
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        calls = self._calls[shapes] = self._calls.get(shapes, 0) + 1
        is_fresh = all(parameter.grad is None for parameter in self._parameters)
        if calls <= WARM_UP_CALLS or not (self._grads or is_fresh):
            return self._run(inputs)
        if is_fresh and (shapes in self._writing or not self._grads):
            recording = self._recorded(self._writing, shapes, inputs)
        else:
            self._take_grads()
            recording = self._recorded(self._adding, shapes, inputs)
        for static, given in zip(recording.inputs, inputs, strict=True):
            static.copy_(given)
        recording.work.replay()
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = parameter.grad if grad is None else grad
        return recording.loss.clone()

    def _run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        before = self._random_states()
        loss = self._loss_of(*inputs)
        if any(not torch.equal(*pair) for pair in zip(before, self._random_states(), strict=True)):
            raise RuntimeError("a recorded loss would draw the same random numbers in each step: set dropout to 0")
        loss.backward()
        return loss.detach()

    @staticmethod
    def _random_states() -> list[Tensor]:
        return [backend.get_rng_state(), *get_rng_tracker().get_states().values()]

    def _recorded(
        self, recordings: dict[_Shapes, _Recording], shapes: _Shapes, inputs: tuple[Tensor, ...]
    ) -> _Recording:
        if shapes not in recordings:
            static, losses = tuple(tensor.clone() for tensor in inputs), []

            def run() -> None:
                loss = self._loss_of(*static)
                loss.backward()
                losses.append(loss.detach())

            work = backend.capture(run, beside=self._last)
            self._last = work
            self._grads = self._grads or [parameter.grad for parameter in self._parameters]
            recordings[shapes] = _Recording(static, losses[0], work)
        return recordings[shapes]

    def _take_grads(self) -> None:
        """What the parameters have, moved to where recordings add to it."""
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            if grad is None or parameter.grad is grad:
                continue
            if parameter.grad is None:
                grad.zero_()
            else:
                grad.copy_(parameter.grad)
            parameter.grad = grad
