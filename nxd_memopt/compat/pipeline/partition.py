"""Cuts a traced model into stages, and says what each stage receives and sends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from nxd_memopt.compat.parallel_state import get_pipeline_model_parallel_rank
from nxd_memopt.compat.pipeline.plain_objects import TensorMeta
from nxd_memopt.parallel_layers.parallel_state import get_pipeline_model_parallel_size


class PipelineIO:
    """An object that a stage receives.

    Args:
        name: name of its node in the graph.
        input_idx: position among the stage's arguments; None if it is only passed on.
        output_idx: position among the previous stage's outputs; None if that stage passes it on.
        metadata: descriptions of its tensors.
        obj: the object with descriptions in place of tensors.
    """

    def __init__(
        self,
        name: str,
        input_idx: int | None = None,
        output_idx: int | None = None,
        metadata: list[TensorMeta] | None = None,
        obj: Any = None,
    ) -> None:
        self.name = name
        self.input_idx = input_idx
        self.output_idx = output_idx
        self.metadata = metadata
        self.obj = obj

    def __repr__(self) -> str:
        positions = f"input_idx_{self.input_idx}_output_idx_{self.output_idx}"
        return f"PipelineIO_{self.name}_{positions}_metadata_{self.metadata}"


StageIO = dict[int, "OrderedDict[str, PipelineIO]"]
"""Stage -> name -> what is received or sent, in this order on both sides."""


def partition_traced_model(traced_model: GraphModule, qualname_map: dict[str, str] | None = None) -> GraphModule:
    """Return ``traced_model`` as one submodule per stage, ``submod_0`` and so on.

    Args:
        traced_model: its nodes with ``meta["partition"]`` are the last ones of their stage.
        qualname_map: filled with name in the result -> name in the model.
    """
    stage = 0
    for node in traced_model.graph.nodes:
        is_cut = "partition" in node.meta
        node.meta["partition"] = stage
        stage += is_cut
    return split_module(
        traced_model,
        traced_model,
        lambda node: node.meta["partition"],
        qualname_map=qualname_map,
        keep_original_order=True,
    )


def adding_live_obj_for_previous_stages(
    stage_id_to_IO_input_names: StageIO,  # noqa: N803 (neuronx-distributed's name)
    stage_id_to_IO_output_names: StageIO,  # noqa: N803
    obj_name: str,
    current_stage: int,
) -> None:
    """Let the stages up to ``current_stage`` pass on the object ``obj_name``, from the one that has it.

    Raises:
        RuntimeError: no stage has it.
    """
    passing: list[int] = []
    stage = current_stage
    while True:
        if stage < 0:
            raise RuntimeError(f"no stage before {current_stage + 1} has {obj_name}: report the model's graph")
        if obj_name in stage_id_to_IO_input_names[stage] or obj_name in stage_id_to_IO_output_names[stage]:
            break
        passing.append(stage)
        stage -= 1
    stage_id_to_IO_output_names[stage].setdefault(obj_name, PipelineIO(obj_name))
    for each in reversed(passing):
        stage_id_to_IO_input_names[each][obj_name] = PipelineIO(obj_name)
        stage_id_to_IO_output_names[each][obj_name] = PipelineIO(obj_name)


def iterate_graph_model_outputs(output_node_args: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the outputs of a graph, from the arguments of its output node: one output or a tuple of them."""
    (output,) = output_node_args
    yield from output if isinstance(output, tuple) else (output,)


def analyze_pipeline_module(
    top_mod: GraphModule,
) -> tuple[StageIO, dict[int, dict[str, int]], dict[int, int], dict[int, int]]:
    """Return what each stage of ``partition_traced_model``'s result receives.

    A value of stage i that stage k > i + 1 uses is received and sent by every stage between. Inputs of the model are
    not sent: each stage takes those that it uses from its own batch.

    Returns:
        By stage: what it receives; the model's inputs that it uses with their position among its arguments; the
        number of its arguments; the number of its outputs.
    """
    model_inputs = {node.name for node in top_mod.graph.nodes if node.op == "placeholder"}
    received: StageIO = {}
    sent: StageIO = {}
    taken: dict[int, dict[str, int]] = {}
    input_counts: dict[int, int] = {}
    output_counts: dict[int, int] = {}
    for stage, (_, part) in enumerate(top_mod.named_children()):
        received[stage], sent[stage], taken[stage] = OrderedDict(), OrderedDict(), {}
        arguments = [node.name for node in _graph(part) if node.op == "placeholder"]
        for position, name in enumerate(arguments):
            if name in model_inputs:
                taken[stage][name] = position
                continue
            adding_live_obj_for_previous_stages(received, sent, name, stage - 1)
            received[stage][name] = PipelineIO(name, input_idx=position)
        outputs = [each.name for node in _graph(part) if node.op == "output" for each in _outputs(node)]
        for position, name in enumerate(outputs):
            sent[stage][name] = PipelineIO(name, output_idx=position)
        input_counts[stage], output_counts[stage] = len(arguments), len(outputs)
    for stage in range(1, len(received)):
        for name, io in received[stage].items():
            io.output_idx = sent[stage - 1][name].output_idx
    return received, taken, input_counts, output_counts


def _graph(part: Any) -> Any:
    return part.graph.nodes


def _outputs(node: Node) -> Iterator[Any]:
    return iterate_graph_model_outputs(node.args)


def stage_to_pipeline_parallel_rank(stage: int, pp_size: int | None = None) -> int:
    """Return the position in the pipeline of the rank that runs ``stage``."""
    if pp_size is None:
        pp_size = get_pipeline_model_parallel_size()
    return stage % pp_size


def analyze_shared_weights_across_stages(
    top_module: nn.Module, partitions: Sequence[nn.Module]
) -> list[list[tuple[str, int]]]:
    """Return the parameters that several ranks have: for each, the name in the first stage of each rank, and the rank.

    Sets ``shared`` of this rank's parameters: True if an earlier rank has the parameter too, so that norms count it
    once.
    """
    owners: dict[nn.Parameter, dict[int, str]] = {param: {} for param in top_module.parameters()}
    for stage, part in enumerate(partitions):
        rank = stage_to_pipeline_parallel_rank(stage)
        for name, param in part.named_parameters():
            is_new = rank not in owners[param]
            if rank == get_pipeline_model_parallel_rank() and is_new:
                param.shared = bool(owners[param])  # pyright: ignore[reportAttributeAccessIssue]
            if is_new:
                owners[param][rank] = name
    return [[(name, rank) for rank, name in ranks.items()] for ranks in owners.values() if len(ranks) > 1]


def create_partitions(pipeline_parallel_size: int, model_layer_names: Sequence[str]) -> list[str]:
    """Return the last layer of every stage but the last; the last stages have one layer more if needed.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    layers = len(model_layer_names)
    per_stage, remainder = divmod(layers, pipeline_parallel_size)
    if per_stage == 0:
        raise ValueError(f"{layers} layers cannot be cut into {pipeline_parallel_size} stages: use fewer stages")
    cuts: list[str] = []
    end = 0
    for stage in range(pipeline_parallel_size - 1):
        end += per_stage + (stage >= pipeline_parallel_size - remainder)
        cuts.append(model_layer_names[end - 1])
    return cuts
