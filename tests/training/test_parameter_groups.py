"""Tests the groups of weight decay: which parameters they have, and what a wrong pattern says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxd_memopt.training.config.train_config import OptimizerConfig
from nxd_memopt.training.optimizer import MasterWeightOptimizer
from nxd_memopt.training.parameter_groups import parameter_groups, require_matches
from tests.reference import assert_says, error_message
from tests.training.runs import losses, run_here, write_config

SHAPES = {
    "model.embed_tokens.weight": (3, 2),
    "model.layers.0.q_proj.weight": (2, 2),
    "model.layers.0.q_proj.bias": (2,),
    "model.layers.10.q_proj.weight": (2, 2),
    "model.norm.weight": (2,),
    "lm_head.weight": (3, 2),
}


def named() -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.ones(shape))) for name, shape in SHAPES.items()]


def group_of(**options: Any) -> dict[str, float]:
    """Weight decay of each parameter."""
    params = named()
    names = {id(param): name for name, param in params}
    groups = parameter_groups(params, OptimizerConfig(weight_decay=0.5, **options))
    found = {names[id(each)]: group.weight_decay for group in groups for each in group.parameters}
    assert sum(len(group.parameters) for group in groups) == len(found) == len(SHAPES)
    return found


def test_vectors_do_not_decay_by_default() -> None:
    assert group_of() == {name: 0.5 if len(shape) == 2 else 0.0 for name, shape in SHAPES.items()}
    assert set(group_of(do_layer_norm_weight_decay=True).values()) == {0.5}


def test_patterns_match_parts_of_names() -> None:
    found = group_of(no_decay=("embed_tokens", "layers.?.*weight"))
    assert [name for name, decay in found.items() if decay] == ["model.layers.10.q_proj.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"no_decay": ("embed_token_",)}, ("optimizer.no_decay 'embed_token_'", "6 trained", "model.layers.*.q_proj")),
        ({"no_decay": ("*",)}, ("pattern '*'", "names no parameter")),
    ],
)
def test_what_a_wrong_pattern_says(options: dict[str, Any], says: tuple[str, ...]) -> None:
    assert_says(error_message(lambda: require_matches(named(), OptimizerConfig(**options))), *says)


def test_the_update_decays_the_groups_with_decay() -> None:
    params = dict(named())
    optimizer = MasterWeightOptimizer(list(params.items()), OptimizerConfig(weight_decay=0.5, no_decay=("embed",)))
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer.reduce_gradients()
    optimizer.step(lr=0.1)
    values = {name: float(param.detach().flatten()[0]) for name, param in params.items()}
    decayed = {name: 1 - 0.1 * 0.5 for name in SHAPES if "q_proj.weight" in name or "lm_head" in name}
    assert values == pytest.approx(dict.fromkeys(SHAPES, 1.0) | decayed)


def test_a_run_reports_its_groups_and_resumes_with_the_same_only(tmp_path: Path) -> None:
    options = {"no_decay": ["embed_tokens"], "decay_steps": 8}
    directory = tmp_path / "half"
    directory.mkdir()
    config = write_config(directory, optimizer=options, trainer={"export": False})
    outcome = run_here(config, "--trainer.max-steps", "4")
    assert outcome.returncode == 0, outcome.stderr
    assert "weight decay 0: 6,288 parameters in 6 tensors" in outcome.stdout
    for changed in (("--optimizer.no-decay", "norm"), ("--optimizer.do-layer-norm-weight-decay",)):
        refused = run_here(config, *changed)
        assert refused.returncode == 2 and "restore it" in refused.stderr and "--model.warm-start" in refused.stderr
    assert run_here(config).returncode == 0
    uninterrupted = tmp_path / "uninterrupted"
    uninterrupted.mkdir()
    assert run_here(write_config(uninterrupted, optimizer=options, trainer={"export": False})).returncode == 0
    assert losses(directory / "run") == losses(uninterrupted / "run")


def test_a_pattern_is_checked_before_a_file_is_written(tmp_path: Path) -> None:
    outcome = run_here(write_config(tmp_path, optimizer={"no_decay": ["wte"]}))
    assert outcome.returncode == 2 and "optimizer.no_decay 'wte' matches none" in outcome.stderr
    assert not (tmp_path / "run").exists()
