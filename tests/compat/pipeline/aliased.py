"""Tests of pipeline modules that need no ranks, in a process with the alias; ``test_pipeline.py`` starts it."""

from __future__ import annotations

import pickle
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers import grads, mappings, parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear
from neuronx_distributed.pipeline import partition, scheduler, trace
from neuronx_distributed.pipeline.manual_pipe_stage import PipelineStageModule
from neuronx_distributed.trainer import hooks
from neuronx_distributed.utils import model_utils, serialization
from torch import nn

from nxd_memopt.parallel_layers import parallel_state as our_state
from tests.compat.pipeline.models import Block, Model


class Pair(NamedTuple):
    """A result with names."""

    first: object
    second: object


def test_objects_travel_without_pickle():
    manager = serialization.SerializationManager()
    tensor = torch.ones(2, 3, requires_grad=True)
    message = Pair({"a": [tensor, None], 2: (tensor,)}, Pair(torch.bfloat16, {1, 2}))
    stripped, tensors, metas = manager.serialize(message)
    assert len(tensors) == 1 and tensors[0] is tensor and metas[0].requires_grad
    with patch.object(pickle, "dumps", side_effect=AssertionError), patch.object(pickle, "loads"):
        text = serialization.compress_to_string(stripped)
        received = serialization.uncompress_from_string(text)
    assert received == stripped and type(received) is Pair
    rebuilt = manager.deserialize(received, tensors)
    assert type(rebuilt) is Pair and rebuilt.first["a"][0] is rebuilt.first[2][0] is tensor
    with pytest.raises(TypeError, match=r"class torch\.nn\.modules\.linear\.Linear cannot be sent"):
        serialization.compress_to_string([nn.Linear(1, 1)])
    for module, name in (("os", "system"), ("no_such_module", "Pair"), (__name__, "Block")):
        with pytest.raises(ValueError, match="is no named tuple here"):
            serialization.uncompress_from_string(f'["named", ["{module}", "{name}", 1]]')


def test_the_loss_is_where_the_specification_says():
    find = serialization.find_loss_from_output_and_spec
    loss = torch.ones(())
    assert find((0, {"loss": loss, "other": 1}), (False, {"loss": True, "other": False})) is loss
    assert find(loss, False) is None
    with pytest.raises(RuntimeError, match=r"keys \['loss'\], the output \['x'\]"):
        find({"x": loss}, {"loss": True})
    with pytest.raises(RuntimeError, match="2 entries, the output 1"):
        find((loss,), (True, False))
    with pytest.raises(RuntimeError, match="marks no loss"):
        find((loss,), (False,))


@pytest.mark.parametrize("layers", [7, 8, 9])
def test_cuts_leave_the_rest_to_the_last_stages(layers):
    names = [str(i) for i in range(layers)]
    cuts = [int(name) for name in partition.create_partitions(4, names)]
    sizes = [end - start for start, end in zip([-1, *cuts], [*cuts, layers - 1], strict=True)]
    assert sizes == {7: [1, 2, 2, 2], 8: [2] * 4, 9: [2, 2, 2, 3]}[layers]


def test_leaves_are_whole_names_and_parallel_layers():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(ColumnParallelLinear(2, 2), nn.Linear(2, 2))
            self.qkv = GQAQKVColumnParallelLinear(2, [2, 2], gather_output=False)

        def forward(self, x):
            x = mappings.copy_to_tensor_model_parallel_region(self.block(x))
            return self.qkv(x)

    leaves, modules = ["Column"], [mappings]
    traced = trace.trace_model(Outer(), input_names=["x"], leaf_modules=leaves, autowrap_modules=modules)
    assert leaves == ["Column"] and modules == [mappings], "the caller's lists stay"
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["block.0", "block.1", "qkv"]
    functions = [node.name for node in traced.graph.nodes if node.op == "call_function"]
    assert functions[0] == "copy_to_tensor_model_parallel_region"
    named = trace.NxDTracer()
    named.leaf_modules = ("Linear",)
    assert named.is_leaf_module(nn.Linear(1, 1), "x") and not named.is_leaf_module(nn.Sequential(), "x")


class Caller(nn.Module):
    """A model that calls a method of its block."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, hidden, mask):
        return self.block.forward(hidden, mask)


def test_methods_of_objects_are_single_calls_in_a_trace_and_themselves_after_it():
    model = Caller()
    methods = {model.block: ["forward"]}
    traced = trace.trace_model(model, input_names=["hidden", "mask"], autowrap_obj_methods=methods)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "placeholder", "call_function", "output"]
    assert "forward" not in vars(model.block)
    with pytest.raises(ValueError, match="Block has no method other"):
        trace.trace_model(model, input_names=["hidden", "mask"], autowrap_obj_methods={model.block: ["other"]})


def test_stages_pass_values_on_and_share_weights():
    model = Model(3)
    traced = trace.trace_model(model, input_names=["ids", "mask", "labels"], leaf_modules=["Block"], tracer_cls="torch")
    for node in traced.graph.nodes:
        if node.target in ("blocks.0", "blocks.1"):
            node.meta["partition"] = True
    names: dict[str, str] = {}
    split = partition.partition_traced_model(traced, names)
    received, taken, _, _ = partition.analyze_pipeline_module(split)
    assert [set(each) for each in taken.values()] == [{"ids", "mask"}, {"mask"}, {"mask", "labels"}]
    passed = [io for io in received[1].values() if io.input_idx is None]
    assert passed and all(io.name in received[2] and received[2][io.name].output_idx is None for io in passed)
    parts = [part for _, part in split.named_children()]
    with patch("neuronx_distributed.pipeline.partition.get_pipeline_model_parallel_size", return_value=3):
        shared = partition.analyze_shared_weights_across_stages(traced, parts)
    assert shared == [[("embed.weight", 0), ("head.weight", 2)]] and model.embed.weight.shared is False


def test_links_between_an_odd_number_of_stages_do_not_overlap():
    """And a group of stages is of the listed pipelines, whatever the order of ranks."""
    pipelines = [[0, 5, 1], [4, 2, 3]]
    listed = "nxd_memopt.parallel_layers.parallel_state.get_pipeline_model_parallel_replica_groups"
    size = "nxd_memopt.parallel_layers.parallel_state.get_pipeline_model_parallel_size"
    created = []
    with patch(listed, return_value=pipelines), patch(size, return_value=3):
        for parity in (False, True):
            links = parallel_state.get_pipeline_model_parallel_sr_group(parity)
            ranks = [rank for link in links for rank in link]
            assert len(ranks) == len(set(ranks))
        assert len(parallel_state.get_pipeline_model_parallel_sr_group()) == 6
        with patch.object(our_state, "group_of", created.append):
            parallel_state.create_pg_with_ranks([0, 2])
    assert created == [[[0, 1], [5], [3, 4], [2]]]


def test_norms_of_half_precision_are_fp32():
    weights = [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1.0)
    weights[1].shared = True  # counted on another stage
    norm = grads.get_grad_norm(weights)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(3**0.5)


def test_groups_for_the_host_end_with_the_others():
    parallel_state.initialize_pp_gloo_groups()
    assert our_state._STATE.host_groups
    our_state.destroy_model_parallel()
    assert not our_state._STATE.host_groups


def test_manual_stages_reach_their_layers():
    layers = [nn.Sequential(nn.Dropout()) for _ in range(5)]
    stages = [PipelineStageModule(layers, 2, i) for i in range(2)]
    assert [len(stage.stage_modules) for stage in stages] == [2, 3]
    stages[1].eval()
    assert [layer[0].training for layer in layers] == [True, True, False, False, False]
    with pytest.raises(ValueError, match=r"gives layers \[1\] no stage"):
        PipelineStageModule(layers[:2], 2, 0, lambda layers, _: {layers[0]: 0})
    weights = [nn.Linear(1, 1), nn.Linear(1, 2)]
    with pytest.raises(ValueError, match="have the shapes"):
        PipelineStageModule.mark_weight_sharing([(layer, "weight") for layer in weights])


def test_schedules_name_their_first_tasks():
    first = next(iter(scheduler.TrainInterleavedSchedule(4, 2, 2, 0)))
    assert str(first[0]) == "ForwardPreprocessTask_microbatch_0_modelchunk_0_graphbreak_True"
    assert scheduler.ReduceGradsTask() == scheduler.ReduceGradsTask(False)
    with pytest.raises(ValueError, match="use Train1F1BSchedule"):
        scheduler.TrainInterleavedSchedule(4, 1, 2, 0)


@pytest.mark.parametrize(("tracer", "error"), [(None, ImportError), ("torch", ValueError)])
def test_models_of_transformers_5_are_refused_with_the_remedies(tracer, error):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(error, match=r"install transformers 4\.48.*manual_pp_partition.*nxd_memopt\.models"):
        trace.trace_model(LlamaForCausalLM(config), input_names=["input_ids", "labels"], tracer_cls=tracer)


def test_helpers_of_model_building():
    with model_utils.init_on_device(torch.device("meta")):
        model = Model(1)
    assert model.embed.weight.is_meta and not model.blocks[0].scale.is_meta
    model_utils.reinit_model(
        model, torch.device("cpu"), lambda module: [nn.init.ones_(p) for p in module.parameters(False)]
    )
    assert model.head.weight is model.embed.weight and model.head.weight.eq(1).all()
    with model_utils.preserve_shared_weights(model), model_utils.preserve_parallel_attributes(model):
        model.embed.weight.tensor_model_parallel = True
        model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))
    assert model.head.weight is model.embed.weight
    assert model_utils.get_model_sequential(model, torch.device("cpu")) is model
    assert not model_utils.get_delay_tracing(model) and not model_utils.check_delay_tracing({})
    assert hooks.execute_all_hooks() == []
