"""Experts of expert-parallel ranks in checkpoints, gradient reductions, clipping and ZeRO-1."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nxd_memopt.checkpoint import (
    TrainingState,
    load_pretrained,
    load_training_state,
    save_pretrained,
    save_training_state,
)
from nxd_memopt.models import model_class
from nxd_memopt.optimizer import AdamW, NeuronZero1Optimizer, OptimizerInBackward
from nxd_memopt.parallel_layers import checkpointing, grads, parallel_state, resharding
from nxd_memopt.parallel_layers.overlapped_grads import OverlappedGradientReduction
from tests.dist.pool import distributed, run_on_ranks
from tests.dist.test_moe_models import MODELS, options_of
from tests.reference import assert_says, error_message, relative_error
from tests.reference_models import batch, full_parameters, hugging_face, local_part, parallel_model

# Gradients against transformers in fp32 (test_moe_models), and one step of AdamW on them.
TOLERANCE = 2e-5


def initialize(tensor: int, expert: int) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, expert_model_parallel_size=expert)


def batches() -> list[dict[str, Tensor]]:
    """One micro-batch of equal shape for each data-parallel rank."""
    size = parallel_state.get_data_parallel_size()
    return [{key: value.roll(index, 0).roll(index, 1) for key, value in batch().items()} for index in range(size)]


def mean_loss_reference(name: str) -> tuple[Any, dict[str, Tensor]]:
    """transformers' model with the gradients of the mean loss over the ranks' batches, and its weights before."""
    reference = hugging_face(MODELS[name]())
    full = full_parameters(reference)
    for each in batches():
        (reference(**each).loss / len(batches())).backward()
    return reference, full


def model_after_backward(name: str, full: dict[str, Tensor], *, sequence_parallel: bool) -> Any:
    config = MODELS[name]()
    model = parallel_model(config, full, sequence_parallel=sequence_parallel, moe=options_of(config, "alltoall"))
    model(**batches()[parallel_state.get_data_parallel_rank()]).loss.backward()
    return model


def assert_gradients(model: Any, reference: Any) -> None:
    wanted = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        want = local_part(name, wanted[name].grad, model.config)
        error = (param.grad - want).norm() / wanted[name].grad.norm()
        assert error < TOLERANCE, f"gradient of {name}: relative error {error:.1e}"


SPLITS = {2: [(1, 2)], 4: [(1, 2), (1, 4), (2, 2)]}


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_groups_and_norm(name, world_size):
    """Experts are summed over their own group and divided by all data-parallel ranks."""
    for tensor, expert in SPLITS[world_size]:
        initialize(tensor, expert)
        reference, full = mean_loss_reference(name)
        model = model_after_backward(name, full, sequence_parallel=tensor > 1)
        grads.allreduce_sequence_parallel_gradients(model)
        grads.bucket_allreduce_gradients(model)
        assert_gradients(model, reference)
        wanted = [param.grad for param in reference.parameters()]
        for norm_type in (2.0, float("inf")):
            want = torch.nn.utils.get_total_norm(wanted, norm_type)
            assert relative_error(grads.get_grad_norm(model, norm_type), want) < TOLERANCE
        grads.clip_grad_norm(model, 0.5)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert_gradients(model, reference)


@distributed(world_size=[2, 4])
def test_overlapped_reduction(world_size):
    initialize(1, 2)
    reference, full = mean_loss_reference("mixtral")
    config = MODELS["mixtral"]()
    model = parallel_model(config, full, moe=options_of(config, "allgather"))
    reduction = OverlappedGradientReduction(model)
    with reduction.last_backward():
        model(**batches()[parallel_state.get_data_parallel_rank()]).loss.backward()
    assert_gradients(model, reference)


def step_of(name: str, how: str) -> None:
    """One AdamW step with clipping, against torch's on transformers' model."""
    reference, full = mean_loss_reference(name)
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.optim.AdamW(reference.parameters(), lr=0.01).step()
    config = MODELS[name]()
    model = parallel_model(config, full, moe=options_of(config, "alltoall"), sequence_parallel=True)
    groups = None
    if how == "replicated":
        groups = [[rank] for rank in range(dist.get_world_size())]
    optimizer = NeuronZero1Optimizer(
        model.parameters(), AdamW, sharding_groups=groups, max_norm=0.5, lr=0.01, weight_decay=0.01
    )
    model(**batches()[parallel_state.get_data_parallel_rank()]).loss.backward()
    if how == "replicated":
        grads.bucket_allreduce_gradients(model)
    optimizer.step()
    wanted = dict(reference.named_parameters())
    for key, param in model.named_parameters():
        change = local_part(key, wanted[key] - full[key], config)
        found = param.detach() - local_part(key, full[key], config)
        # Adam's first step is the sign of the gradient: elements near 0 may differ. One wrong scale of all would
        # change nothing either, which the norm and the gradients above see.
        far = (found - change).abs() > 0.02 * 0.01
        assert far.float().mean() < 0.02, f"{key}: {far.float().mean():.3f} of the updates differ"


@distributed(world_size=4, slow=[2])
@pytest.mark.parametrize("how", ["zero1", "replicated"])
def test_optimizer_step(how, world_size):
    for tensor, expert in SPLITS[world_size]:
        initialize(tensor, expert)
        step_of("mixtral", how)


@distributed(world_size=[2, 4])
def test_the_gradient_norm_of_zero1(world_size):
    for tensor, expert in SPLITS[world_size]:
        initialize(tensor, expert)
        reference, full = mean_loss_reference("mixtral")
        model = model_after_backward("mixtral", full, sequence_parallel=tensor > 1)
        norm = NeuronZero1Optimizer(model.parameters(), AdamW, max_norm=1e9, lr=0.1).reduce_gradients()
        want = torch.nn.utils.get_total_norm([param.grad for param in reference.parameters()])
        assert relative_error(norm, want) < TOLERANCE


@distributed(world_size=2)
def test_optimizer_in_backward():
    initialize(1, 2)
    reference, full = mean_loss_reference("mixtral")
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    config = MODELS["mixtral"]()
    model = parallel_model(config, full, moe=options_of(config, "alltoall"))
    optimizer = OptimizerInBackward(torch.optim.SGD(model.parameters(), lr=0.1))
    model(**batches()[parallel_state.get_data_parallel_rank()]).loss.backward()
    optimizer.step()
    wanted = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        change = local_part(name, wanted[name] - full[name], config)
        error = (param.detach() - local_part(name, full[name], config) - change).norm() / change.norm()
        assert error < 1e-4, f"{name}: {error:.1e}"  # the difference of two weights rounds by 1e-7 of 1, of 1e-3


@distributed(world_size=2, slow=[1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_directories_both_ways(name, world_size, tmp_path):
    """transformers' files, one tensor per expert, into every split; our export into transformers."""
    for tensor, expert in [(1, 1), *SPLITS.get(world_size, [])]:
        if tensor * expert > world_size:
            continue
        initialize(tensor, expert)
        config = MODELS[name]()
        reference = hugging_face(config)
        source = Path(tmp_path) / f"source{tensor}{expert}"
        if dist.get_rank() == 0:
            reference.save_pretrained(source)
            names = set(load_file(source / "model.safetensors"))
            part = "w1" if name == "mixtral" else "gate_proj"
            assert any(stored.endswith(f"experts.3.{part}.weight") for stored in names), "transformers' own format"
        dist.barrier()
        model = model_class(name)(config, device="meta")
        load_pretrained(model, source)
        full = full_parameters(reference)
        for key, param in model.named_parameters():
            assert torch.equal(param, local_part(key, full[key], config)), key
        for size in (1 << 40, 20_000):  # one file, and several
            target = Path(tmp_path) / f"export{tensor}{expert}{size}"
            save_pretrained(model, target, max_shard_size_bytes=size)
            if dist.get_rank() == 0:
                again = AutoModelForCausalLM.from_pretrained(target)
                for key, param in again.named_parameters():
                    assert torch.equal(param, full[key]), key
            dist.barrier()


@distributed(world_size=2)
def test_checkpoints_of_other_experts_are_refused(tmp_path):
    initialize(1, 2)
    directory = Path(tmp_path)
    if dist.get_rank() == 0:
        hugging_face(MODELS["mixtral"](num_local_experts=6)).save_pretrained(directory / "six")
        hugging_face(MODELS["mixtral"]()).save_pretrained(directory / "four")
        (directory / "hole").mkdir()
        tensors = load_file(directory / "four" / "model.safetensors")
        tensors.pop("model.layers.1.block_sparse_moe.experts.2.w3.weight")
        save_file(tensors, directory / "hole" / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    model = parallel_model(MODELS["mixtral"](), moe=options_of(MODELS["mixtral"](), "alltoall"))
    message = error_message(lambda: load_pretrained(model, directory / "six"))
    assert_says(message, "mlp.gate.weight", "[6, 32]", "[4, 32]", "config")
    message = error_message(lambda: load_pretrained(model, directory / "hole"))
    assert_says(message, "expert 2 of 4", "model.layers.1", "w3", "copy")


def train_and_save(directory: str, tensor: int, expert: int) -> None:
    """Two steps, saved after the first; the weights after both, gathered."""
    initialize(tensor, expert)
    config = MODELS["mixtral"]()
    model = parallel_model(config, full_parameters(hugging_face(config)), moe=options_of(config, "alltoall"))
    optimizer = NeuronZero1Optimizer(model.parameters(), AdamW, lr=0.01, optimizer_dtype=torch.float32)
    state = TrainingState(model, optimizer)
    one_step(model, optimizer)
    save_training_state(directory, 1, state=state, config={})


def one_step(model: Any, optimizer: NeuronZero1Optimizer) -> None:
    inputs = batch(rows=4)
    size, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    rows = {key: value.chunk(size)[rank] for key, value in inputs.items()}
    items = torch.tensor(float((inputs["labels"][:, 1:] != -100).sum()) / size)
    model(**rows, num_items_in_batch=items).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def resume(directory: str, tensor: int, expert: int) -> dict[str, Tensor]:
    """Load into a model with other initial weights, run a second step, return this rank's weights."""
    initialize(tensor, expert)
    config = MODELS["mixtral"]()
    torch.manual_seed(99)
    model = parallel_model(config, moe=options_of(config, "alltoall"))
    optimizer = NeuronZero1Optimizer(model.parameters(), AdamW, lr=0.01, optimizer_dtype=torch.float32)
    load_training_state(directory, state=TrainingState(model, optimizer), config={})
    saved = {name: param.detach().clone() for name, param in model.named_parameters()}
    moments = {}
    for stored in optimizer.stored_parameters():
        name = next(key for key, param in model.named_parameters() if param is stored.param)
        moments[name] = optimizer.base_optimizer.state[stored.stored]["exp_avg"].norm().item()
    assert all(value > 0 for name, value in moments.items() if "experts" in name or "norm" in name)
    full: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        gathered = resharding.gather_full_tensor(resharding.gather_experts(param))
        if gathered is not None:
            full[name] = gathered
    for name, param in model.named_parameters():
        assert torch.equal(param, saved[name])
    return full


@pytest.mark.parametrize(("first", "second"), [((1, 2), (1, 1)), ((2, 2), (1, 4)), ((1, 1), (2, 2))])
def test_training_checkpoints_of_one_split_load_into_another(first, second, tmp_path):
    directory = str(tmp_path)
    world = {(1, 1): 1, (1, 2): 2, (2, 2): 4, (1, 4): 4}
    run_on_ranks(train_and_save, world[first], directory, *first)
    (same, *_) = run_on_ranks(resume, world[first], directory, *first)
    (other, *_) = run_on_ranks(resume, world[second], directory, *second)
    initial = full_parameters(hugging_face(MODELS["mixtral"]()))
    assert set(same) == set(other) == set(initial)
    for name, tensor in same.items():
        assert torch.equal(tensor, other[name]), name
        assert not torch.equal(tensor, initial[name]), f"{name} was not trained"


def initial_parameters(expert: int) -> dict[str, Tensor]:
    initialize(1, expert)
    torch.manual_seed(4)
    return {name: param.detach() for name, param in parallel_model(MODELS["mixtral"]()).named_parameters()}


def expect_parts(tensor: int, expert: int, full: dict[str, Tensor]) -> Tensor:
    initialize(tensor, expert)
    torch.manual_seed(4)
    model = parallel_model(MODELS["mixtral"]())
    for name, param in model.named_parameters():
        assert torch.equal(param, local_part(name, full[name], model.config)), name
    return torch.get_rng_state()


def test_initial_weights_do_not_depend_on_the_split():
    """And no two experts are equal, neither on one rank nor on two."""
    (full,) = run_on_ranks(initial_parameters, 1, 1)
    for world, splits in SPLITS.items():
        for split in splits:
            states = run_on_ranks(expect_parts, world, *split, full)
            assert all(torch.equal(state, states[0]) for state in states)
    experts = full["model.layers.0.mlp.experts.down_proj"]
    assert experts.std().item() == pytest.approx(0.2, rel=0.1)  # 3,072 numbers: 8 standard errors
    assert len({tuple(expert.flatten()[:3].tolist()) for expert in experts}) == len(experts)


@distributed(world_size=2)
def test_copies_keep_the_description_of_experts():
    initialize(1, 2)
    model = copy.deepcopy(parallel_model(MODELS["mixtral"]()))
    param = model.model.layers[0].mlp.experts.gate_up_proj
    assert param.expert_model_parallel and param.expert_partition_index == dist.get_rank()


@distributed(world_size=2)
def test_what_does_not_know_experts_is_refused(tmp_path):
    initialize(1, 2)
    model = parallel_model(MODELS["mixtral"]())
    calls = {
        "files": lambda: checkpointing.save({"model": model.state_dict()}, tmp_path),
        "gradients": lambda: grads.bucket_allreduce_gradients([torch.zeros(2)]),
        "layout": lambda: NeuronZero1Optimizer(model.parameters(), AdamW, lr=0.1).nxd_state_dict(),
    }
    facts = {
        "files": ["experts", "expert_model_parallel_size is 2", "save_training_state"],
        "gradients": ["experts", "pass parameters"],
        "layout": ["NxD", "expert_model_parallel_size 2", "save_training_state"],
    }
    for what, call in calls.items():
        assert_says(error_message(call), *facts[what])
