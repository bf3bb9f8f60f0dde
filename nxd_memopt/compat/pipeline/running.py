"""Runs batches through the stages of neuronx-distributed's pipeline model, and returns their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.compat.pipeline import manual_stages, shared_weights
from nxd_memopt.compat.pipeline.local_module import LocalModule
from nxd_memopt.compat.pipeline.micro_batches import loss_weights, split_batch
from nxd_memopt.compat.pipeline.options import ModelOptions
from nxd_memopt.compat.pipeline.partition import StageIO
from nxd_memopt.compat.pipeline.stages import ForeignStages, Run, StagePlan
from nxd_memopt.compat.pipeline.timeline import PPTimeline
from nxd_memopt.parallel_layers import grads
from nxd_memopt.pipeline.runner import PipelineRunner
from nxd_memopt.trainer.loss import find_loss_from_output_and_spec


class RunningModel(LocalModule):
    """Training and evaluation of a model whose stages exist; ``NxDPPModel`` builds them.

    Args:
        module: the complete model.
        options: how it is divided and run.
    """

    def __init__(self, module: Any, options: ModelOptions) -> None:
        super().__init__(module)
        self.options = options
        self.output_loss = options.has_loss
        self.pipeline_parallel_size = self._parallel_state.get_pipeline_model_parallel_size()
        self.pipeline_parallel_rank = self._parallel_state.get_pipeline_model_parallel_rank()
        self.timeline = PPTimeline(options.trace_file_path, self.pipeline_parallel_rank)
        self.input_names: Sequence[str] | None = None
        self.paritioned_model: Any = None  # so spelled in neuronx-distributed
        self.stage_id_to_IO_input_names: StageIO = {}
        self.stage_id_to_model_input_names: dict[int, dict[str, int]] = {}
        self.stage_id_to_input_count: dict[int, int] = {}
        self.stage_id_to_output_count: dict[int, int] = {}
        self._runner: tuple[ForeignStages, PipelineRunner] | None = None

    @property
    def _parallel_state(self) -> Any:
        """The module of process groups, which programs and tests replace in ``pipeline.model``."""
        raise NotImplementedError

    def _shared_weights(self) -> list[shared_weights.SharedWeight]:
        raise NotImplementedError

    def move_model_to_device(self) -> None:
        """Move the stages to the device, once."""
        raise NotImplementedError

    def run_train(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of a batch; gradients accumulate. Every rank of the world calls.

        Args:
            args: none.
            kwargs: the batch, one tensor for each of ``input_names``; the same on all ranks of a pipeline.

        Returns:
            The mean loss on the last rank (``broadcast_and_average_loss``: on all ranks), otherwise None.
        """
        if not self.output_loss:
            raise RuntimeError("training needs a loss: pass output_loss_value_spec, or manual_pp_loss_fn")
        stages, runner, run = self._prepare(args, kwargs, is_training=True)
        with stages.running(run), shared_weights.summed_gradients(self._shared_weights()):
            runner.train(self.options.num_microbatches)
            if not (self.options.use_zero1_optimizer or self.options.use_optimizer_wrapper):
                grads.bucket_allreduce_gradients(self.local_parameters())
        return self._end(run)

    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """Run forwards of a batch without gradients; see ``run_train``. Without a loss, return the output.

        With several micro-batches, the outputs are a list.
        """
        stages, runner, run = self._prepare(args, kwargs, is_training=False)
        with torch.no_grad(), stages.running(run):
            runner.evaluate(self.options.num_microbatches)
        result = self._end(run)
        if self.output_loss:
            return result
        if self.options.num_microbatches == 1:
            return run.outputs[0] if run.outputs else None
        return run.outputs or None

    def _prepare(
        self, args: Sequence[Any], batch: dict[str, Any], *, is_training: bool
    ) -> tuple[ForeignStages, PipelineRunner, Run]:
        """Return what runs the batch."""
        self._validate_partitioned()
        if args:
            raise RuntimeError(
                f"the batch is passed by name, got {len(args)} arguments by position: name {self.input_names}"
            )
        if self.options._mark_step_before_pp_runtime:
            backend.mark_step()
        self.move_model_to_device()
        for module in self.local_stage_modules:
            module.train(is_training)
        if self.options.manual_pp_partition:
            options = self.options
            run = manual_stages.run_of(
                batch, options.num_microbatches, options.manual_pp_loss_fn, options.micro_batch_weight_fn
            )
        else:
            run = self._run_of(batch)
        run.signature = (is_training, run.signature)
        if self._runner is None:
            stages = ForeignStages(self._plans(), self._method, self.timeline)
            group = self._parallel_state.get_pipeline_model_parallel_group()
            self._runner = (stages, PipelineRunner(stages, self.options.virtual_pipeline_size, group))
        return *self._runner, run

    def _run_of(self, batch: dict[str, Tensor]) -> Run:
        """Return the micro-batches of a batch for a traced model."""
        if self.input_names is not None and batch.keys() != set(self.input_names):
            raise RuntimeError(f"the batch has {sorted(batch)}, the model was traced for {list(self.input_names)}")
        micro_batches = split_batch(batch, self.options.num_microbatches)
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in sorted(micro_batches[0].items())}
        weights = loss_weights(micro_batches, self.options.micro_batch_weight_fn) if self.output_loss else []
        return Run(micro_batches, tuple(shapes.items()), weights, self._loss)

    def _loss(self, output: Any, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the loss in the output of the last stage; None without a loss."""
        del batch
        return find_loss_from_output_and_spec(self._with_names(output), self.options.output_loss_value_spec)

    def _with_names(self, output: Any) -> Any:
        """Return the last stage's outputs as the dict that the model returns, if it returns one."""
        # fx returns the values of a dict as a tuple; which key has which is in the graph of the whole model.
        (output_node,) = (node for node in self.paritioned_model.graph.nodes if node.op == "output")
        structure = output_node.args[0]
        if not isinstance(structure, dict):
            return output
        values = output if isinstance(output, tuple) else (output,)
        of_nodes: dict[Any, Any] = {}
        for node in structure.values():
            of_nodes.setdefault(node, values[len(of_nodes)] if len(of_nodes) < len(values) else None)
        return {name: of_nodes[node] for name, node in structure.items()}

    def _plans(self) -> list[StagePlan]:
        """Return what this rank's chunks receive and send."""
        last = self.pipeline_parallel_size * self.options.virtual_pipeline_size - 1
        plans: list[StagePlan] = []
        for chunk, module in enumerate(self.local_stage_modules):
            stage = self.get_current_stage(chunk)
            plans.append(
                StagePlan(
                    module=module,
                    receives=self.stage_id_to_IO_input_names[stage],
                    takes=self.stage_id_to_model_input_names[stage],
                    num_arguments=self.stage_id_to_input_count[stage],
                    has_one_output=self.stage_id_to_output_count[stage] == 1,
                    sends=None if stage == last else self.stage_id_to_IO_input_names[stage + 1],
                )
            )
        return plans

    @property
    def _method(self) -> str:
        """How descriptions of tensors travel."""
        return "gloo" if self.options._use_gloo_for_metadata_comm else "tcp"

    def _end(self, run: Run) -> Any:
        """Return the loss, and end the step."""
        loss = self._reported(run) if self.output_loss else None
        if self.options._mark_step_after_pp_runtime:
            backend.mark_step()
        self.timeline.mark_step_end()
        return loss

    def _reported(self, run: Run) -> Any:
        """Return the loss for the caller."""
        has_loss = bool(run.losses)
        if self.options.return_mb_loss:
            return run.losses if has_loss else None
        if not has_loss and not self.options.broadcast_and_average_loss:
            return None
        loss = torch.zeros((), device=backend.device)
        if has_loss:
            weights = torch.tensor(run.weights, dtype=run.losses[0].dtype, device=run.losses[0].device)
            loss = (torch.stack([each.reshape(()) for each in run.losses]) * weights).sum()
        if self.options.broadcast_and_average_loss:
            # In fp32: the ranks without a loss do not know its dtype.
            loss = self._average(loss.float())
        return loss.cpu() if self.options.losses_on_host else loss

    def _average(self, loss: Tensor) -> Tensor:
        """Return the mean over data- and context-parallel ranks; stages before the last one have 0."""
        for size, group in (
            (
                self._parallel_state.get_context_model_parallel_size(),
                self._parallel_state.get_context_model_parallel_group(),
            ),
            (self._parallel_state.get_data_parallel_size(), self._parallel_state.get_data_parallel_group()),
            (1, self._parallel_state.get_pipeline_model_parallel_group()),
        ):
            loss = backend.all_reduce(loss.reshape(1), group).reshape(()) / size
        return loss

    # Which stage

    def get_current_stage(self, model_chunk_id: int) -> int:
        """Return the stage of a chunk of this rank."""
        return self.pipeline_parallel_size * model_chunk_id + self.pipeline_parallel_rank

    def is_last_pp_rank_last_model_chunk(self, model_chunk_id: int) -> bool:
        """Return whether a chunk of this rank is the last stage."""
        stages = self.pipeline_parallel_size * self.options.virtual_pipeline_size
        return self.get_current_stage(model_chunk_id) == stages - 1

    def is_last_stage(self) -> bool:
        """Return whether this rank has the last stage."""
        return self.is_last_pp_rank_last_model_chunk(self.options.virtual_pipeline_size - 1)
