"""Forward and backward as one CUDA graph, which the host launches in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import Capture, backend
from nxd_memopt.parallel_layers.data_shards import require_replicated
from nxd_memopt.parallel_layers.random import get_rng_tracker
from nxd_memopt.parallel_layers.summed_gradients import forget_sum, move_sum

# Eager calls before the capture: they compile and autotune kernels and map memory between ranks.
WARM_UP_CALLS = 2


@dataclass
class _Graph:
    """A captured forward and backward with its static input tensors.

    ``capture.result`` is the static loss.
    """

    static_inputs: tuple[Tensor, ...]
    capture: Capture[Tensor]


@dataclass
class _ShapeState:
    """Warm-up calls and captured graphs of one combination of input shapes and dtypes.

    Attributes:
        receives_grad: for each parameter, whether it receives a gradient.
        warmup_calls: number of warm-up calls so far.
        overwriting: the graph that overwrites ``.grad``.
        accumulating: the graph that accumulates into ``.grad``.
    """

    receives_grad: list[bool]
    warmup_calls: int = 0
    overwriting: _Graph | None = None
    accumulating: _Graph | None = None


class GraphedLoss:
    """A loss and its backward, captured once per input shape and replayed afterwards.

    A forward and backward pass launches thousands of kernels. If tensor parallelism leaves each
    rank a small share of each kernel, launching takes the host longer than running takes the
    device. A replay is a single launch.

    Gradients are accumulated into ``.grad`` as by ``backward()``. Hooks of
    ``register_post_accumulate_grad_hook`` run after the complete pass. The first two calls for a
    shape run eagerly. The memory of the graphs, gradients included, is allocated as long as this
    object lives: clone a gradient that must outlive the next call.

    Example::

        step = GraphedLoss(model.parameters(), lambda ids: model(ids, labels=ids).loss)
        loss = step(input_ids)  # backward included
        optimizer.step()
        optimizer.zero_grad()

    Args:
        parameters: all tensors that receive gradients from the loss, and the frozen parameters that
            the loss reads. Their memory must not move: the graphs do not see parameters that
            are replaced later, for example by ``load_state_dict(assign=True)``.
        loss_of: maps tensors to a scalar loss. Any other value that it reads must not change
            between calls, including ``train()`` and ``eval()``. It must not copy values to the host
            (``.item()``) and must not draw random numbers. Its Python code and all other hooks run
            only during the warm-up calls and the capture.

    Raises:
        ValueError: the device cannot capture graphs, or parameters are sharded over data-parallel
            ranks, which gathers them to new addresses.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], loss_of: Callable[..., Tensor]) -> None:
        refusal = backend.capture_refusal()
        if refusal is not None:
            raise ValueError(f"a loss as one CUDA graph {refusal}: use loss_of and backward() themselves")
        # Tied parameters appear once. Frozen parameters are included, to detect that they moved.
        self._all_parameters = list(dict.fromkeys(parameters))
        require_replicated(self._all_parameters, "a CUDA graph", "run loss_of and backward() without a graph")
        self._parameters = [p for p in self._all_parameters if p.requires_grad]
        self._loss_of = loss_of
        # Static gradient buffers: all graphs overwrite or accumulate into the same ones.
        self._static_grads: list[Tensor | None] = [None] * len(self._parameters)
        self._shape_states: dict[tuple[tuple[torch.Size, torch.dtype], ...], _ShapeState] = {}
        self._last_capture: Capture[Tensor] | None = None
        self._addresses: list[int] = []  # data pointers of all parameters at the last capture

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the detached loss and accumulate gradients into the parameters' ``.grad``.

        Do not call ``backward()`` on the loss: this call has run it.

        Args:
            inputs: tensors on the device that do not require gradients.

        Raises:
            ValueError: an input is on another device or requires a gradient, the call is inside
                ``torch.autocast`` or ``torch.no_grad``, parameters were frozen, unfrozen or moved,
                or the loss has gradients for tensors that are not in ``parameters``.
            RuntimeError: the loss draws random numbers or cannot be captured.
        """
        self._check(inputs)
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        state = self._shape_states.setdefault(shapes, _ShapeState([False] * len(self._parameters)))
        if state.warmup_calls < WARM_UP_CALLS:
            loss = self._run_eagerly(state, inputs)
            state.warmup_calls += 1  # after the call: one that fails does not count
            return loss
        graph = self._select_graph(state, inputs)
        # The graph reads fixed addresses: copy the inputs to the static tensors, replay, and
        # return a copy of the static loss, which the next replay overwrites.
        for static_input, current_input in zip(graph.static_inputs, inputs, strict=True):
            static_input.copy_(current_input)
        graph.capture.replay()
        self._assign_static_grads(state)
        return graph.capture.result.clone()

    def _check(self, inputs: tuple[Tensor, ...]) -> None:
        for i, value in enumerate(inputs):
            if value.device.type != backend.device.type or value.requires_grad:
                raise ValueError(
                    f"input {i} must be on {backend.device} and require no gradient, "
                    f"got {value.device}, requires_grad={value.requires_grad}"
                )
        # The graphs contain the backward of exactly the parameters that were trainable at
        # construction, at the addresses of the capture.
        trainable_now = [id(p) for p in self._all_parameters if p.requires_grad]
        if trainable_now != [id(p) for p in self._parameters]:
            raise ValueError("parameters were frozen or released: make another GraphedLoss")
        if self._addresses and self._addresses != [p.data_ptr() for p in self._all_parameters]:
            raise ValueError(
                "parameters moved in memory, and the captured graphs still use the old addresses: "
                "copy into them instead, or make another GraphedLoss"
            )
        # Grad mode and autocast are host state, which a replay does not see: the graph would
        # compute gradients, in the dtypes of the capture, whatever the caller asks for.
        if not torch.is_grad_enabled():
            raise ValueError("gradients are switched off: call loss_of itself under no_grad or inference_mode")
        if torch.is_autocast_enabled(backend.device.type):
            raise ValueError("autocast around a call is not captured by the graph: put it inside loss_of")

    def _run_eagerly(self, state: _ShapeState, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run one warm-up call and record which parameters receive gradients."""
        # A replay would repeat the random numbers of the capture. A random state that differs
        # after the forward means that the loss draws numbers.
        random_states = _random_states()
        with backend.warmup(), self._record_receives_grad(state.receives_grad):
            loss = self._loss_of(*inputs)
            for before, after in zip(random_states, _random_states(), strict=True):
                if not torch.equal(before, after):
                    raise RuntimeError(
                        "a loss that draws random numbers cannot be recorded, since the host seeds "
                        "their streams: set dropout to 0"
                    )
            self._require_known_leaves(loss)
            loss.backward()
        return loss.detach()

    def _require_known_leaves(self, loss: Tensor) -> None:
        """Raise an error unless all gradients of ``loss`` go to the known parameters.

        A graph would write the gradients of other tensors into memory that no caller can find.
        """
        known = {id(parameter) for parameter in self._parameters}
        unknown = [leaf for leaf in _leaves(loss) if id(leaf) not in known]
        if unknown:
            raise ValueError(
                f"the loss gives gradients to {len(unknown)} tensors that are not among the parameters, the first of "
                f"shape {list(unknown[0].shape)}: pass them too, or freeze them"
            )

    @contextmanager
    def _record_receives_grad(self, receives_grad: list[bool]) -> Iterator[None]:
        """Set ``receives_grad[i]`` for each parameter that receives a gradient inside the block.

        Other hooks may remove a gradient immediately, so ``.grad`` after the pass does not tell.
        """
        # The hook sets a flag of the host and reads no values from the device.
        handles = []
        for i, parameter in enumerate(self._parameters):
            set_flag = functools.partial(_set_flag, receives_grad, i)
            handles.append(parameter.register_post_accumulate_grad_hook(set_flag))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _select_graph(self, state: _ShapeState, inputs: tuple[Tensor, ...]) -> _Graph:
        """Return the graph to replay, captured if needed, and prepare ``.grad`` for the replay.

        The graph of the first captured shape overwrites ``.grad``. Every other graph accumulates
        into ``.grad``, which is zeroed first if a parameter has no gradient.
        """
        # Overwriting saves one pass of zeros over all gradients. It is possible only if no
        # parameter has a gradient, and only for the shape whose capture allocated the gradients in
        # the graph's memory.
        grads_before = [parameter.grad for parameter in self._parameters]
        try:
            if all(grad is None for grad in grads_before):
                if not any(each.overwriting for each in self._shape_states.values()):
                    self._capture_overwriting(state, inputs)
                if state.overwriting is not None:
                    return state.overwriting
            self._load_static_grads(state)
            if state.accumulating is None:
                state.accumulating = self._capture(state, inputs)
        except BaseException:
            for parameter, grad in zip(self._parameters, grads_before, strict=True):
                parameter.grad = grad
            # After a failure, such as out of memory, release the buffers if no graph uses them.
            states = self._shape_states.values()
            if not any(each.overwriting or each.accumulating for each in states):
                self._static_grads = [None] * len(self._parameters)
            raise
        return state.accumulating

    def _capture_overwriting(self, state: _ShapeState, inputs: tuple[Tensor, ...]) -> None:
        """Capture the graph that overwrites gradients.

        The gradients that its capture allocates become the static buffers.
        """
        # Accumulating graphs that exist by now were captured on gradients of an eager pass, which
        # are no longer the static buffers: capture these graphs again when they are needed.
        for each in self._shape_states.values():
            each.accumulating = None
        self._static_grads = [None] * len(self._parameters)
        state.overwriting = self._capture(state, inputs)
        self._static_grads = [parameter.grad for parameter in self._parameters]

    def _capture(self, state: _ShapeState, inputs: tuple[Tensor, ...]) -> _Graph:
        """Capture forward and backward for inputs of this shape."""
        static_inputs = tuple(tensor.clone() for tensor in inputs)
        # ``.grad`` decides what the graph contains: where it is None, backward allocates a gradient
        # and writes it; where it is a tensor, backward accumulates into it.
        had_grad = [p.grad is not None for p in self._parameters]

        def run() -> Tensor:
            loss = self._loss_of(*static_inputs)
            loss.backward()
            return loss.detach()

        try:
            # Replays run one after another, so ``pool_of`` lets all graphs share one memory pool.
            with _hooks_disabled(self._parameters):
                capture = backend.capture(run, pool_of=self._last_capture)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "the loss cannot be recorded (does it ask the device for a value, such as .item(), "
                "or copy from the host? does a loss outside GraphedLoss, not detached, keep the "
                f"graph of an earlier step alive?): {error}"
            ) from error
        # A gradient that exists only after the capture must have existed in the warm-up calls too.
        # Otherwise ``_assign_static_grads`` would not assign it to the parameter.
        had_and_receives = zip(self._parameters, had_grad, state.receives_grad, strict=True)
        for parameter, had, receives in had_and_receives:
            if parameter.grad is not None and not had and not receives:
                raise RuntimeError(
                    "the recording gives gradients to other parameters than the first calls of this "
                    "shape did: only the inputs' shapes may decide which"
                )
        self._last_capture = capture
        self._addresses = [parameter.data_ptr() for parameter in self._all_parameters]
        return _Graph(static_inputs, capture)

    @torch.no_grad()
    def _assign_static_grads(self, state: _ShapeState) -> None:
        """Set ``.grad`` to the static gradients and run the hooks, as backward would."""
        updated: list[tuple[nn.Parameter, Tensor]] = []
        for i, parameter in enumerate(self._parameters):
            static_grad = self._static_grads[i]
            if state.receives_grad[i] and static_grad is not None:
                updated.append((parameter, static_grad))
        # A replay writes to the gradients without autograd's knowledge: raise their version
        # counters, by which autograd and the sums over sequence shards detect writes.
        torch.autograd.graph.increment_version([grad for _, grad in updated])
        for parameter, grad in updated:
            # A ``.grad`` of None means that the replay overwrote the static buffer: the mark of an
            # earlier step's sum over sequence shards is no longer valid.
            if parameter.grad is None:
                forget_sum(parameter, grad)
            parameter.grad = grad
        # Hooks run after all gradients are set: a hook may read gradients of other parameters.
        for parameter, _ in updated:
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)

    @torch.no_grad()
    def _load_static_grads(self, state: _ShapeState) -> None:
        """Move the present gradients into the static buffers that graphs accumulate into.

        On the first call the present gradients become the static buffers, without a copy.
        """
        for i, parameter in enumerate(self._parameters):
            static_grad = self._static_grads[i]
            is_loaded = static_grad is not None and parameter.grad is static_grad
            if not state.receives_grad[i] or is_loaded:
                continue
            # Without a buffer: adopt the present gradient, or zeros, as the buffer. With a buffer:
            # zero it, or copy the present gradient into it, together with the mark that says
            # whether the gradient is summed over sequence shards.
            if static_grad is None:
                static_grad = parameter.grad
                if static_grad is None:
                    static_grad = torch.zeros_like(parameter)
                self._static_grads[i] = static_grad
            elif parameter.grad is None:
                static_grad.zero_()
            else:
                static_grad.copy_(parameter.grad)
                move_sum(parameter.grad, static_grad)
            parameter.grad = static_grad


def _set_flag(flags: list[bool], index: int, parameter: Tensor) -> None:
    del parameter
    flags[index] = True


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
            if hasattr(node, "variable"):
                found.append(node.variable)
            nodes += [function for function, _ in node.next_functions]
    return found


def _random_states() -> list[Tensor]:
    """Return the random states of the host, the device and the tensor-parallel rng tracker."""
    return [torch.get_rng_state(), backend.get_rng_state(), *get_rng_tracker().get_states().values()]


@contextmanager
def _hooks_disabled(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Disable post-accumulate hooks inside the block.

    Hooks on complete gradients keep Python state, which a replay would not update. They run after
    each replay instead.
    """
    # Autograd reads the parameter's own dict: empty it in place, and fill it again afterwards.
    disabled: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for parameter in parameters:
        hooks = parameter._post_accumulate_grad_hooks
        if hooks:
            disabled.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, saved_hooks in disabled:
            hooks.update(saved_hooks)
