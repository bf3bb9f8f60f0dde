"""Parallel branches in float8: what is rounded, what is communicated, and what is kept for backward."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nxd_memopt.modules.fp8 import use_fp8
from nxd_memopt.modules.parallel_residual import normalised_column_parallel_linears
from nxd_memopt.ops.fp8 import Fp8Recipe
from nxd_memopt.ops.norm import normalise
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.layer_norm import LayerNorm
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear
from tests.dist.pool import distributed
from tests.dist.test_chunked_collectives import in_pieces
from tests.dist.test_fp8 import RECIPES, SEQUENCE_PARALLEL, assert_equal, flat, rounding, uneven
from tests.dist.test_fp8_models import SIZES, in_float8
from tests.reference import CountCollectives, from_all_ranks, shard, tensors
from tests.reference_models import batch, full_parameters, gpt_neox_config, hugging_face, parallel_model

LENGTH, BATCH, HIDDEN, WIDTHS = 22, 3, 32, (32, 64)


def branches_of(recipe: Fp8Recipe, *, bias: bool, sequence_parallel: bool):
    """Pairs of a norm, whose gains and shifts differ from pair to pair, and a layer."""
    size = dist.get_world_size()
    pairs = []
    for number, width in enumerate(WIDTHS):
        norm = LayerNorm(HIDDEN, sequence_parallel_enabled=sequence_parallel)
        options = {"bias": bias, "gather_output": False, "sequence_parallel_enabled": sequence_parallel}
        layer = ColumnParallelLinear(HIDDEN, width, **options)
        layer.fp8 = recipe
        with torch.no_grad():
            norm.weight.copy_(tensors(HIDDEN, seed=20 + number) * 3)
            norm.bias.copy_(tensors(HIDDEN, seed=30 + number))
            layer.weight.copy_(shard(uneven(width, HIDDEN, seed=number), 0, size=size))
        pairs.append((norm, layer))
    return pairs


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("bias", [True, False])
@SEQUENCE_PARALLEL
@RECIPES
def test_affine_parts_of_norms_are_rounded_with_the_weights(recipe, sequence_parallel, bias):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    branches = branches_of(recipe, bias=bias, sequence_parallel=sequence_parallel)
    whole = uneven(LENGTH, BATCH, HIDDEN, seed=3)
    x = (shard(whole, 0, size=size) if sequence_parallel else whole).clone().requires_grad_()
    outputs = normalised_column_parallel_linears(x, *branches)
    upstream = [shard(uneven(LENGTH, BATCH, width, seed=4 + i), -1, size=size) for i, width in enumerate(WIDTHS)]
    torch.autograd.backward(outputs, upstream)

    normalised = normalise(whole, branches[0][0].eps)[0]
    total = torch.zeros(LENGTH * BATCH, HIDDEN, dtype=torch.float64)
    for (norm, layer), output, gradient in zip(branches, outputs, upstream, strict=True):
        weight, gain, shift = (each.detach() for each in (layer.weight, norm.weight, norm.bias))
        y, dx, dw = rounding(recipe).products(flat(normalised), (weight * gain).double(), flat(gradient))
        constant = weight.double() @ shift.double()
        bias_grad = flat(gradient).sum(0)
        if layer.bias is not None:
            constant = constant + layer.bias.detach().double()
            assert_equal(layer.bias.grad, bias_grad, "db")
        assert_equal(output, y + constant, "output")
        assert_equal(layer.weight.grad, dw * gain.double() + bias_grad[:, None] * shift.double(), "dW")
        of_norm = torch.stack([(dw * weight.double()).sum(0), bias_grad @ weight.double()])
        # Under sequence parallelism the sum over ranks comes later.
        of_norm = of_norm if sequence_parallel else sum(from_all_ranks(of_norm))
        assert_equal(norm.weight.grad, of_norm[0], "gradient of the norm's weight")
        assert_equal(norm.bias.grad, of_norm[1], "gradient of the norm's bias")
        total += dx
    leaf = whole.double().requires_grad_()
    total = sum(from_all_ranks(total)).view(whole.shape)
    (dx,) = torch.autograd.grad(normalise(leaf, branches[0][0].eps)[0], leaf, total)
    error = (x.grad - (shard(dx, 0, size=size) if sequence_parallel else dx)).norm() / dx.norm()
    assert error < 1e-5  # the norm's backward is in fp32


@distributed(world_size=2)
@RECIPES
def test_normalised_rows_that_arrive_in_pieces(recipe, monkeypatch):
    with in_pieces(monkeypatch) as started:
        test_affine_parts_of_norms_are_rounded_with_the_weights.distributed_body(recipe, True, True)
    assert started


@distributed(world_size=1)
def test_frozen_parameters_have_no_gradient():
    parallel_state.initialize_model_parallel(1)
    branches = branches_of(Fp8Recipe(), bias=True, sequence_parallel=False)
    x = uneven(LENGTH, HIDDEN, seed=3).requires_grad_()
    gradients = []
    for parts in (
        [],
        [branches[0][1].weight, branches[1][0].bias],
        [p for pair in branches for m in pair for p in m.parameters()],
    ):
        for part in parts:
            part.requires_grad_(False)
            part.grad = None
        torch.autograd.backward(
            normalised_column_parallel_linears(x, *branches), [x.new_ones(LENGTH, n) for n in WIDTHS]
        )
        gradients.append(x.grad.clone())
        x.grad = None
        assert all(part.grad is None for part in parts)
    assert all(torch.equal(*pair) for pair in pairwise(gradients))


def communicated(recipe: Fp8Recipe | None) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and bytes of the collectives of a decoder layer: what two layers have more than one."""
    found = []
    for layers in (1, 2):
        config = gpt_neox_config(**SIZES, num_hidden_layers=layers, max_position_embeddings=32)
        model = parallel_model(config, full_parameters(hugging_face(config)), sequence_parallel=True).bfloat16()
        if recipe is not None:
            use_fp8(model, recipe)
        ids = torch.zeros(2, 32, dtype=torch.long)  # 32 rows of a shard, which columns need not pad
        with CountCollectives() as counts:
            model(ids, labels=ids).loss.backward()
        found.append((counts.calls, counts.bytes))
    calls, sizes = ({name: two[name] - one[name] for name in two} for one, two in zip(*found, strict=True))
    return calls, sizes


@distributed(world_size=2)
def test_gathers_half_the_bytes_and_reduces_the_same():
    parallel_state.initialize_model_parallel(2)
    calls, sizes = communicated(None)
    gathers, reductions = "_allgather_base_", "_reduce_scatter_base_"
    assert calls[gathers] == 3 and calls[reductions] == 2
    # The normalised rows in forward and in backward, and the gradient of the sum.
    array = sizes[gathers] // 6
    found_calls, found = communicated(Fp8Recipe())
    assert (found_calls[reductions], found[reductions]) == (calls[reductions], sizes[reductions])
    assert (found_calls[gathers], found[gathers]) == (3, 3 * array)
    # Scales of their own: the columns of the gradient too, and 4 bytes for each row's 128 numbers.
    found_calls, found = communicated(Fp8Recipe(granularity="rowwise"))
    assert (found_calls[reductions], found[reductions]) == (calls[reductions], sizes[reductions])
    assert found[gathers] == 4 * array + 2 * array * 4 // 128


@distributed(world_size=1)
@RECIPES
def test_the_activation_is_computed_again(recipe):
    parallel_state.initialize_model_parallel(1)
    config = gpt_neox_config(**SIZES, num_hidden_layers=1)
    model = in_float8(config, hugging_face(config), recipe)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(**batch())
    tokens = batch()["input_ids"].numel()
    # The activation's input, which is the only one of these sizes; nothing of it is kept in float8.
    wide = {t.data_ptr() for t in kept if t.dim() > 1 and t.shape[-1] == 64 and t.numel() == 64 * tokens}
    assert len(wide) == 1 and not any(t.itemsize == 1 and t.size(0) == 64 for t in kept)
