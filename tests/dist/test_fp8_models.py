"""Models with float8 layers: without the rounding they equal transformers, with it one rank, within the rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory
from nxd_memopt.modules.fp8 import use_fp8
from nxd_memopt.modules.moe import Experts
from nxd_memopt.ops import fp8, fp8_grouped
from nxd_memopt.ops.fp8 import Fp8Recipe, Operand
from nxd_memopt.parallel_layers import grads, layers, parallel_state
from nxd_memopt.parallel_layers.functional import fp8_linear
from nxd_memopt.planner.sizes.fp8_layers import LEAST_PRODUCTS
from tests.dist.pool import distributed
from tests.reference import assert_same_on_all_ranks, assert_says, error_message, relative_error
from tests.reference_models import (
    batch,
    full_gradients,
    full_parameters,
    gpt_neox_config,
    granite_config,
    hugging_face,
    llama_config,
    local_part,
    mixtral_config,
    parallel_model,
    phi3_config,
    qwen2_config,
    qwen2_moe_config,
    qwen3_config,
)

# Sizes on each rank are multiples of 16 for T = 4, which shares each of 2 KV heads between two ranks.
SIZES = {"hidden_size": 128, "intermediate_size": 64}
CONFIGS = {
    "llama": lambda: llama_config(**SIZES, tie_word_embeddings=True),
    "llama biases": lambda: llama_config(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: qwen2_config(**SIZES),
    "qwen3": lambda: qwen3_config(**SIZES | {"head_dim": 16}),
    "phi3": lambda: phi3_config(**SIZES),
    "granite": lambda: granite_config(**SIZES),
    "neox": lambda: gpt_neox_config(**SIZES),
    "neox sequential": lambda: gpt_neox_config(**SIZES, use_parallel_residual=False),
    "mixtral": lambda: mixtral_config(**SIZES),
    "qwen2 with experts": lambda: qwen2_moe_config(
        **SIZES, moe_intermediate_size=64, shared_expert_intermediate_size=64
    ),
}
RECIPES = pytest.mark.parametrize("granularity", fp8.GRANULARITIES)
TOLERANCE = 1e-4  # ten times test_models': the terms of a key bias's gradient cancel, and here are scaled too


@contextmanager
def without_rounding() -> Iterator[None]:
    """Let operands be fp32, with scales and layouts as ever."""

    def kept(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Operand:
        scale = torch.where(largest == 0, 1.0, largest / torch.finfo(dtype).max)
        return Operand(x.float() / scale, scale)

    with (
        mock.patch.object(fp8, "_rounded", kept),
        mock.patch.object(fp8_grouped, "times", lambda x, inverse, dtype: x.float() * inverse),
        mock.patch.object(fp8, "as_bytes", lambda data: data),
        mock.patch.object(fp8_linear, "as_bytes", lambda data: data),
    ):
        yield


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """Yield a list of one number, of the float8 matmuls."""
    counts = [0]

    def counted(*args: Any, **options: Any) -> Tensor:
        counts[0] += 1
        return fp8.product(*args, **options)

    with mock.patch.object(fp8_linear, "product", counted):
        yield counts


def in_float8(config: Any, reference: nn.Module, recipe: Fp8Recipe, **options: Any) -> nn.Module:
    model = parallel_model(config, full_parameters(reference), **options)
    names = use_fp8(model, recipe)
    linears = (layers.ColumnParallelLinear, layers.RowParallelLinear)
    rounded = [module for module in model.backbone.layers.modules() if isinstance(module, (*linears, Experts))]
    assert len(names) == len(rounded) and all(module.fp8 == recipe for module in rounded)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(**batch())
    out.loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    return {"loss": out.loss.detach(), **{name: param.grad.clone() for name, param in model.named_parameters()}}


@distributed(world_size=[1, 2], slow=[4])
@RECIPES
@pytest.mark.parametrize("name", CONFIGS)
def test_without_rounding_gradients_are_transformers(name, granularity, world_size):
    parallel_state.initialize_model_parallel(world_size)
    config = CONFIGS[name]()
    reference = hugging_face(config)
    expected = reference(**batch())
    expected.loss.backward()
    wanted = full_gradients(reference)
    for sequence_parallel in [False, True][: min(world_size, 2)]:
        model = in_float8(config, reference, Fp8Recipe("e4m3", granularity), sequence_parallel=sequence_parallel)
        with without_rounding():
            found = gradients(model)
        assert_same_on_all_ranks(found["loss"], "loss")
        assert relative_error(found.pop("loss"), expected.loss) < TOLERANCE
        for parameter, gradient in found.items():
            error = (gradient - local_part(parameter, wanted[parameter], config)).norm() / wanted[parameter].norm()
            assert error < TOLERANCE, f"{parameter}: {error:.1e}"


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("recipe", [Fp8Recipe(), Fp8Recipe("e4m3", "rowwise")], ids=str)
@pytest.mark.parametrize("name", ["llama biases", "neox"])
def test_gradients_are_transformers_within_float8_roundings(name, recipe, world_size):
    parallel_state.initialize_model_parallel(world_size)
    config = CONFIGS[name]()
    config.initializer_range = 0.05  # errors of one layer do not grow in the next
    reference = hugging_face(config)
    reference(**batch()).loss.backward()
    wanted = full_gradients(reference)
    found = gradients(in_float8(config, reference, recipe, sequence_parallel=True))
    del found["loss"]
    for parameter, gradient in found.items():
        part = local_part(parameter, wanted[parameter], config)
        error = (gradient - part).norm() / wanted[parameter].norm()
        # a lost sum is an error of 0.5; the terms of a key bias's gradient cancel, their errors do not
        assert error < 0.25 or parameter.endswith("k_proj.bias"), f"{parameter}: {error:.3f}"


@distributed(world_size=[1, 2])
@RECIPES
@pytest.mark.parametrize(("width", "least"), [(64, 128**2), (512, 128 * 512)], ids=["attention", "MLP"])
def test_branches_of_which_one_is_in_float8(width, least, granularity, world_size):
    parallel_state.initialize_model_parallel(world_size)
    config = gpt_neox_config(**SIZES | {"intermediate_size": width})
    reference = hugging_face(config)
    reference(**batch()).loss.backward()
    wanted = full_gradients(reference)
    model = parallel_model(config, full_parameters(reference), sequence_parallel=True)
    names = use_fp8(model, Fp8Recipe("e4m3", granularity), tokens=LEAST_PRODUCTS * world_size // least)
    assert len(names) == 4
    with without_rounding(), counted_products() as counts:
        found = gradients(model)
    assert counts == [3 * len(names)]  # forward, dX and dW
    for parameter, gradient in wanted.items():
        part = local_part(parameter, gradient, config)
        assert (found[parameter] - part).norm() < TOLERANCE * gradient.norm(), parameter


def test_a_technique_that_reads_weights_refuses_float8_layers():
    model = in_float8(CONFIGS["llama"](), hugging_face(CONFIGS["llama"]()), Fp8Recipe())
    for option in ({"mlp_tile_tokens": 8}, {"attention_head_groups": 2}):
        apply_memory(model, MemoryConfig(**option))
        assert_says(error_message(lambda: model(**batch())), *option, "fp8")


def test_a_second_call_replaces_the_first():
    model = in_float8(CONFIGS["llama"](), hugging_face(CONFIGS["llama"]()), Fp8Recipe())
    assert use_fp8(model, Fp8Recipe(), tokens=1) == []
    assert all(getattr(module, "fp8", None) is None for module in model.modules())


RECOMPUTE = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "some layers": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "MLP": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
}


@distributed(world_size=[1, 2])
@RECIPES
@pytest.mark.parametrize("name", ["llama", "neox", "mixtral"])
def test_recompute_changes_no_bit(name, granularity, world_size):
    parallel_state.initialize_model_parallel(world_size)
    config = CONFIGS[name]()
    reference = hugging_face(config)
    recipe = Fp8Recipe("hybrid", granularity)
    expected = gradients(in_float8(config, reference, recipe, sequence_parallel=True))
    for what, options in RECOMPUTE.items():
        if (name, what) == ("neox", "MLP"):
            continue  # the branches are then added in another order, in bf16 too
        if what == ("MLP" if name == "mixtral" else "experts"):
            continue  # a layer has an MLP or experts
        found = gradients(in_float8(config, reference, recipe, sequence_parallel=True, **options))
        assert all(torch.equal(found[key], value) for key, value in expected.items())
