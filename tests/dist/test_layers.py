"""Column- and row-parallel linear layers in float64 against one dense layer: output, dX, dW and db."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nxd_memopt.parallel_layers import layers, parallel_state
from tests.dist.pool import distributed
from tests.reference import (
    CountCollectives,
    assert_float64_close,
    assert_says,
    error_message,
    from_all_ranks,
    gradients,
    pad,
    relative_error,
    shard,
    tensors,
    unchanged,
)

F64 = {"dtype": torch.float64}
SEQUENCE_PARALLEL = {"sequence_parallel_enabled": True}


def initialize() -> int:
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    return size


def activations(size: int, width: int, *, dimensions: int = 3, seed: int = 0) -> Tensor:
    """``[S, B, width]``, ``[B, S, width]`` or ``[S, width]``: both leading sizes are multiples of T, times primes."""
    return tensors(*((5 * size, 2 * size) if dimensions == 3 else (5 * size,)), width, seed=seed)


def dense(x: Tensor, weight: Tensor, bias: Tensor | None, upstream: Tensor) -> dict[str, Tensor]:
    """Hand-derived: ``Y = X W^t + b``, ``dX = G W``, ``dW = G^t X``, ``db`` = sum of G over tokens."""
    flat_x, flat_g = x.reshape(-1, x.size(-1)), upstream.reshape(-1, upstream.size(-1))
    y = x @ weight.t() + (0 if bias is None else bias)
    return {"output": y, "dX": upstream @ weight, "dW": flat_g.t() @ flat_x, "db": flat_g.sum(0)}


def non_contiguous(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def run(layer, x: Tensor, upstream: Tensor, *, skip_bias_add: bool = False) -> dict[str, Tensor]:
    """Both passes in the dtype of the layer, for fp32 under autocast; neither may write to what it was given."""
    dtype = layer.weight.dtype
    x = x.detach().to(dtype).requires_grad_()
    with unchanged(x, upstream, layer.weight):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            y = layer(x)
        if skip_bias_add:
            y, bias = y
            assert bias is layer.bias or getattr(layer, "gather_output", False)
            y = y + bias if bias is not None else y
        parameters = [layer.weight] + ([] if layer.bias is None else [layer.bias])
        dx, *dparameters = gradients(y, upstream.to(y.dtype), [x, *parameters])
        assert all(gradient.dtype == dtype for gradient in dparameters)
    return {"output": y, "dX": dx, **dict(zip(["dW", "db"], dparameters, strict=False))}


def check_column(size: int, *, dimensions: int = 3, contiguous: bool = True, output_size: int = 0, **options) -> None:
    stride, sp_dim = options.get("stride", 1), options.get("sequence_dimension", 0)
    sp, gathered = options.get("sequence_parallel_enabled", False), options.get("gather_output", False)
    output_size = output_size or 7 * size * stride
    bias = options.setdefault("bias", True)
    alignment = options.get("pad_alignment_size_per_rank", 1)
    weight = pad(tensors(output_size, 11, seed=1), 0, size * stride * alignment)
    b = pad(tensors(output_size, seed=2), 0, size * stride * alignment) if bias else None
    x, upstream = (
        activations(size, 11, dimensions=dimensions),
        activations(size, len(weight), dimensions=dimensions, seed=3),
    )
    if gathered and not options.get("keep_padded_output"):
        upstream[..., output_size:] = 0.0
    want = dense(x, weight, b, upstream)

    layer = layers.ColumnParallelLinear(11, output_size, **{"gather_output": False, **F64, **options})
    with torch.no_grad():
        layer.weight.copy_(shard(weight, 0, stride=stride))
        if bias:
            layer.bias.copy_(shard(b, 0, stride=stride))
    if gathered:
        kept = slice(None) if options.get("keep_padded_output") else slice(output_size)
        upstream, want["output"] = upstream[..., kept], want["output"][..., kept]
    else:
        upstream, want["output"] = shard(upstream, -1, stride=stride), shard(want["output"], -1, stride=stride)
    if sp:
        x, want["dX"] = shard(x, sp_dim), shard(want["dX"], sp_dim)
    want["dW"], want["db"] = shard(want["dW"], 0, stride=stride), shard(want["db"], 0, stride=stride)
    if not contiguous:
        x, upstream = non_contiguous(x), non_contiguous(upstream)
    compare(run(layer, x, upstream, skip_bias_add=options.get("skip_bias_add", False)), want)


def check_row(size: int, *, dimensions: int = 3, contiguous: bool = True, input_size: int = 0, **options) -> None:
    stride, sp_dim = options.get("stride", 1), options.get("sequence_dimension", 0)
    sp, split_input = options.get("sequence_parallel_enabled", False), not options.get("input_is_parallel", True)
    input_size = input_size or 7 * size * stride
    bias = options.setdefault("bias", True)
    weight, b = pad(tensors(11, input_size, seed=1), 1, size * stride), tensors(11, seed=2) if bias else None
    x, upstream = (
        activations(size, weight.size(1), dimensions=dimensions),
        activations(size, 11, dimensions=dimensions, seed=3),
    )
    if split_input:
        x[..., input_size:] = 0.0
    want = dense(x, weight, b, upstream)

    layer = layers.RowParallelLinear(input_size, 11, **{"input_is_parallel": True, **F64, **options})
    with torch.no_grad():
        layer.weight.copy_(shard(weight, 1, stride=stride))
        if bias:
            layer.bias.copy_(b)
    if split_input:
        x, want["dX"] = x[..., :input_size], want["dX"][..., :input_size]
    else:
        x, want["dX"] = shard(x, -1, stride=stride), shard(want["dX"], -1, stride=stride)
    if sp:
        upstream, want["output"] = shard(upstream, sp_dim), shard(want["output"], sp_dim)
    want["dW"] = shard(want["dW"], 1, stride=stride)
    if not contiguous:
        x, upstream = non_contiguous(x), non_contiguous(upstream)
    got = run(layer, x, upstream, skip_bias_add=options.get("skip_bias_add", False))
    if sp and bias:  # each rank saw its own tokens alone: the sequence-parallel gradient hook sums over ranks
        assert layer.bias.sequence_parallel_enabled
        got["db"] = torch.stack(from_all_ranks(got["db"])).sum(0)
    compare(got, want)


def compare(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in got.items():
        if got["dW"].dtype == torch.float64:
            assert_float64_close(value, want[name], name)
            continue
        # bf16 keeps 8 bits: inputs, weights and results are rounded by 2^-9 = 2e-3 each, in random directions, and
        # partial sums are added once per rank. A missing reduction is an error of 0.7.
        assert relative_error(value, want[name]) < 1e-2, (name, relative_error(value, want[name]))


LAYOUTS = {
    "whole sequence": {},
    "whole sequence, 2-D": {"dimensions": 2},
    "sequence shards, dim 0": {**SEQUENCE_PARALLEL, "sequence_dimension": 0},
    "sequence shards, dim 1": {**SEQUENCE_PARALLEL, "sequence_dimension": 1},
    "sequence shards, 2-D": {**SEQUENCE_PARALLEL, "dimensions": 2},
    "not contiguous": {"contiguous": False},
    "sequence shards, not contiguous": {**SEQUENCE_PARALLEL, "contiguous": False},
}
COMMON = {
    "bias": {},
    "no bias": {"bias": False},
    "skip_bias_add": {"skip_bias_add": True},
    "stride 3": {"stride": 3},
    "fp64 reduction": {"reduce_dtype": torch.float64},
}


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("check", [check_column, check_row])
def test_layouts(check, layout, world_size):
    initialize()
    for name, options in COMMON.items():
        if world_size == 1 and LAYOUTS[layout].get("sequence_parallel_enabled"):
            continue  # shards of one rank are the whole sequence: covered by the other layouts
        try:
            check(world_size, **LAYOUTS[layout], **options)
        except Exception as error:
            error.add_note(f"with {name}")
            raise


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}, {"dtype": torch.float32}],
    ids=["bf16", "bf16, fp32 reduction", "autocast"],
)
@pytest.mark.parametrize("check", [check_column, check_row])
def test_low_precision(check, options, sequence_parallel, world_size):
    initialize()
    check(world_size, sequence_parallel_enabled=sequence_parallel, **options)


@distributed(world_size=[2, 3, 4])
def test_column_pad(world_size):
    initialize()
    # 7 * T * 3 - 1: the last rank holds one row of padding (three times that with alignment)
    for options in ({}, SEQUENCE_PARALLEL, {"pad_alignment_size_per_rank": 4}):
        check_column(world_size, output_size=21 * world_size - 1, pad=True, **options)


@distributed(world_size=[1, 2, 3])
def test_column_gather_output(world_size):
    initialize()
    check_column(world_size, gather_output=True)
    check_column(world_size, gather_output=True, skip_bias_add=False, bias=False, dimensions=2)
    for options in ({}, {"stride": 3}, {"pad": True, "output_size": 7 * world_size - 1}):
        check_column(world_size, gather_output=True, skip_bias_add=True, **options)  # the bias of all columns
    check_column(world_size, gather_output=True, pad=True, output_size=7 * world_size - 1)
    check_column(world_size, gather_output=True, pad=True, keep_padded_output=True, output_size=7 * world_size - 1)


@distributed(world_size=[1, 2, 3])
def test_row_splits_a_whole_input(world_size):
    initialize()
    check_row(world_size, input_is_parallel=False)
    check_row(world_size, input_is_parallel=False, dimensions=2, bias=False)
    check_row(world_size, input_is_parallel=False, stride=3)
    check_row(world_size, input_is_parallel=False, pad=True, input_size=7 * world_size - 1)


@distributed(world_size=2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_frozen(frozen, sequence_parallel):
    """What is frozen gets no gradient, the rest gets the same as without."""
    size = initialize()
    layer = layers.ColumnParallelLinear(4, 6, gather_output=False, sequence_parallel_enabled=sequence_parallel, **F64)
    x = activations(size, 4, seed=dist.get_rank() if sequence_parallel else 0).requires_grad_()
    named = {"weight": layer.weight, "bias": layer.bias, "input": x}
    upstream = torch.ones_like(layer(x))  # expanded or not, by rank alike
    want = dict(zip(named, torch.autograd.grad(layer(x), list(named.values()), upstream), strict=True))
    for name in named:
        named[name].requires_grad_(name not in frozen)
    layer(x).backward(upstream)
    for name, tensor in named.items():
        if name in frozen:
            assert tensor.grad is None
        else:
            assert_float64_close(tensor.grad, want[name], name)


@distributed(world_size=2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_collective_each_for_the_input_and_its_gradient(sequence_parallel):
    """Joint projections share one gather, and one reduction of the gradient; the backward gathers again."""
    initialize()
    options = {"gather_output": False, "bias": False, "sequence_parallel_enabled": sequence_parallel}
    projections = [layers.ColumnParallelLinear(8, 6, **options) for _ in range(3)]
    x = torch.randn(4, 2, 8, requires_grad=True)
    with CountCollectives() as forward:
        outputs = layers.column_parallel_linears(x, projections)
    loss = torch.stack(outputs).square().sum()
    with CountCollectives() as backward:
        loss.backward()
    if sequence_parallel:
        assert forward.calls == {"_allgather_base_": 1}
        assert backward.calls == {"_allgather_base_": 1, "_reduce_scatter_base_": 1}
    else:
        assert forward.calls == {}
        assert backward.calls == {"allreduce_": 1}


@distributed(world_size=2)
def test_sequence_parallel_column_saves_its_shard_alone():
    size = initialize()
    layer = layers.ColumnParallelLinear(8, 6, gather_output=False, bias=False, **SEQUENCE_PARALLEL)
    saved: list[Tensor] = []
    x = torch.randn(4, 2, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    activation_sizes = [t.numel() for t in saved if t.data_ptr() != layer.weight.data_ptr()]
    assert activation_sizes == [x.numel()], f"the gathered input has {size * x.numel()}"


@distributed(world_size=2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_reduce_dtype_is_that_of_the_reduction(sequence_parallel):
    """bf16 partial sums added in fp32 and rounded once: bit-equal to doing so by hand."""
    initialize()
    options = {"dtype": torch.bfloat16, "bias": False, "reduce_dtype": torch.float32}
    options["sequence_parallel_enabled"] = sequence_parallel
    row = layers.RowParallelLinear(64, 16, input_is_parallel=True, **options)
    x = tensors(4, 2, 32, seed=dist.get_rank(), dtype=torch.bfloat16)
    by_hand = torch.stack(from_all_ranks(x @ row.weight.t())).float().sum(0).bfloat16()
    assert torch.equal(row(x), shard(by_hand, 0) if sequence_parallel else by_hand)

    column = layers.ColumnParallelLinear(16, 64, gather_output=False, **options)
    h = tensors(2 if sequence_parallel else 4, 2, 16, dtype=torch.bfloat16).requires_grad_()
    upstream = tensors(4, 2, 32, seed=dist.get_rank(), dtype=torch.bfloat16)
    (dh,) = torch.autograd.grad(column(h), h, upstream)
    by_hand = torch.stack(from_all_ranks(upstream @ column.weight)).float().sum(0).bfloat16()
    assert torch.equal(dh, shard(by_hand, 0) if sequence_parallel else by_hand)


@distributed(world_size=4)
def test_given_group_decides_size_and_rank():
    """With a group of 2 inside a tensor-parallel size of 1."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, context_parallel_size=2)
    group = parallel_state.get_context_model_parallel_group()
    member = dist.get_rank(group)
    layer = layers.ColumnParallelLinear(3, 4, gather_output=True, bias=False, tensor_model_parallel_group=group, **F64)
    assert layer.weight.shape == (2, 3)
    torch.manual_seed(11)
    layer.init_weight_cpu()
    torch.manual_seed(11)
    full = torch.nn.Linear(3, 4, bias=False, dtype=torch.float64).weight.detach()
    assert_float64_close(layer.weight.detach(), full[2 * member : 2 * member + 2], "initialisation")
    x = tensors(5, 3)
    assert_float64_close(layer(x), x @ full.t(), "output")


@distributed(world_size=[1, 2])
def test_one_token_without_leading_dimensions():
    initialize()
    column = layers.ColumnParallelLinear(4, 8, gather_output=False, **F64)
    row = layers.RowParallelLinear(8, 4, input_is_parallel=True, **F64)
    x = tensors(4).requires_grad_()
    output = row(column(x))
    output.sum().backward()
    found = [output.detach(), x.grad, column.weight.grad.clone(), row.weight.grad.clone()]
    column.zero_grad(), row.zero_grad()
    batch = tensors(4).unsqueeze(0).requires_grad_()
    wanted = row(column(batch))
    wanted.sum().backward()
    expected = [wanted.detach().squeeze(0), batch.grad.squeeze(0), column.weight.grad, row.weight.grad]
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert_float64_close(a, b)


@distributed(world_size=[1, 2])
def test_an_output_may_be_written_to_and_may_be_a_partial_sum():
    initialize()
    row = layers.RowParallelLinear(8, 4, bias=False, input_is_parallel=True, **F64)
    x = tensors(3, 2, 8 // dist.get_world_size()).requires_grad_()
    expected = row(x) * 2
    assert_float64_close(row(x).mul_(2), expected)
    row.reduce_output = False
    assert_float64_close(row(x), x @ row.weight.t())


REFUSALS = {
    "column width": (
        lambda: layers.ColumnParallelLinear(4, 7),
        ["output_size 7", "tensor_model_parallel_size 3", "pad=True", "9"],
    ),
    "vocabulary": (lambda: layers.ParallelEmbedding(7, 4), ["num_embeddings 7", "tensor_model_parallel_size 3", "9"]),
    "gathered sequence": (
        lambda: layers.ColumnParallelLinear(4, 6, sequence_parallel_enabled=True),
        ["sequence_parallel_enabled", "gather_output=False"],
    ),
    "whole input of sequence parallel row": (
        lambda: layers.RowParallelLinear(6, 4, sequence_parallel_enabled=True),
        ["sequence_parallel_enabled", "input_is_parallel=True"],
    ),
    "partial sums with bias": (lambda: layers.RowParallelLinear(6, 4, reduce_output=False), ["bias=False"]),
    "sequence length": (
        lambda: layers.RowParallelLinear(6, 4, input_is_parallel=True, sequence_parallel_enabled=True)(
            torch.zeros(1000, 1, 2)
        ),
        ["sequence length 1000", "tensor_model_parallel_size 3", "1002", "sequence_parallel_enabled"],
    ),
}


@distributed(world_size=3)
def test_refusals():
    initialize()
    for call, facts in REFUSALS.values():
        assert_says(error_message(call), *facts)
