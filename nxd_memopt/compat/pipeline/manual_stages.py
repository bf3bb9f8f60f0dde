"""A pipeline model of a list of layers: its stage, and its runs, which take ``inputs`` and ``labels``."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from nxd_memopt.compat.pipeline.manual_pipe_stage import Partition, PipelineStageModule
from nxd_memopt.compat.pipeline.micro_batches import WeightFunction, loss_weights, split_batch
from nxd_memopt.compat.pipeline.partition import PipelineIO
from nxd_memopt.compat.pipeline.stages import Run

INPUTS = "inputs"
LABELS = "labels"
LossFunction = Callable[[Any, Any], Tensor]


def partition(model: Any, partition_fn: Partition | None) -> None:
    """Keep the layers of this rank's stage in ``model``, an ``NxDPPModel``. Every rank of the world calls.

    Raises:
        ValueError: V is above 1.
    """
    chunks = model.options.virtual_pipeline_size
    if chunks != 1:
        raise ValueError(f"a list of layers has one stage on each rank, got virtual_pipeline_size {chunks}: use 1")
    size, rank = model.pipeline_parallel_size, model.pipeline_parallel_rank
    stage = PipelineStageModule(model.original_torch_module, size, rank, partition_fn)
    model.local_stage_modules = [stage]
    _share_weights(model, stage, partition_fn)
    # One object travels: what the last layer of a stage returns.
    for each in range(size):
        received = OrderedDict()
        if each > 0:
            received[f"stage_{each}_input"] = PipelineIO(f"stage_{each}_input", input_idx=0, output_idx=0)
        model.stage_id_to_IO_input_names[each] = received
        model.stage_id_to_model_input_names[each] = {INPUTS: 0} if each == 0 else {}
        model.stage_id_to_input_count[each] = model.stage_id_to_output_count[each] = 1
    model.partitioned = True
    model.create_schedule()
    model.move_model_to_device()


def _share_weights(model: Any, stage: PipelineStageModule, partition_fn: Partition | None) -> None:
    """Create the groups of marked weights, and mark them for norms. Every rank of the world calls."""
    # Creating a group is collective: stages without the weight call too, so that all look at all layers.
    layers, size = model.original_torch_module, model.pipeline_parallel_size
    groups: dict[str, list[int]] = {}
    for each in range(size):
        shared = PipelineStageModule._partition(layers, size, each, partition_fn)[1]
        groups.update({name: stages for name, (stages, _) in shared.items()})
    for name in sorted(groups):
        if len(groups[name]) < 2:
            continue
        group = model._create_pg_with_ranks(groups[name])
        if name not in stage.shared_weights_on_pp_stages:
            continue
        layer, path = stage.shared_weights_on_pp_stages[name][1]
        param = operator.attrgetter(path)(layer)
        # Norms count it on the first stage, and the other stages take its values.
        param.shared = model.pipeline_parallel_rank != groups[name][0]
        local = next(local for local, each in stage.named_parameters() if each is param)
        model.shared_weights_name_to_pg[local] = group


def run_of(
    batch: Mapping[str, Any],
    num_micro_batches: int,
    loss_fn: LossFunction | None,
    weight_of: WeightFunction | None = None,
) -> Run:
    """Return the micro-batches of ``inputs`` and ``labels``, each a tensor or a list of tensors.

    Args:
        batch: the two, with rows in dimension 0.
        num_micro_batches: M.
        loss_fn: mean loss of the last layer's first output and the first labels; None: there is no loss.
        weight_of: number of labels in the loss of a micro-batch, from ``{"labels": its first labels}``.

    Raises:
        RuntimeError: the batch has other entries, or M does not divide its rows.
        ValueError: see ``micro_batches.loss_weights``.
    """
    if batch.keys() != {INPUTS, LABELS}:
        raise RuntimeError(f"a list of layers takes {INPUTS} and {LABELS}, got {sorted(batch)}: pass these two")
    columns: dict[str, Tensor] = {}
    for name, value in batch.items():
        tensors: Sequence[Any] = [value] if isinstance(value, Tensor) else value or ()
        columns.update({f"{name}.{i}": tensor for i, tensor in enumerate(tensors)})
    micro_batches = split_batch(columns, num_micro_batches)
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in micro_batches[0].items())
    lists = [{name: _column(each, name) for name in (INPUTS, LABELS)} for each in micro_batches]

    def finish(output: Any, micro_batch: Mapping[str, Any]) -> Tensor | None:
        return None if loss_fn is None else loss_fn(output[0], micro_batch[LABELS][0].to(output[0].device))

    weights = loss_weights([{name: each[name][0] for name in (LABELS,) if each[name]} for each in lists], weight_of)
    return Run(lists, shapes, weights, finish)


def _column(micro_batch: Mapping[str, Tensor], name: str) -> list[Tensor]:
    return [tensor for key, tensor in micro_batch.items() if key.startswith(f"{name}.")]
