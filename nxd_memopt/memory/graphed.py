"""Owns forward and backward as one CUDA graph: the host gives the device a whole pass in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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

    A pass is thousands of kernels. Where tensor parallelism leaves a rank a small share of each, the host takes longer
    to launch them than the device to run them; a recording is launched as one.

    Gradients come into ``.grad`` as by ``backward()``: they add to what is there, and hooks of
    ``register_post_accumulate_grad_hook`` run, after the whole pass. The first two calls for a shape run as they are.
    The memory of the recordings, gradients with it, is kept as long as this object lives.

    Example::

        step = GraphedLoss(model.parameters(), lambda ids: model(ids, labels=ids).loss)
        loss = step(input_ids)  # backward included
        optimizer.step()
        optimizer.zero_grad()

    Args:
        parameters: those that the loss gives gradients.
        loss_of: maps tensors to a scalar loss. Nothing else that it reads may change between calls; it asks the device
            for no value and draws no random numbers. Other hooks, and its Python code, run while it is recorded only.

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
        self._writing: dict[_Shapes, _Recording] = {}  # one: a second would leave its gradients elsewhere
        self._adding: dict[_Shapes, _Recording] = {}
        self._reached: set[nn.Parameter] = set()  # by gradients
        self._calls: dict[_Shapes, int] = {}
        self._last: Capture | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The loss, detached; the parameters' ``.grad`` are there.

        Raises:
            RuntimeError: the loss draws random numbers, or cannot be recorded.
        """
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        calls = self._calls[shapes] = self._calls.get(shapes, 0) + 1
        if calls <= WARM_UP_CALLS:
            return self._run(inputs)
        is_fresh = all(parameter.grad is None for parameter in self._parameters)
        if is_fresh and (shapes in self._writing or not self._writing):
            recording = self._writing.get(shapes) or self._record_writing(shapes, inputs)
        else:
            self._take_grads()
            recording = self._adding.get(shapes) or self._record(self._adding, shapes, inputs)
        for static, given in zip(recording.inputs, inputs, strict=True):
            static.copy_(given)
        recording.work.replay()
        self._give_grads()
        return recording.loss.clone()

    def _run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        before = self._random_states()
        with backend.rehearsal():
            loss = self._loss_of(*inputs)
            if any(not torch.equal(*pair) for pair in zip(before, self._random_states(), strict=True)):
                raise RuntimeError("a recorded loss would draw the same random numbers in each step: set dropout to 0")
            loss.backward()
        self._reached.update(parameter for parameter in self._parameters if parameter.grad is not None)
        return loss.detach()

    @staticmethod
    def _random_states() -> list[Tensor]:
        return [backend.get_rng_state(), *get_rng_tracker().get_states().values()]

    def _record_writing(self, shapes: _Shapes, inputs: tuple[Tensor, ...]) -> _Recording:
        self._adding.clear()  # they add to gradients of a pass that ran as it is
        self._grads.clear()
        recording = self._record(self._writing, shapes, inputs)
        self._grads = [parameter.grad for parameter in self._parameters]
        return recording

    def _record(self, recordings: dict[_Shapes, _Recording], shapes: _Shapes, inputs: tuple[Tensor, ...]) -> _Recording:
        static, losses = tuple(tensor.clone() for tensor in inputs), []

        def run() -> None:
            loss = self._loss_of(*static)
            loss.backward()
            losses.append(loss.detach())

        with _hooks_laid_aside(self._parameters):
            try:
                self._last = work = backend.capture(run, beside=self._last)
            except RuntimeError as error:
                raise RuntimeError(
                    "the loss cannot be recorded: it may ask the device for a value, such as .item(), or copy from the "
                    f"host; {error}"
                ) from error
        recordings[shapes] = _Recording(static, losses[0], work)
        return recordings[shapes]

    def _give_grads(self) -> None:
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            if grad is not None:
                torch.autograd.graph.increment_version(grad)  # a replay writes behind autograd's back
                parameter.grad = grad
                for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                    hook(parameter)

    def _take_grads(self) -> None:
        """What the parameters have, moved to where recordings add to it; at first that is where it is."""
        self._grads = self._grads or [
            torch.zeros_like(parameter) if parameter.grad is None and parameter in self._reached else parameter.grad
            for parameter in self._parameters
        ]
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            if grad is None or parameter.grad is grad:
                continue
            if parameter.grad is None:
                grad.zero_()
            else:
                grad.copy_(parameter.grad)
            parameter.grad = grad


@contextmanager
def _hooks_laid_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Hooks on complete gradients have a state of their own, which a recording would not see."""
    laid_aside = [(hooks, dict(hooks)) for p in parameters if (hooks := p._post_accumulate_grad_hooks)]
    for hooks, _ in laid_aside:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, each in laid_aside:
            hooks.update(each)
