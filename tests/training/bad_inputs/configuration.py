"""Bad inputs: configuration files and values of options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from tests.training.bad_inputs.case import BadInput
from tests.training.runs import LINES, LLAMA, write_config, write_jsonl

OVERRIDE = "--model.config-overrides."


def _occupied_output(directory: Path) -> Path:
    config = write_config(directory)
    (directory / "run").write_text("a file, not a directory", encoding="utf-8")
    return config


def _option(section: str, name: str, value: Any) -> Callable[[Path], Path]:
    """Return a case's preparation: one option of the file has ``value``."""
    return lambda directory: write_config(directory, **{section: {name: value}})


def _override(name: str, value: Any) -> Callable[[Path], Path]:
    """Return a case's preparation: one entry of ``model.config_overrides`` has ``value``."""
    return _option("model", "config_overrides", LLAMA | {name: value})


def _file(change: Callable[[str], str | bytes]) -> Callable[[Path], Path]:
    """Return a case's preparation: ``change`` gives the content of the YAML file."""

    def prepare(directory: Path) -> Path:
        config = write_config(directory)
        content = change(config.read_text(encoding="utf-8"))
        config.write_bytes(content.encode() if isinstance(content, str) else content)
        return config

    return prepare


def _absent_file(directory: Path) -> Path:
    return directory / "absent.yaml"


def _directory_as_file(directory: Path) -> Path:
    write_config(directory)
    return directory


def _data(name: str, content: bytes) -> Callable[[Path], Path]:
    """Return a case's preparation: the dataset is a file of ``content``."""

    def prepare(directory: Path) -> Path:
        (directory / name).write_bytes(content)
        return write_config(directory, data={"dataset": str(directory / name)})

    return prepare


def _empty_directory_of_data(directory: Path) -> Path:
    (directory / "texts").mkdir()
    return write_config(directory, data={"dataset": str(directory / "texts")})


def _parquet(*rows: list[str]) -> Callable[[Path], Path]:
    """Return a case's preparation: the dataset is a directory of Parquet files with ``rows``."""

    def prepare(directory: Path) -> Path:
        (directory / "rows").mkdir()
        for number, texts in enumerate(rows):
            table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())})
            pyarrow.parquet.write_table(table, directory / "rows" / f"{number}.parquet")
        return write_config(directory, data={"dataset": str(directory / "rows")})

    return prepare


def _cut_off_parquet(directory: Path) -> Path:
    config = _parquet(LINES, LINES)(directory)
    file = directory / "rows" / "1.parquet"
    file.write_bytes(file.read_bytes()[:-8])
    return config


def _saved_splits(directory: Path) -> Path:
    rows = datasets.Dataset.from_dict({"text": LINES})
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(directory / "saved")
    return write_config(directory, data={"dataset": str(directory / "saved")})


def _saved_without_files(directory: Path) -> Path:
    datasets.Dataset.from_dict({"text": LINES}).save_to_disk(directory / "saved")
    (directory / "saved" / "state.json").write_text("{}", encoding="utf-8")
    return write_config(directory, data={"dataset": str(directory / "saved")})


FILES = (
    BadInput("file_missing", _absent_file, ("absent.yaml", "does not exist", "--config")),
    BadInput("file_is_a_directory", _directory_as_file, ("is a directory", "name a YAML file")),
    BadInput("file_not_utf8", _file(lambda text: b"model: {tokenizer: \xff}"), ("config.yaml", "UTF-8")),
    BadInput("file_is_a_list", _file(lambda text: "- model\n- data\n"), ("config.yaml", "must be a mapping", "list")),
    BadInput(
        "file_is_a_text", _file(lambda text: "train my model please\n"), ("config.yaml", "must be a mapping", "str")
    ),
    BadInput("file_not_yaml", _file(lambda text: "model: {tokenizer: \n"), ("config.yaml", "line")),
    BadInput("file_with_tabs", _file(lambda text: "model:\n\ttokenizer: t\n"), ("config.yaml", "spaces")),
    BadInput("file_of_two_documents", _file(lambda text: f"{text}---\n{text}"), ("config.yaml", "document")),
    BadInput(
        "section_twice",
        _file(lambda text: f"{text}trainer: {{max_steps: 1}}\n"),
        ("config.yaml", "'trainer'", "again on line", "merge"),
    ),
    BadInput(
        "option_twice",
        _file(lambda text: text.replace("  lr: 0.01", "  lr: 0.01\n  lr: 0.1")),
        ("'lr'", "again on line", "merge"),
    ),
    BadInput("section_unknown", _file(lambda text: text.replace("trainer:", "triner:")), ("triner", "trainer")),
    BadInput("section_a_list", _file(lambda text: f"{text}launch: [1]\n"), ("launch", "mapping")),
    BadInput(
        "option_and_its_alias",
        _option("data", "encoder_seq_length", 48),
        ("encoder_seq_length", "seq_length", "remove one"),
    ),
    BadInput("unknown_option", _option("trainer", "max_step", 3), ("max_step", "max_steps")),
    BadInput("pipeline_stages", _option("model", "pipeline_model_parallel_size", 2), ("pipeline", "only 1")),
)

VALUES = (
    BadInput("output_dir_is_a_file", _occupied_output, ("is not writable", "choose another")),
    BadInput("output_dir_empty", _option("trainer", "output_dir", ""), ("trainer.output_dir", "name a")),
    BadInput("output_dir_with_a_zero_byte", _option("trainer", "output_dir", "a\0b"), ("trainer.output_dir", "zero")),
    BadInput("home_of_nobody", _option("trainer", "output_dir", "~nobody_/x"), ("trainer.output_dir", "unknown user")),
    BadInput(
        "variable_in_a_path",
        _option("data", "dataset", "${SCRATCH}/lines.jsonl"),
        ("data.dataset '${SCRATCH}/lines.jsonl' has an environment variable", "write its value"),
    ),
    BadInput("eps_zero", _option("optimizer", "eps", 0), ("optimizer.eps must be above 0 and finite, got 0",)),
    BadInput(
        "held_out_text_empty",
        _option("data", "held_out_every", 10**9),
        ("lines.jsonl' is empty", "data.held_out_every 1000000000", "lower"),
    ),
    BadInput(
        "list_as_a_text",
        _option("trainer", "allow_changes", "optimizer.lr"),
        ("trainer.allow_changes", "'optimizer.lr'", "a list in brackets"),
    ),
    BadInput(
        "staging_without_offload",
        _option("optimizer", "optimizer_staging_gib", 8),
        ("optimizer.optimizer_staging_gib 8.0", "optimizer_offload_fraction above 0", "leave"),
    ),
    BadInput(
        "update_in_forward_of_weights_on_the_host",
        lambda directory: write_config(
            directory,
            optimizer={"optimizer_offload_fraction": 1.0, "optimizer_update_in_forward": True},
            memory={"cpu_offloading_weights": True, "cpu_offloading_num_layers": 1},
        ),
        ("set memory.cpu_offloading_weights to false, or optimizer.optimizer_update_in_forward to false",),
    ),
    BadInput("resume_from_empty", _option("trainer", "resume_from", ""), ("trainer.resume_from is empty",)),
    BadInput("warm_start_empty", _option("model", "warm_start", " "), ("model.warm_start is empty",)),
    BadInput("lr_infinite", _option("optimizer", "lr", float("inf")), ("optimizer.lr", "finite", "inf")),
    BadInput("lr_not_a_number", _option("optimizer", "lr", float("nan")), ("optimizer.lr", "nan")),
    BadInput("lr_negative", _option("optimizer", "lr", -1e-4), ("optimizer.lr", "at least 0")),
    BadInput("lr_a_text", _option("optimizer", "lr", "fast"), ("optimizer.lr", "float", "'fast'")),
    BadInput("lr_true", _option("optimizer", "lr", True), ("optimizer.lr", "float", "True")),
    BadInput("clip_grad_infinite", _option("optimizer", "clip_grad", "inf"), ("optimizer.clip_grad", "finite")),
    BadInput("weight_decay_nan", _option("optimizer", "weight_decay", ".nan"), ("optimizer.weight_decay",)),
    BadInput("betas_of_one", _option("optimizer", "betas", [0.9, 1.0]), ("optimizer.betas", "[0, 1)")),
    BadInput("betas_single", _option("optimizer", "betas", 0.9), ("optimizer.betas", "0.9")),
    BadInput("min_lr_above_lr", _option("optimizer", "min_lr_ratio", 10), ("min_lr_ratio", "at most 1")),
    BadInput("schedule_unknown", _option("optimizer", "lr_schedule", "cosin"), ("cosin", "cosine")),
    BadInput(
        "warm_up_beyond_the_last_step",
        _option("optimizer", "warmup_steps", 9),
        ("warmup_steps 9", "schedule of 8 steps", "shorten"),
    ),
    BadInput(
        "warm_up_beyond_the_decay",
        _file(lambda text: text.replace("warmup_steps: 2", "warmup_steps: 6\n  decay_steps: 5")),
        ("warmup_steps 6", "5", "decay_steps"),
    ),
    BadInput("steps_a_fraction", _option("trainer", "max_steps", 8.5), ("trainer.max_steps", "int", "8.5")),
    BadInput("steps_true", _option("trainer", "max_steps", True), ("trainer.max_steps", "int", "True")),
    BadInput("steps_negative", _option("trainer", "max_steps", -1), ("trainer.max_steps", "at least 0")),
    BadInput("seed_negative", _option("trainer", "seed", -1), ("trainer.seed", "at least 0")),
    BadInput("seed_too_large", _option("trainer", "seed", 2**64), ("trainer.seed", "at most")),
    BadInput("export_a_text", _option("trainer", "export", "maybe"), ("trainer.export", "bool", "maybe")),
    BadInput("batch_not_divisible", _option("data", "global_batch_size", 5), ("global_batch_size 5", "4 or 6")),
    BadInput("batch_zero", _option("data", "micro_batch_size", 0), ("micro_batch_size", "at least 1")),
    BadInput("sequence_of_one_token", _option("data", "seq_length", 1), ("seq_length", "at least 2")),
    BadInput(
        "sequence_beyond_the_positions",
        _option("data", "seq_length", 65),
        ("seq_length 65", "max_position_embeddings 64", "config_overrides"),
    ),
    BadInput("two_ranks_wanted", _option("parallel", "tensor_model_parallel_size", 2), ("world size 1", "start")),
)

MODEL_VALUES = (
    BadInput("heads_do_not_divide", _override("num_attention_heads", 7), ("24", "7", "config_overrides")),
    BadInput(
        "kv_heads_do_not_divide",
        _override("num_key_value_heads", 4),
        ("num_attention_heads 6", "num_key_value_heads 4"),
    ),
    BadInput("no_heads", _override("num_attention_heads", 0), ("num_attention_heads", "0")),
    BadInput("no_layers", _override("num_hidden_layers", 0), ("num_hidden_layers", "at least 1")),
    BadInput("odd_head_size", _override("head_dim", 3), ("head_dim 3", "even")),
    BadInput("override_misspelt", _override("hiden_size", 24), ("hiden_size", "'hidden_size'")),
    BadInput("override_unheard_of", _override("qqq", 24), ("qqq", "leave it out")),
    BadInput("override_a_text_for_a_size", _override("hidden_size", "24"), ("hidden_size", "int", "'24'")),
    BadInput("override_a_fraction", _override("intermediate_size", 36.5), ("intermediate_size", "int", "36.5")),
    BadInput("activation_unknown", _override("hidden_act", "swish2"), ("hidden_act", "swish2")),
    BadInput("dropout_above_one", _override("attention_dropout", 1.5), ("attention_dropout", "1.5", "below 1")),
    BadInput("rope_unknown", _override("rope_parameters", {"rope_type": "yarm"}), ("rope_type", "yarm")),
    BadInput("override_model_type_unknown", _override("model_type", "lama"), ("'lama'", "gpt_neox", "llama")),
    BadInput("rope_incomplete", _override("rope_parameters", {"rope_type": "llama3"}), ("llama3", "low_freq_factor")),
    BadInput("rope_a_number", _override("rope_parameters", 5), ("rope_parameters", "5")),
    BadInput("pad_outside", _override("pad_token_id", 999), ("pad_token_id 999", "257")),
    BadInput("no_model", _option("model", "config_overrides", {}), ("model.pretrained", "model_type")),
)

DATA = (
    BadInput("data_missing", _option("data", "dataset", "/absent/texts.jsonl"), ("texts.jsonl", "no such file")),
    BadInput("data_directory_empty", _empty_directory_of_data, ("texts", ".jsonl")),
    BadInput("data_empty", _data("empty.jsonl", b""), ("empty.jsonl", "empty")),
    BadInput("data_of_blanks", _data("blank.txt", b"  \n"), ("blank.txt", "empty")),
    BadInput("data_too_short", _data("short.txt", b"abc"), ("short.txt", "fewer than data.seq_length", "shorten")),
    BadInput("data_of_another_kind", _data("notes.docx", b"x"), ("notes.docx", ".jsonl")),
    BadInput("data_parquet_without_rows", _parquet([], []), ("rows' is empty",)),
    BadInput("data_parquet_cut_off", _cut_off_parquet, ("1.parquet is not a complete Parquet file", "copy")),
    BadInput("data_saved_with_splits", _saved_splits, ("saved'", "['test', 'train']", "name the directory of one")),
    BadInput("data_saved_without_files", _saved_without_files, ("saved'", "_data_files", "save it again")),
    BadInput("data_split_of_a_file", _option("data", "split", "test"), ("data.split 'test'", "lines.jsonl", "leave")),
    BadInput(
        "data_configuration_of_stdlib",
        lambda d: write_config(d, data={"dataset": "stdlib", "dataset_config": "en"}),
        ("data.dataset_config 'en'", "'stdlib'", "leave"),
    ),
    BadInput("data_not_parquet", _data("rows.parquet", b"PAR0"), ("rows.parquet", "not a complete Parquet file")),
    BadInput(
        "data_without_the_column",
        lambda d: write_config(d, data={"dataset": write_jsonl(d / "q.jsonl", ["a"], column="prompt")}),
        ("data.text_column", "'text'", "prompt"),
    ),
    BadInput("data_empty_name", _option("data", "dataset", ""), ("data.dataset", "name a")),
)

COMMAND_LINE = (
    BadInput(
        "option_misspelt", write_config, ("--trainer.max-step", "--trainer.max-steps"), ("--trainer.max-step", "3")
    ),
    BadInput("option_without_value", write_config, ("max-steps",), ("--trainer.max-steps",)),
    BadInput("option_a_text", write_config, ("max-steps", "many"), ("--trainer.max-steps", "many")),
    BadInput("override_without_value", write_config, ("rope-theta", "VALUE"), (f"{OVERRIDE}rope-theta",)),
    BadInput("override_not_yaml", write_config, ("not valid YAML",), (f"{OVERRIDE}rope-theta", "[1")),
    BadInput("recipe_without_name", write_config, ("--recipe", "expected one argument"), ("--recipe",)),
    BadInput("recipe_unknown", lambda d: d / "x.yaml", ("pass one",), ("--recipe", "lama")),
    BadInput("two_configurations", write_config, ("--config", "--recipe", "pass one"), ("--recipe", "smollm2")),
)

CASES: tuple[BadInput, ...] = (*FILES, *VALUES, *MODEL_VALUES, *DATA, *COMMAND_LINE)
