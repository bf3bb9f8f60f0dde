"""Checkpoints written while training goes on: the state of the save's moment, one at a time, nothing half written."""

from __future__ import annotations

import errno
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from nxd_memopt.checkpoint import BackgroundSaver, TrainingState, load_training_state
from nxd_memopt.checkpoint.sharded import snapshot
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.optimizer import NeuronZero1Optimizer
from tests.checkpoint_models import run_killed_at
from tests.reference import assert_says, error_message

CONFIG = {"seed": 1}
BLOCK = 1 << 12  # bytes: parameters below take several blocks, and blocks several parameters


class Run:
    """Training whose every value after a step differs from that before it."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, width: int = 40) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(width, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Linear(33, 7)).to(dtype)
        self.optimizer = NeuronZero1Optimizer(self.model.parameters(), torch.optim.AdamW, lr=0.01)
        self.width, self.position = width, 0

    def forward_backward(self) -> None:
        generator = torch.Generator().manual_seed(self.position)
        batch = torch.randn(6, self.width, generator=generator).to(self.model[0].weight.dtype)
        self.model(batch).float().square().mean().backward()

    def step(self) -> None:
        self.position += 1
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> TrainingState:
        return TrainingState(self.model, self.optimizer, {"position": self.position}, {"rng": torch.get_rng_state()})

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for i, each in enumerate(self.optimizer.stored_parameters()):
            found[f"master {i}"] = each.stored.detach().clone()
            for name, tensor in self.optimizer.base_optimizer.state[each.stored].items():
                found[f"{name} {i}"] = tensor.clone()
        return found

    def resume(self, directory: Path) -> int:
        restored = load_training_state(directory, state=self.state(), config=CONFIG)
        self.position = restored.shared["position"]
        return restored.step


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def small_pool(limit_bytes: int | None = None) -> HostPool:
    return HostPool(limit_bytes, block_bytes=BLOCK)


class Gate:
    """Lets a save's writer go on piece by piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pieces: int = 0) -> None:
        self.left = pieces
        original = snapshot.Snapshot._read

        def read(this, piece, index):
            while self.left <= 0:
                time.sleep(0.001)
            self.left -= 1
            return original(this, piece, index)

        monkeypatch.setattr(snapshot.Snapshot, "_read", read)

    def open(self) -> None:
        self.left = 10**9


@pytest.mark.parametrize(
    ("pieces", "dtype"),
    [(0, torch.bfloat16), (1, torch.float32), (7, torch.bfloat16), (10**9, torch.float32)],
    ids=["none", "one", "some", "all"],
)
def test_what_is_saved_is_the_state_of_the_saves_moment(tmp_path, monkeypatch, pieces, dtype):
    """However much the writer has read when the next update comes; buffers, which forward changes, included."""
    gate = Gate(monkeypatch, pieces)
    run = Run(dtype=dtype)
    with BackgroundSaver(tmp_path, pool=small_pool()) as saver:
        for _ in range(3):
            run.step()
        expected = run.tensors()
        saver.save(3, run.state(), CONFIG)
        for _ in range(3):
            run.step()
            saver.poll()
        gate.open()
        saver.finish()
        assert saver.pool.ledger() == {}
    resumed = Run(dtype=dtype)
    assert resumed.resume(tmp_path) == 3
    assert_equal(resumed.tensors(), expected)
    for _ in range(3):
        resumed.step()
    assert_equal(resumed.tensors(), run.tensors())


def test_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    gate = Gate(monkeypatch, 5)
    run = Run()
    with BackgroundSaver(tmp_path, pool=small_pool()) as saver:
        run.step()
        saver.save(1, run.state(), CONFIG)
        run.step()
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000001.tmp"]
        gate.open()
        saver.save(2, run.state(), CONFIG)
        assert (tmp_path / "step_00000001" / "index.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


def test_a_write_past_the_optimizer_is_an_error_not_a_torn_checkpoint(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    run = Run()
    with BackgroundSaver(tmp_path, pool=small_pool()) as saver:
        run.step()
        saver.save(1, run.state(), CONFIG)
        with torch.no_grad():
            run.model[0].weight.add_(1)
        gate.open()
        message = error_message(saver.finish)
    assert "model.0.weight" in message and "was written to (version" in message
    assert not (tmp_path / "step_00000001").exists()


def test_a_full_disk_is_reported_at_the_next_step_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    run = Run()
    with BackgroundSaver(tmp_path, pool=small_pool()) as saver:
        run.step()
        expected = run.tensors()
        saver.save(1, run.state(), CONFIG)
        saver.finish()

        def full(file, content):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("nxd_memopt.checkpoint.stream._write_all", full)
            run.step()
            saver.save(2, run.state(), CONFIG)
            deadline = time.monotonic() + 20
            with pytest.raises(OSError, match=r"No space left on device: free disk space or choose another directory"):
                while time.monotonic() < deadline:
                    run.step()
                    saver.poll()
        assert saver.pool.ledger() == {}
        resumed = Run()
        assert resumed.resume(tmp_path) == 1
        assert_equal(resumed.tensors(), expected)
        run.step()
        saver.save(9, run.state(), CONFIG)  # what failed is cleared away
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000009"]


def test_too_little_host_memory_names_required_and_available_bytes(tmp_path, monkeypatch):
    run = Run(width=400)  # 40 blocks
    run.step()
    with BackgroundSaver(tmp_path, pool=small_pool(limit_bytes=8 * BLOCK)) as saver:
        message = error_message(lambda: saver.reserve(run.state()))
        assert "more bytes of host memory, and 32768 of the pool's 32768 are left" in message
        gate = Gate(monkeypatch)
        saver.save(1, run.state(), CONFIG)  # begins: nothing has to be copied yet but buffers
        run.step()  # goes on: one rank alone must not stop here
        gate.open()
        message = error_message(saver.finish)
        assert "raise the limit" in message
        assert saver.pool.ledger() == {}
    assert not list(tmp_path.glob("step_00000001"))


def test_a_host_with_too_little_memory_is_named_before_a_copy(tmp_path, monkeypatch):
    run = Run(width=400)
    run.step()
    monkeypatch.setattr("nxd_memopt.memory.host_limits.available_host_bytes", lambda: 8 * BLOCK)
    with BackgroundSaver(tmp_path, pool=small_pool()) as saver:
        message = error_message(lambda: saver.reserve(run.state()))
        assert_says(message, "checkpoint snapshot requires", f"{8 * BLOCK} are available")
        assert saver.pool.allocated_bytes == 0
        # On the host a save may need no copy at all.
        saver.save(1, run.state(), CONFIG)
        saver.finish()
        monkeypatch.setattr(saver, "_transfers", SlowDevice())
        message = error_message(lambda: saver.save(2, run.state(), CONFIG))
        assert_says(message, "checkpoint snapshot requires", f"{8 * BLOCK} are available")


class SlowDevice:
    """Copies that land only when somebody waits for them, of what the source holds then."""

    device = torch.device("cpu")

    def mark(self):
        return self.copy_out([], None)

    def copy_out(self, pairs, after):
        del after
        pending = [(host, source) for host, source in pairs]

        class Transfer:
            def wait(self):
                for host, source in pending:
                    host.copy_(source)
                pending.clear()

            synchronize = wait

            def is_done(self):
                return not pending

        return Transfer()


def test_copies_of_a_device_land_before_its_next_update(tmp_path, monkeypatch):
    """The writer starts the copies late: the update waits until they are started, and until they have landed."""
    gate = Gate(monkeypatch)
    started = snapshot.Snapshot.start_copies
    monkeypatch.setattr(snapshot.Snapshot, "start_copies", lambda this: (time.sleep(0.2), started(this)))
    run = Run(dtype=torch.bfloat16)
    with BackgroundSaver(tmp_path, pool=small_pool()) as saver:
        saver._transfers = SlowDevice()
        run.step()
        expected = run.tensors()
        saver.save(1, run.state(), CONFIG)
        run.step()
        gate.open()
        saver.finish()
    resumed = Run(dtype=torch.bfloat16)
    resumed.resume(tmp_path)
    assert_equal(resumed.tensors(), expected)


@pytest.mark.parametrize("error", [RuntimeError("training failed"), KeyboardInterrupt()])
def test_an_exception_in_training_lets_the_save_finish(tmp_path, error):
    run = Run()
    with pytest.raises(type(error)), BackgroundSaver(tmp_path, pool=small_pool()) as saver:
        run.step()
        expected = run.tensors()
        saver.save(1, run.state(), CONFIG)
        run.step()
        raise error
    resumed = Run()
    assert resumed.resume(tmp_path) == 1
    assert_equal(resumed.tensors(), expected)


def test_an_exception_abandons_a_save_that_stalls(tmp_path, monkeypatch):
    gate = Gate(monkeypatch, 3)
    run = Run()
    started = time.monotonic()
    with (
        pytest.raises(RuntimeError, match="training failed") as caught,
        BackgroundSaver(tmp_path, pool=small_pool(), stall_s=0.2) as saver,
    ):
        run.step()
        saver.save(1, run.state(), CONFIG)
        raise RuntimeError("training failed")
    assert time.monotonic() - started < 10
    assert any("step_00000001 under way did not complete" in note for note in caught.value.__notes__)
    gate.open()
    assert not (tmp_path / "step_00000001").exists()


def test_a_program_that_ends_without_the_block_leaves_a_complete_checkpoint(tmp_path):
    script = """
        import sys
        import torch
        from tests.checkpoint.test_background_saver import CONFIG, BackgroundSaver, Run
        torch.set_num_threads(1)  # sums in the same order as in the test's process
        run = Run(width=4000)
        run.step()
        BackgroundSaver(sys.argv[1]).save(1, run.state(), CONFIG)
        run.step()
        sys.exit(3)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=False, timeout=120)
    assert done.returncode == 3
    resumed, expected = Run(width=4000), Run(width=4000)
    expected.step()
    assert resumed.resume(tmp_path) == 1
    assert_equal(resumed.tensors(), expected.tensors())


def test_a_kill_before_any_file_operation_leaves_a_complete_checkpoint(tmp_path):
    """Of either thread: the steps found grow with the operation before which the process is killed."""
    run, found, finished = Run(), [], False
    run.step()
    state = run.state()

    def save(directory: Path, *steps: int) -> None:
        with BackgroundSaver(directory, keep=1, pool=small_pool()) as saver:
            for step in steps:
                saver.save(step, state, CONFIG)

    while not finished:
        directory = tmp_path / str(len(found))
        save(directory, 1)
        finished = run_killed_at(len(found), directory, lambda at=directory: save(at, 2))
        resumed = Run()
        found.append(resumed.resume(directory))
        assert_equal(resumed.tensors(), run.tensors())
        save(directory, 3)
        assert [path.name for path in directory.iterdir()] == ["step_00000003"], "leftovers are removed"
    assert sorted(found) == found and set(found) == {1, 2} and len(found) > 10
