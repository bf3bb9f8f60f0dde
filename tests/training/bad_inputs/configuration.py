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
    BadInput("file_not_yaml", _file(lambda text: "model: {tokenizer: \n"), ("config.yaml", "line")),
    BadInput("file_with_tabs", _file(lambda text: "model:\n\ttokenizer: t\n"), ("config.yaml", "spaces")),
    BadInput(
        "section_twice",
        _file(lambda text: f"{text}trainer: {{max_steps: 1}}\n"),
        ("config.yaml", "'trainer'", "again on line", "merge"),
    ),
)

VALUES = (
    BadInput("output_dir_is_a_file", _occupied_output, ("is not writable", "choose another")),
    BadInput("home_of_nobody", _option("trainer", "output_dir", "~nobody_/x"), ("trainer.output_dir", "unknown user")),
    BadInput(
        "variable_in_a_path",
        _option("data", "dataset", "${SCRATCH}/lines.jsonl"),
        ("data.dataset '${SCRATCH}/lines.jsonl' has an environment variable", "write its value"),
    ),
    BadInput(
        "held_out_text_empty",
        _option("data", "held_out_every", 10**9),
        ("lines.jsonl' is empty", "data.held_out_every 1000000000", "lower"),
    ),
    BadInput(
        "staging_without_offload",
        _option("optimizer", "optimizer_staging_gib", 8),
        ("optimizer.optimizer_staging_gib 8.0", "optimizer_offload_fraction above 0", "leave"),
    ),
    BadInput(
        "warm_up_beyond_the_last_step",
        _option("optimizer", "decay_steps", 1),
        ("warmup_steps 2", "schedule of 1 steps", "shorten"),
    ),
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
    BadInput("no_layers", _override("num_hidden_layers", 0), ("num_hidden_layers", "at least 1")),
    BadInput("odd_head_size", _override("head_dim", 3), ("head_dim 3", "even")),
    BadInput("override_misspelt", _override("hiden_size", 24), ("hiden_size", "'hidden_size'")),
    BadInput("override_a_text_for_a_size", _override("hidden_size", "24"), ("hidden_size", "int", "'24'")),
    BadInput("activation_unknown", _override("hidden_act", "swish2"), ("hidden_act", "swish2")),
    BadInput("dropout_above_one", _override("attention_dropout", 1.5), ("attention_dropout", "1.5", "below 1")),
    BadInput("rope_unknown", _override("rope_parameters", {"rope_type": "yarm"}), ("rope_type", "yarm")),
    BadInput("rope_incomplete", _override("rope_parameters", {"rope_type": "llama3"}), ("llama3", "low_freq_factor")),
    BadInput("rope_a_number", _override("rope_parameters", 5), ("rope_parameters", "5")),
    BadInput("pad_outside", _override("pad_token_id", 999), ("pad_token_id 999", "257")),
)

DATA = (
    BadInput("data_not_named", _option("data", "dataset", None), ("no data is named", "data.dataset", "stdlib")),
    BadInput("data_missing", _option("data", "dataset", "/absent/texts.jsonl"), ("texts.jsonl", "no such file")),
    BadInput("data_directory_empty", _empty_directory_of_data, ("texts", ".jsonl")),
    BadInput("data_empty", _data("empty.jsonl", b""), ("empty.jsonl", "empty")),
    BadInput("data_too_short", _data("short.txt", b"abc"), ("short.txt", "fewer than data.seq_length", "shorten")),
    BadInput("data_of_another_kind", _data("notes.docx", b"x"), ("notes.docx", ".jsonl")),
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
        ("data.columns", "text", "prompt"),
    ),
)


CASES: tuple[BadInput, ...] = (*FILES, *VALUES, *MODEL_VALUES, *DATA)
