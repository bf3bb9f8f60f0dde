"""Devices of the planner: compute capabilities of GPUs, files of measured ones, and the sources that texts name."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest

from nxd_memopt.architectures.configs import NAMED_CONFIGS, with_defaults
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.commands.plan import command as plan_command
from nxd_memopt.planner.hardware import GIB, device_named, host_device, read_device
from nxd_memopt.planner.search.plan import evaluate
from nxd_memopt.planner.search.problem import Problem, Setting
from tests.reference import assert_says, error_message

ROOT = Path(__file__).resolve().parents[2]
PLANNER = ROOT / "nxd_memopt" / "planner"
ARCHITECTURES = ROOT / "nxd_memopt" / "architectures"


def test_files_of_gpus_without_a_compute_capability_are_measured_again(tmp_path):
    content = dataclasses.asdict(device_named("h200"))
    file = tmp_path / "device.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    assert read_device(file) == device_named("h200")
    # The reserve is not measured: a file of a version that left less has today's.
    file.write_text(json.dumps(content | {"reserve_gib": 0.6}), encoding="utf-8")
    assert read_device(file) == device_named("h200")
    del content["compute_capability"]
    file.write_text(json.dumps(content), encoding="utf-8")
    assert_says(error_message(lambda: read_device(file)), "compute_capability", "calibrate again")


@pytest.mark.parametrize(
    ("model", "devices", "setting", "communicators"),
    [
        ("llama-3-8b", 1, Setting(1), 0),
        ("llama-3-8b", 4, Setting(2, "zero1"), 2),
        # Two ranks have the same KV heads.
        ("llama-3-8b", 32, Setting(16, "zero1"), 3),
        ("llama-3-8b", 8, Setting(1, "zero1", shard_ranks=2), 3),
        ("llama-3-8b", 8, Setting(1, "zero1", shard_ranks=8), 1),
        # Experts of all ranks, and of pairs, whose gradients are reduced over four.
        ("mixtral-8x7b", 8, Setting(1, "zero1", expert_model_parallel_size=8), 2),
        ("mixtral-8x7b", 8, Setting(1, "zero1", expert_model_parallel_size=2), 3),
    ],
)
def test_each_group_of_several_ranks_has_a_communicator(model, devices, setting, communicators):
    """Of NCCL on GPUs; on Trainium the reserve is the same for all numbers of ranks."""
    config = with_defaults({**NAMED_CONFIGS[model], "num_hidden_layers": 1})
    for name, each in (("h200", 0.66), ("trn2", 0.0)):
        problem = Problem(model_spec(config), device_named(name), devices, 512, precision="bf16-true")
        alone = problem.device.usable_bytes()
        assert alone - evaluate(problem, setting).usable_bytes == pytest.approx(communicators * each * GIB, abs=2)


def test_what_is_outside_of_the_allocator_is_left_free():
    """MiB on four H200s after a step with T=4: a context, libraries, one communicator."""
    device = device_named("h200")
    left = device.memory_bytes - device.usable_bytes(communicators=1)
    assert 0 <= left / 2**20 - 1601 < 64


def test_devices_beyond_those_of_a_host_are_shown_as_hosts(tmp_path, capsys):
    """Also where fewer ranks of a host were calibrated than it has."""
    file = tmp_path / "device.json"
    calibrated = dataclasses.replace(device_named("h200"), ranks_per_host=2, measured=True)
    file.write_text(json.dumps(dataclasses.asdict(calibrated)), encoding="utf-8")
    for device, devices, shown in (
        ("h200", 8, "on 8 x h200, "),
        ("h200", 16, "h200 on 2 hosts of 8, "),
        (file, 6, "h200 on 3 hosts of 2, "),
    ):
        arguments = ["--model", "llama-3.2-1b", "--device", str(device), "--devices", str(devices)]
        assert plan_command.main([*arguments, "--seq-length", "4096", "--show", "1"]) == 0
        assert shown in capsys.readouterr().out


def test_a_calibrated_device_is_not_called_uncalibrated(tmp_path, capsys):
    """A CPU whose rates one process has measured."""
    file = tmp_path / "cpu.json"
    device = dataclasses.replace(host_device(8.0, 1), measured=True)
    file.write_text(json.dumps(dataclasses.asdict(device)))
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--model", str(tmp_path), "--device", str(file), "--seq-length", "64", "--show", "1"]
    assert plan_command.main(arguments) == 0
    shown = capsys.readouterr().out
    assert_says(shown, "come from measured rates", "in MiB", "weights")
    arguments += ["--devices", "2", "--parallel.tensor-model-parallel-size", "2"]
    message = error_message(lambda: plan_command.main(arguments))
    assert_says(message, "tensor_model_parallel_size 2", "calibrated with 1", "torchrun")


@pytest.mark.parametrize(
    "path", sorted([*PLANNER.rglob("*.py"), *ARCHITECTURES.rglob("*.py")]), ids=lambda path: path.name
)
def test_files_that_docstrings_name_exist(path):
    folders = (ROOT, ROOT / "nxd_memopt", ROOT / "nxd_memopt" / "models", PLANNER)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    names = re.findall(r"``([\w/]+\.py)", "\n".join(texts))
    missing = [name for name in names if not any((folder / name).is_file() for folder in folders)]
    # Of other packages.
    assert [name for name in missing if not name.startswith("flash_attn/")] == []
