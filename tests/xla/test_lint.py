"""The lint of graphs finds what Neuron's compiler refuses, and nothing else; queues of experts at the largest size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.backends.neuron import MOST_OF_TOP_K, xla_inspect
from nxd_memopt.modules.moe.capacity import queue_positions
from tests.reference import assert_says, error_message
from tests.xla.lint import unsupported

LONG = 20_000  # more than a top-k may find

CASES: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "argsort": (lambda x: x.argsort(), ["sort of s64", f"sort, of which {LONG} elements are used"]),
    "cumsum": (lambda x: x.cumsum(0), ["reduce-window of s64"]),
    "matmul": (lambda x: x.unsqueeze(0) @ x.unsqueeze(1), ["dot of s64"]),
    "scatter-add": (lambda x: torch.zeros_like(x).scatter_add_(0, x, x), ["scatter of s64 with add"]),
    "count": (lambda x: (x > 1).sum(), ["reduce of s64 with add"]),
    "float sort": (lambda x: x.float().sort().values, [f"sort, of which {LONG} elements are used"]),
    "large top-k": (lambda x: torch.topk(x.float(), 17_000).values, ["sort, of which 17000 elements are used"]),
    "top-k": (lambda x: torch.topk(x.float(), MOST_OF_TOP_K).indices, []),
    "scatter": (lambda x: torch.zeros_like(x).scatter_(0, x, x), []),
    "maximum": (lambda x: x.amax(), []),
    "float sums": (lambda x: x.float().cumsum(0) + x.float().sum(), []),
    "random numbers": (lambda x: torch.rand_like(x, dtype=torch.float32), []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_lint_finds(name):
    function, expected = CASES[name]
    x = torch.arange(LONG).to(backend.device)
    backend.mark_step()
    assert unsupported(xla_inspect.traced_hlo([function(x)])) == expected


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_queues_of_the_largest_capacity(policy):
    """65,536 tokens: one place more is refused, with the highest weights alone."""
    weights, experts = (torch.zeros(2**16, 1, dtype=dtype).to(backend.device) for dtype in (torch.float32, torch.int64))
    backend.mark_step()
    assert unsupported(xla_inspect.traced_hlo([queue_positions(weights, experts, 2, policy, MOST_OF_TOP_K)])) == []
    if policy == "position":
        queue_positions(weights, experts, 2, policy, MOST_OF_TOP_K + 1)
        return
    message = error_message(lambda: queue_positions(weights, experts, 2, policy, MOST_OF_TOP_K + 1))
    assert_says(message, "16,385 highest weights", "backend xla finds at most 16,384", "set it to 'position'")
