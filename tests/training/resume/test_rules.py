"""Tests what happens to options that a resumed run changes."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from nxd_memopt.checkpoint.sharded.fingerprint import flat_config
from nxd_memopt.options import NEW_RUN, WARM_START, Resume
from nxd_memopt.training.config.parsing import config_from_mapping
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.resume.changes import Changes, changed_draws, compare_options, recorded_options, require_known
from nxd_memopt.training.resume.rules import RULES, options_when_asked
from tests.training.runs import LLAMA


def build(**sections: dict[str, Any]) -> TrainConfig:
    model = {"tokenizer": "t", "config_overrides": LLAMA} | sections.pop("model", {})
    return config_from_mapping({"model": model, **sections})


def recorded(config: TrainConfig) -> dict[str, Any]:
    overrides = dict(config.model.config_overrides)
    return recorded_options(config, AutoConfig.for_model(overrides.pop("model_type"), **overrides))


def compare(before: TrainConfig, after: TrainConfig, *allowed: str) -> Changes:
    return compare_options(flat_config(recorded(before)), recorded(after), allowed)


def test_an_unchanged_run_has_no_differences() -> None:
    assert compare(build(), build()) == Changes()


# Sections before and after, with one change of the results that a resumed run is asked for.
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "optimizer.lr": ({}, {"optimizer": {"lr": 1e-4}}),
    "optimizer.betas": ({}, {"optimizer": {"betas": [0.8, 0.9]}}),
    "parallel.reduce_dtype": ({}, {"parallel": {"reduce_dtype": "float32"}}),
    "data.global_batch_size": ({}, {"data": {"global_batch_size": 16}}),
    "lora.lora_dropout": ({"lora": {"lora_rank": 4}}, {"lora": {"lora_rank": 4, "lora_dropout": 0.1}}),
}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "trainer.precision": ({}, {"trainer": {"precision": "bf16-mixed"}}),
    "trainer.seed": ({}, {"trainer": {"seed": 5}}),
    "data.seq_length": ({}, {"data": {"seq_length": 512}}),
    "optimizer.no_decay": ({}, {"optimizer": {"no_decay": ["norm"]}}),
    "lora.lora_rank": ({"lora": {"lora_rank": 4, "lora_alpha": 8}}, {"lora": {"lora_rank": 2, "lora_alpha": 8}}),
    "lora.use_rslora": ({"lora": {"lora_rank": 4}}, {"lora": {"lora_rank": 4, "use_rslora": True}}),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_change_of_the_results_needs_to_be_allowed(name: str) -> None:
    before, after = (build(**sections) for sections in ASKED[name])
    refused = compare(before, after, "another.option")
    assert len(refused.refusals) == 1 and not refused.notes
    assert f"{name} was " in refused.refusals[0] and f"--trainer.allow-changes {name}" in refused.refusals[0]
    allowed = compare(before, after, name)
    assert not allowed.refusals
    assert len(allowed.notes) == 1 and allowed.notes[0].startswith(f"{name}: ")


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_of_the_state_is_refused_with_what_to_do_instead(name: str) -> None:
    before, after = (build(**sections) for sections in REFUSED[name])
    changes = compare(before, after, name)
    assert len(changes.refusals) == 1 and not changes.notes
    assert f"{name} was " in changes.refusals[0] and "start a new run" in changes.refusals[0]


def test_an_option_that_this_version_lacks_is_said() -> None:
    stored = flat_config(recorded(build())) | {"optimizer.removed": 3}
    notes = compare_options(stored, recorded(build()), ()).notes
    assert notes == ["optimizer.removed was 3: this version has no such option"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_size", 48), ("num_hidden_layers", 3), ("rope_theta", 5e5), ("rms_norm_eps", 1e-5)],
)
def test_another_architecture_is_refused(name: str, value: float) -> None:
    after = build(model={"config_overrides": LLAMA | {name: value}})
    changes = compare(build(), after, f"model.config_overrides.{name}")
    assert any(
        f"config_overrides.{'rope_parameters.' if name == 'rope_theta' else ''}{name} was" in text
        for text in changes.refusals
    ), changes


def test_weights_of_another_shape_are_not_offered_as_a_start() -> None:
    for name, value, remedy in (("hidden_size", 48, NEW_RUN), ("rms_norm_eps", 1e-5, WARM_START)):
        after = build(model={"config_overrides": LLAMA | {name: value}})
        refusal = compare(build(), after, f"model.config_overrides.{name}").refusals[0]
        assert refusal.endswith(f"restore it, or {remedy}")
    for name in ("num_moe_experts", "moe_router_topk"):
        assert RULES[f"moe.{name}"].resume is Resume.REFUSED and f"moe.{name}" not in options_when_asked()


def test_another_architecture_in_config_json_is_refused() -> None:
    """The options are the same; the file of model.pretrained has changed."""
    sizes = {name: value for name, value in LLAMA.items() if name != "model_type"} | {"rms_norm_eps": 1e-5}
    current = recorded_options(build(), AutoConfig.for_model("llama", **sizes))
    changes = compare_options(flat_config(recorded(build())), current, ())
    assert "model.config_overrides.rms_norm_eps was 1e-06 and is 1e-05" in changes.refusals[0]


def test_an_override_with_the_value_of_the_pretrained_configuration_is_no_change() -> None:
    after = build(model={"config_overrides": LLAMA | {"rms_norm_eps": 1e-6}})  # transformers' default
    assert compare(build(), after) == Changes()


def test_dropout_may_change_when_asked() -> None:
    after = build(model={"config_overrides": LLAMA | {"attention_dropout": 0.1}})
    name = "model.config_overrides.attention_dropout"
    assert f"--trainer.allow-changes {name}" in compare(build(), after).refusals[0]
    assert compare(build(), after, name).notes == [f"{name}: 0.0 -> 0.1, from this step on"]


@pytest.mark.parametrize(
    ("section", "option", "values"),
    [
        ("data", "micro_batch_size", (1, 2)),
        ("parallel", "virtual_pipeline_model_parallel_size", (None, 2)),
        ("parallel", "pipeline_model_parallel_layout", (None, [1, 1])),
    ],
)
def test_another_division_draws_other_numbers_with_dropout_alone(section: str, option: str, values: list[Any]) -> None:
    for dropout in (0.0, 0.1):
        model = {"config_overrides": LLAMA | {"attention_dropout": dropout}}
        sizes = {"parallel": {"pipeline_model_parallel_size": 2}}
        before, after = (
            recorded(build(model=model, **sizes | {section: sizes.get(section, {}) | {option: value}}))
            for value in values
        )
        assert changed_draws(flat_config(before), before) == []
        said = f"changed {section}.{option}: dropout and jitter draw other numbers than an uninterrupted run"
        assert changed_draws(flat_config(before), after) == ([said] if dropout else [])


def test_one_stage_on_each_rank_is_the_default() -> None:
    model = {"config_overrides": LLAMA | {"attention_dropout": 0.1}}
    sizes = {"pipeline_model_parallel_size": 2}
    before, after = (
        recorded(build(model=model, parallel=sizes | {"virtual_pipeline_model_parallel_size": chunks}))
        for chunks in (None, 1)
    )
    assert changed_draws(flat_config(before), after) == []


def test_another_pretrained_directory_with_an_equal_configuration() -> None:
    before, after = build(model={"pretrained": "a"}), build(model={"pretrained": "b"})
    said = "model.pretrained: a -> b, with an equal configuration; the weights stay as they are"
    assert compare(before, after).notes == [said]


def test_content_is_not_said_to_be_equal_where_it_may_differ() -> None:
    before, after = build(data={"dataset": "a.jsonl"}), build(data={"dataset": "b.jsonl"})
    assert compare(before, after).notes == ["data.dataset: a.jsonl -> b.jsonl, with equal content"]
    assert compare(before, after, "data.dataset").notes == ["data.dataset: a.jsonl -> b.jsonl"]


def test_an_option_that_the_checkpoint_lacks_had_its_default() -> None:
    stored = flat_config(recorded(build()))
    del stored["optimizer.eps"], stored["trainer.allow_tf32"]
    assert compare_options(stored, recorded(build()), ()) == Changes()
    changed = recorded(build(optimizer={"eps": 1e-6}))
    assert "optimizer.eps was 1e-08 and is 1e-06" in compare_options(stored, changed, ()).refusals[0]


def test_allowed_changes_are_options_that_can_be_allowed() -> None:
    require_known(options_when_asked())
    with pytest.raises(ValueError, match=r"'optimizer.lrr' is not one of .*did you mean 'optimizer.lr'"):
        require_known(["optimizer.lrr"])
    with pytest.raises(ValueError, match=r"'data.seq_length' is not one of"):
        require_known(["data.seq_length"])


def test_the_micro_batch_of_a_model_with_experts_decides_its_results() -> None:
    """Capacities and balancing losses are those of a micro-batch."""
    mixtral = {"tokenizer": "t", "config_overrides": LLAMA | {"model_type": "mixtral", "num_local_experts": 4}}
    before, after = (
        config_from_mapping({"model": mixtral, "data": {"micro_batch_size": size, "global_batch_size": 8}})
        for size in (1, 2)
    )
    refused = compare(before, after)
    assert len(refused.refusals) == 1 and "--trainer.allow-changes data.micro_batch_size" in refused.refusals[0]
    assert not compare(before, after, "data.micro_batch_size").refusals
