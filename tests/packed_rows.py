"""Packed rows for the tests, and what each rank does with them: losses of documents, optimizer steps of a file."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.utils import move_model_to_device
from nxd_memopt.training.config.data_parallel import DataParallelConfig
from nxd_memopt.training.config.train_config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig, TrainerConfig
from nxd_memopt.training.data.micro_batches import MicroBatch, micro_batches
from nxd_memopt.training.data.packing import (
    DOCUMENT_START,
    ID_MASK,
    NOT_TRAINED,
    Tokens,
    documents_per_row,
    trained_tokens,
)
from nxd_memopt.training.evaluation import _transformers_loss
from nxd_memopt.training.parallelize import parallelize
from nxd_memopt.training.resume.plan import ResumePlan
from nxd_memopt.training.state import Training
from nxd_memopt.training.step import train_step
from tests.reference_models import (
    CONFIGS,
    VOCAB,
    full_parameters,
    gathered,
    hugging_face,
    local_part,
    parallel_model,
)

LENGTH = 12
DOCUMENTS = ((5, 1, 6), (12,), (3, 9))
"""Lengths of the documents of each row."""


def packed_rows(lengths=DOCUMENTS, *, not_trained=((0, 2), (0, 8), (1, 4)), seed: int = 3) -> Tokens:
    """Rows with documents of ``lengths`` and random ids; the tokens (row, column) of ``not_trained`` have the flag."""
    rows = np.random.default_rng(seed).integers(VOCAB, size=(len(lengths), LENGTH)).astype(np.int32)
    for row, of_row in enumerate(lengths):
        assert sum(of_row) == LENGTH
        rows[row, np.cumsum([0, *of_row])[:-1]] |= DOCUMENT_START
    for row, column in not_trained:
        rows[row, column] |= NOT_TRAINED
    return rows


def isolated_batch(rows: Tokens, *, spare: int = 3) -> MicroBatch:
    boundaries = len(rows) * documents_per_row(rows) + 1 + spare
    return MicroBatch.of(rows, divisor=trained_tokens(rows, isolated=True), num_boundaries=boundaries)


def loss_of_separate_documents(model: Any, rows: Tokens, lengths=DOCUMENTS) -> Tensor:
    """The sum of the token losses of each document alone, by a transformers model, divided by their number."""
    losses = []
    for row, of_row in zip(rows, lengths, strict=True):
        start = 0
        for length in of_row:
            document = torch.from_numpy(row[start : start + length].astype(np.int64))
            start += length
            ids, flagged = document & ID_MASK, (document & NOT_TRAINED) != 0
            logits = model(ids[None]).logits[0, :-1]
            losses.append(F.cross_entropy(logits, ids[1:], reduction="none")[~flagged[1:]])
    together = torch.cat(losses)
    return together.sum() / len(together)


def check_packed_losses(name: str, size: int, options: dict[str, Any]) -> None:
    """On every rank: the packed loss and gradients are those of separate documents, by transformers."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    config, rows = CONFIGS[name](), packed_rows()
    reference = hugging_face(config)
    expected = loss_of_separate_documents(reference, rows)
    expected.backward()
    batch = isolated_batch(rows)
    # transformers with the same labels and a mask of documents
    theirs = _transformers_loss(reference, batch)
    torch.testing.assert_close(theirs, expected, rtol=1e-5, atol=0)  # fp32, as below
    model = parallel_model(config, full_parameters(reference), sequence_parallel=size > 1, **options)
    move_model_to_device(model, backend.device)
    loss = batch.to(backend.device).loss(model)
    loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    assert loss.shape == ()
    torch.testing.assert_close(loss.detach().cpu(), expected.detach(), rtol=1e-5, atol=0)  # fp32 sums in another order
    wanted = dict(reference.named_parameters())
    for parameter, value in model.named_parameters():
        full = wanted[parameter].grad
        error = (value.grad.cpu() - local_part(parameter, full, config)).norm() / full.norm()
        assert error < 2e-5, f"gradient of {parameter}: relative error {error:.1e}"  # as in test_models.py


STEP_LENGTHS = ((5, 7), (12,), (1, 1, 10), (4, 4, 4), (2, 10), (12,), (6, 6), (3, 3, 6))
"""Two steps of four rows. Row 1 has no trained token, row 2 few of them."""
STEP_UNTRAINED = tuple((1, column) for column in range(12)) + tuple((2, column) for column in range(3, 11))


class ListedRows:
    """Sequences of training in an array, ``[n, S]``."""

    def __init__(self, rows: Tokens) -> None:
        self._rows = rows
        self.documents_per_row = documents_per_row(rows)

    def rows(self, positions: range) -> Tokens:
        return self._rows[list(positions)]


def run_steps(micro_batch_size: int, options: dict[str, Any]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Two optimizer steps of the rows of ``STEP_LENGTHS`` on this rank: losses and norms, and the full weights."""
    size = options.get("tensor_model_parallel_size", 1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    hf_config = CONFIGS["llama"]()
    config = TrainConfig(
        ModelConfig(tokenizer="none", config_overrides={"model_type": "llama"}),
        parallel=ParallelConfig(size, sequence_parallel_enabled=size > 1),
        memory=MemoryConfig(**options.get("memory", {})),
        data=DataConfig(
            seq_length=LENGTH,
            micro_batch_size=micro_batch_size,
            global_batch_size=4,
            isolate_documents=options.get("isolate_documents", True),
        ),
        # A large eps: AdamW's first updates would otherwise amplify the rounding of gradients near 0.
        optimizer=OptimizerConfig(lr=0.01, eps=1e-3, clip_grad=1.0),
        data_parallel=DataParallelConfig(sharding=options.get("sharding", "none")),
        trainer=TrainerConfig(max_steps=2),
    )
    full = full_parameters(hugging_face(hf_config))
    model = parallel_model(hf_config, full, sequence_parallel=size > 1)
    move_model_to_device(model, backend.device)
    optimizer, forward_backward = parallelize(model, config)
    training = Training(model, optimizer, forward_backward, ResumePlan(config, {}), {})
    rows = ListedRows(packed_rows(STEP_LENGTHS, not_trained=STEP_UNTRAINED))
    values = []
    for step in range(2):
        result = train_step(training, config, micro_batches(config.data, rows, training.plan.position(step)))
        values += [result.loss.item(), result.grad_norm.item()]
    weights = {}
    for name, param in model.named_parameters():
        weight = gathered(param, param) if dist.is_initialized() else param.detach()
        weights[name] = weight.cpu().numpy()
    return values, weights
