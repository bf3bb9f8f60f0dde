"""Runs this rank's stages of a foreign model: what they receive, their arguments, and what they send."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.compat.pipeline.comm import recv_python_object, send_python_object
from nxd_memopt.compat.pipeline.partition import PipelineIO
from nxd_memopt.compat.pipeline.plain_objects import TensorMeta, to_text
from nxd_memopt.compat.pipeline.serialization import SerializationManager
from nxd_memopt.compat.pipeline.timeline import Timeline, mark_timeline
from nxd_memopt.pipeline.runner import StageOutput


@dataclass
class StagePlan:
    """One stage.

    Args:
        module: its layers.
        receives: objects that it receives, by name and in order.
        takes: inputs of the model that it takes from the batch, with their position among its arguments.
        num_arguments: number of its arguments.
        has_one_output: whether ``module`` returns its only output, not a tuple of outputs.
        sends: objects that the next stage receives; None of the last stage.
    """

    module: nn.Module
    receives: Mapping[str, PipelineIO]
    takes: Mapping[str, int]
    num_arguments: int
    has_one_output: bool
    sends: Mapping[str, PipelineIO] | None


@dataclass
class Run:
    """Inputs and results of one training or evaluation step.

    Args:
        micro_batches: what each micro-batch's stages take.
        signature: equal for runs whose stages exchange tensors of the same shapes.
        weights: share of each micro-batch in the loss.
        finish: turns the output of the last stage into a loss, or returns None.
        losses: of each micro-batch, in order; on the last stage.
        outputs: of the last stage, where ``finish`` returns None.
    """

    micro_batches: Sequence[Mapping[str, Any]]
    signature: Any
    weights: Sequence[float]
    finish: Callable[[Any, Mapping[str, Any]], Tensor | None]
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


class ForeignStages:
    """The stages of a rank, for ``pipeline.runner``.

    Shapes are exchanged once for each shape of the batch, when its first micro-batch arrives: no forward runs for them.

    Args:
        plans: one for each chunk.
        method: how descriptions travel; see ``comm.send_python_object``.
        timeline: records forwards.
    """

    def __init__(self, plans: Sequence[StagePlan], method: str, timeline: Timeline) -> None:
        self.plans = plans
        self._method = method
        self._timeline = timeline
        self._serializer = SerializationManager()
        self._received: dict[Any, list[Any]] = {}
        self._sent: dict[Any, str] = {}
        self._autocast: list[tuple[str, torch.dtype]] = []
        self._run: Run | None = None

    @contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Use ``run`` in the block. The caller's autocast is on in forwards only."""
        self._run = run
        kinds = {backend.device.type, "cuda"}
        enabled = [kind for kind in sorted(kinds) if torch.is_autocast_enabled(kind)]
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in enabled]
        run.signature = (run.signature, tuple(self._autocast))
        try:
            with ExitStack() as stack:
                for kind in enabled:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                yield
        finally:
            self._run = None

    def inputs(self, micro_batch: int, chunk: int) -> list[Tensor]:
        """Return a tensor for each one that the chunk receives; see ``pipeline.runner.Stages``."""
        del micro_batch
        return [
            torch.empty(meta.shape, dtype=meta.dtype, device=backend.device, requires_grad=meta.requires_grad)
            for skeleton in self._skeletons(chunk)
            for meta in _tensors_of(skeleton)
        ]

    def _skeletons(self, chunk: int) -> list[Any]:
        """Return the objects that a chunk receives, with descriptions in place of tensors."""
        key = (self._current.signature, chunk)
        if key not in self._received:
            self._received[key] = recv_python_object(method=self._method)
        return self._received[key]

    def forward(self, micro_batch: int, chunk: int, inputs: Sequence[Tensor]) -> StageOutput:
        """Run a chunk; see ``pipeline.runner.Stages``."""
        run = self._current
        plan = self.plans[chunk]
        batch = run.micro_batches[micro_batch]
        received = self._rebuild(plan, chunk, inputs)
        arguments: list[Any] = [None] * plan.num_arguments
        for name, position in plan.takes.items():
            arguments[position] = _to_device(batch[name])
        for name, io in plan.receives.items():
            if io.input_idx is not None:
                arguments[io.input_idx] = received[name]
        with ExitStack() as stack, mark_timeline(self._timeline, f"mb_{micro_batch}_chunk_{chunk}_ForwardStep"):
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            output = plan.module(*arguments)
            if plan.sends is None:
                return self._finish(micro_batch, output)
        outputs = [output] if plan.has_one_output else output
        objects = [received[n] if io.output_idx is None else outputs[io.output_idx] for n, io in plan.sends.items()]
        return StageOutput(sent=self._describe(micro_batch, chunk, objects))

    def _rebuild(self, plan: StagePlan, chunk: int, inputs: Sequence[Tensor]) -> dict[str, Any]:
        """Return the received objects, by name."""
        objects: dict[str, Any] = {}
        if not plan.receives:
            return objects
        start = 0
        for name, skeleton in zip(plan.receives, self._skeletons(chunk), strict=True):
            count = len(_tensors_of(skeleton))
            objects[name] = self._serializer.deserialize(skeleton, list(inputs[start : start + count]))
            start += count
        return objects

    def _describe(self, micro_batch: int, chunk: int, objects: Sequence[Any]) -> list[Tensor]:
        """Return the tensors of ``objects``, and tell the next stage the rest once.

        Raises:
            RuntimeError: micro-batches of one shape have outputs of different shapes.
        """
        skeletons: list[Any] = []
        sent: list[Tensor] = []
        for each in objects:
            skeleton, tensors, _ = self._serializer.serialize(each)
            skeletons.append(skeleton)
            sent += [tensor.contiguous() for tensor in tensors]
        text = to_text(skeletons)
        key = (self._current.signature, chunk)
        if key not in self._sent:
            self._sent[key] = text
            send_python_object(skeletons, method=self._method)
        if self._sent[key] != text:
            raise RuntimeError(
                f"the output of micro-batch {micro_batch} differs in shapes, dtypes, requires_grad or numbers from "
                f"that of an equal batch before, {text} from {self._sent[key]}: build the model again after a change "
                "of its parameters, and let its outputs depend on the shapes of inputs alone"
            )
        return sent

    def _finish(self, micro_batch: int, output: Any) -> StageOutput:
        """Return the last stage's loss, or keep its output."""
        run = self._current
        loss = run.finish(output, run.micro_batches[micro_batch])
        if loss is None:
            run.outputs.append(output)
            return StageOutput()
        if loss.numel() != 1:
            raise RuntimeError(f"the loss must have one element, got {list(loss.shape)}: return its mean or sum")
        run.losses.append(loss.detach())
        return StageOutput(losses=[loss * run.weights[micro_batch]])

    @property
    def _current(self) -> Run:
        assert self._run is not None, "a run is in progress"
        return self._run


def _tensors_of(skeleton: Any) -> list[TensorMeta]:
    """Return the descriptions of the different tensors in an object, in the order in which they are sent."""
    found = {meta.tensor_index: meta for meta in SerializationManager().extract_stubs(skeleton)}
    return [found[i] for i in sorted(found)]


def _to_device(value: Any) -> Any:
    """Return tensors of the batch, or a list of them, on the device."""
    if isinstance(value, Tensor):
        return value.to(backend.device)
    return [_to_device(each) for each in value]
