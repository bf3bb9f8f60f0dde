"""Float8 linear layers on 1 and 2 ranks against float64 products of operands on the formats' grids."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.checkpoint import load_pretrained, save_pretrained
from nxd_memopt.config import ParallelConfig
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.models import model_class
from nxd_memopt.models.gpt_neox import GPTNeoXMLP
from nxd_memopt.modules.fp8 import float8_groups, use_fp8
from nxd_memopt.modules.lora.layers import adapt
from nxd_memopt.modules.mlp import fused_gated_mlp
from nxd_memopt.ops import fp8
from nxd_memopt.ops.activation import gated_activation
from nxd_memopt.ops.fp8 import Fp8Recipe
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel_linears,
    row_parallel,
)
from tests.dist.pool import distributed
from tests.dist.test_chunked_collectives import in_pieces
from tests.reference import assert_says, error_message, from_all_ranks, relative_error, shard, tensors
from tests.reference_fp8 import E4M3, E5M2, Rounding, rounded
from tests.reference_models import gpt_neox_config, llama_config

# S, B, H and the outputs of two layers; with T = 2 a shard has 33 rows, no multiple of 16
LENGTH, BATCH, HIDDEN, WIDTHS = 22, 3, 32, (32, 64)
GRADIENTS = {"hybrid": E5M2, "e4m3": E4M3}
RECIPES = pytest.mark.parametrize("recipe", [Fp8Recipe(f, g) for f in fp8.FORMATS for g in fp8.GRANULARITIES], ids=str)
SEQUENCE_PARALLEL = pytest.mark.parametrize("sequence_parallel", [False, True])


def uneven(*shape: int, seed: int):
    """Numbers whose rows and columns differ by powers of 2, in fp32: another scale gives other values."""
    x = tensors(*shape, seed=seed).float()
    x = x * 2.0 ** (tensors(shape[-1], seed=seed + 50) * 2).float()
    return x * 2.0 ** (tensors(*shape[:-1], 1, seed=seed + 70)).float()


def ones_and_twos(weight):
    weight.copy_(torch.arange(weight.numel()).view_as(weight) % 7 % 2 + 1)


def rounding(recipe: Fp8Recipe) -> Rounding:
    return Rounding(recipe.granularity, GRADIENTS[recipe.format])


def flat(x):
    return x.reshape(-1, x.size(-1)).double()


def assert_equal(found, expected, what: str) -> None:
    error = relative_error(found.reshape(expected.shape).double(), expected)
    assert error < 1e-6, f"{what}: {error:.2e}"


@distributed(world_size=[1, 2])
@SEQUENCE_PARALLEL
@RECIPES
def test_column_parallel_layers_with_one_input(recipe, sequence_parallel):
    size, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(size)
    options = {"gather_output": False, "sequence_parallel_enabled": sequence_parallel}
    layers = [ColumnParallelLinear(HIDDEN, width, **options) for width in WIDTHS]
    for number, layer in enumerate(layers):
        layer.fp8 = recipe
        with torch.no_grad():
            layer.weight.copy_(shard(uneven(WIDTHS[number], HIDDEN, seed=number), 0, size=size))
    whole = uneven(LENGTH, BATCH, HIDDEN, seed=3)
    x = (shard(whole, 0, size=size) if sequence_parallel else whole).clone().requires_grad_()
    outputs = column_parallel_linears(x, layers)
    upstream = [shard(uneven(LENGTH, BATCH, width, seed=4 + i), -1, size=size) for i, width in enumerate(WIDTHS)]
    torch.autograd.backward(outputs, upstream)

    # The layers' weights are one operand, as are their gradients.
    weight = torch.cat([layer.weight.detach() for layer in layers])
    y, dx, dw = rounding(recipe).products(flat(whole), weight.double(), flat(torch.cat(upstream, -1)))
    y = y + torch.cat([layer.bias.detach() for layer in layers]).double()
    assert_equal(torch.cat(outputs, -1), y, "output")
    assert_equal(torch.cat([layer.weight.grad for layer in layers]), dw, "dW")
    dx = sum(from_all_ranks(dx)).view(whole.shape)
    assert_equal(x.grad, shard(dx, 0, size=size, rank=rank) if sequence_parallel else dx, "dX")


@distributed(world_size=[1, 2])
@SEQUENCE_PARALLEL
@RECIPES
def test_row_parallel_layers_with_one_output(recipe, sequence_parallel):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    options = {"bias": False, "input_is_parallel": True, "sequence_parallel_enabled": sequence_parallel}
    layers = [RowParallelLinear(width, HIDDEN, **options) for width in WIDTHS]
    for number, layer in enumerate(layers):
        layer.fp8 = recipe
        with torch.no_grad():
            layer.weight.copy_(shard(uneven(HIDDEN, WIDTHS[number], seed=number), 1, size=size))
    inputs = [
        shard(uneven(LENGTH, BATCH, width, seed=4 + i), -1, size=size).clone().requires_grad_()
        for i, width in enumerate(WIDTHS)
    ]
    output = row_parallel([(x, layer.weight) for x, layer in zip(inputs, layers, strict=True)], layers[0])
    upstream = uneven(LENGTH, BATCH, HIDDEN, seed=9)
    output.backward(shard(upstream, 0, size=size) if sequence_parallel else upstream)

    expected = [
        rounding(recipe).products(flat(x.detach()), layer.weight.detach().double(), flat(upstream))
        for x, layer in zip(inputs, layers, strict=True)
    ]
    y = sum(from_all_ranks(sum(each[0] for each in expected))).view(upstream.shape)
    assert_equal(output, shard(y, 0, size=size) if sequence_parallel else y, "output")
    for x, layer, (_, dx, dw) in zip(inputs, layers, expected, strict=True):
        assert_equal(x.grad, dx, "dX")
        assert_equal(layer.weight.grad, dw, "dW")


@distributed(world_size=[1, 2])
@RECIPES
def test_gated_row_parallel_layer_rounds_the_activation_once(recipe):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    options = {"bias": False, "input_is_parallel": True, "sequence_parallel_enabled": size > 1}
    layer = RowParallelLinear(WIDTHS[1], HIDDEN, **options)
    layer.fp8 = recipe
    gate, up = (
        shard(tensors(LENGTH, BATCH, WIDTHS[1], seed=i).float(), -1, size=size).clone().requires_grad_()
        for i in range(2)
    )
    output = fused_gated_mlp(gate * 1, up * 1, layer, "silu")
    upstream = uneven(LENGTH, BATCH, HIDDEN, seed=9)
    output.backward(shard(upstream, 0, size=size) if size > 1 else upstream)

    activated = gated_activation(gate.detach(), up.detach(), "silu")
    y, dx, dw = rounding(recipe).products(flat(activated), layer.weight.detach().double(), flat(upstream))
    assert_equal(output, shard(sum(from_all_ranks(y)).view(upstream.shape), 0, size=size), "output")
    assert_equal(layer.weight.grad, dw, "dW")
    leaves = [gate.detach().double().requires_grad_(), up.detach().double().requires_grad_()]
    expected = torch.autograd.grad(gated_activation(*leaves, "silu"), leaves, dx.view(gate.shape))
    for leaf, gradient in zip((gate, up), expected, strict=True):
        assert_equal(leaf.grad, gradient, "gradient")


@distributed(world_size=2)
@RECIPES
def test_shards_of_one_row_have_scales_of_their_own(recipe):
    parallel_state.initialize_model_parallel(2)
    options = {"bias": False, "sequence_parallel_enabled": True}
    column = ColumnParallelLinear(HIDDEN, 64, gather_output=False, **options)
    row = RowParallelLinear(64, HIDDEN, input_is_parallel=True, **options)
    column.fp8 = row.fp8 = recipe
    whole, upstream = uneven(2, 1, HIDDEN, seed=3), uneven(2, 1, HIDDEN, seed=9)
    x = shard(whole, 0, size=2).clone().requires_grad_()
    output = column(x)
    y, _, _ = rounding(recipe).products(flat(whole), column.weight.detach().double(), flat(output.detach()))
    assert_equal(output, y, "output")
    activations = output.detach().requires_grad_()
    row(activations).backward(shard(upstream, 0, size=2))
    weight = row.weight.detach().double()
    _, dx, dw = rounding(recipe).products(flat(activations.detach()), weight, flat(upstream))
    assert_equal(activations.grad, dx, "dX")
    assert_equal(row.weight.grad, dw, "dW")


@distributed(world_size=2)
@RECIPES
def test_the_sequence_may_be_dimension_1(recipe):
    parallel_state.initialize_model_parallel(2)
    whole = uneven(LENGTH, BATCH, HIDDEN, seed=3)
    found = []
    for dimension in (0, 1):
        options = {"sequence_parallel_enabled": True, "sequence_dimension": dimension, "init_method": ones_and_twos}
        column = ColumnParallelLinear(HIDDEN, 64, bias=False, gather_output=False, **options)
        row = RowParallelLinear(64, HIDDEN, bias=False, input_is_parallel=True, **options)
        column.fp8 = row.fp8 = recipe
        x = shard(whole, 0, size=2).movedim(0, dimension).clone().requires_grad_()
        output = row(column(x))
        output.backward(x.detach() * 2)
        moved = [each.movedim(dimension, 0) for each in (output, x.grad)]
        found.append([*moved, column.weight.grad, row.weight.grad])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@distributed(world_size=2)
@RECIPES
def test_a_nan_of_one_rank_reaches_all_ranks(recipe):
    parallel_state.initialize_model_parallel(2)
    layer = ColumnParallelLinear(HIDDEN, 32, bias=False, gather_output=False, sequence_parallel_enabled=True)
    layer.fp8 = recipe
    x = uneven(4, HIDDEN, seed=dist.get_rank())
    if dist.get_rank() == 0:
        x[1, 3] = -torch.tensor(float("nan"))
    output = layer(x.requires_grad_())
    assert output[1].isnan().all() and (recipe.is_rowwise or output.isnan().all())
    output.nan_to_num().sum().backward()
    # the columns of X have the scales of all ranks' rows
    assert layer.weight.grad[:, 3].isnan().all() and (recipe.is_rowwise or layer.weight.grad.isnan().all())


@distributed(world_size=1)
@RECIPES
def test_frozen_weights_of_row_parallel_layers_pass_the_gradient_on(recipe):
    parallel_state.initialize_model_parallel(1)
    layer = RowParallelLinear(32, HIDDEN, bias=False, input_is_parallel=True)
    layer.fp8 = recipe
    gradients = []
    for needs_weight in (True, False):
        layer.weight.requires_grad_(needs_weight)
        x = uneven(LENGTH, 32, seed=3).requires_grad_()
        layer(x).backward(uneven(LENGTH, HIDDEN, seed=4))
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@distributed(world_size=1)
@RECIPES
def test_an_update_of_weights_changes_their_scale(recipe):
    parallel_state.initialize_model_parallel(1)
    x = uneven(LENGTH, HIDDEN, seed=3)
    for layer in (ColumnParallelLinear(HIDDEN, 32, bias=False), RowParallelLinear(HIDDEN, 32, bias=False)):
        layer.fp8 = recipe
        before = layer(x)
        with torch.no_grad():
            layer.weight *= 4
        assert torch.equal(layer(x), 4 * before)


@distributed(world_size=1)
@RECIPES
def test_no_tokens_have_no_gradient(recipe):
    parallel_state.initialize_model_parallel(1)
    layers = (
        ColumnParallelLinear(HIDDEN, 32, gather_output=False),
        RowParallelLinear(32, HIDDEN, input_is_parallel=True),
    )
    x = torch.zeros(0, 2, HIDDEN, requires_grad=True)
    for layer in layers:
        layer.fp8 = recipe
    layers[1](layers[0](x)).sum().backward()
    assert x.grad.shape == x.shape
    assert all((parameter.grad == 0).all() for layer in layers for parameter in layer.parameters())


@distributed(world_size=1)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_saves_a_float8_input_and_nothing_for_frozen_weights(is_frozen):
    parallel_state.initialize_model_parallel(1)
    layer = ColumnParallelLinear(HIDDEN, 16, bias=False, gather_output=False)
    layer.fp8 = Fp8Recipe()
    layer.weight.requires_grad_(not is_frozen)
    x = uneven(LENGTH, HIDDEN, seed=3).requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = layer(x)
    # [H, S] with S padded to a multiple of 16, and its scale
    expected = [] if is_frozen else [(HIDDEN, 32), (1, 1)]
    assert [
        tuple(t.shape) for t in kept if t is not layer.weight and t.data_ptr() != layer.weight.data_ptr()
    ] == expected
    output.sum().backward()
    assert x.grad is not None and (layer.weight.grad is None) == is_frozen


@distributed(world_size=1)
def test_evaluation_keeps_the_dtype():
    parallel_state.initialize_model_parallel(1)
    layer = ColumnParallelLinear(HIDDEN, 16, bias=False, gather_output=False)
    x = uneven(LENGTH, HIDDEN, seed=3)
    expected = layer(x)
    layer.fp8 = Fp8Recipe()
    assert not torch.equal(layer(x), expected)
    assert torch.equal(layer.eval()(x), expected)


@pytest.mark.parametrize("granularity", fp8.GRANULARITIES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_reaches_all_results_of_its_scale(value, granularity):
    x = uneven(5, 16, seed=0)
    x[2, 3] = value
    recipe = Fp8Recipe(granularity=granularity)
    operand = fp8.as_rows(x, fp8.magnitudes(x, recipe), fp8.FORWARD_DTYPE)
    weight = uneven(16, 16, seed=1)
    result = fp8.product(operand, fp8.as_rows(weight, fp8.magnitudes(weight, recipe), fp8.FORWARD_DTYPE), x.dtype)
    assert result[2].isnan().all()
    assert result.isnan().all(1).tolist() == ([False, False, True, False, False] if recipe.is_rowwise else [True] * 5)


@pytest.mark.parametrize("granularity", fp8.GRANULARITIES)
def test_zeros_stay_zeros_with_the_scale_1(granularity):
    x = torch.zeros(3, 16)
    sizes = fp8.magnitudes(x, Fp8Recipe(granularity=granularity))
    for operand in fp8.as_both(x, sizes, torch.float8_e5m2):
        assert (operand.scale == 1).all() and (operand.data.float() == 0).all()


@pytest.mark.parametrize("granularity", fp8.GRANULARITIES)
def test_numbers_without_a_finite_inverse_scale_become_zeros(granularity):
    x = torch.full((3, 16), 1e-38)
    x[0, 0] = 0
    sizes = fp8.magnitudes(x, Fp8Recipe(granularity=granularity))
    for operand in fp8.as_both(x, sizes, torch.float8_e5m2):
        assert (operand.scale == 1).all() and (operand.data.float() == 0).all()


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_grid_of_the_reference_is_pytorchs(format):
    dtype = torch.float8_e4m3fn if format is E4M3 else torch.float8_e5m2
    x = torch.cat([uneven(100, 7, seed=0), uneven(100, 7, seed=2) * 2.0**-8, torch.zeros(1, 7)])
    largest = x.abs().max().double()
    operand = fp8.as_rows(x, fp8.Magnitudes(largest.float().view(1, 1), largest.float().view(1, 1)), dtype)
    assert torch.equal(operand.data.double() * operand.scale.double(), rounded(x.double(), format, largest))


def test_unknown_names_are_refused():
    assert_says(error_message(lambda: Fp8Recipe("e5m2")), "fp8", "hybrid")
    assert_says(error_message(lambda: Fp8Recipe(granularity="blockwise")), "fp8_recipe", "rowwise")


def with_adapter(layer, recipe: Fp8Recipe):
    """The layer, frozen, with an adapter whose B is not zero."""
    adapt("layer", layer, LoraConfig(lora_rank=4, lora_alpha=8))
    layer.weight.requires_grad_(False)
    layer.fp8 = recipe
    with torch.no_grad():
        layer.lora_B.weight.copy_(shard_like(layer.lora_B.weight))
    return layer


def shard_like(weight):
    """Numbers that are equal on all ranks for a replicated weight, and differ for a sharded one."""
    rank = dist.get_rank() if weight.tensor_model_parallel else 0
    return tensors(*weight.shape, seed=20 + rank).float() * 0.1


@distributed(world_size=[1, 2])
@SEQUENCE_PARALLEL
@RECIPES
def test_column_parallel_layers_with_adapters(recipe, sequence_parallel):
    size, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(size)
    options = {"bias": False, "gather_output": False, "sequence_parallel_enabled": sequence_parallel}
    layers = [with_adapter(ColumnParallelLinear(HIDDEN, width, **options), recipe) for width in WIDTHS]
    whole = uneven(LENGTH, BATCH, HIDDEN, seed=3)
    x = (shard(whole, 0, size=size) if sequence_parallel else whole).clone().requires_grad_()
    outputs = column_parallel_linears(x, layers)
    upstream = [shard(uneven(LENGTH, BATCH, width, seed=4 + i), -1, size=size) for i, width in enumerate(WIDTHS)]
    torch.autograd.backward(outputs, upstream)

    weight = torch.cat([layer.weight for layer in layers]).double()
    y, dx, _ = rounding(recipe).products(flat(whole), weight, flat(torch.cat(upstream, -1)))
    base = y.split([layer.weight.size(0) for layer in layers], 1)
    for layer, output, rounded_output, gradient in zip(layers, outputs, base, upstream, strict=True):
        down, up = layer.lora_A.weight.detach().double(), layer.lora_B.weight.detach().double()
        assert_equal(output, rounded_output + layer.scale * flat(whole) @ down.t() @ up.t(), "output")
        assert_equal(layer.lora_B.weight.grad, layer.scale * flat(gradient).t() @ (flat(whole) @ down.t()), "dB")
        dx = dx + layer.scale * flat(gradient) @ up @ down
        assert layer.weight.grad is None
    dx = sum(from_all_ranks(dx)).view(whole.shape)
    assert_equal(x.grad, shard(dx, 0, size=size, rank=rank) if sequence_parallel else dx, "dX")


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("is_gated", [False, True])
@RECIPES
def test_row_parallel_layer_with_an_adapter(recipe, is_gated):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    options = {"bias": False, "input_is_parallel": True, "sequence_parallel_enabled": size > 1}
    layer = with_adapter(RowParallelLinear(WIDTHS[1], HIDDEN, **options), recipe)
    inputs = [
        shard(tensors(LENGTH, BATCH, WIDTHS[1], seed=i).float(), -1, size=size).clone().requires_grad_()
        for i in range(2)
    ]
    output = fused_gated_mlp(*(x * 1 for x in inputs), layer, "silu") if is_gated else layer(inputs[0])
    upstream = uneven(LENGTH, BATCH, HIDDEN, seed=9)
    output.backward(shard(upstream, 0, size=size) if size > 1 else upstream)

    leaves = [x.detach().double().requires_grad_() for x in inputs]
    x = (gated_activation(*inputs, "silu") if is_gated else inputs[0]).detach()
    y, dx, _ = rounding(recipe).products(flat(x), layer.weight.double(), flat(upstream))
    down, up = layer.lora_A.weight.detach().double(), layer.lora_B.weight.detach().double()
    y = sum(from_all_ranks(y + layer.scale * flat(x) @ down.t() @ up.t()))
    assert_equal(output, shard(y.view(upstream.shape), 0, size=size), "output")
    rank_grad = layer.scale * flat(upstream) @ up
    assert_equal(layer.lora_A.weight.grad, rank_grad.t() @ flat(x), "dA")
    exact = gated_activation(*leaves, "silu") if is_gated else leaves[0]
    expected = torch.autograd.grad(exact, leaves[: 1 + is_gated], (dx + rank_grad @ down).view(exact.shape))
    for leaf, gradient in zip(inputs, expected, strict=False):
        assert_equal(leaf.grad, gradient, "dX")


@distributed(world_size=[1, 2])
@pytest.mark.parametrize(("make_config", "matmuls"), [(llama_config, 7), (gpt_neox_config, 4)])
def test_weights_stored_in_float8_are_those_of_the_files_rounded_once(make_config, matmuls, tmp_path):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    config = make_config(hidden_size=128, intermediate_size=96)
    parallel = ParallelConfig(size, sequence_parallel_enabled=size > 1)
    model = model_class(config.model_type)
    original = model(config, parallel=parallel)
    # Merged branches round other operands than layers with stored weights, which are computed one by one.
    for module in original.modules():
        if isinstance(module, GPTNeoXMLP):
            module.register_forward_hook(lambda *_: None)
    save_pretrained(original, tmp_path)
    stored = model(config, parallel=parallel, device="meta")
    groups = float8_groups(stored, first_last_layers_bf16=0)
    load_pretrained(stored, tmp_path, in_float8=groups)
    use_fp8(stored, Fp8Recipe())
    # As many bytes as elements, and the values that rounding gives: equal losses, gradients and evaluations.
    linears = {name: each for name, each in stored.named_parameters() if each.itemsize == 1}
    assert len(linears) == sum(len(group) for group in groups) == matmuls * config.num_hidden_layers
    use_fp8(original, Fp8Recipe())
    with torch.no_grad():
        for name, parameter in original.named_parameters():
            if name in linears:
                parameter.copy_(linears[name].float() * linears[name].scale)
                parameter.requires_grad_(False)
                linears[name].requires_grad_(False)
            else:
                assert torch.equal(parameter, stored.get_parameter(name))
    ids = torch.randint(0, config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    losses = [model(ids, labels=ids).loss for model in (original, stored)]
    assert relative_error(losses[1], losses[0]) < 1e-6
    for loss in losses:
        loss.backward()
    for name, parameter in stored.named_parameters():
        if name not in linears:
            assert relative_error(parameter.grad, original.get_parameter(name).grad) < 1e-5, name
    stored.eval()
    assert relative_error(stored(ids, labels=ids).loss, losses[0]) < 1e-6


@distributed(world_size=2)
@RECIPES
@pytest.mark.parametrize(
    "check",
    [
        test_column_parallel_layers_with_one_input,
        test_row_parallel_layers_with_one_output,
        test_column_parallel_layers_with_adapters,
    ],
)
def test_rows_that_arrive_in_pieces(check, recipe, monkeypatch):
    with in_pieces(monkeypatch) as started:
        check.distributed_body(recipe, True)
    assert started


@distributed(world_size=2)
@RECIPES
def test_rows_of_a_gated_layer_that_arrive_in_pieces(recipe, monkeypatch):
    with in_pieces(monkeypatch):
        test_gated_row_parallel_layer_rounds_the_activation_once.distributed_body(recipe)


@distributed(world_size=2)
@RECIPES
@pytest.mark.parametrize("is_gated", [False, True])
def test_rows_of_a_layer_with_an_adapter_that_arrive_in_pieces(recipe, is_gated, monkeypatch):
    with in_pieces(monkeypatch):
        test_row_parallel_layer_with_an_adapter.distributed_body(recipe, is_gated)
