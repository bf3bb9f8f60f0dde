"""Helpers for tests of the training program: a byte tokenizer, small configurations, starting the program."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nxd_memopt.commands.convert import Convert
from tests.dist import pool

PROGRAM = ("-m", "nxd_memopt.training")
LIMIT_S = 500  # seconds that a program may run: two ranks compile layers for minutes while other tests run
END = 256
EXACT = ("step", "loss", "grad_norm", "lr", "loss_scale", "skipped")  # the last two in fp16 only
LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": END,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
TENSOR_AND_SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel_enabled": True}
LINES = [f"document {i} " + "abc xyz " * (3 + i % 7) for i in range(200)]


def byte_tokenizer(extra: int = 0) -> PreTrainedTokenizerFast:
    """One token per byte, and an end-of-text token; ``extra`` tokens more that no text has."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>", *(f"<extra{i}>" for i in range(extra))]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def write_jsonl(path: Path, texts: list[str], column: str = "text") -> str:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def write_config(directory: Path, **sections: Mapping[str, Any]) -> Path:
    """A run of a small random LLaMA on ``LINES``; ``sections`` are laid over it. Returns the YAML file."""
    byte_tokenizer().save_pretrained(directory / "tokenizer")
    base: dict[str, dict[str, Any]] = {
        "model": {"tokenizer": str(directory / "tokenizer"), "config_overrides": LLAMA},
        "memory": {},
        "parallel": {},
        "data_parallel": {},
        "moe": {},
        "data": {
            "dataset": write_jsonl(directory / "lines.jsonl", LINES),
            "seq_length": 24,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "eval_sequences": 6,
        },
        "optimizer": {"lr": 0.01, "warmup_steps": 2},
        "trainer": {"output_dir": str(directory / "run"), "max_steps": 8, "save_interval": 2},
    }
    for name, options in sections.items():
        base[name] = base.get(name, {}) | dict(options)
    if base["data"].get("mixture"):
        del base["data"]["dataset"]
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(base), encoding="utf-8")
    return file


@dataclass(frozen=True)
class Outcome:
    """What a finished run of the script left."""

    returncode: int
    stdout: str
    stderr: str


def environment(**changes: str) -> dict[str, str]:
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"OMP_NUM_THREADS": "1", "NXD_MEMOPT_BACKEND": "cpu", **changes}


def command(config: Path, *options: str, ranks: int = 1) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, *PROGRAM, "--config", str(config), *options]


def train(
    config: Path,
    *options: str,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    file_size_limit: int | None = None,
) -> Outcome:
    """Run the script to its end: alone, or under torchrun; with a limit, larger files fail as on a full disk."""

    def limit_files() -> None:
        if file_size_limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_limit, file_size_limit))

    program = subprocess.Popen(
        command(config, *options, ranks=ranks),
        env=environment(PYTHONFAULTHANDLER="1", **(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit_files,
    )
    try:
        stdout, stderr = program.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        # Each process prints where it stands, torchrun's ranks too.
        for pid in (*descendants(program.pid), program.pid):
            os.kill(pid, signal.SIGABRT)
        stdout, stderr = program.communicate()
        pytest.fail(f"the program ran for more than {LIMIT_S} s:\n{stdout[-2000:]}\n{stderr[-20000:]}")
    return Outcome(program.returncode, stdout, stderr)


def descendants(pid: int) -> list[int]:
    """Return the processes that ``pid`` and its descendants have started."""
    found: list[int] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
        found += [*descendants(int(child)), int(child)]
    return found


@contextmanager
def without_extras() -> Iterator[None]:
    """Leave out the picture of the losses, and what would end the exclusion of imports from garbage collection.

    Both take half of a small run's time; tests of their own are in reporting/test_loss_plot.py and test_model.py.
    """
    from nxd_memopt.training import loop
    from nxd_memopt.training.reporting import reporter

    with mock.patch.object(loop, "gc_frozen", nullcontext), mock.patch.object(reporter, "draw_losses"):
        yield


def run_here(config: Path, *options: str) -> Outcome:
    """Run the program in this process, on one rank: 10 times faster than ``train``, which starts one."""
    from nxd_memopt.training.__main__ import main

    returncode = 0
    with without_extras(), redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        try:
            returncode = main(["--config", str(config), *options])
        except SystemExit as stop:
            returncode = int(stop.code or 0)
        finally:
            pool.reset_process(seed=pool.SEED)
    return Outcome(returncode, stdout.getvalue(), stderr.getvalue())


def run_on_pool(config: Path, *options: str, ranks: int) -> str:
    """Run the program on the pool's ranks, which need no start; return rank 0's standard output."""
    return pool.run_on_ranks(_run_rank, ranks, str(config), options)[0]


def _run_rank(config: str, options: tuple[str, ...]) -> str:
    """Run the program on this rank of the pool, whose process group exists already."""
    from nxd_memopt.parallel_layers import parallel_state, random
    from nxd_memopt.training.config.parsing import parse_config
    from nxd_memopt.training.loop import run

    parsed = parse_config(["--config", config, *options])
    parallel = parsed.parallel
    parallel_state.initialize_model_parallel(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
    )
    random.model_parallel_manual_seed(parsed.trainer.seed)
    with without_extras(), redirect_stdout(io.StringIO()) as stdout:
        run(parsed)
    return stdout.getvalue()


def require_converted(run: Path) -> None:
    """Check that the newest checkpoint of a run converts to the files of the run's own export, byte for byte."""
    for form, own in (("hf", "export"), ("peft", "adapter")):
        if not (run / own).is_dir():
            continue
        before = _content(run)
        target = run.with_name(f"{run.name}_{form}")
        Convert(run, target, source_format="checkpoint", target_format=cast(Any, form))()
        assert _content(target) == _content(run / own) and _content(run) == before


def _content(directory: Path) -> dict[Path, bytes]:
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the rows of a record; none if nothing has been recorded, so that there is no file."""
    if name != "metrics.jsonl" and not (run / name).exists():
        return []
    return [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows(run)]


def exact(run: Path) -> list[list[Any]]:
    """What an interruption of a run must not change, for each step."""
    return [[row.get(name) for name in EXACT] for row in rows(run)]


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))
