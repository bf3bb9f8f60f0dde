"""The command line: what it prints, converts and refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import transformers

from nxd_memopt import cli
from nxd_memopt.backends import backend
from nxd_memopt.commands import doctor
from tests.deferred_transfers import DeferredTransfers


def run(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["nxd-memopt", *map(str, arguments)])
    return cli.main()


def test_doctor_names_backend_and_reason(monkeypatch, capsys):
    assert run(monkeypatch, "doctor") == 0
    printed = capsys.readouterr().out
    assert "backend cpu: NXD_MEMOPT_BACKEND=cpu (cpu on cpu)" in printed
    assert torch.__version__ in printed
    assert "data-parallel sharding: zero1, zero2, zero3\n" in printed
    assert "float8 matmuls (trainer.fp8): not available: needs an NVIDIA GPU of compute capability 9.0" in printed
    assert "host memory: nothing is offloaded: the backend cpu has no copies" in printed
    assert "fused operations: plain PyTorch (the kernels are for NVIDIA GPUs, the device is cpu): RMSNorm" in printed
    lines = printed.splitlines()
    neox = lines.index("fused paths of gpt_neox:")
    llama = lines.index("fused paths of granite, llama, mistral, phi3, qwen2, qwen2_moe, qwen3:")
    assert "  attention and MLP in parallel: on in 1 of 1" in lines[neox:llama]
    assert any(line.startswith("  projection of q_proj, k_proj, v_proj: on in 1 of 1") for line in lines[llama:])
    assert len(lines) < 40, "it fits a screen"


def test_doctor_says_what_another_backend_can_do(monkeypatch, capsys):
    monkeypatch.setattr(type(backend), "host_transfers", lambda self: DeferredTransfers())
    monkeypatch.setattr(type(backend), "fp8_refusal", lambda self: None)
    monkeypatch.delattr(type(backend), "gradient_sharding_refusal")
    assert run(monkeypatch, "doctor") == 0
    printed = capsys.readouterr().out
    assert "float8 matmuls (trainer.fp8): available" in printed
    assert "zero1; of gradients and parameters (zero2, zero3) it is not available on the backend cpu" in printed
    assert re.search(r"host memory: activations and optimizer states can be offloaded \([0-9.]+ GiB", printed)


@pytest.mark.parametrize("file", ["checkpoints/step_00000001/index.json", "rank_00000.safetensors"])
def test_convert_of_a_run_names_the_option_that_reads_it(file, monkeypatch, capsys, tmp_path):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    assert run(monkeypatch, "convert", "--source", tmp_path, "--target", tmp_path / "target") == 2
    assert "has a training checkpoint: add --from checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stored", "configured"), [("float32", "bfloat16"), ("bfloat16", "float16"), ("bfloat16", "bfloat16")]
)
def test_convert_keeps_the_dtype_of_the_weights(stored, configured, monkeypatch, capsys, tmp_path):
    """Another dtype of config.json would round them, or make 1e5 infinite."""
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    source = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, stored))
    with torch.no_grad():
        source.lm_head.weight[0, :2] = torch.tensor([1e5, 1e-9])
    source.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text()) | {"dtype": configured}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert run(monkeypatch, "convert", "--source", tmp_path, "--target", tmp_path / "out") == 0
    said = f"the weights are torch.{stored}, and config.json says" in capsys.readouterr().out
    assert said == (stored != configured)
    converted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, expected), actual in zip(source.named_parameters(), converted.parameters(), strict=True):
        assert torch.equal(actual, expected) and actual.dtype == expected.dtype, name


def test_ctrl_c_is_one_line_and_status_130(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    assert run(monkeypatch, "convert") == 130
    assert capsys.readouterr().err == "nxd-memopt: stopped by SIGINT\n"


def test_usage_errors_exit_with_2(monkeypatch, capsys):
    assert run(monkeypatch) == 2 and "certify" in capsys.readouterr().out
    for words, message in (
        (["trian"], "command 'trian' is not one of"),
        (
            ["plan", "--modell", "x", "--device", "h100"],
            "unknown option --modell: did you mean --model?; nxd-memopt plan --help shows",
        ),
        (["plan", "--model", "x"], "--device; nxd-memopt plan --help"),
        (["certify", "--tensor-model-parallel-size", "8"], "did you mean --parallel.tensor-model-parallel-size?"),
        (["plan", "--model", "llama3.1-8b-instrukt", "--device", "h100"], "is not one of"),
        (["prepare", "--workers", "0"], "--workers: must be at least 1, got '0'"),
        (["convert", "--source", "a", "--target", "b", "--from", "gguf"], "--from: invalid choice: 'gguf'"),
        (["convert"], "required: --source, --target; nxd-memopt convert --help"),
    ):
        assert run(monkeypatch, *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("nxd-memopt: error: ") and message in line


def test_help_of_each_command_needs_no_package():
    """And no command but certify imports torch for it."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'yaml', 'rich'])); "
        "from nxd_memopt.cli import run\nfor name in ('plan', 'launch', 'prepare', 'profile', 'convert'): "
        "assert run([name, '--help']) == 0\nrun(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.count("--SECTION.OPTION VALUE") == 4, done.stderr


def test_commands_of_the_host_open_no_device():
    """With a backend that this machine lacks, as a NeuronCore that a run has."""
    names = ("certify", "convert", "prepare")
    code = f"from nxd_memopt.cli import run\nfor name in {names}: assert run([name, '--help']) == 0"
    environ = os.environ | {"NXD_MEMOPT_BACKEND": "neuron"}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True)


def test_convert_to_neuronx_distributed_and_back(monkeypatch, capsys, tmp_path):
    """Grouped KV heads on several ranks, pipeline stages, fused projections, one file per tensor: bit-equal."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    there = ["convert", "--source", tmp_path / "hf", "--target", tmp_path / "nxd", "--to", "nxd"]
    there += ["--tensor-model-parallel-size", 4, "--pipeline-model-parallel-size", 2, "--kv-size-multiplier", 2]
    assert run(monkeypatch, *there) == 2
    assert "--kv-order: strided for trn1, consecutive for trn2" in capsys.readouterr().err
    assert run(monkeypatch, *there, "--kv-order", "strided", "--fused-qkv", "--xser") == 0
    assert "8 of 8: dp_rank_00_tp_rank_03_pp_rank_01.pt" in capsys.readouterr().out
    assert (tmp_path / "nxd" / "model" / "dp_rank_00_tp_rank_03_pp_rank_01.pt.tensors").is_dir()
    back = ["convert", "--source", tmp_path / "nxd", "--target", tmp_path / "back", "--from", "nxd"]
    assert run(monkeypatch, *back) == 2
    assert "--config" in capsys.readouterr().err
    assert run(monkeypatch, *back, "--config", tmp_path / "hf" / "config.json") == 0
    assert "tensor_model_parallel_size 4, 2 replicas of each KV head in strided order" in capsys.readouterr().out
    converted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    for (name, expected), actual in zip(model.named_parameters(), converted.parameters(), strict=True):
        assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--xser", "--kv-order", "strided"], "--from hf --to hf takes no --xser, --kv-order"),
        (["--to", "nxd", "--config", "x"], "--from hf --to nxd takes no --config"),
        (["--from", "nxd", "--to", "nxd"], "convert to hf, and from there"),
        (
            ["--to", "nxd", "--tensor-model-parallel-size", "0"],
            "--tensor-model-parallel-size must be at least 1, got 0",
        ),
        (["--max-shard-size-gib", "nan"], "--max-shard-size-gib must be a positive number, got nan"),
        (["--to", "nxd"], "needs --tensor-model-parallel-size"),
    ],
)
def test_options_of_other_formats_are_refused(options, message, monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "convert", "--source", tmp_path, "--target", tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["doctor"], ["train", "--help"]])
def test_a_reader_that_has_ended_is_no_error(arguments):
    """As with other programs in a pipe to head: no line, and the status of SIGPIPE."""
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-m", "nxd_memopt.cli", *arguments]
    done = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_another_broken_pipe_is_an_error(monkeypatch, capfd):  # whose standard output is a file
    def fail(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(doctor, "main", fail)
    assert run(monkeypatch, "doctor") == 2
    assert "Broken pipe" in capfd.readouterr().err
