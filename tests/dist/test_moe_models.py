"""Mixtral and Qwen3-MoE in fp32 against transformers: loss with balancing loss, and every gradient, on every split."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.architectures.parameters import require_shardable
from nxd_memopt.checkpoint import save_pretrained
from nxd_memopt.config import ParallelConfig
from nxd_memopt.models import model_class
from nxd_memopt.models.mixtral import MixtralForCausalLM
from nxd_memopt.modules.moe.hf_options import with_shared_expert
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers import grads, parallel_state
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message, relative_error
from tests.reference_models import (
    batch,
    full_parameters,
    hugging_face,
    local_part,
    mixtral_config,
    padded_batch,
    parallel_model,
    qwen2_moe_config,
    qwen3_moe_config,
)

# fp32 has 6e-8. The loss is a mean of some hundred numbers: measured 2e-7 at most. Gradients are sums in another
# order: measured 4e-6 at most. A lost reduction, or the balancing loss at another scale, is above 1e-2.
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 2e-5
MODELS = {"mixtral": mixtral_config, "qwen2_moe": qwen2_moe_config, "qwen3_moe": qwen3_moe_config}


def options_of(config: Any, dispatcher: str, **changes: Any) -> MoEConfig:
    """The options that the config implies, with another dispatcher."""
    given = {
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "hf_aux_loss",
        "moe_aux_loss_coeff": config.router_aux_loss_coef,
    }
    return MoEConfig(config.num_experts, **{**given, "moe_token_dispatcher_type": dispatcher, **changes})


def mean_over_ranks(tensor: torch.Tensor, group: Any, ranks: int) -> torch.Tensor:
    total = tensor.detach().clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total / ranks


def reduced(name: str, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of the mean loss of all data-parallel ranks, by hand."""
    size = parallel_state.get_data_parallel_size()
    if ".experts." in name:
        return mean_over_ranks(grad, parallel_state.get_expert_data_parallel_group(), size)
    return mean_over_ranks(grad, parallel_state.get_data_parallel_group(), size)


def check(
    name: str, tensor: int, expert: int, sequence_parallel: bool, dispatcher: str, *, padded: bool = False, **memory
) -> None:
    """Each data-parallel rank has rows of its own; the reference runs them one after another."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, expert_model_parallel_size=expert)
    config = MODELS[name]()
    inputs = padded_batch() if padded else batch()
    size, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    batches = [{key: value.roll(index, 0)[: 3 - index % 2] for key, value in inputs.items()} for index in range(size)]
    if dispatcher == "allgather":  # equal shapes on all ranks
        batches = [{key: value.roll(index, 0) for key, value in inputs.items()} for index in range(size)]
    reference = hugging_face(config)
    full = full_parameters(reference)
    outputs = []
    for each in batches:
        outputs.append(reference(**each))
        (outputs[-1].loss / size).backward()
    moe = options_of(config, dispatcher)
    model = parallel_model(config, full, sequence_parallel=sequence_parallel, moe=moe, **memory)
    assert {key for key, _ in model.named_parameters()} == set(full)
    output = model(**batches[rank], output_router_logits=True)
    assert output.router_loss > 0.1
    wanted = outputs[rank]
    assert relative_error(output.loss.detach(), wanted.loss.detach()) < LOSS_TOLERANCE
    assert relative_error(output.aux_loss.detach(), wanted.aux_loss.detach()) < LOSS_TOLERANCE
    kept = batches[rank].get("attention_mask", torch.ones_like(batches[rank]["input_ids"])).bool().flatten()
    for ours, theirs in zip(output.router_logits, wanted.router_logits, strict=True):
        assert ours.shape == theirs.shape and relative_error(ours[kept], theirs[kept].detach()) < GRADIENT_TOLERANCE
    output.loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    wanted = dict(reference.named_parameters())
    for key, param in model.named_parameters():
        assert param.grad is not None, f"{key} has no gradient"
        want = local_part(key, wanted[key].grad, config)
        error = (reduced(key, param.grad) - want).norm() / wanted[key].grad.norm()
        assert error < GRADIENT_TOLERANCE, f"gradient of {key}: relative error {error:.1e}"


FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
# T, EP, sequence parallelism, dispatcher, memory
SPLITS: dict[int, list[tuple[int, int, bool, str, dict[str, Any]]]] = {
    1: [(1, 1, False, "allgather", {}), (1, 1, False, "alltoall", FULL)],
    2: [
        (2, 1, False, "alltoall", {}),
        (2, 1, True, "allgather", FULL),
        (2, 1, True, "alltoall", SELECTIVE),
        (1, 2, False, "allgather", SELECTIVE),
        (1, 2, False, "alltoall", {}),
        (1, 2, False, "alltoall", FULL),
    ],
    4: [
        (2, 2, True, "allgather", {}),
        (2, 2, True, "alltoall", FULL),
        (2, 2, False, "allgather", FULL),
        (1, 2, False, "alltoall", SELECTIVE),
        (4, 1, True, "allgather", {}),
        (1, 4, False, "alltoall", {}),
    ],
    8: [
        (4, 2, True, "alltoall", FULL),
        (4, 2, False, "allgather", SELECTIVE),
        (2, 4, True, "allgather", {}),
        (2, 4, False, "alltoall", SELECTIVE),
        (2, 2, True, "alltoall", SELECTIVE),
    ],
    16: [
        (4, 4, True, "alltoall", {}),
        (4, 4, True, "allgather", FULL),
        (4, 4, False, "alltoall", SELECTIVE),
    ],
}


@distributed(world_size=[1, 2, 4], slow=[8, 16], timeout_s=600)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(name, world_size):
    for tensor, expert, sequence_parallel, dispatcher, memory in SPLITS[world_size]:
        parallel_state.destroy_model_parallel()
        try:
            check(name, tensor, expert, sequence_parallel, dispatcher, **memory)
        except Exception as error:
            error.add_note(f"T={tensor} EP={expert} SP={sequence_parallel} {dispatcher} {memory}")
            raise


@distributed(world_size=[1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_padded_batches(name, world_size):
    """Padding does not count in the balancing loss, as in transformers."""
    check(name, min(world_size, 2), world_size // 2 or 1, world_size > 1, "allgather", padded=True)


@distributed(world_size=[1, 2])
def test_the_loss_of_a_step_does_not_depend_on_its_micro_batches(world_size):
    """With num_items_in_batch the shares of the routers' losses add up to 1."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    config = mixtral_config()
    ids = batch(rows=4)["input_ids"]
    moe = options_of(config, "alltoall", moe_router_load_balancing_type="seq_aux_loss", moe_z_loss_coeff=0.2)
    model = parallel_model(config, full_parameters(hugging_face(config)), sequence_parallel=True, moe=moe)
    items = torch.tensor(float(4 * (ids.size(1) - 1)))
    results = []
    for rows in (4, 2, 1):
        model.zero_grad()
        total = torch.zeros(())
        for part in ids.split(rows):
            output = model(part, labels=part, num_items_in_batch=items)
            output.loss.backward()
            total += output.loss.detach()
        results.append((total, model.model.layers[0].mlp.gate.weight.grad.clone()))
    for total, grad in results[1:]:
        assert relative_error(total, results[0][0]) < LOSS_TOLERANCE
        assert relative_error(grad, results[0][1]) < GRADIENT_TOLERANCE


@distributed(world_size=[1, 2])
def test_the_fractions_of_a_step_leave_the_random_streams_alone(world_size):
    """They are counted with the jitter that the step's own forward draws again."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    config = mixtral_config()
    moe = options_of(config, "alltoall", moe_router_load_balancing_type="global_aux_loss", moe_input_jitter_eps=0.1)
    model = parallel_model(config, full_parameters(hugging_face(config)), moe=moe)
    ids = batch(rows=4)["input_ids"]
    mine = ids.chunk(world_size)[parallel_state.get_data_parallel_rank()]
    before = torch.get_rng_state()
    with model.balanced_over_step([{"input_ids": mine, "labels": mine}]):
        assert torch.equal(torch.get_rng_state(), before)
        means = model.moe_layers()[0].step_means
        counted = model(mine, labels=mine).router.tokens_per_expert[0]
    assert all(layer.step_means is None for layer in model.moe_layers())
    counted = mean_over_ranks(counted, parallel_state.get_data_parallel_group(), 1)
    assert torch.allclose(means[:-1], counted / ids.numel())


@distributed(world_size=[1, 2])
def test_the_global_loss_of_padded_batches_does_not_depend_on_the_split(world_size):
    """With the default weights, of ranks and micro-batches with different numbers of tokens and of trained labels."""
    parallel_state.initialize_model_parallel()
    config = mixtral_config()
    ids = batch(rows=4)["input_ids"]
    lengths = torch.tensor([ids.size(1), 3, ids.size(1) - 2, 5])
    mask = torch.arange(ids.size(1)) < lengths.unsqueeze(1)
    labels = ids.masked_fill(~mask, -100)
    labels[2, :4] = -100  # a question, which counts in the losses of routers
    inputs = {"input_ids": ids, "labels": labels, "token_mask": mask}
    moe = options_of(config, "alltoall", moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.5)
    full = full_parameters(hugging_face(config))
    alone = parallel_model(config, full, moe=moe)
    expected = alone(**inputs).loss
    expected.backward()
    rank = parallel_state.get_data_parallel_rank()
    mine = {name: value.chunk(world_size)[rank] for name, value in inputs.items()}
    divisor = (labels[:, 1:] != -100).sum() / world_size
    for rows in (4 // world_size, 1):
        model = parallel_model(config, full, moe=moe)
        columns = [value.split(rows) for value in mine.values()]
        parts = [dict(zip(mine, part, strict=True), num_items_in_batch=divisor) for part in zip(*columns, strict=True)]
        total = torch.zeros(())
        with model.balanced_over_step(parts) if len(parts) > 1 else nullcontext():
            for part in parts:
                loss = model(**part).loss
                loss.backward()
                total += loss.detach()
        grads.bucket_allreduce_gradients(model)
        dist.all_reduce(total) if world_size > 1 else None
        assert relative_error(total / world_size, expected) < LOSS_TOLERANCE
        for (name, param), want in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert relative_error(param.grad, want.grad) < GRADIENT_TOLERANCE, f"{name} {rows}"


@distributed(world_size=1)
def test_evaluation_has_the_cross_entropy_alone():
    parallel_state.initialize_model_parallel()
    config = mixtral_config()
    model = parallel_model(config)
    with_losses = model(**batch())
    model.eval()
    without = model(**batch())
    assert without.router_loss is None
    assert relative_error(without.loss, with_losses.loss - with_losses.router_loss) < LOSS_TOLERANCE


@distributed(world_size=1)
def test_metrics():
    parallel_state.initialize_model_parallel()
    config = mixtral_config()
    for per_layer in (False, True):
        moe = options_of(config, "alltoall", moe_per_layer_logging=per_layer)
        model = parallel_model(config, moe=moe)
        output = model(**batch())
        metrics = model.router_metrics(output.router)
        assert relative_error(metrics["moe/load_balancing_loss"], output.router_loss) < LOSS_TOLERANCE
        counts = output.router.tokens_per_expert
        assert torch.equal(counts.sum(1), torch.full((2,), 2.0 * batch()["input_ids"].numel()))
        assert metrics["moe/max_load"].item() == pytest.approx((counts.amax(1) / counts.mean(1)).max().item())
        assert ("moe/max_load_layer_1" in metrics) == per_layer


def build(**changes: Any):
    moe = changes.pop("moe", None)
    parallel = changes.pop("parallel", None)
    return MixtralForCausalLM(mixtral_config(**changes), moe=moe, parallel=parallel, device="meta")


REFUSALS = {
    "experts per rank": (
        lambda: build(num_local_experts=5),
        ["num_moe_experts 5", "expert_model_parallel_size 2"],
    ),
    "another number of experts": (
        lambda: build(moe=MoEConfig(8)),
        ["num_moe_experts 8", "4", "MixtralConfig"],
    ),
    "blocks and all-to-all": (
        lambda: build(
            moe=MoEConfig(4, moe_expert_block_size=8, moe_token_dispatcher_type="alltoall"),
            parallel=ParallelConfig(expert_model_parallel_size=2),
        ),
        ["moe_expert_block_size 8", "expert_model_parallel_size 2", "'allgather'"],
    ),
    "export of sigmoid scores": (
        lambda: save_pretrained(build(moe=MoEConfig(4, moe_router_score_function="sigmoid")), "nowhere"),
        ["moe_router_score_function 'sigmoid'", "transformers' mixtral", "save_training_state"],
    ),
    "shared experts": (
        lambda: build(moe=MoEConfig(4, moe_shared_expert_intermediate_size=8)),
        ["moe_shared_expert_intermediate_size 8", "MixtralConfig", "with_shared_expert"],
    ),
    "another shared expert than the config's": (
        lambda: with_shared_expert(qwen2_moe_config(), 8, gate=True),
        ["moe_shared_expert_intermediate_size 8", "Qwen2MoeConfig", "20"],
    ),
    "shared expert and ranks": (
        lambda: require_shardable(model_spec(with_shared_expert(mixtral_config(), 7, gate=False)), 2),
        ["moe_shared_expert_intermediate_size 7", "tensor_model_parallel_size 2"],
    ),
    "jitter of a gated shared expert": (
        lambda: with_shared_expert(mixtral_config(router_jitter_noise=0.1), 8, gate=True),
        ["moe_shared_expert_gate True", "router_jitter_noise is 0.1", "moe_input_jitter_eps"],
    ),
    "tiles": (lambda: parallel_model(mixtral_config(), mlp_tile_tokens=8), ["mlp_tile_tokens 8", "leave it out"]),
    "weights on the host": (
        lambda: parallel_model(mixtral_config(), cpu_offloading_weights=True, cpu_offloading_num_layers=1),
        ["cpu_offloading_weights", "leave it out"],
    ),
    "experts of a dense model": (
        lambda: model_class("llama")(llama(), parallel=ParallelConfig(expert_model_parallel_size=2), device="meta"),
        ["expert_model_parallel_size 2", "dense"],
    ),
    "fractions of another loss": (
        lambda: parallel_model(mixtral_config()).balanced_over_step([batch()]).__enter__(),
        ["global_aux_loss", "hf_aux_loss"],
    ),
}


def llama():
    from tests.reference_models import llama_config

    return llama_config()


@distributed(world_size=2)
def test_refusals():
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    for what, (call, facts) in REFUSALS.items():
        try:
            assert_says(error_message(call), *facts)
        except AssertionError as error:
            error.add_note(what)
            raise
