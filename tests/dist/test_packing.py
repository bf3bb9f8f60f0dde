"""Packed rows over ranks: the loss of separate documents, and a step that does not depend on how it is divided."""

from __future__ import annotations

import numpy as np
import pytest

from tests.dist.pool import distributed, run_on_ranks
from tests.packed_rows import check_packed_losses, run_steps


@distributed(world_size=[1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"fused_linear_cross_entropy": False}, {"attention_backend": "tiled"}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "neox"])
def test_packed_rows_have_the_loss_of_separate_documents(name, options, world_size):
    check_packed_losses(name, world_size, options)


@distributed(world_size=1)
@pytest.mark.parametrize("name", ["mistral", "qwen2 tied, window in the second layer"])
def test_packed_rows_have_the_loss_of_separate_documents_in_a_window(name, world_size):
    """The check of an export by transformers too: it adds no window to a mask that it is given."""
    check_packed_losses(name, world_size, {})


@pytest.mark.parametrize(
    ("ranks", "micro_batch_size", "options"),
    [
        (1, 1, {}),
        (2, 1, {}),
        (4, 1, {}),
        (4, 1, {"sharding": "zero1"}),
        (2, 4, {"tensor_model_parallel_size": 2}),
    ],
    ids=["accumulation4", "data2_accumulation2", "data4", "data4_zero1", "tensor2"],
)
def test_a_step_is_the_same_in_any_division(ranks: int, micro_batch_size: int, options: dict) -> None:
    """Rows have 10, 0, 1 and 9 trained tokens: a mean of means, or a NaN of the empty row, would show."""
    expected, weights = run_on_ranks(run_steps, 1, 4, {})[0]
    for values, found in run_on_ranks(run_steps, ranks, micro_batch_size, options):
        assert values == pytest.approx(expected, rel=1e-6)
        for name, value in weights.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
