"""Tests the training script's configuration: YAML sections, NeMo's names, command-line overrides, errors."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest

from nxd_memopt.options import field_types
from nxd_memopt.training.config.help import descriptions
from nxd_memopt.training.config.other_tools import NAMES
from nxd_memopt.training.config.parsing import config_from_mapping, parse_config
from nxd_memopt.training.config.train_config import SECTIONS, TrainConfig
from nxd_memopt.training.inputs import require_inputs
from nxd_memopt.training.runtime.errors import user_errors

MODEL = {"pretrained": "some/directory"}


def build(**sections: object) -> TrainConfig:
    return config_from_mapping({"model": MODEL, **sections})


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_command_line_wins_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "model: {pretrained: d}\ntrainer: {max_steps: 7, seed: 5}\n")
    config = parse_config(["--config", file, "--trainer.max-steps", "20"])
    assert (config.trainer.max_steps, config.trainer.seed, config.trainer.keep_checkpoints) == (20, 5, 2)


def test_the_command_line_takes_the_words_of_yaml(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.yaml",
        "model: {pretrained: d}\nmemory: {mlp_tile_tokens: 64}\ntrainer: {async_save: true, seed: 5}\n",
    )
    words = ["--trainer.async-save", "false", "--parallel.sequence_parallel_enabled=true", "--trainer.export", "true"]
    words += ["--parallel.tensor-model-parallel-size", "2"]
    others = [
        "--memory.mlp-tile-tokens",
        "null",
        "--trainer.enable-cuda-graph",
        "false",
        "--data-parallel.sharding=zero1",
    ]
    config = parse_config(["--config", file, *words, *others, "--trainer.resume-from", "null", "--trainer.seed", "6"])
    trainer = config.trainer
    found = (trainer.async_save, trainer.export, trainer.enable_cuda_graph, trainer.resume_from, trainer.seed)
    assert found == (False, True, False, None, 6)
    assert config.parallel.sequence_parallel_enabled and config.data_parallel.sharding == "zero1"
    assert config.memory.mlp_tile_tokens is None
    # a word that is the value of an option of texts, and an option without its value
    assert parse_config(["--config", file, "--model.tokenizer", "true"]).model.tokenizer == "true"
    assert parse_config(["--config", file, "--trainer.export=false"]).trainer.export is False
    assert parse_config(["--config", file, "--trainer.export", "verify"]).trainer.export == "verify"
    for chosen in (["--memory", "auto"], ["--memory=auto"]):
        assert parse_config(["--model.pretrained", "d", *chosen, "--trainer.seed", "6"]).auto_memory


@pytest.mark.parametrize(
    "entries", [("0.8,0.9",), ("=0.8,0.9",), ("0.8,", "0.9"), ("0.8", "0.9"), ("0.8, 0.9",)], ids=str
)
def test_lists_of_the_command_line_may_have_commas(entries: tuple[str, ...]) -> None:
    names = [entry.replace("0.8", "norm").replace("0.9", "mlp") for entry in entries]
    options = [("--optimizer.betas", entries), ("--memory.recompute-modules", names), ("--optimizer.no_decay", names)]
    arguments = [
        part for name, values in options for part in ([name + values[0]] if values[0][0] == "=" else [name, *values])
    ]
    more = ["--model.pretrained", "d", "--memory.recompute-granularity", "selective"]
    config = parse_config([*more, *arguments, "--trainer.seed", "6"])
    assert config.optimizer.betas == (0.8, 0.9) and config.trainer.seed == 6
    assert config.memory.recompute_modules == config.optimizer.no_decay == ("norm", "mlp")


def test_config_overrides_can_be_overridden(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "model: {tokenizer: t, config_overrides: {model_type: llama, hidden_size: 64}}\n")
    config = parse_config(["--config", file, "--model.config-overrides.hidden-size", "32"])
    assert config.model.config_overrides == {"model_type": "llama", "hidden_size": 32}
    entries = ["attention-dropout=0.1", "tie-word-embeddings=true", "hidden-size=32"]
    arguments = [f"--model.config-overrides.{entry}" for entry in entries]
    added = parse_config(["--config", file, *arguments, "--trainer.max-steps", "3"])
    others = {"attention_dropout": 0.1, "tie_word_embeddings": True}
    assert added.model.config_overrides == config.model.config_overrides | others
    assert added.trainer.max_steps == 3
    # Also with values of another type than the file's.
    text = (
        "model: {tokenizer: t, config_overrides: {model_type: llama, rope_theta: 10000, tie_word_embeddings: true}}\n"
    )
    typed = write(tmp_path / "typed.yaml", text)
    arguments = ["--model.config-overrides.rope-theta", "1e6", "--model.config-overrides.tie-word-embeddings", "false"]
    changed = parse_config(["--config", typed, *arguments]).model.config_overrides
    assert changed == {"model_type": "llama", "rope_theta": 1e6, "tie_word_embeddings": False}
    shares = ["--data.mixture.~/a-b.txt", "1", "--data.mixture.c.jsonl", "3"]
    mixture = parse_config(["--config", file, *shares]).data.mixture
    assert mixture == {str(Path("~/a-b.txt").expanduser()): 1.0, "c.jsonl": 3.0}


def test_the_help_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_config(["--help"])
    assert not stop.value.code
    shown = capsys.readouterr().out
    assert "--optimizer.min-lr-ratio  number (default 0.1; at least 0; at most 1; resume: when asked)" in shown
    for section, cls in SECTIONS.items():
        names = [f"--{section}.{field.name}".replace("_", "-") for field in dataclasses.fields(cls)]
        assert [name for name in names if f"  {name}  " not in shown] == []


@pytest.mark.parametrize("described", ["a: one.", "a: one.\n        b: two.\n        c: three."])
def test_an_option_without_a_text_and_a_text_without_an_option(described: str) -> None:
    cls = dataclasses.make_dataclass("Options", [("a", int), ("b", int)])
    cls.__doc__ = f"""Options.

    Args:
        {described}
    """
    with pytest.raises(ValueError, match="describes other options"):
        descriptions(cls)


def test_nemo_model_section_pastes_in() -> None:
    nemo = {
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "activations_checkpoint_granularity": "full",
        "activations_checkpoint_method": "uniform",
        "activations_checkpoint_num_layers": 2,
        "encoder_seq_length": 4096,
        "micro_batch_size": 2,
        "global_batch_size": 16,
    }
    config = build(model=MODEL | nemo)
    assert (config.parallel.tensor_model_parallel_size, config.parallel.sequence_parallel_enabled) == (4, True)
    memory = config.memory
    assert (memory.recompute_granularity, memory.recompute_method, memory.recompute_num_layers) == (
        "full",
        "uniform",
        2,
    )
    assert (config.data.seq_length, config.data.micro_batch_size, config.data.global_batch_size) == (4096, 2, 16)


def test_micro_batches_of_a_step_that_nemo_computes_are_not_taken_from_its_trainer() -> None:
    assert build(trainer={"accumulate_grad_batches": 1, "devices": 8}) == build()
    with pytest.raises(ValueError, match=r"trainer.accumulate_grad_batches 8 is not supported: only 1 is"):
        build(trainer={"accumulate_grad_batches": 8})


def test_nemo_names_of_selective_recompute() -> None:
    names = {"granularity": "selective", "method": "block", "num_layers": 3}
    nemo = {f"activations_checkpoint_{name}": value for name, value in names.items()}
    memory = build(model=MODEL | nemo).memory
    assert (memory.recompute_modules, memory.num_selective_layers(32)) == (("core_attn",), 3)
    # NeMo's own configurations have the method with 0 layers, which NeMo ignores.
    with pytest.raises(ValueError, match=r"recompute_num_layers must be at least 1, got 0: for all layers leave"):
        build(model=MODEL | nemo | {"activations_checkpoint_num_layers": 0})


def test_yaml_numbers_without_a_point_are_floats() -> None:
    assert build(optimizer={"lr": "1e-4", "betas": [0, "1e-1"]}).optimizer.betas == (0.0, 0.1)
    assert build(optimizer={"lr": "1e-4"}).optimizer.lr == 1e-4  # how PyYAML reads a bare 1e-4


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"modell": {}}, "unknown key 'modell' in the configuration: did you mean 'model'?"),
        ({"data": {"seq_lenght": 8}}, "unknown key 'seq_lenght' in data: did you mean 'seq_length'?"),
        ({"data": {"seq_length": 8.5}}, r"data.seq_length must be int, got 8.5 of type float"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, r"optimizer.betas must be two numbers in \[0, 1\), got \[0.9, 1.0\]"),
        (
            {"data_parallel": {"sharding": "zero1"}, "optimizer": {"overlap_grad_reduce": True}},
            "overlap_grad_reduce is true and data_parallel.sharding is zero1: .* change one of the two",
        ),
        (
            {"data_parallel": {"sharding": "zero1"}, "optimizer": {"use_distributed_optimizer": False}},
            "optimizer.use_distributed_optimizer sets data_parallel.sharding a second time, to 'none' after 'zero1'",
        ),
        (
            {"optimizer": {"use_distributed_optimizer": "zero1"}},
            r"optimizer.use_distributed_optimizer 'zero1' is not one of \[True, False\]",
        ),
        (
            {"trainer": {"enable_cuda_graph": True}, "data_parallel": {"sharding": "zero3"}},
            "enable_cuda_graph is true and data_parallel.sharding is zero3: .*; change one of the two",
        ),
        ({"trainer": {"wandb_project": ""}}, "trainer.wandb_project is empty"),
        ({"parallel": 3}, "parallel must be a mapping of option names to values, got int"),
        ({"model": {"config_overrides": {"hidden_size": 8}}}, "config_overrides has no model_type"),
        ({"model": {"config_overrides": {"model_type": "llama"}}}, "model.tokenizer is needed"),
        ({"model": MODEL | {"context_parallel_size": 2}}, "context_parallel_size 2 is not supported"),
        (
            {"model": MODEL | {"sequence_parallel": True}, "parallel": {"sequence_parallel_enabled": False}},
            "sets parallel.sequence_parallel_enabled a second time",
        ),
        (
            {"parallel": {"tensor_model_parallel_size": 3, "sequence_parallel": True}, "data": {"seq_length": 1000}},
            "data.seq_length 1000 is not divisible by tensor_model_parallel_size 3",
        ),
        (
            {"data": {"micro_batch_size": 3, "global_batch_size": 8}},
            "data.global_batch_size 8 is not divisible by data.micro_batch_size 3",
        ),
    ],
)
def test_errors_name_relation_values_and_remedy(sections: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**sections)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "absent.yaml"], "configuration file absent.yaml does not exist"),
        (["--recipe"], "--recipe: expected one argument"),
        (["--recipe", "lama"], "there is no recipe 'lama'"),
        (["--recipe", "smollm2", "--config", "c.yaml"], "pass one"),
        (["--trainer.max-stepz", "3"], "did you mean --trainer.max-steps?"),
        (["--trainer.max-steps", "x"], "--trainer.max-steps must be int, got 'x'"),
        (["--trainer.max-steps"], "--trainer.max-steps has the values []: write --trainer.max-steps VALUE"),
        (["--data.dataset", "a.jsonl", "b.jsonl"], "write --data.dataset VALUE, with quotes around a pattern"),
        (["--trainer.devices", "2"], "--nproc N of nxd-memopt train"),
        (["--trainer.max-steps", "3", "4"], "--trainer.max-steps has the values ['3', '4']"),
        (["train", "it"], "unknown option train"),
        (["--model.config-overrides.rope-theta", "[1"], "not valid YAML"),
        (["--model.config-overrides.rope-theta"], "rope-theta has no value"),
        (["--data.dataset", "a", "--data.mixture.b", "1"], "data.dataset and data.mixture are both given"),
        (["--model.pretrained", "d", "--parallel.tensor-model-parallel-size", "0"], "must be at least 1, got 0"),
        ([], "model.pretrained is not set"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop, user_errors():
        parse_config(arguments)
    shown = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in shown
    assert shown.startswith("error: ") and shown.count("\n") == 1


def test_flags_of_other_tools_are_named_in_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), user_errors():
        parse_config(["--learning_rate", "1e-4", "--per_device_train_batch_size", "8", "--trainer.lr", "1", "--bf16"])
    assert capsys.readouterr().err.splitlines() == [
        "error: 4 problems:",
        "- unknown option --learning_rate: here it is optimizer.lr",
        "- unknown option --per_device_train_batch_size: here it is data.micro_batch_size",
        "- unknown option --trainer.lr: it is optimizer.lr",
        "- unknown option --bf16: here it is trainer.precision bf16-mixed",
    ]


def test_what_names_of_other_tools_stand_for_are_options() -> None:
    for name in NAMES.values():
        if name.startswith("--nproc N"):  # of the commands
            continue
        section, _, option = name.partition(" ")[0].strip(",;").partition(".")
        assert option in field_types(SECTIONS[section]), name


def test_a_batch_that_the_ranks_do_not_divide_says_what_to_change() -> None:
    config = build(data={"global_batch_size": 2})
    with pytest.raises(ValueError, match=r"size 3 = 3: use a multiple of 3 for data.global_batch_size, .* fewer ranks"):
        config.accumulation_steps(3)


def test_a_hub_that_does_not_answer_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # restored after the test
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    model = {"tokenizer": "owner/absent", "config_overrides": {"model_type": "llama"}}
    config = build(model=model, data={"dataset": "owner/data"})
    with pytest.raises(ValueError, match=r"2 problems:") as raised:
        require_inputs(config)
    said = str(raised.value)
    assert "model.tokenizer owner/absent is no directory" in said and "'owner/data' is no local file" in said
    assert said.count("http://127.0.0.1:1 does not answer: name local files") == 2


def test_other_exceptions_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError), user_errors():
        raise RuntimeError("unexpected")


def test_malformed_yaml_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not valid YAML") as caught:
        parse_config(["--config", write(tmp_path / "c.yaml", "a: [}\n")])
    assert "\n" not in str(caught.value)


def test_world_size_must_be_a_multiple_of_the_tensor_parallel_size() -> None:
    config = build(parallel={"tensor_model_parallel_size": 3}, data={"seq_length": 6, "global_batch_size": 4})
    assert (config.data_parallel_size(6), config.accumulation_steps(6)) == (2, 2)
    with pytest.raises(ValueError, match="world size 4 is not divisible by tensor_model_parallel_size 3: start"):
        config.data_parallel_size(4)
    with pytest.raises(ValueError, match=r"global_batch_size 4 is not divisible by .* data-parallel size 3 = 3"):
        config.accumulation_steps(9)


def test_a_full_disk_that_another_library_meets_has_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), user_errors():
        raise OSError(errno.ENOSPC, "No space left on device")
    expected = "error: [Errno 28] No space left on device: free disk space and start the same command again\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("strategy", "stage"),
    [("no_shard", "none"), ("optim", "zero1"), ("optim_grads", "zero2"), ("optim_grads_params", "zero3")],
)
def test_megatrons_names_of_sharding_and_offload(strategy: str, stage: str) -> None:
    pasted: dict[str, object] = {"data_parallel_sharding_strategy": strategy, "use_distributed_optimizer": None}
    if stage in ("zero2", "zero3"):
        pasted["num_distributed_optimizer_instances"] = 2
    config = build(model=MODEL | pasted)
    assert config.data_parallel.sharding == stage
    assert config.data_parallel.num_distributed_optimizer_instances == (2 if stage in ("zero2", "zero3") else 1)
    assert dataclasses.replace(config) == config  # resolved once, and again to the same
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    if stage in ("none", "zero1"):
        assert build(model=MODEL | pasted, trainer=offload).optimizer.optimizer_offload_fraction == 0.5


def test_options_that_say_the_same_twice_may_agree() -> None:
    agreeing = {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim"}
    assert build(optimizer={"use_distributed_optimizer": True}).data_parallel.sharding == "zero1"
    assert build(model=MODEL | agreeing, data_parallel={"sharding": "zero1"}).data_parallel.sharding == "zero1"
    assert build(optimizer={"use_distributed_optimizer": False}).data_parallel.sharding == "none"


@pytest.mark.parametrize("rank", [8, 16])
def test_adapters_of_the_recipe_have_the_documented_scale_at_every_rank(rank: int) -> None:
    words = [
        "--recipe",
        "fine_tune_lora",
        "--model.pretrained",
        "m",
        "--data.dataset",
        "d",
        "--lora.lora-rank",
        str(rank),
    ]
    lora = parse_config(words).lora.config()
    assert lora is not None and lora.scale == 2
