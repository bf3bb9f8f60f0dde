"""Settings that the training program refuses are no plan either."""

from __future__ import annotations

import pytest

from nxd_memopt.architectures.configs import NAMED_CONFIGS, with_defaults
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.hardware import device_named
from nxd_memopt.planner.search.plan import evaluate
from nxd_memopt.planner.search.problem import Problem, Setting


def test_groups_that_a_ranks_heads_do_not_have_are_no_plan():
    problem = Problem(
        model=model_spec(with_defaults(NAMED_CONFIGS["smollm2-135m"])),
        device=device_named("h200"),
        devices=1,
        sequence_length=2048,
        global_batch_size=1,
    )
    memory = MemoryConfig(recompute_granularity="full", attention_head_groups=2)
    with pytest.raises(ValueError, match="attention_head_groups 2 does not divide a rank's 9 query heads and 3 KV"):
        evaluate(problem, Setting(1, "none", 1, memory))
    memory = MemoryConfig(recompute_granularity="full", attention_head_groups=3)
    assert evaluate(problem, Setting(1, "none", 1, memory)).fits
