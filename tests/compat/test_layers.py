"""Layers and functions with neuronx-distributed's arguments, next to plain PyTorch."""

from __future__ import annotations

import warnings
from importlib import import_module
from inspect import signature

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nxd_memopt.modules.lora import LoraConfig, get_lora_model
from nxd_memopt.parallel_layers import parallel_state
from tests.alias_modules import import_without_alias
from tests.dist.pool import distributed

layers, functions, utils = (import_without_alias(name) for name in ("layers", "functions", "utils"))
ColumnParallelLinear, RowParallelLinear = layers.ColumnParallelLinear, layers.RowParallelLinear
LinearWithAsyncCommunication, ParallelEmbedding = layers.LinearWithAsyncCommunication, layers.ParallelEmbedding
RMSNorm = import_without_alias("modules").RMSNorm
NAMES = import_without_alias("names").NAMES

# Names of arguments, for calls by keyword and in this order for calls by position.
SIGNATURES = {
    "input_ process_group": "copy_to_tensor_model_parallel_region reduce_from_tensor_model_parallel_region "
    "scatter_to_tensor_model_parallel_region gather_from_tensor_model_parallel_region "
    "scatter_input_channels_to_tensor_model_parallel_region",
    "input_ gather_dim process_group": "gather_from_tensor_model_parallel_region_with_dim",
    "input_ sequence_dimension process_group": "scatter_to_sequence_parallel_region "
    "reduce_scatter_to_sequence_parallel_region",
    "input_ sequence_dimension to_model_parallel process_group": "gather_from_sequence_parallel_region",
}


def test_rms_norm_has_the_other_librarys_defaults():
    x = torch.full((2, 8), 1e-3)
    found = RMSNorm((8,), elementwise_affine=True)(x)
    torch.testing.assert_close(found, x * (1e-6 + 1e-5) ** -0.5)
    for options in ({"normalized_shape": (4, 8)}, {"normalized_shape": 8, "elementwise_affine": False}):
        with pytest.raises(ValueError, match=r"normalized_shape|elementwise_affine"):
            RMSNorm(**options)


@distributed(world_size=2)
@pytest.mark.parametrize("gathers", [False, True])
def test_a_linear_function_without_a_group_has_the_tensor_parallel_one(gathers):
    parallel_state.initialize_model_parallel(2)
    rank = parallel_state.get_tensor_model_parallel_rank()
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 6), (8, 6)))
    x.requires_grad_()
    (expected,) = torch.autograd.grad(F.linear(x, weight).square().sum(), x)
    own = x.detach().chunk(2)[rank] if gathers else x.detach()
    own.requires_grad_()
    output = LinearWithAsyncCommunication.apply(
        own, weight.chunk(2)[rank], None, not gathers, gathers, 0, True, None, torch.float64
    )
    torch.testing.assert_close(output, F.linear(x, weight).chunk(2, -1)[rank])
    output.square().sum().backward()
    torch.testing.assert_close(own.grad, expected.chunk(2)[rank] if gathers else expected)


@pytest.mark.parametrize("arguments", SIGNATURES)
def test_arguments_have_the_other_librarys_names(arguments):
    for name in SIGNATURES[arguments].split():
        ours, _, attribute = NAMES["neuronx_distributed.parallel_layers.mappings"][name].partition(":")
        found = getattr(functions if ours == "nxd_memopt.compat.functions" else import_module(ours), attribute)
        assert list(signature(found).parameters)[: len(arguments.split())] == arguments.split(), name


@distributed(world_size=2)
def test_lora_adapts_the_layers_of_the_other_library():
    """The base's output is unchanged, B is 0 at first, and only the adapters are trained."""
    parallel_state.initialize_model_parallel(2)
    model = nn.Sequential()
    model.up = ColumnParallelLinear(4, 8, gather_output=False)
    model.down = RowParallelLinear(8, 4, input_is_parallel=True)
    for layer in model:
        nn.init.normal_(layer.bias)
    x = torch.ones(3, 4)
    expected = model(x)
    get_lora_model(model, LoraConfig(lora_rank=2, target_modules=("up", "down")))
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)
    assert {name for name, param in model.named_parameters() if param.requires_grad} == {
        f"{layer}.lora_{factor}.weight" for layer in ("up", "down") for factor in "AB"
    }

    class Doubled(ColumnParallelLinear):
        def forward(self, input):
            return 2 * super().forward(input)

    for layer in (
        ColumnParallelLinear(4, 7, gather_output=False, pad=True),
        Doubled(4, 8, gather_output=False),
    ):
        with pytest.raises(ValueError, match="adapters are for"):
            get_lora_model(nn.Sequential(layer), LoraConfig(lora_rank=2, target_modules=("0",)))


def test_what_the_other_library_ignores_is_refused():
    parallel_state.initialize_model_parallel()
    with pytest.raises(ValueError, match="sequence_parallel_enabled=True is not offered"):
        ParallelEmbedding(8, 4, shard_across_embedding=True, sequence_parallel_enabled=True)
    with pytest.raises(ValueError, match="zero1_optimizer is False"):
        functions.get_grad_norm([nn.Parameter(torch.ones(1))], zero1_optimizer_groups=[[0]])
    with pytest.raises(ValueError, match=r"rank_ordering=\[0\] is not offered"):
        utils.set_tensor_model_parallel_attributes(torch.ones(2), True, 0, 1, rank_ordering=[0])


def test_options_of_file_names_are_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_without_alias("modules").LoraConfig(lora_rank=2)
    for options in ({"lora_save_dir": "elsewhere"}, {"save_lora_config_adapter": True}):
        with pytest.warns(UserWarning, match="have no effect"):
            import_without_alias("modules").LoraConfig(lora_rank=2, **options)
