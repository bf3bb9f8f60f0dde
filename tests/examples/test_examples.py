"""Runs every file of docs/examples, and the README's loop, on two CPU processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from nxd_memopt.backends import backend
from tests.training.runs import LINES, byte_tokenizer, environment, summary, write_jsonl

pytestmark = pytest.mark.skipif(backend.name != "cpu", reason="the examples do not depend on the device")

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
SIZES = {"vocab_size": 257, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 256}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a small LLaMA and a tokenizer."""
    directory = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **HEADS, bos_token_id=None, pad_token_id=None)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def run(*arguments: str | Path, ranks: int = 2) -> str:
    """Return what ``torchrun`` prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [*torchrun, *map(str, arguments)]
    path = os.pathsep.join([str(EXAMPLES.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]


@pytest.mark.slow
def test_a_training_loop(pretrained: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("\n".join(LINES), encoding="utf-8")
    arguments = ("--model", pretrained, "--text", tmp_path / "text", "--seq-length", "32", "--lr", "0.01")
    found = losses(run(EXAMPLES / "train_loop.py", *arguments, "--output", tmp_path / "export"))
    alone = losses(run(EXAMPLES / "train_loop.py", *arguments, "--output", tmp_path / "export1", ranks=1))
    assert len(found) == 10 and found[-1] < found[0]
    assert found == pytest.approx(alone, rel=0.02)  # bf16, sums in another order
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")


def loss_of(directory: Path, ids: torch.Tensor) -> float:
    """The loss that transformers computes in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(ids, labels=ids).loss.item()


@pytest.mark.slow
def test_the_loop_of_the_readme(pretrained: Path, tmp_path: Path) -> None:
    """The loop as it is printed lowers the loss of its batch, and transformers loads the export."""
    readme = (EXAMPLES.parents[1] / "README.md").read_text(encoding="utf-8")
    (loop,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert len(loop.splitlines()) <= 25
    for name, path in (("path/to/llama", pretrained), ("path/to/export", tmp_path / "export")):
        assert name in loop
        loop = loop.replace(name, str(path))
    before, word, after = loop.partition("for input_ids in batches:")
    batches = "batches = [torch.arange(32, device=backend.device).unsqueeze(0)] * 20\n"
    (tmp_path / "loop.py").write_text(before + batches + word + after, encoding="utf-8")
    run(tmp_path / "loop.py")
    ids = torch.arange(32).unsqueeze(0)
    assert loss_of(tmp_path / "export", ids) < loss_of(pretrained, ids) - 1e-3


@pytest.mark.slow
def test_a_script_of_neuronx_distributed() -> None:
    found = losses(run("-m", "nxd_memopt.compat", EXAMPLES / "nxd_script.py"))
    assert len(found) == 5 and found[-1] < found[0]


@pytest.mark.slow
def test_continued_pretraining(pretrained: Path, tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", LINES)
    options = ["--model.pretrained", pretrained, "--data.dataset", corpus, "--trainer.output-dir", tmp_path / "run"]
    options += ["--data.seq-length", "32", "--trainer.max-steps", "4", "--trainer.save-interval", "2"]
    config = EXAMPLES / "continue_pretraining.yaml"
    run("-m", "nxd_memopt.training", "--config", config, *options, "--optimizer.warmup-steps", "1")
    result = summary(tmp_path / "run")
    assert result["steps"] == 4
    assert result["transformers_difference"] < 0.02  # bf16


@pytest.mark.slow
def test_instruction_tuning(pretrained: Path, tmp_path: Path) -> None:
    """Conversations about the standard library: the held-out loss of the answers falls."""
    data = tmp_path / "conversations.jsonl"
    subprocess.run([sys.executable, EXAMPLES / "make_conversations.py", data], check=True, timeout=100)
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(
        template + "{% if add_generation_prompt %}assistant: {% endif %}", encoding="utf-8"
    )
    options = ["--model.pretrained", pretrained, "--data.dataset", data, "--trainer.output-dir", tmp_path / "run"]
    options += ["--data.chat-template", tmp_path / "chat.jinja", "--data.seq-length", "64"]
    config = EXAMPLES / "instruction_tuning.yaml"
    printed = run("-m", "nxd_memopt.training", "--config", config, *options, "--optimizer.lr", "0.01")
    result = summary(tmp_path / "run")
    assert result["held_out_loss_after"] < result["held_out_loss_before"] - 0.3
    assert printed.index("⟦") < printed.index("step 10/16")
