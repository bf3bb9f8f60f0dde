"""Calibration: plausible rates of this machine, a file that the planner takes, and what it changes in a plan."""

from __future__ import annotations

import dataclasses
import json

import pytest

from nxd_memopt.commands.plan import command as plan_command
from nxd_memopt.planner.hardware import device_named
from nxd_memopt.planner.timing.step_time import MEASURED, RATES, rates_of
from nxd_memopt.profiling import calibration
from nxd_memopt.profiling.calibration import host_copies_per_s, measure_device, write_device
from tests.deferred_transfers import DeferredTransfers
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(calibration, "_LEAST_S", 0.001)


def test_a_measured_device_is_one_that_plans_take(tmp_path, capsys):
    device, found = measure_device(largest=512, copy_bytes=1 << 20)
    assert set(found["matmul_flops"]["float32"]) == {256, 512}
    # Each precision is measured.
    for name in ("float16", "bfloat16"):
        assert device.matmul_flops[name] == max(found["matmul_flops"][name].values())
    # Slower than any computer and faster than any core.
    assert 1e7 < device.matmul_flops["float32"] == max(found["matmul_flops"]["float32"].values()) < 1e14
    assert 1e-7 < found["launch_s"] < 1e-2
    assert 1e7 < device.memory_bytes_per_s == found["memory_bytes_per_s"] < 1e13
    file = tmp_path / "machine.json"
    write_device(file, device, found)
    assert device_named(str(file)) == device
    assert json.loads(file.read_text())["measurements"]["memory_bytes_per_s"] == found["memory_bytes_per_s"]
    assert plan_command.main(["--model", "smollm2-135m", "--device", str(file), "--trainer.precision", "32-true"]) == 0
    # The parts of these rates that a step reaches are known of GPUs only.
    assert "come from measured rates" in capsys.readouterr().out
    assert_says(error_message(lambda: write_device(file, device, found)), "exists already")


def test_copies_go_both_ways_at_the_same_time():
    transfers = DeferredTransfers()
    assert host_copies_per_s(transfers, 1 << 10) > 0
    assert transfers.bytes_out == transfers.bytes_in >= 2 << 10


def test_measured_rates_stand_for_themselves():
    published = device_named("h200")
    measured = dataclasses.replace(published, measured=True)
    assert rates_of(published) == RATES["cuda"]
    rates = rates_of(measured)
    # An H200 that measures what it was fitted with has the times of the published one.
    assert rates.matmul * MEASURED["matmul"] == pytest.approx(RATES["cuda"].matmul)
    assert rates.matmul_fp32 * MEASURED["matmul_fp32"] == pytest.approx(RATES["cuda"].matmul_fp32)
    assert rates.update * MEASURED["memory"] == pytest.approx(RATES["cuda"].update) and rates.link == 1.0
    assert rates.attention / rates.matmul == pytest.approx(RATES["cuda"].attention / RATES["cuda"].matmul)


@distributed(world_size=2)
def test_ranks_measure_their_collectives():
    from nxd_memopt.parallel_layers import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    device, found = measure_device(largest=256, copy_bytes=1 << 16)
    assert len(found["link_bytes_per_s"]) == 3
    assert device.link_bytes_per_s == max(found["link_bytes_per_s"].values()) > 0


def test_refusals(tmp_path):
    assert_says(error_message(lambda: plan_command.main(["--calibrate"])), "--calibrate", "FILE.json")
    assert_says(
        error_message(lambda: device_named(str(tmp_path / "no.json"))), "no.json", "does not exist", "--calibrate"
    )
    (tmp_path / "other.json").write_text('{"name": "x"}')
    assert_says(error_message(lambda: device_named(str(tmp_path / "other.json"))), "describes no device")
    content = dataclasses.asdict(device_named("h100"))
    for name, value in (
        ("memory_gib", -5),
        ("memory_gib", True),
        ("memory_gib", "80"),
        ("memory_gib", float("nan")),
        ("host_memory_gib", -1),
        ("memory_bytes_per_s", 0),
        ("launch_s", float("inf")),
        ("ranks_per_host", 2.5),
        ("matmul_flops", [1]),
        ("matmul_flops", {"bfloat16": 0, "float16": 1, "float32": 1}),
        ("kind", "tpu"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps(content | {name: value}))
        assert_says(error_message(lambda: device_named(str(tmp_path / "bad.json"))), "bad.json", name)
