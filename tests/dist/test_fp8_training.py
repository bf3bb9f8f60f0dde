"""Runs of the training program with float8 layers: shardings, stages, resumption and export against one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nxd_memopt.backends import backend
from nxd_memopt.planner.techniques import fp8
from tests.dist import pool
from tests.training.runs import LLAMA, TENSOR_AND_SEQUENCE, _run_rank, losses, run_here, summary, write_config

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 4}
MODEL = {"config_overrides": LLAMA | SIZES}
PROGRAM = {"max_steps": 6, "precision": "bf16-mixed", "fp8": "hybrid", "export": False, "save_interval": 3}
STAGES = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}


@contextmanager
def on_this_device() -> Iterator[None]:
    """Let the CPU compute small layers in float8."""
    with mock.patch.object(type(backend), "fp8_refusal", lambda self: None), mock.patch.object(fp8, "LEAST_PRODUCTS", 0):
        yield


def _run_float8(config: str, options: tuple[str, ...]) -> str:
    with on_this_device():
        return _run_rank(config, options)


def run(directory: Path, *options: str, ranks: int, **sections: dict[str, Any]) -> list[float]:
    directory.mkdir(exist_ok=True)
    trainer = PROGRAM | sections.pop("trainer", {})
    data = {"micro_batch_size": 1} | sections.pop("data", {})
    model = MODEL | {"tokenizer": str(directory / "tokenizer")} | sections.pop("model", {})
    config = write_config(directory, model=model, trainer=trainer, data=data, **sections)
    print(pool.run_on_ranks(_run_float8, ranks, str(config), options)[0])
    return losses(directory / "run")
