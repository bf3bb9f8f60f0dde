"""The YAML of ``nxd-memopt plan --write``: a static form of experts for Trainium, and what the plan does not choose."""

from __future__ import annotations

from dataclasses import replace

import yaml

from nxd_memopt.architectures.configs import NAMED_CONFIGS, with_defaults
from nxd_memopt.architectures.experts import options_of
from nxd_memopt.commands.plan import command as plan_command
from nxd_memopt.planner.search.candidates import settings
from nxd_memopt.training.config.parsing import parse_config
from tests.planner.test_plan import problem
from tests.reference import assert_says, error_message


def test_trainium_gets_a_static_form_of_experts(tmp_path, capsys):
    config = {**NAMED_CONFIGS["mixtral-8x7b"], "num_hidden_layers": 2}
    file = tmp_path / "run.yaml"
    written = tmp_path / "written.yaml"
    arguments = ["--config", str(file), "--device", "trn2", "--devices", "8", "--seq-length", "4096"]

    def plan_of(**moe) -> dict:
        file.write_text(yaml.safe_dump({"model": {"config_overrides": config}, "moe": moe}))
        written.unlink(missing_ok=True)
        assert plan_command.main([*arguments, "--write", str(written)]) == 0
        return yaml.safe_load(written.read_text())["moe"]

    blocks = {"moe_expert_block_size": 128, "moe_token_dispatcher_type": "allgather"}
    assert plan_of() == blocks
    assert "Experts in blocks of 128 rows" in capsys.readouterr().out
    assert plan_of(moe_expert_block_size=64, moe_token_dispatcher_type="allgather") == blocks | {
        "moe_expert_block_size": 64
    }
    padded = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}
    assert plan_of(**padded) == padded
    message = error_message(lambda: plan_of(moe_expert_capacity_factor=2.0))
    assert_says(message, "moe_expert_capacity_factor 2.0", "trn2", "moe_pad_expert_input_to_capacity")


def test_blocks_of_experts_with_exchanges_are_planned_without_expert_parallelism():
    asked = problem("mixtral-8x7b")
    moe = replace(options_of(with_defaults(NAMED_CONFIGS["mixtral-8x7b"])), moe_expert_block_size=128)
    for dispatcher, expected in (("alltoall", {1}), ("allgather", {1, 2, 4, 8})):
        with_blocks = replace(asked, moe=replace(moe, moe_token_dispatcher_type=dispatcher))
        assert {each.expert_model_parallel_size for each in settings(with_blocks)} == expected


def test_the_written_file_has_the_planned_expert_parallel_size(tmp_path):
    """Those of the command, whatever the run had before."""
    config = {**NAMED_CONFIGS["mixtral-8x7b"], "num_hidden_layers": 2}
    file, written = tmp_path / "run.yaml", tmp_path / "written.yaml"
    parallel = {"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2}
    file.write_text(yaml.safe_dump({"model": {"config_overrides": config}, "parallel": parallel}))
    arguments = ["--config", str(file), "--device", "h200", "--seq-length", "2048", "--trainer.precision", "bf16-true"]
    sizes = ["--parallel.tensor-model-parallel-size", "1", "--parallel.expert-model-parallel-size", "1"]
    assert plan_command.main([*arguments, "--devices", "1", *sizes, "--write", str(written)]) == 0
    content = yaml.safe_load(written.read_text())["parallel"]
    assert content.get("expert_model_parallel_size", 1) == content["tensor_model_parallel_size"] == 1
    assert "# Training needs --model.tokenizer DIRECTORY and --data.dataset DATA" in written.read_text()
    written.unlink()
    assert plan_command.main([*arguments, "--devices", "8", "--write", str(written)]) == 0
    content = yaml.safe_load(written.read_text())["parallel"]
    assert content["expert_model_parallel_size"] == 4 and content["tensor_model_parallel_size"] == 2


def test_the_written_file_keeps_what_the_plan_does_not_choose(tmp_path):
    file, written = tmp_path / "run.yaml", tmp_path / "written.yaml"
    source = {
        "model": {"config_overrides": NAMED_CONFIGS["smollm2-135m"], "tokenizer": "somewhere"},
        "data": {"dataset": "d.jsonl", "seq_length": 4096, "micro_batch_size": 4, "eval_sequences": 5},
        "optimizer": {"lr": 1e-3, "warmup_steps": 7, "optimizer_offload_fraction": 1.0},
        "trainer": {"output_dir": "mine", "precision": "bf16-mixed", "max_steps": 9},
    }
    file.write_text(yaml.safe_dump(source))
    arguments = ["--config", str(file), "--device", "h200", "--devices", "1", "--write", str(written)]
    assert plan_command.main(arguments) == 0
    content = yaml.safe_load(written.read_text())
    assert content["data"]["dataset"] == "d.jsonl" and content["data"]["eval_sequences"] == 5
    assert content["data"]["micro_batch_size"] != 4 and content["data"]["seq_length"] == 4096
    assert content["optimizer"] == {"lr": 1e-3, "warmup_steps": 7}
    assert content["trainer"]["output_dir"] == "mine" and content["trainer"]["max_steps"] == 9
    config = parse_config(["--config", str(written)])
    assert config.optimizer.lr == 1e-3 and config.data.dataset == "d.jsonl"
    assert "data.dataset" not in written.read_text()


def test_a_sequence_beyond_the_positions_is_refused_before_the_search(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_command, "plans", lambda *_: [][0])
    arguments = ["--model", "llama-3-8b", "--device", "h100", "--seq-length", "20000"]
    message = error_message(lambda: plan_command.main([*arguments, "--write", str(tmp_path / "a.yaml")]))
    assert_says(message, "data.seq_length 20000", "max_position_embeddings 8192", "config_overrides")
