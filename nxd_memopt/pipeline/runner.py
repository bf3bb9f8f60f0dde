"""Runs forwards and backwards of this rank's stages in the order of a pipeline's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from nxd_memopt.backends import backend
from nxd_memopt.backends.base import Message
from nxd_memopt.planner.techniques.pipeline_schedule import (
    Compute,
    Unit,
    forward_units,
    source,
    target,
    training_units,
)

WAITING = "nxd_memopt: part messages between stages"
"""Range of a profile (``profiling/operations.py``) in which a rank sends, receives and waits for its neighbors."""
_RECEIVED = "nxd_memopt: module messages between stages"
"""Range that begins when memory for the inputs of a forward is allocated: backward keeps it like an activation."""


@dataclass(frozen=True)
class StageOutput:
    """Results of a forward of one chunk.

    Args:
        sent: tensors for the next stage, in the order in which it receives them; empty on the last stage.
        losses: scalars whose gradient is 1: the loss of the last stage, and losses of a stage's own.
    """

    sent: Sequence[Tensor] = ()
    losses: Sequence[Tensor] = ()


class Stages(Protocol):
    """What a rank of a pipeline computes."""

    def inputs(self, micro_batch: int, chunk: int) -> list[Tensor]:
        """Return a tensor for each one that the chunk receives, of its shape and dtype, with ``requires_grad`` as
        the backward needs it; the memory may be uninitialized.
        """
        ...

    def forward(self, micro_batch: int, chunk: int, inputs: Sequence[Tensor]) -> StageOutput:
        """Run a chunk on what it has received; nothing for the first stage."""
        ...


@dataclass
class _Saved:
    """What the backward of a forward needs, apart from the graph's own tensors."""

    inputs: list[Tensor]
    sent: list[tuple[GradientEdge, torch.Size, torch.dtype]]
    losses: list[GradientEdge]


class PipelineRunner:
    """Runs the micro-batches of a step through the stages of a pipeline, on one of its ranks.

    It holds the activations of at most as many micro-batches as the schedule has in flight, and frees an output when
    it is sent: backward needs its place in the graph, not its values.

    Args:
        stages: what this rank computes.
        num_chunks: V.
        group: ranks of the pipeline, in the order of the stages.
    """

    def __init__(self, stages: Stages, num_chunks: int, group: ProcessGroup | None) -> None:
        self._stages = stages
        self._chunks = num_chunks
        self._group = group
        self._size = backend.group_size(group)
        self._rank = backend.group_rank(group)
        self._saved: dict[tuple[int, int], _Saved] = {}

    def train(
        self,
        num_micro_batches: int,
        last_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Run forward and backward of all micro-batches; gradients accumulate in the parameters. Every rank calls.

        Args:
            num_micro_batches: M.
            last_backward: returns a context for this rank's last backward of the step.
        """
        units = training_units(self._size, self._chunks, num_micro_batches, self._rank)
        self._run(units, last_backward)
        assert not self._saved, "every forward has had its backward"

    @torch.no_grad()
    def evaluate(self, num_micro_batches: int) -> None:
        """Run the forwards of any number of micro-batches without gradients. Every rank calls."""
        self._run(forward_units(self._size, self._chunks, num_micro_batches), nullcontext)

    def _run(self, units: Sequence[Unit], last_backward: Callable[[], AbstractContextManager[None]]) -> None:
        results: list[Message] = []
        try:
            for index, unit in enumerate(units):
                received = self._exchange(results, unit)
                results = []
                for compute, tensors in zip(unit, received, strict=True):
                    is_last = index == len(units) - 1 and not compute.is_forward
                    with self._named(compute), last_backward() if is_last else nullcontext():
                        run = self._forward if compute.is_forward else self._backward
                        computed = run(compute, tensors)
                    # On devices that record graphs each computation is a graph, the same for all micro-batches.
                    backend.mark_step()
                    to = target(compute, self._size, self._chunks, self._rank)
                    if to is not None:
                        results += [(tensor, to.rank) for tensor in computed]
                    # Otherwise this name keeps what is sent alive during the next computation.
                    del computed
            self._exchange(results, ())
        finally:
            # An error leaves no activations behind.
            self._saved.clear()

    @contextmanager
    def _named(self, compute: Compute) -> Iterator[None]:
        """Note on an error inside which stage it is of."""
        try:
            yield
        except Exception as error:
            direction = "forward" if compute.is_forward else "backward"
            stage, last = compute.chunk * self._size + self._rank, self._chunks * self._size - 1
            error.add_note(
                f"in the {direction} of micro-batch {compute.micro_batch} on stage {stage} of the stages 0 to {last}"
            )
            raise

    def _exchange(self, sends: list[Message], unit: Unit) -> list[list[Tensor]]:
        """Send the results of a unit, and return what each computation of the next one receives."""
        buffers: list[list[Tensor]] = []
        receives: list[Message] = []
        for compute in unit:
            needed = source(compute, self._size, self._chunks, self._rank)
            buffers.append([] if needed is None else self._buffers(compute))
            receives += [(tensor, needed.rank) for tensor in buffers[-1] if needed is not None]
        if not sends and not receives:
            return buffers
        # Without gradients: an input is a leaf, which may require one.
        with torch.no_grad(), record_function(WAITING):
            received = iter(backend.exchange(sends, receives, self._group))
        return [[_leaf_like(buffer, next(received)) for buffer in each] for each in buffers]

    def _buffers(self, compute: Compute) -> list[Tensor]:
        """Return memory for the inputs of a forward, or for the gradients of what it has sent."""
        if compute.is_forward:
            with record_function(_RECEIVED):
                return self._stages.inputs(compute.micro_batch, compute.chunk)
        sent = self._saved[compute.micro_batch, compute.chunk].sent
        return [torch.empty(shape, dtype=dtype, device=backend.device) for _, shape, dtype in sent]

    def _forward(self, compute: Compute, received: list[Tensor]) -> list[Tensor]:
        """Run a forward; return what the next stage receives."""
        output = self._stages.forward(compute.micro_batch, compute.chunk, received)
        if torch.is_grad_enabled():
            sent = [(get_gradient_edge(each), each.shape, each.dtype) for each in output.sent if each.requires_grad]
            losses = [get_gradient_edge(loss) for loss in output.losses if loss.requires_grad]
            self._saved[compute.micro_batch, compute.chunk] = _Saved(received, sent, losses)
        return [each.detach() for each in output.sent]

    def _backward(self, compute: Compute, gradients: list[Tensor]) -> list[Tensor]:
        """Run a backward; return the gradients of what the forward has received."""
        saved = self._saved.pop((compute.micro_batch, compute.chunk))
        roots = [*(edge for edge, _, _ in saved.sent), *saved.losses]
        # Without roots nothing of this stage and of those before it is trained. A loss has the gradient 1.
        if roots:
            torch.autograd.backward(roots, [*gradients, *(None for _ in saved.losses)])
        result: list[Tensor] = []
        for tensor in saved.inputs:
            if tensor.requires_grad:
                # What only outputs without a gradient depend on, such as a foreign model's, has the gradient 0.
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                result.append(gradient.contiguous())
        return result


def _leaf_like(buffer: Tensor, received: Tensor) -> Tensor:
    """Return ``received``, which may be the buffer, as a tensor without history that requires a gradient as it does."""
    return received if received is buffer else received.detach().requires_grad_(buffer.requires_grad)
