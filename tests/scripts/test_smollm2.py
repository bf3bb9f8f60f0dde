"""The program of ``make train``: options that the training program knows, and a hash of all code that converts."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxd_memopt.training.config.parsing import parse_config
from scripts.launch import smollm2


def test_both_runs_have_known_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(smollm2, "wait_for", lambda command: commands.append(command) or 0)
    monkeypatch.setattr(smollm2, "SINGLE_PROCESS_RUN", tmp_path)
    monkeypatch.setattr(smollm2.sys, "argv", ["smollm2.py", "--trainer.max-steps", "5"])
    assert smollm2.run_single_process() == smollm2.run(3) == 0
    single, parallel = (parse_config(command[command.index("--recipe") :]) for command in commands)
    assert (single.trainer.max_steps, parallel.trainer.max_steps) == (2, 5)
    assert (single.parallel.tensor_model_parallel_size, parallel.parallel.tensor_model_parallel_size) == (1, 3)


def test_the_conversion_depends_on_the_code_of_subpackages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = tmp_path / "checkpoint" / "huggingface" / "gguf.py"
    code.parent.mkdir(parents=True)
    code.write_text("before")
    monkeypatch.setattr(smollm2, "CONVERSION_CODE", (tmp_path / "checkpoint",))
    monkeypatch.setattr(smollm2, "find_gguf", lambda: code)
    before = smollm2.conversion()
    code.write_text("behind")
    assert smollm2.conversion() != before
