"""Plans of a YAML: what it states is planned as a run would plan it, and what is written can be trained."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import yaml

from nxd_memopt.architectures.configs import NAMED_CONFIGS
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.backends.cpu import CpuBackend
from nxd_memopt.commands.plan import command as plan_command
from nxd_memopt.commands.plan.fixed import fixed_options, stated_size
from nxd_memopt.commands.plan.yaml_writer import configuration
from nxd_memopt.config import MemoryConfig
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.planner.hardware import device_named
from nxd_memopt.planner.search.candidates import settings
from nxd_memopt.planner.search.fixed_options import FixedOptions, require_possible
from nxd_memopt.planner.search.problem import Setting
from nxd_memopt.planner.sizes.states import STAGES
from nxd_memopt.training import device_support, memory_plan
from nxd_memopt.training.config.parsing import config_from_mapping, parse_config
from nxd_memopt.training.model import load_hf_config
from tests.planner.test_plan import problem, run_of
from tests.reference import assert_says, error_message

SIZES = {**NAMED_CONFIGS["llama-3-8b"], "num_hidden_layers": 4}
DEVICES = 4
# Section with an option that the search does not choose, and other sections that it needs.
STATED: dict[str, dict[str, dict[str, Any]]] = {
    "memory.fused_linear_cross_entropy": {"memory": {"fused_linear_cross_entropy": False}},
    "memory.attention_backend": {"memory": {"attention_backend": "math"}},
    "parallel.sequence_parallel_enabled": {"parallel": {"sequence_parallel_enabled": False}},
    "parallel.reduce_dtype": {"parallel": {"reduce_dtype": "float32", "tensor_model_parallel_size": 2}},
    "parallel.tensor_model_parallel_size": {"parallel": {"tensor_model_parallel_size": 4}},
    "data_parallel.reshard_after_forward": {"data_parallel": {"reshard_after_forward": False, "sharding": "zero3"}},
    "data_parallel.grad_reduce_in_fp32": {"data_parallel": {"grad_reduce_in_fp32": False}},
    "data_parallel.num_distributed_optimizer_instances": {
        "data_parallel": {"num_distributed_optimizer_instances": 2, "sharding": "zero2"}
    },
    "optimizer.overlap_grad_reduce": {"optimizer": {"overlap_grad_reduce": True}},
    "optimizer.in_backward": {
        "optimizer": {"in_backward": True, "clip_grad": 0.0},
        "trainer": {"precision": "bf16-true"},
    },
    "trainer.compile": {"trainer": {"compile": "layer"}},
}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.yaml"


def write(file, sections, config=SIZES) -> None:
    sections = {name: dict(section) for name, section in sections.items()}
    sections["trainer"] = {"precision": "bf16-mixed"} | sections.get("trainer", {})
    sections["data"] = {"seq_length": 2048, "global_batch_size": 16} | sections.get("data", {})
    file.write_text(yaml.safe_dump({"model": {"config_overrides": config}, **sections}))


def plan_of(file, *more: str) -> int:
    return plan_command.main(["--config", str(file), "--device", "h200", "--devices", str(DEVICES), "--json", *more])


@pytest.mark.parametrize("option", STATED)
def test_a_stated_option_is_planned_and_kept(option, file, capsys, monkeypatch):
    """The written file, as a run plans it, has the figures of the command."""
    write(file, STATED[option])
    written = file.with_name("written.yaml")
    assert plan_of(file, "--show", "999", "--write", str(written)) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    config = parse_config(["--config", str(written), "--model.tokenizer", "somewhere"])
    section, name = option.split(".")
    assert getattr(getattr(config, section), name) == STATED[option][section][name]
    for module in (memory_plan, device_support):
        monkeypatch.setattr(module, "world_size", lambda: DEVICES)
    monkeypatch.setattr(device_support, "ranks_per_host", lambda: DEVICES)
    _, plan = memory_plan.planned(config, load_hf_config(config.model), device_named("h200"))
    assert plans[0]["device_bytes"] == plan.memory.device
    assert plans[0]["host_bytes"] == plan.memory.host


@pytest.mark.parametrize("option", STATED)
def test_no_tried_setting_is_refused_by_training(option, file):
    write(file, STATED[option])
    run = run_of("--config", str(file))
    asked = problem("llama-3-8b", "h200", DEVICES, 2048, global_batch_size=16, stages=STAGES)
    precision = run.config.trainer.precision
    asked = replace(asked, model=model_spec(run.model_config()), precision=precision)
    if option == "data_parallel.grad_reduce_in_fp32":
        asked = replace(asked, grad_reduce_in_fp32=False)
    tried = list(settings(asked, fixed_options(run)))
    # Reading a configuration takes some 10 ms: a part of them.
    for setting in random.Random(0).sample(tried, min(12, len(tried))):
        content = configuration(asked, setting, run)
        content["model"]["tokenizer"] = "somewhere"
        config_from_mapping(content).accumulation_steps(DEVICES)


@pytest.mark.parametrize(
    ("sections", "more", "words"),
    [
        ({"trainer": {"compile": "layers"}}, (), ("trainer.compile 'layers'", "did you mean 'layer'")),
        ({"optimizer": {"in_backward": True}}, (), ("in_backward is true", "set clip_grad to 0")),
        ({"data_parallel": {"reshard_after_forward": False}}, ("--devices", "1"), ("reshard_after_forward", "zero3")),
        (
            {"data_parallel": {"num_distributed_optimizer_instances": 3}},
            (),
            ("num_distributed_optimizer_instances is 3", "zero2 and zero3"),
        ),
        ({"memory": {"attention_backend": "nki"}}, (), ("attention_backend on h200 'nki'", "flash4")),
        (
            {"memory": {"attention_backend": "flash4"}, "trainer": {"precision": "32-true"}},
            (),
            ("attention_backend 'flash4'", "float32", "'auto'"),
        ),
        ({"parallel": {"tensor_model_parallel_size": 8}}, (), ("tensor_model_parallel_size 8", "use one of [1, 2, 4]")),
        ({"parallel": {"expert_model_parallel_size": 2}}, (), ("expert_model_parallel_size 2", "leave an option out")),
    ],
)
def test_options_that_cannot_be_met_are_refused(sections, more, words, file):
    write(file, sections)
    written = file.with_name("written.yaml")
    message = error_message(lambda: plan_of(file, *more, "--write", str(written)))
    assert_says(message, *words)
    assert "\n" not in message and not written.exists()


def test_sizes_of_the_command_win(file, capsys):
    """A stated size of 1 is fixed as any other."""
    for stated, more, expected in (
        (1, (), {1}),
        (2, (), {2}),
        (2, ("--parallel.tensor-model-parallel-size", "4"), {4}),
        (None, (), {1, 2, 4}),
    ):
        write(file, {} if stated is None else {"parallel": {"tensor_model_parallel_size": stated}})
        assert plan_of(file, *more, "--show", "9999") == 0
        found = json.loads(capsys.readouterr().out)["plans"]
        assert {plan["setting"]["tensor_model_parallel_size"] for plan in found} == expected


def test_a_recipe_by_its_name_has_no_fixed_sizes(capsys):
    """Its sizes are of another device; the same file by its path has them."""
    arguments = ["--device", "h200", "--devices", "8", "--json", "--show", "9999"]
    assert plan_command.main(["--recipe", "llama3_8b", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)["plans"]
    assert len({plan["setting"]["tensor_model_parallel_size"] for plan in found}) > 1
    run = run_of("--config", "nxd_memopt/training/recipes/llama3_8b.yaml")
    assert stated_size(run, "tensor_model_parallel_size") == 8


def test_staging_of_states_is_kept_where_states_are_offloaded(file, capsys):
    write(file, {"optimizer": {"optimizer_offload_fraction": 1.0, "optimizer_staging_gib": 0.5}})
    run = run_of("--config", str(file))
    asked = problem("llama-3-8b", "h200", DEVICES, 2048, offloads_optimizer=True)
    for setting in settings(asked, fixed_options(run)):
        written = configuration(asked, setting, run)["optimizer"]
        assert written.get("optimizer_staging_gib") == (0.5 if setting.optimizer_offload_fraction else None)


def test_a_yaml_is_planned_and_checked_without_torch(file):
    write(file, {"optimizer": {"overlap_grad_reduce": True}})
    arguments = ["--config", str(file), "--device", "h200", "--write", str(file.with_name("written.yaml"))]
    code = (
        f"import sys; from nxd_memopt.commands.plan.command import main; status = main({arguments}); "
        "sys.exit(status or bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_dropout_has_no_graph():
    """A graph draws no random numbers, and the training program refuses it."""
    config = {**NAMED_CONFIGS["gpt-neox-20b"], "hidden_dropout": 0.1}
    asked = replace(problem("gpt-neox-20b", "h100", 8, 2048), model=model_spec(config))
    assert not any(setting.cuda_graph for setting in settings(asked))
    plain = problem("gpt-neox-20b", "h100", 8, 2048)
    for dropout, exists in ((0.0, True), (0.1, False)):
        adapted = replace(plain, lora=LoraConfig(lora_dropout=dropout))
        assert any(setting.cuda_graph for setting in settings(adapted)) is exists


def test_attention_of_a_device_is_that_of_its_backend():
    name = "sdpa"
    assert name in CpuBackend.attention_implementations
    fixed = FixedOptions(Setting(memory=MemoryConfig(attention_backend=name)))
    require_possible(problem(device="trn2", devices=64), fixed)
    message = error_message(lambda: require_possible(problem(device="trn1", devices=32), fixed))
    assert_says(message, f"attention_backend on trn1 '{name}'", "nki")
    with_compile = FixedOptions(compiles_layers=True)
    assert_says(error_message(lambda: require_possible(problem("mixtral-8x7b"), with_compile)), "compile", "null")
    message = error_message(lambda: require_possible(problem(device="trn1", devices=32), with_compile))
    assert_says(message, "compile", "trn1", "null")


SIZES = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "128"),
        ("vocab_size", None),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 1_000_000),
        ("head_dim", 0),
    ],
)
def test_a_model_of_impossible_sizes_has_no_plan(tmp_path, name, value):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SIZES | {name: value}))
    arguments = ["--model", str(file), "--device", "h100", "--seq-length", "64"]
    assert_says(error_message(lambda: plan_command.main(arguments)), name, repr(value))


def test_without_a_global_batch_a_step_has_4_million_tokens(capsys):
    plan_command.main(["--model", "llama-3-8b", "--device", "h200", "--devices", "8", "--seq-length", "512", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["notes"] and "flash-attn-4" in document["notes"][0]
    assert {plan["sequences_per_step"] for plan in document["plans"]} == {2**22 // 512}
