"""Bad inputs: mixtures, Megatron's tokens, held-out data, NeMo's sections, adapters and parameter groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.training.bad_inputs.case import BadInput
from tests.training.data.test_dataset_shards import repository
from tests.training.runs import LINES, LLAMA, write_config


def _nemo(**model: Any) -> Callable[[Path], Path]:
    """A ``model`` section of NeMo's with some options."""
    sizes = {"num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 36, "num_attention_heads": 6}
    sizes |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}

    def prepare(directory: Path) -> Path:
        config = write_config(directory)
        options = yaml.safe_load(config.read_text(encoding="utf-8"))
        options["model"] = {"tokenizer": options["model"]["tokenizer"], **sizes, **model}
        config.write_text(yaml.safe_dump(options), encoding="utf-8")
        return config

    return prepare


def _section(name: str, **options: Any) -> Callable[[Path], Path]:
    return lambda directory: write_config(directory, **{name: options})


def _repository(kind: str, broken: bytes | None = None, **data: Any) -> Callable[[Path], Path]:
    """A copy of a repository of the hub, with the content of one of its files."""

    def prepare(directory: Path) -> Path:
        path = repository(directory / "repository", kind, LINES)
        if broken is not None:
            (path / "data" / f"train-00001.{kind}").write_bytes(broken)
        return write_config(directory, data={"dataset": str(path)} | data)

    return prepare


STREAMED: dict[str, Any] = {"streaming": True}
CASES: tuple[BadInput, ...] = (
    BadInput("hub_split", _repository("parquet", split="none"), ("repository", "none", "'train', 'test'")),
    BadInput(
        "hub_streamed_file", _repository("parquet", b"PAR1", **STREAMED), ("train-00001.parquet row 1", "correct")
    ),
    BadInput(
        "hub_streamed_line", _repository("jsonl", b"no\n", **STREAMED), ("train-00001.jsonl row 1", "JSON", "correct")
    ),
    BadInput("nemo_norm", _nemo(normalization="layernorm1p"), ("model.normalization 'layernorm1p'", "'rmsnorm'")),
    BadInput("nemo_reference", _nemo(kv_channels="${.absent}"), ("model.kv_channels '${.absent}'", "nothing")),
    BadInput("nemo_key_misspelt", _nemo(num_query_group=2), ("num_query_group", "model")),
    BadInput("lora_module_unknown", _section("lora", lora_rank=2, target_modules=["q_prj"]), ("q_prj",)),
    BadInput(
        "no_decay_of_nothing", _section("optimizer", no_decay=["wte"]), ("optimizer.no_decay 'wte'", "embed_tokens")
    ),
    BadInput(
        "in_backward_with_clipping",
        _section("optimizer", in_backward=True),
        ("optimizer.in_backward", "optimizer.clip_grad is 1.0", "set clip_grad to 0"),
    ),
    BadInput(
        "in_backward_of_micro_batches",
        _section("optimizer", in_backward=True, clip_grad=0),
        ("optimizer.in_backward", "2 micro-batches of 2"),
    ),
    BadInput(
        "model_type_of_another_family",
        _section("model", config_overrides=LLAMA | {"model_type": "bert"}),
        ("'bert'", "llama"),
    ),
)
