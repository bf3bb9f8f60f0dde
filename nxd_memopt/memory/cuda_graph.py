"""Forward and backward as one CUDA graph, which the host launches in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import Capture, backend
from nxd_memopt.parallel_layers.gradient_ledger import forget_sum, move_sum
from nxd_memopt.parallel_layers.random import get_rng_tracker

WARM_UP_CALLS = 2  # run as they are: kernels are compiled and chosen, and memory between ranks is mapped


@dataclass
class _Recording:
    """A pass on the device, the tensors that it reads, and the loss that it leaves."""

    inputs: tuple[Tensor, ...]
    work: Capture[Tensor]


@dataclass
class _Pass:
    """What is known of the passes of one shape."""

    reaches: list[bool]  # which parameters, with gradients
    calls: int = 0
    writing: _Recording | None = None
    adding: _Recording | None = None


class GraphedLoss:
    """A loss and its backward, recorded for each shape of the inputs and replayed from then on.

    A pass is thousands of kernels. Where tensor parallelism leaves a rank a small share of each, the host takes longer
    to launch them than the device to run them; a recording is launched as one.

    Gradients come into ``.grad`` as by ``backward()``: they add to what is there, and hooks of
    ``register_post_accumulate_grad_hook`` run, after the whole pass. The first two calls for a shape run as they are.
    The memory of the recordings, gradients with it, is kept as long as this object lives: a gradient that is to outlive
    the next call must be cloned.

    Example::

        step = GraphedLoss(model.parameters(), lambda ids: model(ids, labels=ids).loss)
        loss = step(input_ids)  # backward included
        optimizer.step()
        optimizer.zero_grad()

    Args:
        parameters: all that the loss gives gradients, and frozen ones that it reads. They keep their memory: other
            ones put in their places later, by ``load_state_dict(assign=True)`` say, would not be seen.
        loss_of: maps tensors to a scalar loss. Nothing else that it reads may change between calls, ``train()`` and
            ``eval()`` included; it asks the device for no value and draws no random numbers. Other hooks, and its
            Python code, run while it is recorded only.

    Raises:
        TypeError: ``parameters`` holds something else.
        ValueError: the device records nothing, or no parameter requires a gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], loss_of: Callable[..., Tensor]) -> None:
        refusal = backend.capture_refusal()
        if refusal is not None:
            raise ValueError(f"a loss as one CUDA graph {refusal}: use loss_of and backward() themselves")
        self._given = _unique_leaves(parameters)
        self._parameters = [parameter for parameter in self._given if parameter.requires_grad]
        if not self._parameters:
            raise ValueError(f"none of {len(self._given)} parameters requires a gradient: pass model.parameters()")
        self._loss_of = loss_of
        self._grads: list[Tensor | None] = [None] * len(self._parameters)  # where all recordings leave them
        self._passes: dict[tuple[tuple[torch.Size, torch.dtype], ...], _Pass] = {}
        self._last: Capture[Tensor] | None = None
        self._addresses: list[int] = []  # of what the recordings read

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The loss, detached; the parameters' ``.grad`` are there.

        Args:
            inputs: tensors on the device that require no gradient.

        Raises:
            TypeError: an input, or what ``loss_of`` returns, is no tensor.
            ValueError: another input, the call is inside ``torch.autocast`` or ``torch.no_grad``, parameters were
                frozen, released or moved, or the loss gives gradients to others than ``parameters``.
            RuntimeError: the loss draws random numbers, or cannot be recorded.
        """
        self._check(inputs)
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        known = self._passes.setdefault(shapes, _Pass([False] * len(self._parameters)))
        if known.calls < WARM_UP_CALLS:
            loss = self._run(known, inputs)
            known.calls += 1
            return loss
        recording = self._recording(known, inputs)
        for static, given in zip(recording.inputs, inputs, strict=True):
            static.copy_(given)
        recording.work.replay()
        self._give_grads(known)
        return recording.work.result.clone()

    def _check(self, inputs: tuple[Tensor, ...]) -> None:
        for i, given in enumerate(inputs):
            if not isinstance(given, Tensor):
                raise TypeError(f"input {i} is a {type(given).__name__}: only tensors can change between replays")
            if given.device.type != backend.device.type or given.requires_grad:
                wanted = f"must be on {backend.device} and require no gradient"
                raise ValueError(f"input {i} {wanted}, got {given.device}, requires_grad={given.requires_grad}")
        if [id(p) for p in self._given if p.requires_grad] != [id(p) for p in self._parameters]:
            raise ValueError("parameters were frozen or released: make another GraphedLoss")
        if self._addresses and self._addresses != [parameter.data_ptr() for parameter in self._given]:
            raise ValueError(
                "parameters moved in memory, and the recordings read where they were: copy into them instead, or make "
                "another GraphedLoss"
            )
        if not torch.is_grad_enabled():
            raise ValueError("gradients are switched off: call loss_of itself under no_grad or inference_mode")
        if torch.is_autocast_enabled(backend.device.type):
            raise ValueError("autocast around a call would not reach its recording: put it inside loss_of")

    def _run(self, known: _Pass, inputs: tuple[Tensor, ...]) -> Tensor:
        random_states = _random_states()
        with backend.rehearsal(), self._noting(known.reaches):
            loss = self._loss_of(*inputs)
            if any(not torch.equal(*pair) for pair in zip(random_states, _random_states(), strict=True)):
                raise RuntimeError(
                    "a loss that draws random numbers cannot be recorded, since the host seeds their streams: set "
                    "dropout to 0"
                )
            self._require_known(loss)
            loss.backward()
        return loss.detach()

    def _require_known(self, loss: Tensor) -> None:
        """A recording would leave the gradients of other tensors where nobody finds them."""
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_of returned a {type(loss).__name__}: return the loss, a tensor of one element")
        known = {id(parameter) for parameter in self._parameters}
        others = [leaf for leaf in _leaves(loss) if id(leaf) not in known]
        if others:
            raise ValueError(
                f"the loss gives gradients to {len(others)} tensors that are not among the parameters, the first of "
                f"shape {list(others[0].shape)}: pass them too, or freeze them"
            )

    @contextmanager
    def _noting(self, reaches: list[bool]) -> Iterator[None]:
        """Which parameters get gradients inside; other hooks may take those away at once."""
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: reaches.__setitem__(i, True))
            for i, parameter in enumerate(self._parameters)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _recording(self, known: _Pass, inputs: tuple[Tensor, ...]) -> _Recording:
        """Of the first shape there is one that writes gradients; all others add to them, after zeros where need be."""
        before = [parameter.grad for parameter in self._parameters]
        try:
            if all(grad is None for grad in before):
                if not any(each.writing for each in self._passes.values()):
                    self._record_writing(known, inputs)
                if known.writing is not None:
                    return known.writing
            self._take_grads(known)
            known.adding = known.adding or self._record(known, inputs)
        except BaseException:
            for parameter, grad in zip(self._parameters, before, strict=True):
                parameter.grad = grad
            if not any(each.writing or each.adding for each in self._passes.values()):
                self._grads = [None] * len(self._parameters)  # out of memory, say: it is not held
            raise
        return known.adding

    def _record_writing(self, known: _Pass, inputs: tuple[Tensor, ...]) -> None:
        for each in self._passes.values():
            each.adding = None  # it adds to gradients of a pass that ran as it is
        self._grads = [None] * len(self._parameters)
        known.writing = self._record(known, inputs)
        self._grads = [parameter.grad for parameter in self._parameters]

    def _record(self, known: _Pass, inputs: tuple[Tensor, ...]) -> _Recording:
        static, had = tuple(tensor.clone() for tensor in inputs), [p.grad is not None for p in self._parameters]

        def run() -> Tensor:
            loss = self._loss_of(*static)
            loss.backward()
            return loss.detach()

        try:
            with _hooks_laid_aside(self._parameters):
                work = backend.capture(run, beside=self._last)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "the loss cannot be recorded (does it ask the device for a value, such as .item(), or copy from the "
                f"host?): {error}"
            ) from error
        gains = [p.grad is not None and not grad for p, grad in zip(self._parameters, had, strict=True)]
        if any(now and not earlier for now, earlier in zip(gains, known.reaches, strict=True)):
            raise RuntimeError(
                "the recording gives gradients to other parameters than the first calls of this shape did: only the "
                "inputs' shapes may decide which"
            )
        self._last, self._addresses = work, [parameter.data_ptr() for parameter in self._given]
        return _Recording(static, work)

    @torch.no_grad()
    def _give_grads(self, known: _Pass) -> None:
        places = zip(self._parameters, self._grads, known.reaches, strict=True)
        reached = [(parameter, grad) for parameter, grad, is_reached in places if is_reached and grad is not None]
        torch.autograd.graph.increment_version([grad for _, grad in reached])  # a replay writes behind autograd's back
        for parameter, grad in reached:
            if parameter.grad is None:
                forget_sum(parameter, grad)  # the replay overwrote what an earlier step summed
            parameter.grad = grad
        for parameter, _ in reached:
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)

    @torch.no_grad()
    def _take_grads(self, known: _Pass) -> None:
        """What the parameters have, moved to where recordings add to it; at first that is where it is."""
        for i, (parameter, reached) in enumerate(zip(self._parameters, known.reaches, strict=True)):
            grad = self._grads[i]
            if not reached or (grad is not None and parameter.grad is grad):
                continue
            if grad is None:
                grad = self._grads[i] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            elif parameter.grad is None:
                grad.zero_()
            else:
                grad.copy_(parameter.grad)
                move_sum(parameter.grad, grad)
            parameter.grad = grad


def _unique_leaves(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    if isinstance(parameters, nn.Module | Tensor):
        raise TypeError(f"parameters is a {type(parameters).__name__}: pass model.parameters()")
    given = list(parameters)
    for each in given:
        if not (isinstance(each, Tensor) and each.is_leaf):
            raise TypeError(f"parameters holds a {type(each).__name__} that is no leaf tensor: pass model.parameters()")
    return list(dict.fromkeys(given))


def _leaves(loss: Tensor) -> list[Tensor]:
    """Whose gradients backward would make."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            nodes += [function for function, _ in node.next_functions]
    return found


def _random_states() -> list[Tensor]:
    return [torch.get_rng_state(), backend.get_rng_state(), *get_rng_tracker().get_states().values()]


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
