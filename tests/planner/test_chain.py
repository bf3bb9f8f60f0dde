"""plan --write, certify, dry run and train are one chain: the written file passes through all of them as it is."""

from __future__ import annotations

import json
import shlex

import pytest

from nxd_memopt.certify import worker
from nxd_memopt.certify.command import read
from nxd_memopt.certify.report.judge import judge
from nxd_memopt.commands.plan import command as plan_command
from nxd_memopt.launch import command as launch_command
from nxd_memopt.training.config.parsing import parse_config
from tests.reference import assert_says, error_message

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 509,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
OFFLOAD = "--optimizer.optimizer-offload-fraction 1 --data-parallel.sharding none"
CASES = {
    "llama, zero3": (GROUPED | {"model_type": "llama"}, "h100", "--data-parallel.sharding zero3"),
    "qwen2, states on the host": (GROUPED | {"model_type": "qwen2"}, "h100", OFFLOAD),
    "qwen3, activations on the host": (
        GROUPED | {"model_type": "qwen3", "head_dim": 16},
        "a100",
        "--memory.cpu-offloading-num-layers 4 --data.micro-batch-size 2",
    ),
    "gpt_neox, recompute of 3 layers": (
        SIZES | {"model_type": "gpt_neox", "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "trn1",
        "--memory.recompute-granularity full --memory.recompute-method block --memory.recompute-num-layers 3",
    ),
    "llama, stages": (GROUPED | {"model_type": "llama"}, "h200", "--parallel.pipeline-model-parallel-size 2"),
    "mixtral": (GROUPED | MIXTRAL | {"model_type": "mixtral"}, "h200", "--optimizer.optimizer-offload-fraction 0"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_written_plan_is_certified_and_trains_as_it_is(name, tmp_path, capsys):
    model, device, options = CASES[name]
    directory, file = tmp_path / "model", tmp_path / "written.yaml"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model))
    size = "--parallel.tensor-model-parallel-size 2 --data.global-batch-size 8"
    arguments = f"--model {directory}/config.json --device {device} --devices 4 {size} {options} --json --write {file}"
    assert plan_command.main(arguments.split()) == 0
    shown = capsys.readouterr()
    (first, *_) = json.loads(shown.out)["plans"]
    certifies, checks, trains = (shlex.split(line) for line in shown.err.splitlines()[-3:])
    asked = read([*certifies[2:], "--backend", "cpu", "--measure-layers", "2", "3"])
    assert asked.planned is not None
    memory = asked.planned.plan.memory
    assert (memory.device, memory.host) == (first["device_bytes"], first["host_bytes"])
    found = judge(
        asked.request,
        worker.measure(asked.request),
        device=asked.device,
        states=asked.states,
        planned=asked.planned,
        max_temp_ratio=None,
        stands_for=asked.run.config.dtype,
        compiler_flags=None,
    )
    assert found.passed, found.checks
    assert "activations" in [check.name for check in found.checks]
    # Of the planned number of ranks, with placeholders for what a model alone does not have.
    assert trains[-4:] == ["--model.tokenizer", "DIRECTORY", "--data.dataset", "DATA"]
    assert trains[trains.index("--nproc") + 1] == "4"
    config = parse_config(trains[trains.index("--config") :])
    assert config.data_parallel_size(4) == 4 // config.parallel.ranks_of_replica and config.accumulation_steps(4) >= 1
    # The dry run has no dataset and no tokenizer, and certifies the same step.
    assert checks[:2] == ["nxd-memopt", "launch"]
    assert checks[-1] == "--dry-run"
    launch = launch_command.plan(*launch_command.parser().separate(checks[2:]), {})
    assert "to train, add --model.tokenizer DIRECTORY and --data.dataset DATA to the command" in launch.notes
    dry_run = [*launch_command.certify_arguments(launch, None), "--backend", "cpu", "--measure-layers", "2", "3"]
    assert read(dry_run).request == asked.request


def test_a_row_is_written_and_a_command_line_is_kept(tmp_path, capsys):
    arguments = [
        "--model",
        "llama-3-8b",
        "--device",
        "h100",
        "--devices",
        "2",
        "--seq-length",
        "2048",
        "--json",
        "--show",
        "100000",
    ]

    def settings(*options: str) -> list[dict]:
        assert plan_command.main([*arguments, *options]) == 0
        return [each["setting"] for each in json.loads(capsys.readouterr().out)["plans"]]

    assert any(each["memory"]["cpu_offloading_num_layers"] for each in settings())
    kept = settings("--optimizer.optimizer-offload-fraction", "0.25", "--memory.cpu-offloading-num-layers", "0")
    assert {each["optimizer_offload_fraction"] for each in kept} == {0.25}
    assert {each["memory"]["cpu_offloading_num_layers"] for each in kept} == {0}
    written = tmp_path / "row.yaml"
    batch = ["--data.micro-batch-size", "3", "--data.global-batch-size", "48"]
    third = settings(*batch, "--row", "3", "--write", str(written))[2]
    config = parse_config(["--config", str(written), "--model.tokenizer", "t"])
    assert config.data.micro_batch_size == third["micro_batch_size"] == 3
    assert config.parallel.tensor_model_parallel_size == third["tensor_model_parallel_size"]
    assert "must be at most" in error_message(lambda: settings("--row", "100000"))


def test_a_length_that_training_refuses_is_neither_written_nor_certified(tmp_path):
    written, config = tmp_path / "written.yaml", tmp_path / "config.json"
    config.write_text(json.dumps(GROUPED | {"model_type": "llama"}))
    arguments = ["--model", str(config), "--device", "h100", "--devices", "4", "--seq-length", "128"]
    for refuses in (lambda: plan_command.main([*arguments, "--write", str(written)]), lambda: read(arguments)):
        assert_says(error_message(refuses), "seq_length 128", "max_position_embeddings 64", "model.config_overrides")
    assert not written.exists()
    assert read([*arguments, "--model.config-overrides.max-position-embeddings", "128"]).planned is not None
