"""The planned activations equal the storages that exist between forward and backward, as integers."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.models import model_class
from nxd_memopt.modules.fp8 import use_fp8
from nxd_memopt.ops.fp8 import Fp8Recipe
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.planner.memory.activations import activations
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.sizes.fp8_layers import Fp8Layers, rounded_layers
from tests.dist.pool import distributed
from tests.planner.storages import LENGTH, ROWS, counted_bytes, sizes_of
from tests.reference import assert_says, error_message
from tests.reference_models import CONFIGS, batch, gpt_neox_config, llama_config

LAYERS = 4
ONE_RANK = ParallelConfig(1)
FULL = {"recompute_granularity": "full"}
TECHNIQUES = {
    "none": {},
    "tiles": {"mlp_tile_tokens": 16},
    "groups of heads": {"attention_head_groups": 2},
    "full, tiles and groups": {**FULL, "mlp_tile_tokens": 16, "attention_head_groups": 2},
    "full": FULL,
    "uniform": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {**FULL, "recompute_method": "block", "recompute_num_layers": 3},
    "nested": {**FULL, "recompute_method": "nested"},
    "nested of 3": {**FULL, "recompute_method": "nested", "recompute_num_layers": 3},
    "full and tiles": {**FULL, "mlp_tile_tokens": 16},
    "all logits": {"fused_linear_cross_entropy": False},
}
for _modules in (
    *(["core_attn"], ["attn"], ["norm"], ["mlp_act"], ["mlp"], ["norm", "mlp_act"]),
    *(["attn", "mlp"], ["core_attn", "norm", "mlp"], ["norm", "attn", "mlp"]),
):
    TECHNIQUES["+".join(_modules)] = {"recompute_granularity": "selective", "recompute_modules": tuple(_modules)}
# GPT-NeoX's branches are merged in the layers that recompute neither attention nor MLP.
for _modules, _number in (("norm+mlp_act", 1), ("attn+mlp", 3), ("mlp", LAYERS)):
    TECHNIQUES[f"{_modules} of {_number}"] = {
        **TECHNIQUES[_modules],
        "recompute_method": "block",
        "recompute_num_layers": _number,
    }
ON_RANKS = (
    ("none", "sdpa"),
    ("core_attn+norm+mlp", "math"),
    ("attn+mlp of 3", "sdpa"),
    ("nested", "sdpa"),
    ("tiles", "tiled"),
    ("all logits", "sdpa"),
)


def check(config, dtype, attention, options, parallel=ONE_RANK, rows=ROWS, *, fp8=None):
    memory = MemoryConfig(attention_backend=attention, **options)
    net = model_class(config.model_type)(config, parallel=parallel, memory=memory, dtype=dtype)
    if fp8 is not None:
        use_fp8(net, Fp8Recipe("hybrid", "rowwise" if fp8.is_rowwise else "tensorwise"), first_last_layers_bf16=1)
    inputs = batch(rows=rows, length=LENGTH)
    net(**inputs).loss.backward()  # caches that a first call makes are not activations
    counted, listed = counted_bytes(net, inputs)
    name = str(dtype).removeprefix("torch.")
    sizes = sizes_of(config, parallel, LENGTH, rows, name, fp8=fp8)
    kernels = Kernels(False, "sdpa" if attention == "auto" else attention, masks_windows=attention == "sdpa")
    plan = activations(sizes, memory, kernels)
    assert plan.device_bytes == counted, "\n".join([str(plan), *listed])
    assert plan.host_bytes == 0


@pytest.mark.parametrize(
    "attention", ["sdpa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tiled", "math"))]
)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TECHNIQUES)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_storages_of_every_technique(config, name, dtype, attention):
    check(config(num_hidden_layers=LAYERS), dtype, attention, TECHNIQUES[name])


@pytest.mark.parametrize(
    ("name", "number"), [("full", "all"), ("uniform", "all"), ("full", 1), ("full", LAYERS), ("block", 2)]
)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_kept_attention(config, name, number):
    kept = {"recompute_keep_core_attn": number}
    options = TECHNIQUES[name] | kept
    check(config(num_hidden_layers=LAYERS), torch.bfloat16, "sdpa", options)


@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_fp16_keeps_the_inputs_of_the_loss(config, rows):
    check(config(), torch.float16, "sdpa", {}, rows=rows)


@pytest.mark.parametrize("fraction", [0.4, 0.9])
def test_an_odd_number_of_rotated_dimensions(fraction):
    """3 and 7 of 8 dimensions: RoPE rotates 4 and all 8."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": fraction}
    check(gpt_neox_config(rope_parameters=rope), torch.float32, "sdpa", {})


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
@distributed(world_size=2, slow=[4])
def test_storages_of_a_rank(world_size, sequence_parallel):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    parallel = ParallelConfig(world_size, sequence_parallel_enabled=sequence_parallel)
    for config in (llama_config(num_hidden_layers=LAYERS), gpt_neox_config(num_hidden_layers=LAYERS)):
        for name, attention in ON_RANKS:
            check(config, torch.bfloat16, attention, TECHNIQUES[name], parallel)


FP8 = {name: Fp8Layers(rounded_layers(1, LAYERS), name == "rowwise", 0) for name in ("tensorwise", "rowwise")}
ROUNDED = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": LAYERS}


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("name", [name for name in TECHNIQUES if "tiles" not in name and "groups" not in name])
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_storages_of_float8_layers(config, name, fp8):
    check(config(**ROUNDED), torch.bfloat16, "sdpa", TECHNIQUES[name], fp8=FP8[fp8])


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("name", CONFIGS)
def test_storages_of_float8_layers_of_every_architecture(name, fp8):
    config = without_dense_layers(CONFIGS[name]())
    sizes = {name: size for name, size in ROUNDED.items() if name != "num_attention_heads"}
    for option, size in {**sizes, "head_dim": 16, "shared_expert_intermediate_size": 32}.items():
        if getattr(config, option, None) is not None or option == "head_dim":
            setattr(config, option, size)
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * LAYERS
    check(config, torch.bfloat16, "auto", {}, fp8=FP8[fp8])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@distributed(world_size=2)
def test_storages_of_float8_layers_on_a_rank(world_size, sequence_parallel):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    parallel = ParallelConfig(world_size, sequence_parallel_enabled=sequence_parallel)
    for config in (llama_config(**ROUNDED), gpt_neox_config(**ROUNDED)):
        for name, fp8 in (("none", "tensorwise"), ("attn+mlp of 3", "rowwise"), ("nested", "rowwise")):
            check(config, torch.bfloat16, "sdpa", TECHNIQUES[name], parallel, fp8=FP8[fp8])


def without_dense_layers(config):
    """Planned are layers of one kind."""
    if getattr(config, "mlp_only_layers", None):
        config.mlp_only_layers = []
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_storages_of_every_architecture(name):
    check(without_dense_layers(CONFIGS[name]()), torch.bfloat16, "auto", {})


WINDOWED = [name for name, config in CONFIGS.items() if model_spec(config()).has_windows]


@pytest.mark.parametrize(
    "attention", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("math", "sdpa")), "auto"]
)
@pytest.mark.parametrize(
    "technique",
    [
        "none",
        "block",
        "core_attn",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("full", "attn", "norm+mlp_act of 1")),
    ],
)
@pytest.mark.parametrize("name", WINDOWED)
def test_storages_of_attention_windows(name, technique, attention):
    config = without_dense_layers(CONFIGS[name]())
    if model_spec(config).has_experts and technique == "norm+mlp_act of 1":
        return  # no layer has such an activation
    # All layers of Mistral and Mixtral have a window, the last two of Qwen.
    config.num_hidden_layers = LAYERS
    if config.model_type not in ("mistral", "mixtral"):
        config.layer_types = ["full_attention"] * 2 + ["sliding_attention"] * 2
    config.sliding_window = 7
    check(config, torch.bfloat16, attention, TECHNIQUES[technique])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("technique", ["none", "full", "attn", "mlp", "norm", "core_attn", "block"])
@pytest.mark.parametrize("residual", [False, True])
def test_dropout_of_the_stream(residual, technique, dtype):
    config = gpt_neox_config(num_hidden_layers=LAYERS, hidden_dropout=0.1, use_parallel_residual=residual)
    check(config, dtype, "sdpa", TECHNIQUES[technique])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("technique", ["none", "full", "attn", "core_attn"])
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_dropout_of_attention(config, technique, dtype):
    check(config(num_hidden_layers=LAYERS, attention_dropout=0.2), dtype, "math", TECHNIQUES[technique])


def test_dropout_in_plain_kernels_of_attention_is_not_planned():
    sizes = sizes_of(llama_config(attention_dropout=0.2), ONE_RANK, 8, 1, "float32")
    message = error_message(lambda: activations(sizes, MemoryConfig(), Kernels(fused=False, attention="sdpa")))
    assert_says(message, "attention_dropout", "'sdpa'", "'math'")
    assert activations(sizes, MemoryConfig(), Kernels(fused=True, attention="cudnn")).device_bytes


EXPERTS = [name for name, config in CONFIGS.items() if model_spec(config()).has_experts and name not in WINDOWED]
MOE_TECHNIQUES = {
    **{name: TECHNIQUES[name] for name in ("none", "full", "uniform", "nested", "block", "all logits", "norm")},
    **{name: TECHNIQUES[name] for name in ("core_attn", "attn")},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    "attn+moe of 3": {
        "recompute_granularity": "selective",
        "recompute_modules": ("attn", "moe"),
        "recompute_method": "block",
        "recompute_num_layers": 3,
    },
}


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "technique",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("none", "moe", "attn+moe of 3")))
        for name in MOE_TECHNIQUES
    ],
)
@pytest.mark.parametrize("name", EXPERTS)
def test_storages_of_experts(name, technique, dtype):
    config = without_dense_layers(CONFIGS[name]())
    config.num_hidden_layers = LAYERS
    if config.model_type == "qwen2_moe":
        config.layer_types = ["full_attention"] * LAYERS
    check(config, dtype, "sdpa", MOE_TECHNIQUES[technique])


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
@distributed(world_size=2)
def test_storages_of_experts_on_a_rank(world_size, sequence_parallel):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    parallel = ParallelConfig(world_size, sequence_parallel_enabled=sequence_parallel)
    for name in ("mixtral", "qwen3"):
        config = without_dense_layers(CONFIGS[name]())
        for technique in ("none", "moe", "nested"):
            check(config, torch.bfloat16, "sdpa", MOE_TECHNIQUES[technique], parallel)
