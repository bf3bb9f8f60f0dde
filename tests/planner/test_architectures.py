"""Tests the table of parameters: it lists what the models have, with the shapes and shards that they have."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import MistralConfig, MixtralConfig, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from nxd_memopt.architectures.adapters import adapter_shapes, adapters_of
from nxd_memopt.architectures.configs import with_defaults
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.architectures.parameters import parameters, require_shardable
from nxd_memopt.config import ParallelConfig
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.models import model_class
from nxd_memopt.modules.lora import add_adapters
from nxd_memopt.parallel_layers import parallel_state
from tests.reference import assert_says, error_message, fake_world
from tests.reference_models import CONFIGS


def build(config: Any, size: int) -> Any:
    parallel = ParallelConfig(size, sequence_parallel_enabled=size > 1)
    return model_class(config.model_type)(config, parallel=parallel, device="meta")


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_is_what_the_models_have(name, size):
    config = CONFIGS[name]()
    with fake_world(size):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        model = build(config, size)
    spec = model_spec(config)
    replicas = spec.kv_replicas(size)
    found = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert found == {parameter.name: parameter.local_shape(size, replicas) for parameter in parameters(spec)}
    # The tag of gradients that are partial sums over a rank's tokens, which the models set themselves.
    tagged = {name for name, p in model.named_parameters() if getattr(p, "sequence_parallel_enabled", False)}
    assert tagged == ({p.name for p in parameters(spec) if p.is_sequence_partial} if size > 1 else set())


def test_a_config_file_and_a_config_object_give_the_same_table():
    for make in CONFIGS.values():
        config = make()
        content = {**config.to_dict(), "num_query_groups": getattr(config, "num_query_groups", None)}
        assert model_spec(content) == model_spec(config)


@pytest.mark.parametrize(
    ("name", "changes", "size", "words"),
    [
        ("llama", {}, 3, ("num_attention_heads", "8", "tensor_model_parallel_size", "3")),
        ("llama", {"intermediate_size": 42}, 4, ("intermediate_size", "42", "4")),
        ("llama", {"num_key_value_heads": 3}, 1, ("num_attention_heads", "8", "3")),
        ("neox", {"num_query_groups": 2}, 1, ("num_query_groups 2", "leave num_query_groups out")),
        ("neox", {"hidden_size": 30}, 1, ("hidden_size", "30", "num_attention_heads", "4")),
    ],
)
def test_sizes_that_cannot_be_sharded_are_refused(name, changes, size, words):
    content = {**CONFIGS[name]().to_dict(), **changes}
    assert_says(error_message(lambda: require_shardable(model_spec(content), size)), *words)


@pytest.mark.parametrize("targets", [None, ("qkv_proj", "gate_up_proj", "down_proj")])
def test_the_parts_of_a_fused_layer_have_one_adapter(targets):
    lora, config = LoraConfig(3, 5, target_modules=targets), CONFIGS["phi3"]()
    model, spec = build(config, 1), model_spec(config)
    add_adapters(model, lora)
    named = [(name, tuple(each.shape)) for name, each in model.named_parameters() if each.requires_grad]
    shapes = [shape for name, shape in named if ".layers.0." in name]
    assert sorted(shapes) == sorted(adapter_shapes(spec, adapters_of(spec, lora), 1))
    for call in (lambda lora: adapters_of(spec, lora), lambda lora: add_adapters(build(config, 1), lora)):
        assert_says(error_message(lambda: call(LoraConfig(target_modules=("q_proj",)))), "'q_proj'", "'qkv_proj'")  # noqa: B023


def test_types_of_another_number_of_layers_are_refused():
    config = CONFIGS["qwen2 tied, window in the second layer"]()
    assert model_spec(config).has_windows
    config.num_hidden_layers = 4
    message = error_message(lambda: model_spec(config))
    assert_says(message, "layer_types names 2 layers", "num_hidden_layers is 4")


@pytest.mark.parametrize("limit", [0, 3, None])
@pytest.mark.parametrize("depth", [1, 5, 24])
@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config, Qwen2MoeConfig])
def test_windows_of_qwens_are_those_of_transformers(config, depth: int, limit: int | None) -> None:
    """Of a config.json without layer_types, which the configs fill in."""
    content = {"num_hidden_layers": depth, "use_sliding_window": True, "sliding_window": 7}
    if limit is not None:
        content["max_window_layers"] = limit
    theirs = config(**content)
    expected = tuple(7 if kind == "sliding_attention" else None for kind in theirs.layer_types)
    assert model_spec(with_defaults({"model_type": theirs.model_type, **content})).windows == expected
    assert model_spec(theirs).windows == expected


@pytest.mark.parametrize("config", [MistralConfig, MixtralConfig, Qwen3MoeConfig])
def test_a_window_is_in_every_layer_where_transformers_reads_no_types(config) -> None:
    """Config files of Qwen3-MoE have max_window_layers, which Qwen3MoeConfig has not."""
    content = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
    theirs = config(**content)
    assert model_spec(theirs).windows == (7, 7, 7)
    assert model_spec(with_defaults({"model_type": theirs.model_type, **content})).windows == (7, 7, 7)
    # It stores the types of layers, and does not read them.
    content["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    assert model_spec(with_defaults({"model_type": theirs.model_type, **content})).windows == (7, 7, 7)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_a_window_without_the_switch_is_off(model_type):
    assert (
        model_spec(with_defaults({"model_type": model_type, "num_hidden_layers": 3, "sliding_window": 7})).windows
        == (None,) * 3
    )


def test_a_window_below_one_is_refused():
    """Megatron's -1 is no bound; as a window it would let queries see later keys."""
    for window in (0, -1):
        config = {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": window}
        message = error_message(lambda config=config: model_spec(with_defaults(config)))
        assert_says(message, f"sliding_window {window} must be at least 1", "leave it out")
