"""Tests of planned memory and time of the stages of a pipeline, and of the search for them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nxd_memopt.architectures.stages import all_stages
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.models import model_class
from nxd_memopt.modules.lora import add_adapters
from nxd_memopt.modules.stages import StageInput
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.planner.hardware import GIB
from nxd_memopt.planner.memory.activations import activations
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.search.candidates import settings
from nxd_memopt.planner.search.fixed_options import FixedOptions
from nxd_memopt.planner.search.plan import evaluate, memory_by_stage, plans
from nxd_memopt.planner.search.problem import Setting
from nxd_memopt.planner.sizes.rank_model import ModelPart
from nxd_memopt.planner.techniques.pipeline_schedule import in_flight
from tests.planner.storages import LENGTH, ROWS, counted_bytes, named, share_of
from tests.planner.test_plan import problem
from tests.reference import fake_world
from tests.reference_models import batch, gpt_neox_config, llama_config

FULL = MemoryConfig(recompute_granularity="full")
CPU = Kernels(fused=False, attention="sdpa")
# Peaks of the allocator on two H200, bf16 states, 8,192 tokens, cuDNN's attention: docs/benchmarks/pipeline.csv.
MEASURED = {
    ("llama-3-8b", 16, 1): (60.8, 42.5),
    ("llama-3-8b", 16, 2): (67.6, 51.6),
    ("gpt-neox-20b", 8, 1): (82.9, 80.7),
    ("gpt-neox-20b", 8, 2): (83.9, 81.9),
}


def staged(size: int, chunks: int = 1, **options: Any) -> Setting:
    return Setting(pipeline_model_parallel_size=size, virtual_pipeline_model_parallel_size=chunks, **options)


@pytest.mark.parametrize(("model", "micro_batches", "chunks"), MEASURED)
def test_measured_peaks_of_both_stages(model: str, micro_batches: int, chunks: int) -> None:
    asked = problem(model, device="h200", devices=2, length=8192, precision="bf16-true")
    asked = replace(asked, global_batch_size=micro_batches, attention="cudnn")
    memory = FULL if model == "gpt-neox-20b" else MemoryConfig()
    setting = staged(2, chunks, memory=memory)
    planned = [each.device_bytes / GIB for each in memory_by_stage(asked, setting)]
    # The rows have one decimal.
    assert planned == pytest.approx(MEASURED[model, micro_batches, chunks], abs=0.11)
    assert evaluate(asked, setting).memory.device_bytes / GIB == max(planned)


def test_the_first_backward_has_no_gradients_of_micro_batches_before() -> None:
    """With as many micro-batches as stages, all are in flight in the first backward alone."""
    asked = problem("llama-3-8b", device="h200", devices=2, length=2304, precision="bf16-true")
    sixteen = named("llama-3-8b", num_hidden_layers=16)
    asked = replace(asked, model=sixteen, global_batch_size=4, attention="flash4")
    setting = staged(2, micro_batch_size=2)
    planned = [each.device_bytes / GIB for each in memory_by_stage(asked, setting)]
    assert planned == pytest.approx((23.11, 19.95), abs=0.11)
    later = memory_by_stage(replace(asked, global_batch_size=6), setting)[0]
    assert min(later.device["gradients"], later.device["other micro-batches"]) > 4 << 30


def test_the_gradient_that_a_stage_receives_exists_until_its_backward_ends() -> None:
    """The runner and autograd's call hold it. The last stage has the same layers, and receives none."""
    asked = problem("llama-3-8b", device="h200", devices=2, length=2048, precision="bf16-true")
    model = named("llama-3-8b", num_hidden_layers=16, vocab_size=1000)
    first, last = memory_by_stage(replace(asked, model=model, global_batch_size=1), staged(2, memory=FULL))
    assert first.moment == last.moment and first.moment.startswith("backward of layer 0")
    assert first.device["activations"] - last.device["activations"] == 2048 * 4096 * 2


@pytest.mark.parametrize(
    ("layers", "chunks", "layout", "micro_batches"),
    [(18, 4, None, 4), (10, 2, (1, 1, 2, 1, 1, 2, 1, 1), 8), (21, 2, (1, 2, 3, 5, 1, 2, 6, 1), 8)],
)
def test_the_plan_is_of_the_fullest_rank(
    layers: int, chunks: int, layout: tuple[int, ...] | None, micro_batches: int
) -> None:
    """Of two ranks with as many layers the one with more of them in its first chunks keeps more."""
    asked = problem("llama-3-8b", device="h200", devices=4, length=2048, precision="bf16-mixed")
    model = named("llama-3-8b", num_hidden_layers=layers, vocab_size=1000)
    asked = replace(asked, model=model, global_batch_size=micro_batches)
    for memory in (MemoryConfig(), FULL):
        setting = staged(4, chunks, memory=memory, pipeline_model_parallel_layout=layout)
        of_ranks = [each.reserved_bytes for each in memory_by_stage(asked, setting)]
        assert evaluate(asked, setting).memory.reserved_bytes == max(of_ranks)


@pytest.mark.parametrize(("chunks", "measured"), [(1, (117.9, 88.4)), (2, (129.0, 98.7))])
def test_measured_peaks_of_both_stages_with_adapters(chunks: int, measured: tuple[float, ...]) -> None:
    asked = problem("llama-3-70b", device="h200", devices=2, length=4096, precision="bf16-true")
    asked = replace(asked, global_batch_size=8, attention="flash4", lora=LoraConfig(lora_rank=16))
    modules = MemoryConfig(recompute_granularity="selective", recompute_modules=("norm", "mlp"))
    memory = replace(modules, recompute_method="block", recompute_num_layers=12)
    planned = [each.device_bytes / GIB for each in memory_by_stage(asked, staged(2, chunks, memory=memory))]
    assert planned == pytest.approx(measured, abs=0.2)


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches"), [(2, 1, 8), (4, 1, 3), (4, 1, 8), (2, 2, 8), (4, 2, 16)]
)
def test_micro_batches_in_flight(stages: int, chunks: int, micro_batches: int) -> None:
    """With the one that is computed: P - r of one chunk; of several chunks as docs/pipeline.md says."""
    for rank in range(stages):
        found = in_flight(stages, chunks, micro_batches, rank)
        most = max(sum(case.counts) for each in found for case in each) + 1
        if chunks == 1:
            assert most == min(stages - rank, micro_batches)
        elif rank == 0:
            assert most == 2 * (stages - 1) + (chunks - 1) * stages + 1


class Stage(nn.Module):
    """A rank's only stage as a model with a loss; a later stage allocates what it would receive."""

    def __init__(self, net: Any, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.net = net
        self.shape = shape

    def forward(self, **inputs: torch.Tensor) -> Any:
        hidden = None
        if not self.net.stages.has_embedding:
            hidden = torch.randn(self.shape).requires_grad_()
        output = self.net(**inputs, stage=StageInput(0, hidden))
        return SimpleNamespace(loss=output.loss if output.hidden is None else output.hidden)


@pytest.mark.parametrize("has_adapters", [False, True], ids=["weights", "adapters"])
@pytest.mark.parametrize("memory", [MemoryConfig(), FULL], ids=["none", "full"])
@pytest.mark.parametrize("make", [llama_config, gpt_neox_config])
def test_kept_storages_of_each_stage(make: Any, memory: MemoryConfig, has_adapters: bool) -> None:
    config = make(num_hidden_layers=5)
    lora = LoraConfig(lora_rank=4) if has_adapters else None
    parallel = ParallelConfig(pipeline_model_parallel_size=3, pipeline_model_parallel_layout=(2, 2, 1))
    inputs = batch(rows=ROWS, length=LENGTH)
    shape = (*inputs["input_ids"].shape, config.hidden_size)
    for rank in range(3):
        with fake_world(3, rank=rank):
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
            net = model_class(config.model_type)(config, parallel=parallel, memory=memory)
            if lora is not None:
                add_adapters(net, lora)
            found, listed = counted_bytes(Stage(net, shape), inputs)
            stages = all_stages(net.spec, parallel)[rank]
            parallel_state.destroy_model_parallel()
        part = ModelPart(tuple(stages.layers), stages.has_embedding, stages.has_head)
        kept = activations(share_of(config, part=part, lora=lora).sizes, memory, CPU)
        # The output is sent and freed by then, but counted here.
        sent = 0 if stages.has_head else shape[0] * shape[1] * shape[2] * 4
        assert kept.device_bytes == found - sent, listed


def test_the_search_divides_what_does_not_fit_otherwise() -> None:
    """LLaMA-3-70B on 256 NeuronCores of trn1: neuronx-distributed's layout, T=32 and P=8, is among what fits."""
    asked = replace(problem("llama-3-70b", device="trn1", devices=256, length=8192), global_batch_size=512)
    found = [plan.setting for plan in plans(asked)]
    assert found and all(setting.pipeline_model_parallel_size > 1 for setting in found)
    sizes = {(each.tensor_model_parallel_size, each.pipeline_model_parallel_size) for each in found}
    assert (32, 8) in sizes
    # A rank of trn1 has one stage.
    assert {each.virtual_pipeline_model_parallel_size for each in found} == {1}


def test_stages_wait_and_send() -> None:
    asked = problem("llama-3-8b", device="h200", devices=2, length=8192, precision="bf16-true")
    asked = replace(asked, global_batch_size=16)
    one, two = (evaluate(asked, staged(2, chunks)).time.terms for chunks in (1, 2))
    compute = sum(one[name] for name in ("matmuls", "attention", "elementwise", "messages between stages"))
    # (P - 1) / (V M) of the work.
    assert one["waiting for other stages"] == pytest.approx(compute / 16)
    assert two["waiting for other stages"] < 0.6 * one["waiting for other stages"]
    assert two["messages between stages"] == pytest.approx(2 * one["messages between stages"])


def test_settings_that_training_refuses_with_stages_are_not_tried() -> None:
    asked = replace(problem("llama-3-8b", device="h200", devices=8, length=8192), global_batch_size=24)
    asked = replace(asked, stages=("none", "zero1", "zero2", "zero3"), offloads_optimizer=True)
    found = [each for each in settings(asked) if each.pipeline_model_parallel_size > 1]
    assert {each.sharding for each in found} == {"none", "zero1"}
    stated = FixedOptions(stated=(("optimizer_offload_fraction", 0.5), ("pipeline_model_parallel_size", 2)))
    assert {each.optimizer_offload_fraction for each in settings(asked, stated)} == {0.5}
    for each in found:
        replicas = 8 // each.ranks_of_replica
        count = 24 // (each.micro_batch_size * replicas)
        stages, chunks = each.pipeline_model_parallel_size, each.virtual_pipeline_model_parallel_size
        assert count >= stages and (chunks == 1 or count % stages == 0)
        assert not each.cuda_graph and not each.optimizer_offload_fraction
        assert not each.memory.cpu_offloading_activations and not each.memory.cpu_offloading_num_layers
        assert chunks == 1 or each.memory.recompute_method not in ("uniform", "nested")


def test_stated_techniques_must_suit_every_rank() -> None:
    asked = replace(problem("llama-3-8b", device="h200", devices=2, length=8192), global_batch_size=16)
    stated = (("recompute_granularity", "full"), ("recompute_method", "block"), ("recompute_num_layers", 16))
    fixed = FixedOptions(stated=(("pipeline_model_parallel_size", 2),), stated_memory=stated)
    # Stages of 17 and 15 layers.
    assert not list(settings(asked, fixed))
    fixed = replace(fixed, stated_memory=(*stated[:2], ("recompute_num_layers", 15)))
    assert {each.memory.recompute_num_layers for each in settings(asked, fixed)} == {15}


@pytest.mark.parametrize("chunks", [2, 4])
def test_a_stated_number_of_stages_of_a_rank_is_planned(chunks: int) -> None:
    asked = problem("llama-3-8b", device="h200", devices=2, length=8192, precision="bf16-true")
    asked = replace(asked, global_batch_size=16)
    sizes = (("pipeline_model_parallel_size", 2), ("virtual_pipeline_model_parallel_size", chunks))
    found = {plan.setting: plan.tokens_per_s for plan in plans(asked, FixedOptions(stated=sizes))}
    assert {each.virtual_pipeline_model_parallel_size for each in found} == {chunks}
    if chunks == 2:
        searched = {plan.setting: plan.tokens_per_s for plan in plans(asked)}
        assert found.items() <= searched.items()


def test_a_stated_layout_of_several_stages_of_a_rank_is_planned() -> None:
    asked = problem("llama-3-8b", device="h200", devices=2, length=8192, precision="bf16-true")
    asked = replace(asked, global_batch_size=16)
    fixed = FixedOptions(Setting(pipeline_model_parallel_layout=(9, 8, 8, 7)))
    assert {plan.setting.virtual_pipeline_model_parallel_size for plan in plans(asked, fixed)} >= {2}


def test_a_layout_of_other_layers_is_named() -> None:
    asked = replace(problem("llama-3-8b", device="h200", devices=2, length=8192), global_batch_size=16)
    fixed = FixedOptions(
        Setting(pipeline_model_parallel_layout=(17, 14)), stated=(("pipeline_model_parallel_size", 2),)
    )
    with pytest.raises(ValueError, match=r"layout \(17, 14\) needs P \* V stages .* --data.global-batch-size"):
        plans(asked, fixed)
