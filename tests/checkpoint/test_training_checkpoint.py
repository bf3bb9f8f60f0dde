"""Training checkpoints in one process: exact resume, kills, retention, refusals; and NxD's save and load."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nxd_memopt.checkpoint import (
    TrainingState,
    find_latest,
    load_training_state,
    require_writable,
    save_training_state,
    stream,
)
from nxd_memopt.checkpoint.sharded.index import write_json
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
        shared, per_rank = {"position": self.position}, {"rng": torch.get_rng_state()}
        return TrainingState(self.model, self.optimizer, shared, per_rank)

    def resume(self, directory):
        restored = load_training_state(directory, state=self.state(), config=CONFIG)
        torch.set_rng_state(restored.per_rank["rng"])
        self.position = restored.shared["position"]
        return restored


class Number(nn.Module):
    def __init__(self, value=0.0):
        super().__init__()
        self.x = nn.Parameter(torch.full((3,), float(value)))


def save(directory, step, value=0.0, **options):
    return save_training_state(directory, step, state=TrainingState(Number(value or step)), config=CONFIG, **options)


def load(directory, **options):
    """Step and value of the newest checkpoint."""
    model = Number()
    restored = load_training_state(directory, state=TrainingState(model), **{"config": CONFIG, **options})
    return restored.step, model.x[0].item()


def steps(directory):
    return [int(path.name.removeprefix("step_")) for path in sorted(directory.glob("step_*"))]


def test_resumed_run_repeats_the_losses_bit_for_bit(tmp_path):
    run = Run()
    for _ in range(3):
        run.step()
    save_training_state(tmp_path, 3, state=run.state(), config=CONFIG)
    expected = [run.step() for _ in range(4)]
    resumed = Run()
    restored = resumed.resume(tmp_path)
    assert (restored.step, restored.notes) == (3, [])
    assert [resumed.step() for _ in range(4)] == expected


def test_layout_and_index(tmp_path):
    path = save(tmp_path, 20, 4.0)
    assert path == tmp_path / "step_00000020" == find_latest(tmp_path)
    assert sorted(file.name for file in path.iterdir()) == ["index.json", "rank_00000.safetensors"]
    index = json.loads((path / "index.json").read_text())
    assert index["step"] == 20 and index["versions"]["torch"] == torch.__version__
    assert index["sizes"] == {"world_size": 1, "tensor_model_parallel_size": 1, "data_parallel_size": 1}
    assert index["config"]["model.hidden_size"] == 8
    (box,) = index["tensors"]["model.x"]["boxes"]
    assert index["tensors"]["model.x"]["shape"] == [3] and index["tensors"]["model.x"]["dtype"] == "float32"
    assert (box["offset"], box["size"], box["crc32"]) == ([0], [3], zlib.crc32(struct.pack("<3f", 4, 4, 4)))
    assert torch.equal(load_file(path / box["file"])[box["key"]], torch.full((3,), 4.0))  # safetensors' own reader


@pytest.mark.parametrize(("before", "step"), [((1, 2), 3), ((3,), 3)])
def test_kill_at_any_moment_leaves_a_complete_checkpoint(before, step, tmp_path):
    kills, latest, finished = 0, [], False
    while not finished:
        directory = tmp_path / str(kills)
        for earlier in before:
            save(directory, earlier)
        finished = run_killed_at(kills, directory, lambda at=directory: save(at, step, 9.0))
        found, value = load(directory)
        assert found in (before[-1], step) and value in (before[-1], 9.0)
        latest.append(value)
        save(directory, step + 1)
        assert steps(directory)[-1] == step + 1
        assert all((path / "index.json").is_file() for path in directory.iterdir()), "leftovers are removed"
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
        load(tmp_path / "absent")


def record_operations(monkeypatch, directory):
    """Writes, flushes and renames below ``directory`` in order, as ``(operation, name)``."""
    found = []

    def recorded(module, name, path_of):
        original = getattr(module, name)

        def call(*args, **options):
            path = path_of(args[0])
            if path.startswith(str(directory)):
                found.append((name, path.rpartition("/")[2]))
            return original(*args, **options)

        monkeypatch.setattr(module, name, call)

    recorded(os, "fsync", lambda descriptor: str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    recorded(os, "rename", str)
    recorded(os, "replace", str)
    recorded(stream, "_write_all", lambda file: str(file.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux")
def test_files_are_flushed_before_they_are_renamed_and_directories_after(tmp_path, monkeypatch):
    """What a crash of the host may lose is never needed by what it may keep."""
    run = tmp_path / "run"
    found = record_operations(monkeypatch, run)
    save(run, 1)
    writes = [name for operation, name in found if operation == "_write_all"]
    assert set(writes) == {"rank_00000.safetensors"}
    assert found[len(writes) :] == [
        ("fsync", "rank_00000.safetensors"),
        ("fsync", "rank_00000.json.incomplete"),
        ("replace", "rank_00000.json.incomplete"),
        ("fsync", "step_00000001.tmp"),
        ("fsync", "index.json.incomplete"),
        ("replace", "index.json.incomplete"),
        ("fsync", "step_00000001.tmp"),
        ("rename", "step_00000001.tmp"),
        ("fsync", "run"),
    ]


def test_a_configuration_with_inf_and_nan_is_json_and_equals_itself(tmp_path):
    values = {"norm": float("inf"), "rates": [1.0, float("nan")], "deep": {"low": -float("inf")}}

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    path = save_training_state(tmp_path, 1, state=TrainingState(Number(1.0)), config=values)
    content = json.loads((path / "index.json").read_text(), parse_constant=refuse)
    assert content["config"]["norm"] == {"$float": "inf"}
    load(tmp_path, config=values)
    with pytest.raises(ValueError, match=r"norm was inf and is 1\.0\n- rates was \[1\.0, nan\] and is \[1\.0, 2\.0\]"):
        load(tmp_path, config={**values, "norm": 1.0, "rates": [1.0, 2.0]})
    older = {key: value for key, value in content.items() if key != "checksum"}
    older["config"] = {"norm": float("inf"), "rates": [1.0, float("nan")], "deep.low": -float("inf")}
    checksum = f"{zlib.crc32(json.dumps(older, sort_keys=True).encode()):08x}"  # as it was written before
    (path / "index.json").write_text(json.dumps({**older, "checksum": checksum}))
    load(tmp_path, config=values)


@pytest.mark.parametrize("name", ["../other/rank_00000.safetensors", "rank_00001.safetensors"])
def test_a_file_name_that_leads_elsewhere_is_refused(name, tmp_path):
    path = save(tmp_path / "run", 1)
    shutil.copytree(path, tmp_path / "run" / "other")
    content = json.loads((path / "index.json").read_text())
    content["tensors"]["model.x"]["boxes"][0]["file"] = name
    if "/" in name:
        content["files"][name] = content["files"]["rank_00000.safetensors"]
    del content["checksum"]
    write_json(path / "index.json", content)
    with pytest.raises(ValueError, match="must be listed and lie in the same directory"):
        load(tmp_path / "run")


@pytest.mark.parametrize("keep", [1, 2])
def test_old_checkpoints_that_are_links_are_unlinked_and_never_followed(keep, tmp_path):
    """Checkpoints that were moved to another disk; the links go, what they point to stays."""
    run, archive = tmp_path / "run", tmp_path / "archive"
    archive.mkdir()
    for step in (1, 2):
        save(run, step)
        (run / f"step_{step:08d}").rename(archive / str(step))
        (run / f"step_{step:08d}").symlink_to(archive / str(step))
    save(run, 2, 9.0, keep=keep)  # in place of a link
    assert steps(run) == [1, 2][-keep:] and load(run) == (2, 9.0)
    for step in (3, 4):
        save(run, step, keep=keep)
    assert steps(run) == [3, 4][-keep:] and sorted(path.name for path in archive.iterdir()) == ["1", "2"]
    assert all((archive / name / "index.json").is_file() for name in "12")
    (run / "step_00000005").symlink_to(tmp_path / "absent")
    save(run, 5)
    assert load(run) == (5, 5.0)


def test_files_of_others_stay_and_leftovers_of_killed_removals_go(tmp_path):
    (tmp_path / "step_notes.tmp").write_text("mine")
    (tmp_path / "step_00000001.tmp").symlink_to(tmp_path)
    (tmp_path / ".step_00000001.replaced.tmp").mkdir()
    (tmp_path / ".step_00000001.replaced.tmp" / "index.json").write_text("{}")
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_notes.tmp"]


def test_another_configuration_names_every_field_with_both_values(tmp_path):
    save(tmp_path, 1)
    other = {**CONFIG, "model": {"hidden_size": 16}, "batch_size": 2, "seed": 1}
    with pytest.raises(ValueError, match="new run in another directory") as caught:
        load(tmp_path, config=other)
    for text in ("model.hidden_size was 8 and is 16", "batch_size was 4 and is 2", "seed was absent and is 1"):
        assert text in str(caught.value)
    assert "dtype" not in str(caught.value)
    assert load(tmp_path, config=other, not_compared=("model.hidden_size", "batch_size", "seed")) == (1, 1.0)


def test_truncated_and_missing_files_name_the_remedy(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    for file, kept_bytes in (("rank_00000.safetensors", 50), ("rank_00000.safetensors", None), ("index.json", 50)):
        (path / file).write_bytes((path / file).read_bytes()[:kept_bytes])
        if kept_bytes is None:
            (path / file).unlink()
        with pytest.raises(ValueError, match=rf"{file} .*delete .*step_00000002 to resume from the step before"):
            load(tmp_path)


def test_one_changed_bit_anywhere_is_found(tmp_path):
    path = save(tmp_path, 1)
    for name in ("rank_00000.safetensors", "index.json"):
        content = (path / name).read_bytes()
        for position in range(0, len(content), 3):
            changed = bytearray(content)
            changed[position] ^= 1
            (path / name).write_bytes(changed)
            with contextlib.suppress(ValueError):
                assert load(tmp_path) == (1, 1.0), f"byte {position} of {name}"
        (path / name).write_bytes(content)
    assert load(tmp_path) == (1, 1.0)


def test_misuse_is_refused(tmp_path):
    save(tmp_path, 5)
    with pytest.raises(ValueError, match="holds step 5, later than step 4"):
        save(tmp_path, 4)
    with pytest.raises(ValueError, match="keep at least 1, got step 6 and keep 0"):
        save(tmp_path, 6, keep=0)
    state = TrainingState(Number(), shared={"a": [1, nn.Linear(1, 1)]})
    with pytest.raises(ValueError, match=r"shared\['a'\]\[1\] has the type Linear"):
        save_training_state(tmp_path, 6, state=state, config=CONFIG)
    # A float to ``isinstance``, and something to unpickle in a file.
    state = TrainingState(Number(), shared={"loss": numpy.float64(1.5)})
    with pytest.raises(ValueError, match=r"shared\['loss'\] has the type float64"):
        save_training_state(tmp_path, 6, state=state, config=CONFIG)
    assert steps(tmp_path) == [5]


def test_unwritable_directory_is_found_before_training(tmp_path):
    require_writable(tmp_path / "new" / "run")
    assert not list((tmp_path / "new" / "run").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"output directory .* is not writable"):
        require_writable(tmp_path / "file" / "below")


# neuronx-distributed's API


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
