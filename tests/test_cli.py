"""The command line: what it prints, converts and refuses."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers

from nxd_memopt import cli


def run(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["nxd-memopt", *map(str, arguments)])
    return cli.main()


def test_doctor_names_backend_and_reason(monkeypatch, capsys):
    assert run(monkeypatch, "doctor") == 0
    printed = capsys.readouterr().out
    assert "backend cpu: NXD_MEMOPT_BACKEND=cpu (cpu on cpu)" in printed
    assert torch.__version__ in printed
    assert "RMSNorm, residual + RMSNorm: plain PyTorch (the kernels are for NVIDIA GPUs, the device is cpu)" in printed


def test_convert_writes_what_transformers_loads(monkeypatch, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
    source = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    assert run(monkeypatch, "convert", "--source", tmp_path, "--target", tmp_path / "out") == 0
    converted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, expected), actual in zip(source.named_parameters(), converted.parameters(), strict=True):
        assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected), name


def test_user_errors_are_one_line_and_status_2(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "convert", "--source", tmp_path / "absent", "--target", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("nxd-memopt: error:") and "absent" in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["convert"]])
def test_usage_errors_exit_with_2(monkeypatch, arguments):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *arguments)
    assert stopped.value.code == 2
