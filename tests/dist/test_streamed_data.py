"""Text that is tokenized while it is used: one order for all ranks and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.runs import (
    TENSOR_AND_SEQUENCE,
    losses,
    run_here,
    run_on_pool,
    write_config,
)

pytestmark = pytest.mark.slow

DATA = {"streaming": True, "micro_batch_size": 1, "global_batch_size": 4}


@pytest.mark.parametrize(("ranks", "parallel"), [(2, {}), (4, TENSOR_AND_SEQUENCE)], ids=["data2", "tensor2_data2"])
def test_a_run_resumes_on_other_ranks(tmp_path: Path, ranks: int, parallel: dict[str, object]) -> None:
    """The losses of one process that was not interrupted, although the text goes on where the first ranks stopped."""
    for name in ("uninterrupted", "resumed"):
        (tmp_path / name).mkdir()
    optimizer = {"decay_steps": 8}
    reference = write_config(tmp_path / "uninterrupted", data=DATA, optimizer=optimizer, trainer={"export": False})
    assert run_here(reference).returncode == 0
    dataset = {"dataset": str(tmp_path / "uninterrupted" / "lines.jsonl")}
    tokenizer = {"tokenizer": str(tmp_path / "uninterrupted" / "tokenizer")}
    options = {"model": tokenizer, "data": DATA | dataset, "optimizer": optimizer}
    first = write_config(tmp_path / "resumed", parallel=parallel, trainer={"max_steps": 3, "export": False}, **options)
    run_on_pool(first, ranks=ranks)
    second = write_config(tmp_path / "resumed", trainer={"export": False}, **options)
    outcome = run_here(second)
    assert outcome.returncode == 0, outcome.stderr
    assert "resuming after step 3" in outcome.stdout
    assert losses(tmp_path / "resumed" / "run") == pytest.approx(losses(tmp_path / "uninterrupted" / "run"), rel=2e-5)
