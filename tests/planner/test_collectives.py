"""The formulas of collectives: nested recompute against the collectives that a step issues, and bytes that are sent."""

from __future__ import annotations

from collections import Counter

import pytest

from nxd_memopt.certify import worker
from nxd_memopt.certify.report.judge import _shape
from nxd_memopt.planner.timing.collectives import Collective, expected_collectives, sent_bytes
from tests.certify_steps import FULL, GPT_NEOX, LLAMA, parallel, request
from tests.reference import assert_says, error_message


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "tensor"])
@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", [LLAMA, pytest.param(GPT_NEOX, marks=pytest.mark.slow)], ids=["llama", "gpt_neox"])
def test_nested_recompute_equals_the_step(config, number, sequence):
    """Five layers: the last chunk of two or three layers is shorter."""
    memory = {**FULL, "recompute_method": "nested", "recompute_num_layers": number}
    asked = request("cpu", config, memory, parallel=parallel(4, sequence=sequence), sequence_length=32)
    measured = worker.measure_variant(asked, 5).collectives
    assert measured == expected_collectives(_shape(asked, 5), asked.memory, stops_early=True)


def test_nested_recompute_on_xla_is_refused():
    asked = request("cpu", LLAMA, {**FULL, "recompute_method": "nested"}, parallel=parallel(4, sequence=True))
    message = error_message(lambda: expected_collectives(_shape(asked, 4), asked.memory, stops_early=False), ValueError)
    assert_says(message, "nested", "uniform")


def test_sent_bytes_are_those_of_rings():
    of_each = {"all_gather": 75.0, "reduce_scatter": 75.0, "all_to_all": 75.0, "all_reduce": 150.0}
    for kind, expected in of_each.items():
        assert sent_bytes(Counter({Collective(kind, 100, 4): 1})) == expected
        assert sent_bytes(Counter({Collective(kind, 100, 4): 3})) == 3 * expected
        assert sent_bytes(Counter({Collective(kind, 100, 1): 1})) == 0
