"""Rows of documents: what is packed where, which tokens are trained, and the tensors of a micro-batch."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.modules.causal_lm import IGNORE_INDEX
from nxd_memopt.ops.packed import PackedDocuments
from nxd_memopt.training.config.train_config import DataConfig, ModelConfig, TrainConfig
from nxd_memopt.training.data import packing
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.data.packing import (
    DOCUMENT_START,
    ID_MASK,
    NOT_TRAINED,
    BestFit,
    Concatenation,
    Tokens,
)
from nxd_memopt.training.evaluation import _batches
from nxd_memopt.training.parallelize import parallelize
from tests.memory.test_cuda_graph import PlayedGraph
from tests.packed_rows import (
    LENGTH,
    STEP_LENGTHS,
    STEP_UNTRAINED,
    isolated_batch,
    loss_of_separate_documents,
    packed_rows,
    run_steps,
)
from tests.reference_models import CONFIGS, hugging_face, llama_config, parallel_model
from tests.training.runs import END, rows, run_here, summary, write_config

LENGTHS = [5, 30, 8, 1, 16, 9, 16, 7, 40, 3]


def documents(lengths: list[int]) -> list[Tokens]:
    """Document i has tokens 100 i + 1, 100 i + 2, ..."""
    return [np.arange(100 * i + 1, 100 * i + 1 + length, dtype=np.int32) for i, length in enumerate(lengths)]


def pack(packer: BestFit | Concatenation, documents: list[Tokens]) -> list[Tokens]:
    """The rows of all documents."""
    return [*(row for document in documents for row in packer.add(document)), *packer.finish()]


def pieces(packed: list[Tokens]) -> list[list[int]]:
    """The ids of each document of the rows, as attention sees them: a row's first token starts one."""
    found = []
    for row in packed:
        starts = [0, *(np.flatnonzero(row[1:] & DOCUMENT_START) + 1), len(row)]
        found += [(row[a:b] & ID_MASK).tolist() for a, b in pairwise(starts)]
    return found


def test_concatenated_documents_continue_in_the_next_row() -> None:
    packed = pack(Concatenation(16), documents(LENGTHS))
    joined = np.concatenate(documents(LENGTHS))
    assert [(row & ID_MASK).tolist() for row in packed] == joined[: len(packed) * 16].reshape(-1, 16).tolist()
    assert len(packed) == sum(LENGTHS) // 16
    assert sum(int(np.count_nonzero(row & DOCUMENT_START)) for row in packed) == len(LENGTHS) - 1  # one is dropped
    # document 1 has 11 tokens in row 0, 16 in row 1 and 3 in row 2
    assert pieces(packed)[:4] == [
        list(range(1, 6)),
        list(range(101, 112)),
        list(range(112, 128)),
        list(range(128, 131)),
    ]


def test_best_fit_cuts_only_documents_longer_than_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "WINDOW_TOKENS", 60)  # several windows
    packed = pack(BestFit(16, padding_id=END, seed=0), documents(LENGTHS))
    found = [piece for piece in pieces(packed) if piece[0] != END]
    expected = [
        document[start : start + 16].tolist()
        for document in documents(LENGTHS)
        for start in range(0, len(document), 16)
    ]
    assert sorted(found) == sorted(expected)
    for row in packed:
        is_padding = (row & ID_MASK) == END
        assert np.array_equal((row & NOT_TRAINED) != 0, is_padding)
        assert np.count_nonzero(row[is_padding] & DOCUMENT_START) == min(1, is_padding.sum())
    assert [row.tolist() for row in pack(BestFit(16, padding_id=END, seed=0), documents(LENGTHS))] == [
        row.tolist() for row in packed
    ]


def test_best_fit_takes_the_row_with_the_least_space() -> None:
    # 12 and 10 open rows with 4 and 6 left; 6 fits the second exactly, and 4 the first
    packed = pack(BestFit(16, padding_id=END, seed=0), documents([4, 10, 6, 12]))
    assert len(packed) == 2 and not any((row & NOT_TRAINED).any() for row in packed)
    assert sorted(Counter(map(len, pieces(packed))).items()) == [(4, 1), (6, 1), (10, 1), (12, 1)]


def test_best_fit_loses_and_repeats_no_token() -> None:
    seed = 3
    lengths = np.random.default_rng(seed).integers(1, 70, size=200).tolist()
    packed = np.stack(pack(BestFit(32, padding_id=END, seed=seed), documents(lengths)))
    kept = (packed & ID_MASK)[(packed & NOT_TRAINED) == 0]
    assert Counter(kept.tolist()) == Counter(np.concatenate(documents(lengths)).tolist())
    # No piece of a cut document is taken for the end of the document before it in its row.
    cut = [document[start : start + 32].tolist() for document in documents(lengths) for start in range(0, 70, 32)]
    assert sorted(piece for piece in pieces(list(packed)) if piece[0] != END) == sorted(filter(None, cut))
    assert (packed & NOT_TRAINED).astype(bool).mean() < 0.05


def test_labels_bounds_and_positions_of_a_micro_batch() -> None:
    batch = MicroBatch.of(packed_rows(), divisor=7, num_boundaries=9)
    assert batch.documents is not None
    assert batch.documents.boundaries.tolist() == [0, 5, 6, 12, 24, 27, 36, 36, 36]
    reference = PackedDocuments.of(batch.documents.boundaries, 3, LENGTH)
    assert torch.equal(batch.documents.ids, reference.ids)
    assert torch.equal(batch.documents.positions(), reference.positions())
    ignored = [(0, column) for column in (0, 2, 5, 6, 8)] + [(1, 0), (1, 4), (2, 0), (2, 3)]
    assert (batch.labels == IGNORE_INDEX).nonzero().tolist() == [list(place) for place in ignored]
    assert torch.equal(batch.labels.where(batch.labels >= 0, batch.ids), batch.ids)
    assert batch.divisor.tolist() == [7] and int(batch.ids.max()) <= ID_MASK
    together = MicroBatch.of(packed_rows(), divisor=7)
    assert together.documents is None
    assert (together.labels == IGNORE_INDEX).nonzero().tolist() == [[0, 2], [0, 8], [1, 4]]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_held_out_row_is_evaluated_once(replicas: int, size: int) -> None:
    """7 rows, which no division but one fits: ranks run equally many batches, and copies add nothing."""
    held_out = packed_rows(STEP_LENGTHS[:7], not_trained=((6, 3),))
    data = DataConfig(micro_batch_size=size)
    config = TrainConfig(ModelConfig(tokenizer="none", config_overrides={"model_type": "llama"}), data=data)
    shares = [_batches(held_out, config, rank, replicas, torch.device("cpu")) for rank in range(replicas)]
    assert {len(share) for share in shares} == {math.ceil(math.ceil(7 / replicas) / size)}
    batches = [batch for share in shares for batch in share]
    assert {batch.ids.shape for batch in batches} == {(size, LENGTH)}
    # Labels of a copy are all ignored; a row's own ones are those of a batch with all rows.
    expected = isolated_batch(held_out)
    found = [labels.tolist() for batch in batches for labels in batch.labels if (labels != IGNORE_INDEX).any()]
    assert sorted(found) == sorted(expected.labels.tolist())
    assert {batch.divisor.item() for batch in batches} == {expected.divisor.item()}


def test_a_step_has_the_loss_of_its_separate_documents() -> None:
    """Against transformers, with a row of four that has no trained token."""
    values, _ = run_steps(1, {})
    first = packed_rows(STEP_LENGTHS, not_trained=STEP_UNTRAINED)[:4]
    expected = loss_of_separate_documents(hugging_face(CONFIGS["llama"]()), first, STEP_LENGTHS[:4])
    assert values[0] == pytest.approx(expected.item(), rel=1e-5)  # fp32 sums in another order


def test_documents_that_are_not_isolated_see_each_other() -> None:
    values, _ = run_steps(2, {"isolate_documents": False})
    first = packed_rows(STEP_LENGTHS, not_trained=STEP_UNTRAINED)[:4]
    one_document = tuple((LENGTH,) for _ in range(4))
    expected = loss_of_separate_documents(hugging_face(CONFIGS["llama"]()), first, one_document)
    assert values[0] == pytest.approx(expected.item(), rel=1e-5)


def test_a_replay_copies_every_tensor_of_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording replays with the second batch's labels, bounds, positions and divisor."""
    torch.manual_seed(0)
    model = parallel_model(llama_config(), attention_backend="tiled")
    monkeypatch.setattr(backend, "capture_refusal", lambda: None)
    monkeypatch.setattr(backend, "capture", lambda function, pool_of: PlayedGraph(function, list(model.parameters())))
    config = TrainConfig(ModelConfig(tokenizer="none", config_overrides={"model_type": "llama"}))
    _, forward_backward = parallelize(model, config)
    layouts = (((5, 1, 6),), ((12,),), ((4, 8),), ((2, 2, 8),), ((7, 5),))
    for i, lengths in enumerate(layouts):
        packed = packed_rows(lengths, not_trained=((0, i + 1),), seed=i)
        batch = MicroBatch.of(packed, divisor=i + 1, num_boundaries=5)
        found = forward_backward(batch)
        with torch.no_grad():
            assert found.item() == pytest.approx(batch.loss(model).item(), rel=1e-6), i


def test_a_run_and_its_export_have_one_held_out_loss(tmp_path: Path) -> None:
    config = write_config(tmp_path, trainer={"export": "verify", "max_steps": 3, "save_interval": "never"})
    outcome = run_here(config, "--data.packing", "best_fit")
    assert outcome.returncode == 0, outcome.stderr
    assert summary(tmp_path / "run")["transformers_difference"] < 1e-5  # fp32 sums in another order
    assert "packing best_fit: at most" in outcome.stdout
    assert "documents: isolated in sdpa attention" in outcome.stdout
    assert len(rows(tmp_path / "run")) == 3
