"""The moments of a step's backward, and the search for the highest one."""

from __future__ import annotations

import pytest

from nxd_memopt.architectures.configs import NAMED_CONFIGS, with_defaults
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.planner.hardware import device_named
from nxd_memopt.planner.memory import backward_peak
from nxd_memopt.planner.memory.backward import layer_moments
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.search.candidates import settings
from nxd_memopt.planner.search.plan import evaluate
from nxd_memopt.planner.search.problem import Problem
from nxd_memopt.planner.sizes.rank_sizes import rank_sizes


@pytest.mark.parametrize("model", ["mixtral-8x7b", "gpt-neox-20b"])
def test_layers_that_are_left_out_do_not_have_the_peak(model, monkeypatch):
    """Of Mixtral the statistics of routers grow from layer to layer."""
    asked = Problem(model_spec(with_defaults(NAMED_CONFIGS[model])), device_named("a100-40gb"), 8, 32768)
    tried = [each for each in settings(asked) if each.tensor_model_parallel_size in (1, 8) and not each.cuda_graph]
    found = [evaluate(asked, each).memory for each in tried]
    monkeypatch.setattr(backward_peak, "_decisive_layers", lambda sizes, *_: range(sizes.num_layers))
    assert found == [evaluate(asked, each).memory for each in tried]


@pytest.mark.parametrize(("tensor_size", "copies"), [(1, (True, True)), (2, (False, True)), (4, (False, False))])
def test_wide_experts_copy_the_rows_of_their_matmuls(tensor_size, copies):
    """Of Mixtral, 14,336 columns of an expert: a matmul with at least 8,192 of them on the rank reads a copy.

    The gradient of gate and up, twice as wide, copies a quarter of the 4,096 columns of the tokens at a time.
    """
    config = with_defaults(NAMED_CONFIGS["mixtral-8x7b"])
    parallel = ParallelConfig(tensor_size, sequence_parallel_enabled=tensor_size > 1)
    sizes = rank_sizes(model_spec(config), parallel, sequence_length=1000, micro_batch_size=3, dtype="bfloat16")
    moments = {each.name: each.temporary for each in layer_moments(sizes, MemoryConfig(), Kernels(True, "flash4"))}
    rows = 3000 * 2
    found = [moments[f"MLP, {name}"]["copied rows"] for name in ("last projection", "first projections")]
    assert found == [rows * 4096 * 2 * copies[0], rows * 1024 * 2 * copies[1]]
