"""ZeRO stages and states on the host with expert parallelism, against one process with all experts and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nxd_memopt.checkpoint import TrainingState, load_training_state, save_training_state
from nxd_memopt.data_parallel import Zero2Optimizer, shard_model
from nxd_memopt.optimizer import AdamW
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.data_shards import gather_rows
from nxd_memopt.parallel_layers.resharding import gather_experts, gather_full_tensor
from tests.data_parallel.stages import MAX_NORM, OFFLOAD, Run, parameter_groups
from tests.dist.pool import distributed, run_on_ranks
from tests.dist.test_moe_models import MODELS, options_of
from tests.host_copies import HostOnly
from tests.reference import assert_says, error_message, relative_error
from tests.reference_models import batch, full_parameters, hugging_face, local_part, parallel_model

STEPS = 3
# T, EP for each number of ranks: experts of 1 and of 2 ranks, and both kinds of sharding.
SPLITS = {2: [(1, 2)], 4: [(1, 2), (2, 2), (1, 4)]}
# Updates of fp32 weights in three steps, whose gradients agree within 2e-5 (test_moe_models). A gradient of experts
# that is divided by another number of ranks changes the norm, by which it is clipped, and all updates by above 1e-2.
TOLERANCE = 1e-3
NORM_TOLERANCE = 2e-5


def initialize(tensor: int, expert: int) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, expert_model_parallel_size=expert)


def micro_batches(step: int) -> list[list[dict[str, Tensor]]]:
    """Two micro-batches of each data-parallel rank."""
    size = parallel_state.get_data_parallel_size()
    shifts = [[2 * (step * size + rank) + i for i in range(2)] for rank in range(size)]
    return [
        [{key: value.roll(shift, 0).roll(shift, 1) for key, value in batch().items()} for shift in own]
        for own in shifts
    ]


def reference_steps() -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights of transformers' model before and after the steps of torch's AdamW, and the norms."""
    reference = hugging_face(MODELS["mixtral"]())
    before = full_parameters(reference)
    optimizer = torch.optim.AdamW(parameter_groups(reference.parameters()), lr=1e-2, eps=1e-3, betas=(0.8, 0.9))
    norms = []
    for step in range(STEPS):
        everything = [each for own in micro_batches(step) for each in own]
        for each in everything:
            (reference(**each).loss / len(everything)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return before, full_parameters(reference), norms


def train(stage: str, before: dict[str, Tensor], dispatcher: str, **memory: Any) -> Run:
    """The same steps at a stage."""
    run = build(stage, before, dispatcher, **memory)
    for step in range(STEPS):
        train_step(run, step)
    return run


def build(stage: str, full: dict[str, Tensor] | None, dispatcher: str = "alltoall", **memory: Any) -> Run:
    config = MODELS["mixtral"]()
    sequence = parallel_state.get_tensor_model_parallel_size() > 1
    moe = options_of(config, dispatcher)
    model = parallel_model(config, full, sequence_parallel=sequence, moe=moe, **memory)
    return Run.of(model, stage)


def train_step(run: Run, step: int) -> None:
    for each in micro_batches(step)[parallel_state.get_data_parallel_rank()]:
        (run.model(**each).loss / 2).backward()
    run.reduce()
    run.optimizer.update_parameters()
    run.optimizer.zero_grad()


def compare(stage: str, tensor: int, expert: int, dispatcher: str = "alltoall", **memory: Any) -> None:
    initialize(tensor, expert)
    before, after, norms = reference_steps()
    run = train(stage, before, dispatcher, **memory)
    assert run.norms == pytest.approx(norms, rel=NORM_TOLERANCE)
    assert min(norms) > MAX_NORM  # clipping is active
    for name, param in run.model.named_parameters():
        change = local_part(name, after[name] - before[name], run.model.config)
        found = gather_rows(param).detach() - local_part(name, before[name], run.model.config)
        assert relative_error(found, change) < TOLERANCE, name


@distributed(world_size=2, slow=[4])
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3", OFFLOAD])
def test_steps_equal_one_process(stage: str, world_size: int) -> None:
    for tensor, expert in SPLITS[world_size]:
        try:
            compare(stage, tensor, expert)
        except Exception as error:
            error.add_note(f"T={tensor} EP={expert}")
            raise


@distributed(world_size=2, slow=[4])
@pytest.mark.parametrize(
    "memory",
    [{"recompute_granularity": "selective", "recompute_modules": ("moe",)}, {"recompute_granularity": "full"}],
    ids=["moe", "full"],
)
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_recompute_and_the_other_dispatcher(stage: str, memory: dict[str, Any], world_size: int) -> None:
    """The experts' weights are gathered once more, in a unit inside that of the layer."""
    compare(stage, world_size // 2, 2, "allgather", **memory)


@distributed(world_size=2)
def test_kept_attention_of_sharded_experts() -> None:
    """The recompute gathers experts in other steps than forward: they must not change which results are kept."""
    memory: dict[str, Any] = {"recompute_granularity": "full", "recompute_keep_core_attn": True}
    memory["attention_backend"] = "sdpa"
    compare("zero3", 1, 2, **memory)


class SizesOut(HostOnly):
    """Copies to the host, and how many bytes each has."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def to_host(self, source: Tensor, pieces: Any) -> Any:
        self.sizes.append(source.numel())
        return super().to_host(source, pieces)


@distributed(world_size=2)
@pytest.mark.parametrize(
    "memory",
    [{"cpu_offloading_num_layers": 2}, {"recompute_granularity": "full", "cpu_offloading_activations": True}],
    ids=["layers", "full"],
)
def test_offloaded_activations_of_sharded_experts(memory: dict[str, Any]) -> None:
    """Experts are gathered inside of the layer whose saved tensors go to the host; their weights do not."""
    transfers = SizesOut()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nxd_memopt.memory.offload._MIN_BYTES", 1)
        patch.setattr("nxd_memopt.memory.apply.backend.host_transfers", lambda: transfers)
        compare("zero3", 1, 2, **memory)
    # The bytes of a rank's down projections. Some activations have as many by chance, but not in each forward.
    forwards = 2 * STEPS * 2  # offloading layers, steps, micro-batches
    assert transfers.sizes and transfers.sizes.count(2 * 32 * 24 * 4) < forwards


def full_weights(run: Run) -> dict[str, Tensor]:
    """All parameters, on tensor-parallel rank 0."""
    full: dict[str, Tensor] = {}
    for name, param in run.model.named_parameters():
        gathered = gather_full_tensor(gather_experts(gather_rows(param)))
        if gathered is not None:
            full[name] = gathered
    return full


def save_and_continue(directory: str, stage: str, tensor: int, expert: int) -> dict[str, Tensor]:
    """One step, a checkpoint, another step."""
    initialize(tensor, expert)
    run = build(stage, full_parameters(hugging_face(MODELS["mixtral"]())))
    same_step(run)
    save_training_state(directory, 1, state=TrainingState(run.model, run.optimizer), config={})
    same_step(run)
    return full_weights(run)


def load_and_continue(directory: str, stage: str, tensor: int, expert: int) -> dict[str, Tensor]:
    """The second step of a model with other initial weights that loads the checkpoint."""
    initialize(tensor, expert)
    torch.manual_seed(99)
    run = build(stage, None)
    load_training_state(directory, state=TrainingState(run.model, run.optimizer), config={})
    same_step(run)
    return full_weights(run)


def same_step(run: Run) -> None:
    """A step on four rows for every D, without the routers' losses, which depend on D."""
    inputs = batch(rows=4)
    size, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    rows = {key: value.chunk(size)[rank] for key, value in inputs.items()}
    items = torch.tensor(float((inputs["labels"][:, 1:] != -100).sum()) / size)
    run.model(**rows, num_items_in_batch=items, router_loss_weight=0.0).loss.backward()
    run.reduce()
    run.optimizer.update_parameters()
    run.optimizer.zero_grad()


# Stage, T, EP and number of ranks of the run that saves and of the run that loads.
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("zero3", 1, 2, 2), ("zero1", 1, 1, 1)),
        (("zero3", 1, 2, 4), ("zero3", 1, 1, 2)),
        pytest.param((OFFLOAD, 1, 2, 4), ("zero3", 1, 4, 4), marks=pytest.mark.slow),
        pytest.param(("zero3", 2, 2, 4), (OFFLOAD, 1, 4, 4), marks=pytest.mark.slow),
    ],
)
def test_checkpoints_load_into_other_stages_and_splits(first: Any, second: Any, tmp_path: Path) -> None:
    *first, ranks = first
    (wanted, *_) = run_on_ranks(save_and_continue, ranks, str(tmp_path), *first)
    *second, ranks = second
    (found, *_) = run_on_ranks(load_and_continue, ranks, str(tmp_path), *second)
    initial = full_parameters(hugging_face(MODELS["mixtral"]()))
    assert set(wanted) == set(found) == set(initial)
    for name, tensor in wanted.items():
        change = tensor - initial[name]
        assert relative_error(found[name] - initial[name], change) < TOLERANCE, name


@distributed(world_size=4)
def test_parts_of_the_data_parallel_ranks_are_refused() -> None:
    """Hybrid sharding would shard experts over ranks that have other ones."""
    initialize(1, 2)
    config = MODELS["mixtral"]()
    model = parallel_model(config, moe=options_of(config, "alltoall"))
    facts = ["expert_model_parallel_size", "2", "leave"]
    assert_says(error_message(lambda: shard_model(model, ranks_per_replica=2)), "ranks_per_replica", *facts)
    message = error_message(lambda: Zero2Optimizer(model.parameters(), AdamW, lr=0.1, ranks_per_replica=2))
    assert_says(message, "sharding_groups", *facts)
