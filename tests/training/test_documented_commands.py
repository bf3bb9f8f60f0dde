"""Runs the commands of docs/getting_started.md and docs/training.md, in the pages' order; README has a part of them."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from nxd_memopt.backends import backend
from tests.training.chats import CONVERSATIONS, tokenizer, write_rows
from tests.training.runs import LINES, LLAMA, environment, rows, write_jsonl

pytestmark = pytest.mark.skipif(backend.name != "cpu", reason="the commands do not depend on the device")

ROOT = Path(__file__).resolve().parents[2]
GUIDE = "docs/getting_started.md"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)  # language and text
# The steps of a recipe for a real model; appended to its command.
FEW_STEPS = ["--trainer.max-steps", "3", "--optimizer.warmup-steps", "1"]


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of ``languages`` in a page."""
    found = FENCED.findall((ROOT / page).read_text(encoding="utf-8"))
    return [text for language, text in found if language in languages]


def commands(page: str, *programs: str) -> list[list[str]]:
    """The words of each command of ``programs`` in the fenced blocks of a page."""
    lines = [line for text in blocks(page, "", "bash") for line in text.replace("\\\n", " ").splitlines()]
    return [words for line in lines if line.startswith(programs) and (words := shlex.split(line, comments=True))]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A working directory with everything that the commands name; ``my.yaml`` is the guide's, with small sizes."""
    torch.manual_seed(0)
    sizes = LLAMA | {"max_position_embeddings": 1024, "bos_token_id": None, "pad_token_id": None}
    config = transformers.LlamaConfig(**{name: value for name, value in sizes.items() if name != "model_type"})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "MODEL_DIRECTORY")
    tokenizer().save_pretrained(tmp_path / "MODEL_DIRECTORY")
    write_rows(tmp_path / "conversations.jsonl", CONVERSATIONS)
    write_jsonl(tmp_path / "corpus.jsonl", LINES)
    options: dict[str, dict[str, Any]] = yaml.safe_load("".join(blocks(GUIDE, "yaml")))
    options["data"] |= {"seq_length": 24, "global_batch_size": 2, "eval_sequences": 4}
    options["optimizer"] |= {"lr": 0.001, "warmup_steps": 1}
    options["trainer"] |= {"max_steps": 6}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    return tmp_path


def start(words: list[str], directory: Path) -> subprocess.Popen[str]:
    program = {"nxd-memopt": ["nxd_memopt.cli"], "torchrun": ["torch.distributed.run"]}[words[0]]
    return subprocess.Popen(
        [sys.executable, "-m", *program, *words[1:]],
        cwd=directory,
        env=environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed[-4000:]
    return printed


def steps(directory: Path, run: str) -> list[int]:
    return [row["step"] for row in rows(directory / "runs" / run)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_guide(directory: Path) -> None:
    found = commands(GUIDE, "nxd-memopt")
    assert [words[1] for words in found] == ["doctor", "train", "convert", *["train"] * 3, "plan", "plan"]
    printed = [finish(start(words + FEW_STEPS * ("--recipe" in words), directory)) for words in found]
    assert "⟦" in printed[1] and steps(directory, "fine_tune_lora") == [1, 2, 3]
    assert (directory / "exported" / "model.safetensors").is_file()
    assert steps(directory, "two") == list(range(1, 7))
    assert "resuming after step 6" in printed[5] and steps(directory, "mine") == list(range(1, 121))
    # What the guide does with the export.
    program = [sys.executable, "-c", *blocks(GUIDE, "python")]
    done = subprocess.run(program, cwd=directory, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_training_page(directory: Path) -> None:
    *alone, on_hosts, adapters = commands("docs/training.md", "nxd-memopt", "torchrun")
    assert [words[1] for words in alone] == ["prepare", *["train"] * 3] and on_hosts[0] == "torchrun"
    printed = [finish(start(words, directory)) for words in alone]
    assert steps(directory, "mine") == list(range(1, 7))
    assert "optimizer.lr: 0.001 -> 0.0001" in printed[2] and steps(directory, "lower") == [7, 8, 9, 10]
    assert "warm start" in printed[3] and steps(directory, "new") == list(range(1, 7))
    finish(start(adapters + FEW_STEPS, directory))
    assert (directory / "runs" / "fine_tune_lora" / "adapter" / "tokenizer.json").is_file()
    # Two hosts, which are this one twice.
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"localhost:{free.getsockname()[1]}"
    words = [place if word == "HOST:29500" else word for word in on_hosts]
    words += ["--trainer.output-dir", "runs/hosts"]
    for process in [start(words, directory) for _ in range(2)]:
        finish(process)
    assert steps(directory, "hosts") == list(range(1, 7))


def test_the_extra_that_is_installed_exists() -> None:
    (words,) = commands(GUIDE, "pip")
    assert words[:2] == ["pip", "install"] and len(words) == 3
    extra = re.fullmatch(r"\.\[(\w+)\]", words[2])
    assert extra is not None and f'"{extra[1]}": ' in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_the_readme_has_commands_of_the_guide() -> None:
    programs = ("pip", "make", "nxd-memopt")
    readme = commands("README.md", *programs)
    assert len(readme) == 3 and all(words in commands(GUIDE, *programs) for words in readme)
