"""The planned memory of a run: said before weights are loaded, refused if it cannot fit, chosen by ``memory: auto``."""

from __future__ import annotations

import dataclasses
import json
import math
import types

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

from nxd_memopt.certify.request import request_of
from nxd_memopt.config import MemoryConfig
from nxd_memopt.launch.trainium import neuron_cc_flags
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.memory.peak import step_memory
from nxd_memopt.planner.sizes.states import StateLayout
from nxd_memopt.training import loop, memory_plan
from nxd_memopt.training.config.moe import resolve_options
from nxd_memopt.training.config.parsing import parse_config
from nxd_memopt.training.memory_plan import plan_memory
from nxd_memopt.training.model import load_hf_config
from tests.planner.storages import share_of
from tests.reference import assert_says, error_message
from tests.training.runs import LLAMA, MIXTRAL, run_here, write_config

DEEP = {**LLAMA, "num_hidden_layers": 8}


def config_of(tmp_path, *options, **sections):
    return parse_config(["--config", str(write_config(tmp_path, **sections)), *options])


def plan_of(config, monkeypatch, available=1 << 40):
    monkeypatch.setattr(memory_plan, "available_host_bytes", lambda: available)
    return plan_memory(config, load_hf_config(config.model, config.moe))


def test_the_plan_is_that_of_the_step(tmp_path, monkeypatch, capsys):
    config = config_of(tmp_path, model={"config_overrides": DEEP}, data={"global_batch_size": 8})
    unchanged, plan = plan_of(config, monkeypatch)
    assert unchanged is config and plan.available_bytes == 1 << 40
    hf_config = load_hf_config(config.model)
    share = share_of(hf_config, config.parallel, 24, 2)
    used = step_memory(
        share, MemoryConfig(), Kernels(False, "sdpa"), StateLayout(4, master_weights=False), accumulation_steps=4
    )
    assert plan.planned_bytes == used.device_bytes
    shown = capsys.readouterr().out
    assert "memory: planned" in shown and "of 1024.00 available" in shown and used.moment in shown


def test_what_cannot_fit_is_refused_and_what_may_is_said(tmp_path, monkeypatch, capsys):
    config = config_of(tmp_path, model={"config_overrides": DEEP})
    _, plan = plan_of(config, monkeypatch)
    needed = plan.planned_bytes
    capsys.readouterr()
    plan_of(config, monkeypatch, needed)
    assert "warning" not in capsys.readouterr().out
    plan_of(config, monkeypatch, needed - 100)
    assert_says(capsys.readouterr().out, "warning: the planned memory", "memory: auto")
    message = error_message(lambda: plan_of(config, monkeypatch, int(needed / 1.2)))
    assert_says(message, "planned memory of a step", "exceeds", "memory: auto", "nxd-memopt plan")


@pytest.mark.parametrize(("stage", "precision"), [("zero3", "bf16-mixed"), ("zero2", "32-true")])
def test_a_host_without_room_for_the_weights_of_zero3_is_refused(tmp_path, monkeypatch, stage, precision):
    trainer = {"precision": precision}
    config = config_of(tmp_path, model={"config_overrides": DEEP}, trainer=trainer, data_parallel={"sharding": stage})
    # A device with its own memory: what this process has is the host's.
    device = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"))
    monkeypatch.setattr(memory_plan, "backend", device)
    monkeypatch.setattr(memory_plan, "ranks_per_host", lambda: 4)
    hf_config = load_hf_config(config.model)
    bytes_of_one = getattr(torch, config.dtype).itemsize
    needed = sum(param.numel() for param in LlamaForCausalLM(hf_config).parameters()) * bytes_of_one
    check = memory_plan._require_room_for_initialization
    monkeypatch.setattr(memory_plan, "available_host_bytes", lambda: 4 * needed)
    check(config, hf_config)
    monkeypatch.setattr(memory_plan, "available_host_bytes", lambda: 4 * needed - 4)
    if stage == "zero2":
        check(config, hf_config)
        return
    message = error_message(lambda: check(config, hf_config))
    assert_says(message, f"{needed} bytes", f"{needed - 1} are available for each of 4 ranks", "use_cpu_initialization")
    without = dataclasses.replace(config.parallel, use_cpu_initialization=False)
    check(dataclasses.replace(config, parallel=without), hf_config)


def test_a_run_that_cannot_fit_stops_before_its_model_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_plan, "available_host_bytes", lambda: 1000)
    monkeypatch.setattr(loop, "build_model", lambda *_: pytest.fail("the model was built"))
    monkeypatch.setattr(loop, "load_vocabulary", lambda *_, **__: pytest.fail("the tokenizer was loaded"))
    outcome = run_here(write_config(tmp_path))
    assert outcome.returncode == 2 and "the planned memory of a step" in outcome.stderr
    assert not (tmp_path / "run" / "tokens").exists()


def test_options_that_are_not_planned_are_named(tmp_path, monkeypatch, capsys):
    config = config_of(tmp_path, memory={"recompute_granularity": "full", "attention_head_groups": "auto"})
    _, plan = plan_of(config, monkeypatch, 1)
    assert plan.planned_bytes is None
    assert_says(capsys.readouterr().out, "memory: not planned", "attention_head_groups 'auto'")


def test_what_the_process_uses_before_the_model_is_not_the_plan_s(tmp_path, monkeypatch):
    _, plan = plan_of(config_of(tmp_path), monkeypatch)
    monkeypatch.setattr(memory_plan.backend, "memory_allocated", lambda: 700)
    assert plan.before_model().measured_bytes(1000) == 300
    assert plan.measured_bytes(1 << 40) != (1 << 40) - 700


def test_compiled_layers_are_planned_where_the_compiler_chooses_nothing(tmp_path, monkeypatch, capsys):
    full = {"recompute_granularity": "full"}
    compiled = {"compile": "layer", "enable_cuda_graph": False}
    for memory in ({}, {**full, "recompute_keep_core_attn": True}, {**full, "cpu_offloading_num_layers": 1}):
        config = config_of(tmp_path, memory=memory, trainer=compiled)
        _, plan = plan_of(config, monkeypatch)
        assert plan.planned_bytes is None
        assert_says(capsys.readouterr().out, "memory: not planned", "trainer.compile 'layer'", "'full'")
    planned = [plan_of(config_of(tmp_path, memory=full, trainer=each), monkeypatch)[1] for each in ({}, compiled)]
    assert planned[0].planned_bytes == planned[1].planned_bytes is not None


def test_the_staging_memory_of_offloaded_states_is_that_of_the_run(tmp_path, monkeypatch):
    plans = []
    for gib in (1.0, 3.0):
        optimizer = {"optimizer_offload_fraction": 1.0, "optimizer_staging_gib": gib}
        sizes = {**DEEP, "vocab_size": 8192, "hidden_size": 16384, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = config_of(
            tmp_path, model={"config_overrides": sizes}, optimizer=optimizer, trainer={"precision": "bf16-mixed"}
        )
        plans.append(plan_of(config, monkeypatch)[1].planned_bytes)
    # Slots of 192 MiB: 5 and 16 of them.
    assert plans[1] - plans[0] == 11 * 192 * 2**20


def write_auto(tmp_path, memory="auto", **sections):
    file = write_config(tmp_path, model={"config_overrides": DEEP}, **sections)
    content = yaml.safe_load(file.read_text())
    content["memory"] = memory
    file.write_text(yaml.safe_dump(content))
    return file


def test_auto_takes_the_fastest_that_fits(tmp_path, monkeypatch, capsys):
    config = parse_config(["--config", str(write_auto(tmp_path)), "--memory.attention-backend", "tiled"])
    assert config.auto_memory and config.memory.attention_backend == "tiled"
    plain, most = plan_of(config, monkeypatch)
    assert plain.memory == MemoryConfig(attention_backend="tiled")
    assert "memory: auto chose attention_backend: tiled" in capsys.readouterr().out
    # What nested recompute needs is the least.
    assert not plain.auto_memory
    memory = MemoryConfig(recompute_granularity="full", recompute_method="nested", attention_backend="tiled")
    full = dataclasses.replace(plain, memory=memory)
    _, least = plan_of(full, monkeypatch)
    assert least.planned_bytes < most.planned_bytes
    chosen, plan = plan_of(config, monkeypatch, (least.planned_bytes + most.planned_bytes) // 2)
    assert chosen.memory.recompute_granularity is not None and plan.planned_bytes <= plan.available_bytes
    assert "recompute_granularity" in capsys.readouterr().out
    message = error_message(lambda: plan_of(config, monkeypatch, least.planned_bytes // 2))
    assert_says(message, "memory: auto finds nothing", "more ranks")


def test_auto_contradicts_techniques_of_the_section(tmp_path):
    file = write_config(tmp_path, memory={"recompute_granularity": "full"})
    message = error_message(lambda: parse_config(["--config", str(file), "--memory", "auto"]))
    assert_says(message, "memory: auto", "recompute_granularity", "remove one")
    assert_says(error_message(lambda: parse_config(["--config", str(write_auto(tmp_path, "automatic"))])), "memory")


def test_launchers_do_not_guess_what_auto_will_choose(tmp_path):
    config = parse_config(["--config", str(write_auto(tmp_path))])
    message = error_message(lambda: request_of(config, {}, backend="cpu", device="trn2", layer_counts=None))
    assert_says(message, "memory: auto", "nxd-memopt plan --write")
    # It may choose recompute, which trn1's compiler keeps at -O1 only.
    assert "-O1" in neuron_cc_flags(config, "")


def test_metrics_and_summary_have_planned_and_measured(tmp_path):
    file = write_auto(tmp_path, trainer={"max_steps": 2, "export": False})
    outcome = run_here(file)
    assert outcome.returncode == 0, outcome.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {row["planned_memory_bytes"] for row in rows} == {summary["planned_memory_bytes"]}
    assert summary["planned_memory_bytes"] > 0 and summary["available_memory_bytes"] > 1 << 20
    # A host counts the program too; what it used before the model is not the run's.
    assert summary["measured_memory_bytes"] < summary["peak_memory_bytes"][0]
    assert "planned memory" in outcome.stdout and "the process grew by" in outcome.stdout
    # A host's allocator keeps freed blocks, which the growth of the process has too.
    assert summary["freed_memory_bytes"] > 0 and "kept by malloc" in outcome.stdout
    assert outcome.stdout.index("memory: auto chose") < outcome.stdout.index("held-out loss")


def test_models_with_experts_say_what_is_planned(tmp_path, monkeypatch, capsys):
    config = config_of(tmp_path, model={"config_overrides": MIXTRAL})
    _, plan = plan_of(config, monkeypatch)
    hf_config = load_hf_config(config.model)
    share = share_of(hf_config, config.parallel, 24, 2)
    used = step_memory(share, MemoryConfig(), Kernels(False, "sdpa"), StateLayout(4), accumulation_steps=2)
    assert plan.planned_bytes == used.device_bytes
    weights = sum(math.prod(shape) for shape in share.shapes) * 4
    assert used.device["weights"] == weights and share.sizes.moe is not None
    # Layers with experts that are recomputed are planned as such.
    memory = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    recomputed = config_of(tmp_path, model={"config_overrides": MIXTRAL}, memory=memory)
    assert plan_of(recomputed, monkeypatch)[1].planned_bytes < plan.planned_bytes
    # Options of the section reach the plan: fewer rows than choices, here 2 experts' of 24 tokens each.
    dropping = config_of(tmp_path, model={"config_overrides": MIXTRAL}, moe={"moe_expert_capacity_factor": 0.25})
    assert plan_of(dropping, monkeypatch)[1].planned_bytes < plan.planned_bytes
    assert "balanced routing" not in capsys.readouterr().out


def test_expert_parallel_runs_name_the_routing_that_is_planned(tmp_path, monkeypatch, capsys):
    for padded in (False, True):
        moe = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": padded}
        parallel = {"expert_model_parallel_size": 2}
        config = config_of(tmp_path, model={"config_overrides": MIXTRAL}, moe=moe, parallel=parallel)
        monkeypatch.setattr(memory_plan, "world_size", lambda: 2)
        monkeypatch.setattr(memory_plan, "share_texts", lambda text: [text])
        _, plan = plan_of(config, monkeypatch)
        hf_config = load_hf_config(config.model)
        options = resolve_options(config.moe, hf_config)
        share = share_of(hf_config, config.parallel, 24, 2, moe=options)
        layout = StateLayout(4, data_parallel_size=2, expert_ranks=2)
        used = step_memory(share, MemoryConfig(), Kernels(False, "sdpa"), layout)
        assert plan.planned_bytes == used.device_bytes
        # Shapes that do not depend on the routing need no assumption.
        assert ("planned for a balanced routing" in capsys.readouterr().out) != padded
