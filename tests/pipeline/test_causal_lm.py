"""Tests that a model in stages has the loss, the gradients and the norm of the complete model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.models import model_class
from nxd_memopt.modules.lora import LoraConfig, add_adapters
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers import grads, parallel_state, random
from nxd_memopt.pipeline.causal_lm import PipelinedCausalLM
from nxd_memopt.pipeline.tied import sum_tied_gradients
from tests.dist.pool import distributed
from tests.reference import error_message
from tests.reference_models import gpt_neox_config, llama_config, mixtral_config, qwen2_moe_config

VOCABULARY = 61
# Gradients of tied weights, and norms, are added in another order than by one rank.
ROUNDING = 1e-6


def batches(count: int) -> list[dict[str, Any]]:
    """Micro-batches of two lengths with unequal numbers of trained labels, and the divisor of all of them."""
    generator = torch.Generator().manual_seed(5)
    found: list[dict[str, Any]] = []
    for index in range(count):
        ids = torch.randint(VOCABULARY, (2, 8 + 4 * (index % 2)), generator=generator)
        labels = ids.clone()
        labels[0, : 1 + index] = -100
        found.append({"input_ids": ids, "labels": labels, "num_items_in_batch": torch.tensor([40.0])})
    return found


def build(config: Any, lora: bool, memory: MemoryConfig, **parallel: Any) -> Any:
    random.model_parallel_manual_seed(3)
    size = parallel_state.get_tensor_model_parallel_size()
    sequence = {"tensor_model_parallel_size": size, "sequence_parallel_enabled": size > 1}
    experts: dict[str, Any] = {}
    if config.model_type == "mixtral" and not config.output_router_logits:
        balance = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3}
        experts["moe"] = MoEConfig(config.num_local_experts, moe_router_topk=config.num_experts_per_tok, **balance)
    model = model_class(config.model_type)(
        config, parallel=ParallelConfig(**sequence, **parallel), memory=memory, **experts
    )
    if lora:
        add_adapters(model, LoraConfig(lora_rank=3, init_lora_weights="gaussian"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.constant_(parameter, 0.02)
    return model


def train_whole(model: Any, steps: list[dict[str, Any]]) -> Tensor:
    total = torch.zeros(())
    for batch in steps:
        weight = {"router_loss_weight": 1 / len(steps)} if model.has_experts else {}
        output = model(**batch, **weight)
        output.loss.backward()
        total += (output.cross_entropy if model.has_experts else output.loss).detach()
    return total


def check(
    config: Any,
    stages: int,
    chunks: int | None,
    count: int,
    *,
    lora: bool = False,
    memory: MemoryConfig | None = None,
) -> None:
    memory = memory or MemoryConfig()
    whole = build(config, lora, memory)
    model = build(
        config, lora, memory, pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=chunks
    )
    own = dict(model.named_parameters())
    full = dict(whole.named_parameters())
    assert own.keys() < full.keys()
    for name, parameter in own.items():
        assert torch.equal(parameter, full[name]), name

    steps = batches(count)
    expected = train_whole(whole, steps)
    pipeline = PipelinedCausalLM(model)
    if model.has_experts:
        for batch in steps:
            batch["router_loss_weight"] = 1 / count
    found = pipeline.train(steps)
    # Bit-equal: every operation has the same inputs.
    assert torch.equal(found, expected if model.stages.has_head else torch.zeros(()))
    sum_tied_gradients(model.parameters())
    for name, parameter in own.items():
        if not parameter.requires_grad:
            assert parameter.grad is None
        elif hasattr(parameter, "shared"):
            torch.testing.assert_close(parameter.grad, full[name].grad, rtol=ROUNDING, atol=ROUNDING)
        else:
            assert torch.equal(parameter.grad, full[name].grad), name
    check_norm(model, whole)

    model.eval()
    whole.eval()
    with torch.no_grad():
        expected = sum(whole(**batch).loss for batch in steps)
    found = pipeline.evaluate(steps)
    assert torch.equal(found, expected if model.stages.has_head else torch.zeros(()))


def check_norm(model: Any, whole: Any) -> None:
    """The norm of the stages is that of the complete model, on every rank."""
    for each in (model, whole):
        grads.allreduce_sequence_parallel_gradients(each)
    # Of the complete model on every rank of the pipeline, of which the norm of stages is the sum.
    stages = parallel_state.get_pipeline_model_parallel_size()
    expected = grads.get_grad_norm(whole) / stages**0.5
    torch.testing.assert_close(grads.get_grad_norm(model), expected, rtol=ROUNDING, atol=0)
    expected = grads.get_grad_norm(whole, torch.inf)
    torch.testing.assert_close(grads.get_grad_norm(model, torch.inf), expected, rtol=ROUNDING, atol=0)


MODELS = {
    "llama": lambda: llama_config(num_hidden_layers=5),
    "tied": lambda: llama_config(num_hidden_layers=5, tie_word_embeddings=True),
    "gpt_neox": lambda: gpt_neox_config(num_hidden_layers=5),
    "mixtral": lambda: mixtral_config(num_hidden_layers=5, output_router_logits=False),
}


@distributed(world_size=2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("chunks", "count"), [(None, 3), (2, 4)])
def test_two_stages(name: str, chunks: int | None, count: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    check(MODELS[name](), 2, chunks, count)


@distributed(world_size=2)
def test_adapters_and_recompute() -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    check(llama_config(num_hidden_layers=5), 2, None, 3, lora=True)
    full = MemoryConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
    check(llama_config(num_hidden_layers=5), 2, 2, 2, memory=full)
    # A chunk of recompute would run the layers of both stages of a rank in the forward of the first.
    nested = MemoryConfig(recompute_granularity="full", recompute_method="nested")
    chunks = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    with pytest.raises(ValueError, match="recomputes 2 layers together, which may be of two stages of a rank"):
        build(llama_config(num_hidden_layers=8), False, nested, **chunks)


@distributed(world_size=2)
def test_a_stage_without_the_modules_that_others_recompute() -> None:
    """Layers with experts are on the second stage alone, layers with an MLP on the first."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = qwen2_moe_config(num_hidden_layers=2, mlp_only_layers=[0], decoder_sparse_step=1)
    config.output_router_logits = False
    for modules in (("moe",), ("mlp", "norm")):
        check(config, 2, None, 2, memory=MemoryConfig(recompute_granularity="selective", recompute_modules=modules))
    all_experts = qwen2_moe_config(num_hidden_layers=2, mlp_only_layers=[], decoder_sparse_step=1)
    all_experts.output_router_logits = False
    nothing = MemoryConfig(recompute_granularity="selective", recompute_modules=("mlp",))
    with pytest.raises(ValueError, match="'mlp' names no module of this model"):
        build(all_experts, False, nothing, pipeline_model_parallel_size=2)


@pytest.mark.slow
@distributed(world_size=4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("stages", "chunks", "count"), [(4, None, 1), (4, None, 3), (4, None, 8), (2, None, 3), (2, 2, 2)]
)
def test_four_ranks(name: str, stages: int, chunks: int | None, count: int) -> None:
    """Four stages, or two stages of two tensor-parallel ranks with sequence parallelism."""
    tensor = 4 // stages
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages)
    check(MODELS[name](), stages, chunks, count)


@distributed(world_size=2)
def test_dropout_is_the_same_in_recomputation_and_other_on_each_stage() -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = gpt_neox_config(num_hidden_layers=4, hidden_dropout=0.5)
    gradients: list[dict[str, Tensor]] = []
    for memory in (MemoryConfig(), MemoryConfig(recompute_granularity="full")):
        model = build(config, False, memory, pipeline_model_parallel_size=2)
        random.model_parallel_manual_seed(3, per_stage=True)
        PipelinedCausalLM(model).train(batches(2))
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
    random.model_parallel_manual_seed(3, per_stage=True)
    drawn = backend.all_gather(torch.rand(4), parallel_state.get_pipeline_model_parallel_group())
    assert not torch.equal(drawn[:4], drawn[4:])


@distributed(world_size=2)
def test_outputs_are_freed_and_few_micro_batches_are_in_flight() -> None:
    """Of eight micro-batches the first stage keeps two, and no output that it has sent."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = build(llama_config(num_hidden_layers=2), False, MemoryConfig(), pipeline_model_parallel_size=2)
    pipeline = PipelinedCausalLM(model)
    alive: list[int] = []
    seen: list[Any] = []
    kept: list[int] = []
    original = pipeline.forward

    def forward(micro_batch: int, chunk: int, inputs: Any) -> Any:
        kept.append(sum(not storage.expired() for storage in seen))  # outputs of forwards before this one
        output = original(micro_batch, chunk, inputs)
        alive.append(len(pipeline._runner._saved))  # of micro-batches before this one
        seen.extend(torch.multiprocessing.reductions.StorageWeakRef(each.untyped_storage()) for each in output.sent)
        return output

    pipeline.forward = forward
    pipeline.train(batches(8))
    assert max(alive) + 1 == 2 - model.stages.rank
    assert all(storage.expired() for storage in seen)
    assert max(kept) == 0


@distributed(world_size=2)
def test_losses_over_all_layers_are_refused() -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = mixtral_config(num_hidden_layers=2, output_router_logits=True)
    message = error_message(lambda: build(config, False, MemoryConfig(), pipeline_model_parallel_size=2))
    assert message.endswith("pipeline_model_parallel_size is 2: set it to aux_loss, which balances each layer")
