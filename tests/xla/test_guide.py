"""The developer guide's blocks on simulated NeuronCores, and torch's checkpoint function under the alias there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.test_public_checkpoint import (
    test_a_retained_graph_recomputes_again,
    test_contexts_are_entered_around_both_passes,
    test_options_change_no_result,
    test_what_it_cannot_honour_is_refused,
    test_without_gradients_it_only_runs,
)
from tests.guide import test_guide
from tests.reference import assert_says
from tests.xla.test_backend import run_python

__all__ = [
    "test_a_retained_graph_recomputes_again",
    "test_contexts_are_entered_around_both_passes",
    "test_options_change_no_result",
    "test_what_it_cannot_honour_is_refused",
    "test_without_gradients_it_only_runs",
]

IMPORTS = """
import types, sys, torch
earlier = types.ModuleType("earlier")  # imported before the alias, as transformers may have been
exec("from torch.utils.checkpoint import checkpoint as recompute", vars(earlier))
sys.modules["earlier"] = earlier
import nxd_memopt.compat
from torch.utils.checkpoint import checkpoint
import torch.utils.checkpoint as module
from nxd_memopt import memory
functions = [checkpoint, module.checkpoint, torch.utils.checkpoint.checkpoint, earlier.recompute]
assert all(function is memory.checkpoint for function in functions), functions
from nxd_memopt.backends import backend
from nxd_memopt.backends.neuron.xla_inspect import traced_hlo
for options in ({}, {"use_reentrant": True}, {"use_reentrant": False}):
    x = torch.ones(4, 4, device="xla", requires_grad=True)
    checkpoint(lambda t: (t @ t).sin(), x, **options).sum().backward()
    assert traced_hlo([x.grad]).count("opt-barrier(") == 1
x = torch.ones(4, device="xla", requires_grad=True)
module.checkpoint_sequential([torch.sin, torch.cos], 2, x, use_reentrant=False).sum().backward()
assert torch.allclose(x.grad.cpu(), -torch.sin(torch.sin(torch.ones(4))) * torch.cos(torch.ones(4)))
print("barriers are there")
"""


@pytest.mark.slow
def test_blocks_of_the_guide_equal_one_rank(tmp_path: Path) -> None:
    test_guide.test_blocks_equal_one_rank(False, tmp_path)


def test_torchs_checkpoint_is_the_barrier_checkpoint_under_the_alias() -> None:
    finished = run_python(IMPORTS)
    assert finished.stdout.strip() == "barriers are there", finished.stderr


@pytest.mark.slow
def test_torchs_checkpoint_refuses_flags_that_undo_it() -> None:
    finished = run_python(IMPORTS, NEURON_CC_FLAGS="-O2")
    assert finished.returncode != 0 and "there" not in finished.stdout
    assert_says(finished.stderr, "ValueError", "NEURON_CC_FLAGS=-O1")
