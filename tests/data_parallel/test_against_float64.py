"""ZeRO stages on D=2 x T=2 ranks against transformers' model in float64 and a float64 AdamW, to the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nxd_memopt.parallel_layers import parallel_state
from tests.data_parallel.stages import MAX_NORM, OFFLOAD, Run, initialize
from tests.data_parallel.test_checkpoints import save
from tests.dist.pool import distributed
from tests.reference_adamw import ROUNDING, Float64AdamW
from tests.reference_models import IGNORED, VOCAB, full_parameters, hugging_face, llama_config, parallel_model

RATES = (1e-2, 0.0, 3e-3)
MICRO_BATCHES = 3
# A gradient is the result of about 20 matmuls in a row, forward and backward, each of which adds up at most
# 61 products (the vocabulary): fewer than 2,000 roundings.
GRADIENT_ROUNDINGS = 2000 * ROUNDING


def micro_batch(step: int, index: int, data_rank: int) -> dict[str, Tensor]:
    """Another number of trained tokens for each rank, and none in one micro-batch of rank 0."""
    generator = torch.Generator().manual_seed(100 * step + 10 * index + data_rank)
    ids = torch.randint(VOCAB, (2, 8), generator=generator)
    labels = ids.clone()
    labels[:, : (3 * index + 2 * data_rank + step) % 7] = IGNORED
    if (index, data_rank) == (1, 0):
        labels[:] = IGNORED
    return {"input_ids": ids, "labels": labels}


def trained_tokens(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())


@distributed(world_size=4)
@pytest.mark.parametrize(
    "stage", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("zero1", "zero2", "zero3")), OFFLOAD]
)
def test_steps_and_checkpoint(stage: str, tmp_path: Path) -> None:
    initialize(2)
    config = llama_config(initializer_range=0.1, num_key_value_heads=1, tie_word_embeddings=True)
    dense = hugging_face(config)
    run = Run.of(parallel_model(config, full_parameters(dense), sequence_parallel=True), stage)
    dense = dense.double()
    params = dict(dense.named_parameters())
    reference = Float64AdamW(
        list(params.values()),
        weight_decay=[0.1 if param.dim() > 1 else 0.0 for param in params.values()],
        betas=(0.8, 0.9),
        eps=1e-3,
        max_norm=MAX_NORM,
    )
    ranks = parallel_state.get_data_parallel_size()
    for step, lr in enumerate(RATES):
        batches = [[micro_batch(step, i, rank) for rank in range(ranks)] for i in range(MICRO_BATCHES)]
        num_tokens = sum(trained_tokens(batch) for row in batches for batch in row)
        dense.zero_grad()
        for batch in [batch for row in batches for batch in row if trained_tokens(batch)]:
            (dense(**batch).loss * trained_tokens(batch) / num_tokens).backward()
        for row in batches:
            divisor = torch.tensor([num_tokens / ranks])
            run.model(**row[parallel_state.get_data_parallel_rank()], num_items_in_batch=divisor).loss.backward()
            with torch.no_grad():
                run.model(row[0]["input_ids"])  # an evaluation between two micro-batches
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        run.reduce()
        run.optimizer.update_parameters()
        run.optimizer.zero_grad()
        gradients = [param.grad for param in params.values()]
        errors = [GRADIENT_ROUNDINGS * torch.full_like(grad, grad.abs().max().item()) for grad in gradients]
        norm = reference.step(gradients, lr, errors=errors)
        assert norm > MAX_NORM, "clipping is active"
        assert run.norms[-1] == pytest.approx(norm, rel=GRADIENT_ROUNDINGS)
        with torch.no_grad():
            for param, weight in zip(params.values(), reference.weights, strict=True):
                param.copy_(weight)
    saved = save(run, tmp_path)
    for index, name in enumerate(params):
        weight, mean, square = (
            saved[f"{kind}.{name}"] for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
        )
        reference.require(index, weight=weight, mean=mean, square=square, what=f"{stage} {name}")
        assert saved[f"optimizer.step.{name}"] == len(RATES)
