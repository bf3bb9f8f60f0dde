"""A snapshot of a training state: writes that it must notice, memory that it must give back, copies to the host."""

from __future__ import annotations

import threading
import types

import pytest
import torch

from nxd_memopt.checkpoint import BackgroundSaver
from nxd_memopt.checkpoint.layout import Part
from nxd_memopt.checkpoint.sharded import saving, snapshot
from nxd_memopt.checkpoint.stream import Entry
from tests.checkpoint.test_background_saver import CONFIG, Gate, Run, SlowDevice, small_pool
from tests.reference import error_message


@pytest.mark.parametrize("when", ["before", "after", "updated"])
def test_a_write_past_the_optimizer_is_an_error_on_a_device(when, tmp_path, monkeypatch):
    """Before the copy is queued, or after that, when it may be under way, also if an update follows."""
    gate, launched = Gate(monkeypatch), threading.Event()
    start = snapshot.Snapshot.start_copies

    def start_copies(this):
        if when == "before":
            launched.wait()
        start(this)
        launched.set()

    monkeypatch.setattr(snapshot.Snapshot, "start_copies", start_copies)
    run = Run(dtype=torch.bfloat16)
    with BackgroundSaver(tmp_path, pool=small_pool()) as saver:
        saver._transfers = SlowDevice()
        run.step()
        saver.save(1, run.state(), CONFIG)
        if when != "before":
            launched.wait()
        with torch.no_grad():
            run.model[0].weight.add_(1)
        launched.set()
        if when == "updated":
            run.step()
        gate.open()
        message = error_message(saver.finish)
        assert saver.pool.ledger() == {}
    assert "model.0.weight" in message and "was written to (version" in message
    assert not (tmp_path / "step_00000001").exists()


@pytest.mark.parametrize("device", [None, SlowDevice()], ids=["cpu", "device"])
def test_memory_that_cannot_be_pinned_fails_the_save_not_the_step(device, tmp_path, monkeypatch):
    """One rank alone must not stop in ``step``, while the others wait for it in the next collective."""
    gate, exhausted = Gate(monkeypatch), threading.Event()
    start = snapshot.Snapshot.start_copies
    monkeypatch.setattr(snapshot.Snapshot, "start_copies", lambda this: (exhausted.wait(), start(this)))
    run = Run()
    with BackgroundSaver(tmp_path, pool=small_pool()) as saver:
        saver._transfers = device
        run.step()
        saver.save(1, run.state(), CONFIG)

        def fail():
            raise RuntimeError("cudaHostAlloc failed")

        monkeypatch.setattr(saver.pool, "_allocate", fail)
        exhausted.set()
        run.step()
        gate.open()
        with pytest.raises(RuntimeError, match="cudaHostAlloc failed"):
            saver.finish()
        assert saver.pool.ledger() == {}


def test_an_update_takes_no_memory_of_a_closed_snapshot(tmp_path):
    """The writer fails and closes the snapshot while ``before_update`` waits for copies."""
    run, pool = Run(), small_pool()
    run.step()
    taken = snapshot.Snapshot(saving.RankSave(tmp_path, 1, run.state(), CONFIG, 2).sources, pool, None)

    class Transfer:
        wait = staticmethod(lambda: taken.close())
        synchronize = staticmethod(lambda: None)

    taken._window_transfers.append(Transfer())
    taken.before_update()
    assert pool.ledger() == {}


class Counted:
    """A tensor of a device that compiles graphs: it can be copied to the host in full only."""

    device = types.SimpleNamespace(type="xla")

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self.copies, self._version = values, 0, 0

    def cpu(self) -> torch.Tensor:
        self.copies += 1
        return self._values.clone()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_tensor_of_many_boxes_is_copied_to_the_host_once(in_background):
    values = [torch.arange(64.0), torch.arange(64.0) + 100]
    tensors = [Counted(each) for each in values]
    parts = [Part((16 * i,), (16,), 16 * i, (16,), 0, 0, (0,)) for i in range(4)]
    sources = [
        snapshot.SnapshotSource(Entry(f"{i} {part.start}", torch.float32, (16,)), tensor, part)
        for i, tensor in enumerate(tensors)
        for part in parts
    ]
    reader = snapshot.HostReader()
    taken = snapshot.Snapshot(sources, small_pool(), None) if in_background else None
    read = [
        torch.cat([piece.clone() for piece in (taken.chunks_of(i) if taken else reader.chunks(source))])
        for i, source in enumerate(sources)
    ]
    assert torch.equal(torch.cat(read).view(torch.float32), torch.cat(values))
    assert [tensor.copies for tensor in tensors] == [1, 1]
