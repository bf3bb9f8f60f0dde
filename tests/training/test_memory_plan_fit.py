"""A run names the memory that it lacks, of device or host, and plans the attention that runs in its process."""

from __future__ import annotations

import dataclasses

import pytest

from nxd_memopt.architectures.configs import NAMED_CONFIGS, with_defaults
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.backends import backend
from nxd_memopt.backends.cuda import attention as cuda_attention
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.hardware import GIB, device_named
from nxd_memopt.planner.search.candidates import memories
from nxd_memopt.planner.search.choice import choose_memory
from nxd_memopt.planner.search.plan import Plan, evaluate
from nxd_memopt.planner.search.problem import Problem, Setting, kernels_of
from nxd_memopt.training import memory_plan
from nxd_memopt.training.memory_plan import plan_memory, planned
from nxd_memopt.training.model import load_hf_config
from tests.reference import assert_says, error_message
from tests.training.runs import LLAMA
from tests.training.test_memory_plan import config_of

FULL = {"recompute_granularity": "full"}


def problem(length=131072, **memory) -> Problem:
    """A step on one H200, with other memory of the device (``memory_gib``) or the host (``host_memory_gib``)."""
    config = with_defaults(NAMED_CONFIGS["llama-3-8b"])
    device = dataclasses.replace(device_named("h200"), **memory)
    return Problem(model_spec(config), device, 1, length, precision="bf16-true")


def test_a_plan_without_room_for_its_margin_is_a_warning(capsys):
    setting = Setting(memory=MemoryConfig(**FULL))
    needed = evaluate(problem(), setting).memory
    lacking = problem().device.memory_bytes - problem().usable_bytes
    plan = evaluate(problem(memory_gib=(needed.device_bytes + lacking + GIB // 4) / GIB), setting)
    assert needed.device_bytes < plan.usable_bytes < needed.reserved_bytes
    assert not plan.fits
    memory_plan._require_fit(plan)
    shown = capsys.readouterr().out
    assert_says(shown, "warning: the planned memory", f"{plan.usable_bytes / GIB:.2f} GiB that tensors can use")


def offloaded(host_gib: float) -> Plan:
    memory = MemoryConfig(**FULL, cpu_offloading_activations=True)
    return evaluate(problem(host_memory_gib=host_gib), Setting(memory=memory))


def test_a_host_without_room_is_named(capsys):
    needed = offloaded(1000.0).memory.host_bytes
    assert needed > 4 * GIB
    room = needed / GIB / 0.9
    memory_plan._require_fit(offloaded(room * 1.01))
    assert capsys.readouterr().out == ""
    memory_plan._require_fit(offloaded(room / 1.05))
    assert_says(capsys.readouterr().out, "warning", "GiB of host memory for each rank", "offload less")
    message = error_message(lambda: memory_plan._require_fit(offloaded(room / 1.2)))
    assert_says(message, "planned memory of a step", f"{needed / GIB:.2f} GiB of ", "host memory", "offload less")
    assert "on each device" not in message
    (shortage,) = offloaded(room / 1.2).shortages
    assert shortage.place == "host" and shortage.missing_bytes == needed - int(room / 1.2 * GIB * 0.9)


def test_auto_names_the_memory_that_is_short():
    """States on the host: no technique makes them smaller, and the device has room."""
    setting = Setting(memory=MemoryConfig(), optimizer_offload_fraction=1.0)
    asked = dataclasses.replace(problem(2048, host_memory_gib=8.0), precision="bf16-mixed")
    message = error_message(lambda: choose_memory(asked, setting))
    assert_says(message, "memory: auto finds nothing", "of 7.20 GiB of host memory", "more ranks")
    assert "on each device" not in message


def test_auto_names_the_setting_that_lacks_least():
    """Checkpoints on the host need the least of the device, and tens of GiB of a host that has one."""
    asked = problem(host_memory_gib=1.0)
    plans = [evaluate(asked, Setting(memory=memory)) for memory in memories(asked)]
    needed = min(plan.memory.reserved_bytes for plan in plans if not plan.memory.host_bytes)
    assert needed > min(plan.memory.reserved_bytes for plan in plans) + GIB
    message = error_message(lambda: choose_memory(problem(host_memory_gib=1.0, memory_gib=needed / GIB), Setting()))
    assert_says(message, f"needs {needed / GIB:.2f} GiB of ", "on each device")
    assert "host" not in message


def run_on_hopper(tmp_path, monkeypatch, **sections):
    """A configuration, in a process whose backend is that of a Hopper without flash-attn-4."""
    monkeypatch.setattr(backend, "attention_implementations", cuda_attention.implementations(9))
    monkeypatch.setattr(backend, "attention_refusal", cuda_attention.refusal)
    monkeypatch.setattr(memory_plan, "_device", lambda: device_named("h200"))
    sizes = {**LLAMA, "hidden_size": 192}
    sections.setdefault("model", {"config_overrides": sizes})
    sections.setdefault("trainer", {"precision": "bf16-mixed"})
    config = config_of(tmp_path, **sections)
    return config, load_hf_config(config.model)


def test_a_run_plans_the_attention_that_its_backend_takes(tmp_path, monkeypatch):
    config, hf_config = run_on_hopper(tmp_path, monkeypatch)
    here, _ = planned(config, hf_config)
    assert kernels_of(here, config.memory).attention == ("flash" if config.data.isolate_documents else "cudnn")
    # Of another device the order alone is known.
    there, _ = planned(config, hf_config, device_named("h200"))
    assert kernels_of(there, config.memory).attention == "flash4"
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    here, _ = planned(config, hf_config)
    assert kernels_of(here, config.memory).attention in ("efficient", "tiled")


def test_ranks_with_other_attention_are_refused_on_every_rank(tmp_path, monkeypatch, capsys):
    config, hf_config = run_on_hopper(tmp_path, monkeypatch)
    monkeypatch.setattr(memory_plan, "share_texts", lambda text: [text, "efficient" if text.isalpha() else text])
    message = error_message(lambda: planned(config, hf_config))
    assert_says(message, "ranks take different attention", "efficient", "attention_backend")
    _, plan = plan_memory(config, hf_config)
    assert plan.planned_bytes is None and "not planned (ranks take different" in capsys.readouterr().out


@pytest.mark.parametrize(("stage", "expected"), [("none", None), ("zero3", 4)])
def test_a_plan_can_be_that_of_other_ranks(tmp_path, monkeypatch, stage, expected):
    instances = {} if stage == "none" else {"num_distributed_optimizer_instances": "hosts"}
    sections = {"data_parallel": {"sharding": stage, **instances}, "data": {"global_batch_size": 32}}
    config, hf_config = run_on_hopper(tmp_path, monkeypatch, **sections)
    device = dataclasses.replace(device_named("h200"), ranks_per_host=4)
    asked, plan = planned(config, hf_config, device, ranks=8)
    assert asked.devices == 8 and plan.setting.shard_ranks == expected


def test_every_rank_has_the_smallest_host_memory(tmp_path, monkeypatch):
    config, hf_config = run_on_hopper(tmp_path, monkeypatch)
    monkeypatch.setattr(memory_plan, "available_host_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(memory_plan, "share_texts", lambda text: [text, text if text.isalpha() else "32.0"])
    assert planned(config, hf_config)[0].device.host_memory_gib == 32.0
