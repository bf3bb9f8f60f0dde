"""Bad inputs: models, tokenizers, checkpoints and export directories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.training.bad_inputs.case import BadInput
from tests.training.runs import LLAMA, byte_tokenizer, run_here, write_config

NEWEST = "checkpoints/step_00000004"
Change = Callable[[Path], None]


def _pretrained(change: Change, **sections: dict[str, Any]) -> Callable[[Path], Path]:
    """Return a case's preparation: a Hugging Face directory of random weights, damaged by ``change``."""

    def prepare(directory: Path) -> Path:
        from nxd_memopt.checkpoint import save_pretrained
        from nxd_memopt.models import model_class
        from nxd_memopt.training.config.train_config import ModelConfig
        from nxd_memopt.training.model import load_hf_config

        config = load_hf_config(ModelConfig(tokenizer="t", config_overrides=LLAMA))
        model = model_class("llama")(config)
        source = directory / "source"
        save_pretrained(model, source, max_shard_size_bytes=20_000)
        byte_tokenizer().save_pretrained(source)
        change(source)
        options = {"pretrained": str(source), "tokenizer": None, "config_overrides": {}}
        options |= sections.pop("model", {})
        return write_config(directory, model=options, **sections)

    return prepare


def _edit_json(name: str, **changes: Any) -> Change:
    """Return a change of the JSON file ``name``; None removes a key."""

    def change(source: Path) -> None:
        content = json.loads((source / name).read_text(encoding="utf-8")) | changes
        content = {key: value for key, value in content.items() if value is not None}
        (source / name).write_text(json.dumps(content), encoding="utf-8")

    return change


def _write(name: str, text: str) -> Change:
    return lambda source: (source / name).write_text(text, encoding="utf-8") and None


def _remove(pattern: str) -> Change:
    def change(source: Path) -> None:
        for path in list(source.glob(pattern)):
            path.unlink()

    return change


def _shorten(pattern: str) -> Change:
    def change(directory: Path) -> None:
        path = sorted(directory.rglob(pattern))[-1]
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return change


def _nan_weight(source: Path) -> None:
    path = sorted(source.glob("*.safetensors"))[0]
    tensors = load_file(path)
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, path, metadata={"format": "pt"})


def _resumed(change: Change) -> Callable[[Path], Path]:
    """Return a case's preparation: a finished run of four steps, changed by ``change``."""

    def prepare(directory: Path) -> Path:
        config = write_config(directory, trainer={"max_steps": 4, "export": False}, data={"eval_sequences": 0})
        assert run_here(config).returncode == 0
        change(directory / "run")
        return config

    return prepare


def _edit_config(run: Path) -> None:
    file = run.parent / "config.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("hidden_size: 24", "hidden_size: 48"), encoding="utf-8")


def _larger_tokenizer(directory: Path) -> Path:
    config = write_config(directory)
    byte_tokenizer(extra=3).save_pretrained(directory / "tokenizer")
    return config


def _export_is_a_file(directory: Path) -> Path:
    (directory / "run").mkdir()
    (directory / "run" / "export").write_text("the only copy", encoding="utf-8")
    return write_config(directory)


def _export_is_the_source(directory: Path) -> Path:
    first = write_config(directory, trainer={"max_steps": 1, "save_interval": "never"}, optimizer={"warmup_steps": 0})
    assert run_here(first).returncode == 0
    model = {"pretrained": str(directory / "run" / "export"), "tokenizer": None, "config_overrides": {}}
    return write_config(directory, model=model)


def _occupied_export(directory: Path) -> Path:
    export = directory / "run" / "export"
    export.mkdir(parents=True)
    (export / "thesis.txt").write_text("the only copy", encoding="utf-8")
    return write_config(directory)


CASES: tuple[BadInput, ...] = (
    BadInput("model_without_config", _pretrained(_remove("config.json")), ("source", "config.json", "copy")),
    BadInput("model_config_broken", _pretrained(_write("config.json", '{"model_type": ')), ("config.json", "again")),
    BadInput("model_without_weights", _pretrained(_remove("*.safetensors*")), ("source", "no weights")),
    BadInput("model_shard_shortened", _pretrained(_shorten("model-0000*.safetensors")), ("model-0000", "again")),
    BadInput("model_weights_not_finite", _pretrained(_nan_weight), ("not finite",)),
    BadInput(
        "model_quantized",
        _pretrained(_edit_json("config.json", quantization_config={"quant_method": "fp8"})),
        ("quantization_config", "'fp8'", "take the checkpoint that they were made from"),
    ),
    BadInput("model_not_a_directory", lambda d: write_config(d, model={"pretrained": str(d / "absent")}), ("absent",)),
    BadInput(
        "checkpoint_without_index",
        _resumed(_remove(f"{NEWEST}/index.json")),
        ("step_00000004", "no index.json", "resume from step 2"),
    ),
    BadInput("checkpoint_of_another_model", _resumed(_edit_config), ("hidden_size", "24", "another")),
    BadInput("checkpoint_shortened", _resumed(_shorten("step_*/*.safetensors")), ("step_00000004", "delete")),
    BadInput(
        "end_of_text_of_another_model",
        _pretrained(_edit_json("config.json", eos_token_id=7)),
        ("256 '<end>'", "7 ", "data.end_of_text"),
    ),
    BadInput(
        "end_of_text_unknown",
        lambda d: write_config(d, data={"end_of_text": "</s>"}),
        ("data.end_of_text", "'</s>'", "'<end>'"),
    ),
    BadInput(
        "tokenizer_larger_than_the_model", _larger_tokenizer, ("260 rows", "vocab_size 257", "model.resize_embedding")
    ),
    BadInput(
        "model_type_of_another_model",
        _pretrained(lambda source: None, model={"config_overrides": {"model_type": "gpt_neox"}}),
        ("'gpt_neox'", "'llama'", "leave model_type out"),
    ),
    BadInput("export_is_a_file", _export_is_a_file, ("export", "is a file", "trainer.export")),
    BadInput("export_is_the_pretrained_model", _export_is_the_source, ("model.pretrained", "choose another")),
    BadInput(
        "export_occupied", _occupied_export, ("export", "neither empty nor an export", "choose another directory")
    ),
)
