"""The search for the highest moment of a step looks at every layer that can have it."""

from __future__ import annotations

import pytest

from nxd_memopt.planner import peak
from nxd_memopt.planner.candidates import settings
from nxd_memopt.planner.hardware import device_named
from nxd_memopt.planner.model_configs import NAMED_CONFIGS, with_defaults
from nxd_memopt.planner.plan import evaluate
from nxd_memopt.planner.problem import Problem


@pytest.mark.parametrize("model", ["mixtral-8x7b", "gpt-neox-20b"])
def test_layers_that_are_left_out_do_not_have_the_peak(model, monkeypatch):
    """Of Mixtral the statistics of routers grow from layer to layer."""
    asked = Problem(with_defaults(NAMED_CONFIGS[model]), device_named("a100-40gb"), 8, 32768)
    tried = [each for each in settings(asked) if each.tensor_model_parallel_size in (1, 8) and not each.cuda_graph]
    found = [evaluate(asked, each).memory for each in tried]
    monkeypatch.setattr(peak, "_is_decisive", lambda *_: True)
    assert found == [evaluate(asked, each).memory for each in tried]
