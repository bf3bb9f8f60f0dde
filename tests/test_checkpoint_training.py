"""Training checkpoints in one process: exact resume, kills, retention, refusals; and NxD's save and load."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from nxd_memopt.checkpoint import find_latest, load_training_state, require_writable, save_training_state
from nxd_memopt.config import MemoryConfig
from nxd_memopt.parallel_layers import checkpointing
from tests.checkpoint_models import run_killed_at

CONFIG = {"model": {"hidden_size": 8}, "batch_size": 4, "dtype": torch.bfloat16, "memory": MemoryConfig()}


class Run:
    """A training run whose losses depend on all that a checkpoint must hold: weights, optimizer, random state, data."""

    def __init__(self):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.position = 0

    def step(self):
        self.position += 1
        loss = self.model(torch.full((4, 8), float(self.position))).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "position": self.position,
        }

    def restore(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.position = state["position"]


def save(directory, step, value=0.0, **options):
    state = {"x": torch.full((3,), float(value or step))}
    return save_training_state(directory, step, state=state, config=CONFIG, **options)


def steps(directory):
    return [int(path.name.removeprefix("step_")) for path in sorted(directory.glob("step_*"))]


def test_resumed_run_repeats_the_losses_bit_for_bit(tmp_path):
    run = Run()
    for _ in range(3):
        run.step()
    save_training_state(tmp_path, 3, state=run.state(), config=CONFIG)
    expected = [run.step() for _ in range(4)]
    resumed = Run()
    step, state = load_training_state(tmp_path, config=CONFIG)
    resumed.restore(state)
    assert step == 3
    assert [resumed.step() for _ in range(4)] == expected


def test_layout_and_manifest(tmp_path):
    path = save(tmp_path, 20)
    assert path == tmp_path / "step_00000020" == find_latest(tmp_path)
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "rank_00000.pt"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 20 and manifest["versions"]["torch"] == torch.__version__
    assert manifest["config"]["world_size"] == manifest["config"]["tensor_model_parallel_size"] == 1
    assert manifest["config"]["model.hidden_size"] == 8


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(keep, tmp_path):
    for step in (5, 10, 15, 20):
        save(tmp_path, step, keep=keep)
    assert steps(tmp_path) == [5, 10, 15, 20][-keep:]


def test_the_same_step_can_be_saved_again(tmp_path):
    save(tmp_path, 5, 1.0, keep=1)
    save(tmp_path, 5, 2.0, keep=1)
    assert load_training_state(tmp_path, config=CONFIG)[1]["x"][0] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


@pytest.mark.parametrize(("before", "step"), [((1, 2), 3), ((3,), 3)])
def test_kill_at_any_moment_leaves_a_complete_checkpoint(before, step, tmp_path):
    kills, latest, finished = 0, [], False
    while not finished:
        directory = tmp_path / str(kills)
        for earlier in before:
            save(directory, earlier)
        finished = run_killed_at(kills, directory, lambda at=directory: save(at, step, 9.0))
        found, state = load_training_state(directory, config=CONFIG)
        assert found in (before[-1], step) and state["x"][0] in (before[-1], 9.0)
        latest.append(float(state["x"][0]))
        save(directory, step + 1)
        assert steps(directory)[-1] == step + 1
        assert all((path / "manifest.json").is_file() for path in directory.iterdir()), "leftovers are removed"
        kills += 1
    assert kills > 10 and sorted(latest) == latest and set(latest) == {before[-1], 9.0}


def test_unfinished_checkpoints_are_not_found(tmp_path):
    assert find_latest(tmp_path) is None and find_latest(tmp_path / "absent") is None
    save(tmp_path, 1)
    (tmp_path / "step_00000002.tmp").mkdir()
    (tmp_path / "step_00000003").mkdir()
    (tmp_path / "other").mkdir()
    assert find_latest(tmp_path) == tmp_path / "step_00000001"
    with pytest.raises(ValueError, match="has no complete checkpoint"):
        load_training_state(tmp_path / "absent", config=CONFIG)


def test_another_configuration_names_every_field_with_both_values(tmp_path):
    save(tmp_path, 1)
    other = {**CONFIG, "model": {"hidden_size": 16}, "batch_size": 2, "seed": 1}
    with pytest.raises(ValueError, match="new run in another directory") as caught:
        load_training_state(tmp_path, config=other)
    for text in ("model.hidden_size was 8 and is 16", "batch_size was 4 and is 2", "seed was absent and is 1"):
        assert text in str(caught.value)
    assert "dtype" not in str(caught.value)


@pytest.mark.parametrize("file_name", ["rank_00000.pt", "manifest.json"])
def test_truncated_file_names_the_remedy(file_name, tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / file_name
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=rf"{file_name} .*delete .*step_00000002 to resume from the step before"):
        load_training_state(tmp_path, config=CONFIG)


def test_missing_rank_file_is_an_error(tmp_path):
    (save(tmp_path, 1) / "rank_00000.pt").unlink()
    with pytest.raises(ValueError, match=r"rank_00000.pt does not exist"):
        load_training_state(tmp_path, config=CONFIG)


def test_misuse_is_refused(tmp_path):
    save(tmp_path, 5)
    with pytest.raises(ValueError, match="holds step 5, later than step 4"):
        save(tmp_path, 4)
    with pytest.raises(ValueError, match="keep at least 1, got step 6 and keep 0"):
        save(tmp_path, 6, keep=0)
    with pytest.raises(ValueError, match=r"state\['a'\]\[1\] has the type Linear"):
        save_training_state(tmp_path, 6, state={"a": [1, nn.Linear(1, 1)]}, config=CONFIG)
    assert steps(tmp_path) == [5]


def test_unwritable_directory_is_found_before_training(tmp_path):
    require_writable(tmp_path / "new" / "run")
    assert not list((tmp_path / "new" / "run").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"output directory .* is not writable"):
        require_writable(tmp_path / "file" / "below")


# neuronx-distributed's API


def test_nxd_round_trip_of_model_and_optimizer(tmp_path):
    run = Run()
    run.step()
    checkpointing.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, tmp_path)
    other = Run()
    checkpointing.load(tmp_path, other.model)
    checkpointing.load(tmp_path, model_or_optimizer=other.optimizer, model_key="optimizer")
    torch.manual_seed(0)
    expected = [run.step(), run.step()]
    torch.manual_seed(0)
    other.position = 1
    assert [other.step(), other.step()] == expected
    assert (tmp_path / "tp_rank_00_pp_rank_00" / "checkpoint.pt").is_file()


def test_nxd_down_cast(tmp_path):
    state = {"a": torch.randn(4), "b": [torch.arange(3), 7]}
    checkpointing.save({"model": state}, tmp_path, down_cast_bf16=True)
    loaded = checkpointing.load(tmp_path)["model"]
    assert torch.equal(loaded["a"], state["a"].bfloat16())
    assert torch.equal(loaded["b"][0], torch.arange(3)) and loaded["b"][1] == 7


def test_nxd_saves_a_view_without_the_rest_of_its_storage(tmp_path):
    checkpointing.save({"a": torch.zeros(1_000_000)[:10]}, tmp_path)
    assert (tmp_path / "tp_rank_00_pp_rank_00" / "checkpoint.pt").stat().st_size < 10_000


def test_nxd_load_errors(tmp_path):
    model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"checkpoint.pt does not exist: .*tensor-parallel size"):
        checkpointing.load(tmp_path, model)
    checkpointing.save({"model": nn.Linear(2, 4).state_dict()}, tmp_path)
    with pytest.raises(ValueError, match="does not fit the model"):
        checkpointing.load(tmp_path, model)
    with pytest.raises(ValueError, match=r"no entry 'weights': .*\['model'\]"):
        checkpointing.load(tmp_path, model, model_key="weights")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        checkpointing.save({}, tmp_path / "file")


def test_full_shape_is_checked_when_slicing(tmp_path):
    model = nn.Linear(2, 3)
    for name, value in {"tensor_model_parallel": True, "partition_dim": 0, "full_shape": (3, 2)}.items():
        setattr(model.weight, name, value)
    with pytest.raises(ValueError, match=r"weight has shape \[5, 2\] in the checkpoint but \[3, 2\] in the model"):
        checkpointing.get_sharded_model_dict(model, {"weight": torch.zeros(5, 2)})
