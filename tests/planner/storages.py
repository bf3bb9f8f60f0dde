"""Counts the storages that a forward pass leaves for backward."""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist

from nxd_memopt.architectures.configs import NAMED_CONFIGS, with_defaults
from nxd_memopt.architectures.model_spec import ModelSpec, model_spec
from nxd_memopt.certify.measure.eager import _Recorder
from nxd_memopt.config import ParallelConfig
from nxd_memopt.planner.sizes.rank_model import RankModel, rank_model
from nxd_memopt.planner.sizes.rank_sizes import RankSizes, rank_sizes

ROWS, LENGTH = 3, 24  # of tests.reference_models.batch
ONE_RANK = ParallelConfig(1)


def named(model: str, **changes) -> ModelSpec:
    """A published model, with other options."""
    return model_spec(with_defaults({**NAMED_CONFIGS[model], **changes}))


def _batch(config, length: int, rows: int, dtype) -> tuple[ModelSpec, dict]:
    spec = config if isinstance(config, ModelSpec) else model_spec(config)
    name = str(dtype).removeprefix("torch.")
    return spec, {"sequence_length": length, "micro_batch_size": rows, "dtype": name}


def sizes_of(
    config, parallel=ONE_RANK, length: int = LENGTH, rows: int = ROWS, dtype="float32", **options
) -> RankSizes:
    """Sizes of one rank of a model, by its config or its facts."""
    spec, batch = _batch(config, length, rows, dtype)
    return rank_sizes(spec, parallel, **batch, **options)


def share_of(
    config, parallel=ONE_RANK, length: int = LENGTH, rows: int = ROWS, dtype="float32", part=None, **options
) -> RankModel:
    """Share of one rank of a model, or of a part of its layers; other arguments as ``sizes_of``."""
    spec, batch = _batch(config, length, rows, dtype)
    return rank_model(spec, rank_sizes(spec, parallel, **batch, **options), part)


def counted_bytes(net: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[int, dict]:
    """Bytes of the storages that a forward allocates and that still exist after it, with their list."""
    recorder = _Recorder()
    with recorder:
        loss = net(**inputs).loss
        # gloo's threads hold the tensors of a collective until every rank has left it
        if dist.is_initialized():
            dist.barrier()
            events = -1
            while events != len(recorder._events):
                events = len(recorder._events)
                time.sleep(0.3)
        gc.collect()
    alive: dict[int, int] = {}
    for serial, change in recorder._events:
        alive[serial] = alive.get(serial, 0) + change
    del loss
    listed = [f"{t}" for i, t in enumerate(recorder.tensors, 1) if alive[i]]
    return sum(alive.values()), listed
