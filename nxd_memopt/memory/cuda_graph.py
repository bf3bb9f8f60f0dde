"""Forward and backward as one CUDA graph, which the host launches in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import Capture, backend
from nxd_memopt.parallel_layers.gradient_ledger import clear_sum_record, move_sum_record
from nxd_memopt.parallel_layers.random import get_rng_tracker

# Eager calls before the capture: they compile and autotune kernels and map memory between ranks.
WARM_UP_CALLS = 2


@dataclass
class _Recording:
    """A captured forward and backward with its static input tensors and its static loss."""

    inputs: tuple[Tensor, ...]
    work: Capture[Tensor]


@dataclass
class _Pass:
    """State of one input shape: warm-up calls and recordings.

    Attributes:
        reaches: for each parameter, whether it receives a gradient.
        calls: warm-up calls so far.
        writing: the recording that overwrites ``.grad``.
        adding: the recording that accumulates into ``.grad``.
    """

    reaches: list[bool]
    calls: int = 0
    writing: _Recording | None = None
    adding: _Recording | None = None


class GraphedLoss:
    """A loss and its backward, captured once per input shape and replayed afterwards.

    A forward and backward pass launches thousands of kernels. If tensor parallelism leaves each
    rank a small share of each kernel, launching takes the host longer than running takes the
    device. A replay is a single launch.

    Gradients are accumulated into ``.grad`` as by ``backward()``. Hooks of
    ``register_post_accumulate_grad_hook`` run after the complete pass. The first two calls for a
    shape run eagerly. The memory of the recordings, gradients included, is kept as long as this
    object lives: clone a gradient that must outlive the next call.

    Example::

        step = GraphedLoss(model.parameters(), lambda ids: model(ids, labels=ids).loss)
        loss = step(input_ids)  # backward included
        optimizer.step()
        optimizer.zero_grad()

    Args:
        parameters: all tensors that receive gradients from the loss, and the frozen parameters that
            the loss reads. Their memory must not move: the recordings do not see parameters that
            are replaced later, for example by ``load_state_dict(assign=True)``.
        loss_of: maps tensors to a scalar loss. Any other value that it reads must not change
            between calls, including ``train()`` and ``eval()``. It must not copy values to the host
            (``.item()``) and must not draw random numbers. Its Python code and all other hooks run
            only during the warm-up calls and the capture.

    Raises:
        TypeError: ``parameters`` contains something other than leaf tensors.
        ValueError: the device cannot capture graphs, or no parameter requires a gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], loss_of: Callable[..., Tensor]) -> None:
        refusal = backend.capture_refusal()
        if refusal is not None:
            raise ValueError(f"a loss as one CUDA graph {refusal}: use loss_of and backward() themselves")
        # Tied parameters appear once. Frozen parameters are kept too, to detect that they moved.
        self._given = _unique_leaves(parameters)
        self._parameters = [parameter for parameter in self._given if parameter.requires_grad]
        if not self._parameters:
            raise ValueError(f"none of {len(self._given)} parameters requires a gradient: pass model.parameters()")
        self._loss_of = loss_of
        # Static gradient buffers: all recordings write or accumulate into the same ones.
        self._grads: list[Tensor | None] = [None] * len(self._parameters)
        self._passes: dict[tuple[tuple[torch.Size, torch.dtype], ...], _Pass] = {}
        self._last: Capture[Tensor] | None = None
        self._addresses: list[int] = []  # data pointers of the parameters that the recordings read

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the detached loss and accumulate gradients into the parameters' ``.grad``.

        Args:
            inputs: tensors on the device that do not require gradients.

        Raises:
            TypeError: an input or the return value of ``loss_of`` is not a tensor.
            ValueError: an input is on another device or requires a gradient, the call is inside
                ``torch.autocast`` or ``torch.no_grad``, parameters were frozen, unfrozen or moved,
                or the loss has gradients for tensors that are not in ``parameters``.
            RuntimeError: the loss draws random numbers or cannot be captured.
        """
        self._check(inputs)
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        known = self._passes.setdefault(shapes, _Pass([False] * len(self._parameters)))
        if known.calls < WARM_UP_CALLS:
            loss = self._run(known, inputs)
            known.calls += 1
            return loss
        recording = self._recording(known, inputs)
        # The graph reads fixed addresses: copy the inputs to the static tensors, replay, and return
        # a copy of the static loss, which the next replay overwrites.
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
        # Recordings contain the backward of exactly the parameters that were trainable at
        # construction, at the addresses of the capture.
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
        """Run one warm-up call eagerly and note the parameters that receive gradients."""
        # A replay would repeat the random numbers of the capture. A random state that differs after
        # the forward means that the loss draws numbers.
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
        """Raise an error unless all gradients of ``loss`` go to the known parameters.

        A recording would write the gradients of other tensors into memory that no caller can find.
        """
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
        """Set ``reaches[i]`` for each parameter that receives a gradient inside the block.

        Other hooks may remove a gradient immediately, so ``.grad`` after the pass does not tell.
        """
        # ``i=i`` binds the index at definition; the hook sets a flag and reads no values from the
        # device.
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
        """Return the recording to replay, capturing it if needed, with ``.grad`` prepared for the
        replay.

        The graph of the first captured shape overwrites ``.grad``. Every other graph accumulates
        into ``.grad``, which is zeroed first if a parameter has no gradient.
        """
        # Overwriting saves one pass of zeros over all gradients. It is possible only if no
        # parameter has a gradient, and only for the shape whose capture allocated the gradients in
        # the graph's memory.
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
                # After a failure, such as out of memory, release the buffers: no recording uses
                # them.
                self._grads = [None] * len(self._parameters)
            raise
        return known.adding

    def _record_writing(self, known: _Pass, inputs: tuple[Tensor, ...]) -> None:
        """Capture the recording that overwrites gradients; its gradients become the static
        buffers.
        """
        for each in self._passes.values():
            # It accumulates into the gradients of an eager pass, which are replaced below.
            each.adding = None
        self._grads = [None] * len(self._parameters)
        known.writing = self._record(known, inputs)
        self._grads = [parameter.grad for parameter in self._parameters]

    def _record(self, known: _Pass, inputs: tuple[Tensor, ...]) -> _Recording:
        """Capture forward and backward for inputs of this shape."""
        # ``.grad`` decides what the capture contains: None allocates and writes, a tensor
        # accumulates.
        static, had = tuple(tensor.clone() for tensor in inputs), [p.grad is not None for p in self._parameters]

        def run() -> Tensor:
            loss = self._loss_of(*static)
            loss.backward()
            return loss.detach()

        try:
            # All recordings run one after another, so ``pool_of`` lets them share one memory pool.
            with _hooks_laid_aside(self._parameters):
                work = backend.capture(run, pool_of=self._last)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "the loss cannot be recorded (does it ask the device for a value, such as .item(), or copy from the "
                f"host?): {error}"
            ) from error
        # A gradient that exists only after the capture must have existed in the warm-up calls too.
        # Otherwise replays would not hand it to the parameter.
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
        """Set ``.grad`` to the static gradients and run the hooks, as backward would."""
        places = zip(self._parameters, self._grads, known.reaches, strict=True)
        reached = [(parameter, grad) for parameter, grad, is_reached in places if is_reached and grad is not None]
        # A replay writes to the gradients without autograd's knowledge: raise their version
        # counters.
        torch.autograd.graph.increment_version([grad for _, grad in reached])
        for parameter, grad in reached:
            # A gradient of None means that the replay overwrote the static buffer: a sum over
            # sequence shards that was recorded for the old values is no longer valid.
            if parameter.grad is None:
                clear_sum_record(parameter, grad)  # the replay overwrote what an earlier step summed
            parameter.grad = grad
        # Hooks run after all gradients are set: a hook may read gradients of other parameters.
        for parameter, _ in reached:
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)

    @torch.no_grad()
    def _take_grads(self, known: _Pass) -> None:
        """Move the present gradients into the static buffers that recordings accumulate into.

        On the first call the present gradients become the static buffers, without a copy.
        """
        for i, (parameter, reached) in enumerate(zip(self._parameters, known.reaches, strict=True)):
            grad = self._grads[i]
            if not reached or (grad is not None and parameter.grad is grad):
                continue
            # Three cases: adopt the present gradient as static buffer; zero the buffer (no
            # gradient); copy the present gradient into the buffer and transfer the record that says
            # whether it is summed.
            if grad is None:
                grad = self._grads[i] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            elif parameter.grad is None:
                grad.zero_()
            else:
                grad.copy_(parameter.grad)
                move_sum_record(parameter.grad, grad)
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
    """Return the leaf tensors that receive gradients in the backward of ``loss``."""
    # Depth-first walk of the autograd graph; AccumulateGrad nodes have the leaf as ``variable``.
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
    """Return the random states of the host, the device and the tensor-parallel rng tracker."""
    return [torch.get_rng_state(), backend.get_rng_state(), *get_rng_tracker().get_states().values()]


@contextmanager
def _hooks_laid_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Disable post-accumulate hooks inside the block.

    Hooks on complete gradients keep Python state, which a capture would not update. They run after
    each replay instead.
    """
    laid_aside = [(hooks, dict(hooks)) for p in parameters if (hooks := p._post_accumulate_grad_hooks)]
    for hooks, _ in laid_aside:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, each in laid_aside:
            hooks.update(each)
