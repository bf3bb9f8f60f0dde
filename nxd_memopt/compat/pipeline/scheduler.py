"""neuronx-distributed's schedules: the tasks of one rank, in steps.

They describe a schedule for programs and tests that read it; nothing runs these tasks. A pipeline model runs
``planner.techniques.pipeline_schedule``, from which ``Train1F1BSchedule`` and ``TrainInterleavedSchedule`` are made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from nxd_memopt.planner.techniques.pipeline_schedule import Compute, Unit, source, target, training_units


class PipelineTask:
    """A task of one micro-batch.

    Args:
        mb: micro-batch.
        model_chunk: chunk of the rank's layers.
        graph_break: whether the graph ends after the task.
    """

    def __init__(self, mb: int, model_chunk: int = 0, graph_break: bool = True) -> None:
        self.mb = mb
        self.model_chunk = model_chunk
        self.graph_break = graph_break

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __repr__(self) -> str:
        where = f"microbatch_{self.mb}_modelchunk_{self.model_chunk}"
        return f"{type(self).__name__}_{where}_graphbreak_{self.graph_break}"


class ForwardPreprocessTask(PipelineTask):
    """Take or receive the inputs of a forward."""


class ForwardStepTask(PipelineTask):
    """Run a forward."""


class ForwardPostprocessTask(PipelineTask):
    """Send the outputs of a forward."""


class BackwardPreprocessTask(PipelineTask):
    """Receive the gradients of a forward's outputs."""


class BackwardStepTask(PipelineTask):
    """Run a backward."""


class BackwardPostprocessTask(PipelineTask):
    """Send the gradients of a forward's inputs."""


class PostProcessTask(PipelineTask):
    """A task after all micro-batches."""

    def __init__(self, graph_break: bool = True) -> None:
        super().__init__(-1, -1, graph_break)


class ReduceGradsTask(PostProcessTask):
    """Reduce gradients over data-parallel ranks and over the stages of shared weights."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return "ReduceGradsTask"


Step = list[PipelineTask]


class PipeSchedule(ABC):
    """Tasks of one rank; iterating yields the lists of ``steps``.

    Args:
        num_microbatches: M.
        stages: P, the ranks of the pipeline.
        stage_id: position of the rank.
    """

    def __init__(self, num_microbatches: int, stages: int, stage_id: int) -> None:
        self.num_microbatches = num_microbatches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """Yield the tasks of each step."""

    @property
    def stage(self) -> int:
        """Position of the rank."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """P, the ranks of the pipeline."""
        return self.stages

    @property
    def is_first_stage(self) -> bool:
        """Whether no rank is before this one."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether no rank is after this one."""
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[Step]:
        return self.steps()


class InferenceSchedule(PipeSchedule):
    """Forwards of one chunk, one micro-batch after the other."""

    def steps(self) -> Iterator[Step]:
        """Yield the tasks of each micro-batch."""
        for mb in range(self.num_microbatches):
            yield [ForwardPreprocessTask(mb), ForwardStepTask(mb), ForwardPostprocessTask(mb)]


class Train1F1BSchedule(PipeSchedule):
    """One forward and one backward in turn, after the forwards that the next ranks need to begin."""

    def steps(self) -> Iterator[Step]:
        """Yield the tasks of each forward and each backward, then the reduction."""
        # The gradient of a micro-batch is received before the activation of the forward before it is sent: the
        # ranks at both ends of a link have this order.
        unsent: list[PipelineTask] = []
        warmup = min(self.stages - self.stage_id - 1, self.num_microbatches)
        for (compute,) in training_units(self.stages, 1, self.num_microbatches, self.stage_id):
            mb = compute.micro_batch
            if not compute.is_forward:
                yield self._backward(mb, unsent)
                unsent = []
                continue
            step: Step = [ForwardPreprocessTask(mb), ForwardStepTask(mb)]
            sends: list[PipelineTask] = [] if self.is_last_stage else [ForwardPostprocessTask(mb)]
            if mb < warmup:
                yield step + sends
            else:
                yield step
                unsent = sends
        yield [ReduceGradsTask()]

    def _backward(self, mb: int, unsent: list[PipelineTask]) -> Step:
        """Return the tasks of a backward."""
        step: Step = [] if self.is_last_stage else [BackwardPreprocessTask(mb)]
        step += [*unsent, BackwardStepTask(mb)]
        if not self.is_first_stage:
            step.append(BackwardPostprocessTask(mb))
        return step


class TrainInterleavedSchedule(PipeSchedule):
    """Several chunks of layers on a rank: a step is a forward, a forward and a backward, or a backward.

    A step computes, receives for the next step and sends its own results.

    Args:
        num_microbatches: M, a multiple of P.
        num_model_chunks: V, at least 2.
        stages: P.
        stage_id: position of the rank.
        fused_send_recv: do not end the graph between a send and the receive after it.
        fused_fwd_bwd: do not end the graph between a forward and the backward after it.
        use_odd_even_scheduler: order sends and receives by the parity of the rank.
    """

    def __init__(
        self,
        num_microbatches: int,
        num_model_chunks: int,
        stages: int,
        stage_id: int,
        fused_send_recv: bool = False,
        fused_fwd_bwd: bool = False,
        use_odd_even_scheduler: bool = False,
    ) -> None:
        super().__init__(num_microbatches, stages, stage_id)
        if num_model_chunks < 2:
            raise ValueError(
                f"num_model_chunks must be at least 2, got {num_model_chunks}: use Train1F1BSchedule for 1"
            )
        self.num_model_chunks = num_model_chunks
        # With one group of micro-batches no step has a forward and a backward.
        has_steady_state = num_microbatches > stages
        self.fused_send_recv = fused_send_recv and has_steady_state
        self.fused_fwd_bwd = fused_fwd_bwd and has_steady_state
        self.use_odd_even_scheduler = use_odd_even_scheduler
        self._units = training_units(stages, num_model_chunks, num_microbatches, stage_id)

    def steps(self) -> Iterator[Step]:
        """Yield the tasks of each step, then the reduction."""
        before: Step = [_task(ForwardPreprocessTask, self._units[0][0])]
        following: list[Unit] = [*self._units[1:], ()]
        for unit, after in zip(self._units, following, strict=True):
            yield before + self._computations(unit) + self._exchange(unit, after)
            before = []
        yield [ReduceGradsTask()]

    def _computations(self, unit: Unit) -> Step:
        """Return the forward and the backward of a step."""
        tasks: Step = []
        for compute in unit:
            if compute.is_forward:
                breaks = len(unit) == 1 or not self.fused_fwd_bwd
                tasks.append(_task(ForwardStepTask, compute, graph_break=breaks))
            else:
                tasks.append(_task(BackwardStepTask, compute))
        return tasks

    def _exchange(self, unit: Unit, after: Unit) -> Step:
        """Return the receives for the step ``after`` and the sends of ``unit``."""
        where = (self.stages, self.num_model_chunks, self.stage_id)
        receive_forward = [each for each in after if each.is_forward]
        receive_backward = [each for each in after if not each.is_forward and source(each, *where)]
        send_forward = [each for each in unit if each.is_forward and target(each, *where)]
        send_backward = [each for each in unit if not each.is_forward and target(each, *where)]
        # A fused send and receive is one graph: the first of the two does not end it.
        fuses = self.fused_send_recv and not self.use_odd_even_scheduler
        tasks = {
            "rF": [_task(ForwardPreprocessTask, e, graph_break=not (fuses and send_backward)) for e in receive_forward],
            "sF": [
                _task(ForwardPostprocessTask, e, graph_break=not (fuses and receive_backward)) for e in send_forward
            ],
            "rB": [_task(BackwardPreprocessTask, e) for e in receive_backward],
            "sB": [_task(BackwardPostprocessTask, e) for e in send_backward],
        }
        return [task for kind in self._order() for task in tasks[kind]]

    def _order(self) -> tuple[str, ...]:
        """Return the order of receives and sends, in which neighbors do not wait for each other."""
        if self.use_odd_even_scheduler:
            return ("rF", "sF", "sB", "rB") if self.stage_id % 2 == 0 else ("sF", "rF", "rB", "sB")
        return ("sF", "rB", "rF", "sB") if self.is_last_stage else ("rF", "sB", "sF", "rB")


def _task(kind: type[PipelineTask], compute: Compute, *, graph_break: bool = True) -> PipelineTask:
    return kind(compute.micro_batch, compute.chunk, graph_break)


class TrainSchedule(PipeSchedule):
    """``Train1F1BSchedule`` with an empty step where the rank waits: all ranks have 2 (M + P - 1) steps."""

    def steps(self) -> Iterator[Step]:
        """Yield the tasks of each step; the reduction is in the last one."""
        total = 2 * (self.num_microbatches + self.stages - 1)
        previous = -1
        for step in range(total):
            # Neighbors alternate: where one runs a forward, the other one runs a backward.
            is_forward = (step + self.stage_id) % 2 == 0
            if is_forward:
                mb = (step - self.stage_id) // 2
                tasks = self._forward_step(mb, previous)
            else:
                mb = (step + self.stage_id + 1) // 2 - self.stages
                tasks = self._backward_step(mb, previous)
            if step == total - 1:
                tasks.append(ReduceGradsTask())
            previous = mb
            yield tasks

    def _is_valid(self, mb: int) -> bool:
        return 0 <= mb < self.num_microbatches

    def _forward_step(self, mb: int, previous: int) -> Step:
        """Return the tasks of a forward, after the sends of the backward ``previous``."""
        tasks: Step = []
        if self._is_valid(previous) and not self.is_first_stage:
            tasks.append(BackwardPostprocessTask(previous))
        if self._is_valid(mb):
            tasks += [ForwardPreprocessTask(mb), ForwardStepTask(mb)]
        return tasks

    def _backward_step(self, mb: int, previous: int) -> Step:
        """Return the tasks of a backward, with the sends of the forward ``previous``."""
        tasks: Step = []
        if self._is_valid(mb) and not self.is_last_stage:
            tasks.append(BackwardPreprocessTask(mb))
        if self._is_valid(previous) and not self.is_last_stage:
            tasks.append(ForwardPostprocessTask(previous))
        if self._is_valid(mb):
            tasks.append(BackwardStepTask(mb))
        return tasks
