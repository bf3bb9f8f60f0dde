"""Published models: as many parameters as their files have, and every spelling of their names."""

from __future__ import annotations

import math

import pytest

from nxd_memopt.architectures.configs import NAMED_CONFIGS, load_model_config, require_sizes, with_defaults
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.architectures.parameters import parameters, require_supported_values
from nxd_memopt.architectures.published import published_name, spelled
from nxd_memopt.command_line import recipes
from nxd_memopt.training.config.parsing import recipe_path
from tests.reference import assert_says, error_message

# Numbers of parameters that the Hugging Face Hub states for the safetensors files, tied weights once.
PUBLISHED = {
    "gpt-neox-20b": 20_554_567_680,
    "granite-3.3-2b-instruct": 2_533_539_840,
    "granite-3.3-8b-instruct": 8_170_864_640,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "phi-3-mini-4k-instruct": 3_821_079_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm2-135m": 134_515_008,
}


def test_models_have_their_published_numbers_of_parameters():
    found = {}
    for name, published in NAMED_CONFIGS.items():
        config = with_defaults(published)
        require_sizes(config)
        require_supported_values(config, "it")
        found[name] = sum(math.prod(parameter.shape) for parameter in parameters(model_spec(config)))
    assert found == PUBLISHED


def test_what_the_number_of_parameters_does_not_show():
    """Heads, windows and RoPE."""
    assert model_spec(with_defaults(NAMED_CONFIGS["qwen3-0.6b"])).head_dim == 128
    assert model_spec(with_defaults(NAMED_CONFIGS["llama-3.2-3b"])).head_dim == 128
    windows = {name: set(model_spec(with_defaults(config)).windows) for name, config in NAMED_CONFIGS.items()}
    assert windows.pop("mistral-7b-v0.1") == {4096} and windows.pop("phi-3-mini-4k-instruct") == {2047}
    assert set().union(*windows.values()) == {None}
    rope = NAMED_CONFIGS["llama-3.2-1b"]["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("llama3", 32.0, 5e5)
    assert NAMED_CONFIGS["llama-3-8b"]["rope_parameters"]["rope_type"] == "default"
    assert NAMED_CONFIGS["qwen3-30b-a3b"]["norm_topk_prob"] and not NAMED_CONFIGS["qwen3-8b"].get("tie_word_embeddings")


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini-4k-instruct"),
        ("ibm-granite/granite-3.3-8b-instruct", "granite-3.3-8b-instruct"),
        ("qwen3_30b_a3b", "qwen3-30b-a3b"),
        ("mistral-7b", "mistral-7b-v0.1"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("Qwen2.5-7B-Instruct", None),  # its context is another one
        ("llama-3-80b", None),
    ],
)
def test_spellings(spelling, name):
    assert published_name(spelling) == name
    if name is not None:
        assert load_model_config(spelling) == NAMED_CONFIGS[name]


def test_each_name_has_a_spelling_of_its_own():
    assert all(published_name(name) == name for name in NAMED_CONFIGS)
    assert all(spelled(name, recipes()) == name for name in recipes())


def test_recipes_in_other_spellings():
    assert recipe_path("llama3-8b") == recipe_path("Llama-3_8B") == recipe_path("llama3_8b")
    assert_says(error_message(lambda: recipe_path("lama")), "no recipe 'lama'", "llama3_8b")
