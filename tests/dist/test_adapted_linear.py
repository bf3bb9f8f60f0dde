"""Layers that compute their adapters in their matmuls, against layers and factors called one by one, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nxd_memopt.modules.lora import LoraConfig, get_lora_model
from nxd_memopt.modules.mlp import fused_gated_mlp
from nxd_memopt.ops.activation import gated_activation
from nxd_memopt.ops.norm import add_rms_norm
from nxd_memopt.ops.parts import packed_view
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.functional import gated_mlp
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear, column_parallel_linears
from tests.dist.pool import distributed
from tests.reference import assert_float64_close, shard, tensors

LENGTH, BATCH, HIDDEN, WIDTH = 20, 3, 14, 12
F64: dict[str, Any] = {"dtype": torch.float64}


class Layers(nn.Module):
    """Three column-parallel layers of one input, and a row-parallel one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        columns = {"bias": True, "gather_output": False, **options, **F64}
        self.q, self.k, self.v = (ColumnParallelLinear(HIDDEN, WIDTH, **columns) for _ in range(3))
        self.row = RowParallelLinear(WIDTH, HIDDEN, input_is_parallel=True, **options, **F64)


def adapted(targets: tuple[str, ...], **options: Any) -> Any:
    """Layers with adapters whose B is not 0."""
    torch.manual_seed(3)
    layers = get_lora_model(Layers(**options), LoraConfig(3, 5, target_modules=targets))
    for name, parameter in layers.named_parameters():
        if "lora_B" in name:
            full = tensors(*parameter.full_shape, seed=len(name))  # pyright: ignore[reportAttributeAccessIssue]
            sharded = getattr(parameter, "tensor_model_parallel", False)
            with torch.no_grad():
                parameter.copy_(shard(full, 0) if sharded else full)
    return layers


def results(function: Any, layers: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of inputs and factors."""
    outputs = function(*inputs)
    trained = [parameter for parameter in layers.parameters() if parameter.requires_grad]
    wanted = [x for x in (*inputs, *trained) if x.requires_grad]
    upstream = [tensors(*output.shape, seed=5 + i) for i, output in enumerate(outputs)]
    kept = [i for i, output in enumerate(outputs) if output.requires_grad]
    found = torch.autograd.grad([outputs[i] for i in kept], wanted, [upstream[i] for i in kept], allow_unused=True)
    empty = torch.zeros(1, **F64)
    return [*(output.detach() for output in outputs), *(empty if x is None else x.clone() for x in found)]


def called(layers: Any) -> None:
    """Let every adapter be called as layers of their own."""
    for layer in layers.modules():
        if hasattr(layer, "fused_adapter"):
            layer.fused_adapter.unavailable = "compared"


def compare(function: Any, layers: Any, inputs: list[Tensor]) -> None:
    found = results(function, layers, inputs)
    called(layers)
    expected = results(function, layers, inputs)
    for a, b in zip(found, expected, strict=True):
        assert_float64_close(a, b)


def columns(layers: Any) -> Any:
    names = (layers.q, layers.k, layers.v)

    def run(x: Tensor) -> list[Tensor]:
        outputs = column_parallel_linears(x, names)
        return [layer.adapted(x, output) for layer, output in zip(names, outputs, strict=True)]

    return run


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("sequence_dimension", [None, 0, 1])
@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("targets", [("q", "k", "v"), ("q", "v"), ("k",)])
def test_column_layers_with_one_input(targets, has_grad, sequence_dimension):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    options: dict[str, Any] = {}
    x = tensors(LENGTH, BATCH, HIDDEN, seed=0)
    if sequence_dimension is not None:
        options = {"sequence_parallel_enabled": True, "sequence_dimension": sequence_dimension}
        x = shard(x.movedim(0, sequence_dimension).contiguous(), sequence_dimension, size=size)
    layers = adapted(targets, **options)
    compare(columns(layers), layers, [x.requires_grad_(has_grad)])


@distributed(world_size=1)
@pytest.mark.parametrize("targets", [("q", "k", "v"), ("v",)])
def test_packed_weights_and_gradients(targets):
    """As on GPUs: weights, outputs and their gradients are parts of one tensor each."""
    parallel_state.initialize_model_parallel(1)
    layers = adapted(targets)
    packed = torch.cat([layer.weight.detach() for layer in (layers.q, layers.k, layers.v)])
    for layer, rows in zip((layers.q, layers.k, layers.v), packed.split(WIDTH), strict=True):
        layer.weight.data = rows

    def joint(x: Tensor) -> list[Tensor]:
        outputs = columns(layers)(x)
        view = packed_view(outputs, -1)
        if layers.v.fused_adapter.unavailable is None:
            assert view is not None
        return [Packed.apply(*outputs)]

    compare(joint, layers, [tensors(LENGTH, BATCH, HIDDEN, seed=0).requires_grad_()])


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("sequence_dimension", [None, 0, 1])
def test_the_gradient_of_a_from_the_input_of_the_norm(sequence_dimension, checkpointed):
    """The result of a norm is not kept, unless it was written to or a checkpoint keeps it as an input."""
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    options: dict[str, Any] = {}
    x = tensors(LENGTH, BATCH, HIDDEN, seed=0)
    if sequence_dimension is not None:
        options = {"sequence_parallel_enabled": True, "sequence_dimension": sequence_dimension}
        x = shard(x.movedim(0, sequence_dimension).contiguous(), sequence_dimension, size=size)
    weight, run = 1 + 0.1 * tensors(HIDDEN, seed=1), columns(layers := adapted(("q", "v"), **options))
    kept: set[int] = set()

    def after_norm(change: Any) -> Any:
        def function(x: Tensor, added: Tensor) -> list[Tensor]:
            def note(saved: Tensor) -> Tensor:
                kept.add(saved.untyped_storage().data_ptr())
                return saved

            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
                normed, total = add_rms_norm(x, added, weight, 1e-6)
                changed = change(normed)
                outputs = checkpoint(run, changed, use_reentrant=False) if checkpointed else run(changed)
            is_kept = changed.untyped_storage().data_ptr() in kept
            assert is_kept == (checkpointed or change is not same), change
            return [*outputs, total]

        return function

    inputs = [x.requires_grad_(), tensors(*x.shape, seed=2).requires_grad_()]
    found = results(after_norm(same), layers, inputs)
    for a, b in zip(found, results(after_norm(torch.clone), layers, inputs), strict=True):
        assert_float64_close(a, b)
    doubled = results(after_norm(lambda normed: normed.mul_(2)), layers, inputs)
    for a, b in zip(doubled, results(after_norm(lambda normed: 2 * normed), layers, inputs), strict=True):
        assert_float64_close(a, b)
    with torch.inference_mode():  # tensors have no versions
        assert torch.equal(run(add_rms_norm(inputs[0], inputs[1], weight, 1e-6)[0])[0], found[0])


@distributed(world_size=1)
@pytest.mark.parametrize("changed", ["sum", "weight"])
def test_what_a_norm_keeps_is_written_to(changed):
    """The layer then keeps its input: the norm's backward does not run where adapters alone are asked for."""
    parallel_state.initialize_model_parallel(1)
    layers = adapted(("q", "k", "v"))
    downs = [layer.lora_A.weight for layer in (layers.q, layers.k, layers.v)]
    found = []
    for writes in (False, True):
        x, weight = tensors(LENGTH, BATCH, HIDDEN, seed=0).requires_grad_(), 1 + 0.1 * tensors(HIDDEN, seed=1)
        normed, total = add_rms_norm(x, tensors(*x.shape, seed=2), weight, 1e-6)
        if writes:
            (total if changed == "sum" else weight).add_(1)
        outputs = columns(layers)(normed)
        upstream = [tensors(*output.shape, seed=5) for output in outputs]
        found.append(torch.autograd.grad(outputs, downs, upstream))
    for a, b in zip(*found, strict=True):
        assert_float64_close(a, b)


def same(x: Tensor) -> Tensor:
    return x


class Packed(torch.autograd.Function):
    """The parts as one tensor, whose gradients are parts of one."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.sizes = [part.size(-1) for part in parts]
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.contiguous().split(ctx.sizes, -1)


@distributed(world_size=1)
def test_parts_of_a_fused_layer_have_one_a():
    parallel_state.initialize_model_parallel(1)
    layers = adapted(("q", "k", "v"))
    layers.k.lora_A = layers.v.lora_A = layers.q.lora_A
    compare(columns(layers), layers, [tensors(LENGTH, BATCH, HIDDEN, seed=0).requires_grad_()])
    x = tensors(HIDDEN, seed=1).requires_grad_()
    compare(lambda x: [layers.q(x)], layers, [x])


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("sequence_dimension", [None, 0, 1])
def test_row_layer(sequence_dimension):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    options: dict[str, Any] = {}
    x = tensors(LENGTH, BATCH, WIDTH, seed=0)
    if sequence_dimension is not None:
        options = {"sequence_parallel_enabled": True, "sequence_dimension": sequence_dimension}
        x = x.movedim(0, sequence_dimension).contiguous()
    layers = adapted(("row",), **options)
    compare(lambda x: [layers.row(x)], layers, [shard(x, -1, size=size).requires_grad_()])


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tile_rows", [1000, 7])
@pytest.mark.parametrize("hidden_act", ["silu", "gelu"])
def test_gated_mlp(hidden_act, tile_rows, sequence_parallel):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    layers = adapted(("row",), sequence_parallel_enabled=sequence_parallel)
    inputs = [shard(tensors(LENGTH, BATCH, WIDTH, seed=i), -1, size=size).requires_grad_() for i in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gated_mlp, "ACTIVATION_TILE_BYTES", tile_rows * WIDTH // size * 8)
        found = results(lambda g, u: [fused_gated_mlp(g * 1, u * 1, layers.row, hidden_act)], layers, inputs)
    called(layers)
    expected = results(lambda g, u: [layers.row(gated_activation(g, u, hidden_act))], layers, inputs)
    for a, b in zip(found, expected, strict=True):
        assert_float64_close(a, b)


def kept_by(function: Any) -> list[Tensor]:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        output = function()
    del output
    return kept


@distributed(world_size=1)
def test_what_is_kept():
    """Inputs once, r columns, and parameters; frozen layers keep no input, and the gated MLP no activation."""
    parallel_state.initialize_model_parallel(1)
    layers = adapted(("q", "v", "row"))
    own = {parameter.data_ptr() for parameter in layers.parameters()}
    x = tensors(LENGTH, BATCH, HIDDEN, seed=0).requires_grad_()
    sizes = [each.numel() for each in kept_by(lambda: columns(layers)(x)) if each.data_ptr() not in own]
    assert sorted(sizes) == [2 * 3 * LENGTH * BATCH, x.numel()]
    assert not [each for each in kept_by(lambda: layers.k(x)) if each.data_ptr() not in own]
    gate, up = (tensors(LENGTH, BATCH, WIDTH, seed=i).requires_grad_() * 1 for i in range(2))
    kept = kept_by(lambda: fused_gated_mlp(gate, up, layers.row, "silu"))
    sizes = [each.numel() for each in kept if each.data_ptr() not in own]
    assert sorted(sizes) == [3 * LENGTH * BATCH, gate.numel(), up.numel()]


@distributed(world_size=1)
@pytest.mark.filterwarnings("ignore:.*lora_A has a hook")
def test_a_factor_with_a_hook_is_called():
    parallel_state.initialize_model_parallel(1)
    layers = adapted(("q", "row"))
    x = tensors(LENGTH, BATCH, HIDDEN, seed=0)
    expected = layers.q(x)
    calls: list[int] = []
    handle = layers.q.lora_A.register_forward_hook(lambda *_: calls.append(1))
    assert_float64_close(layers.q(x).detach(), expected.detach())
    assert calls
    handle.remove()
    assert layers.q.fused_adapter.is_active


@distributed(world_size=1)
def test_autocast_casts_factors_and_gradients_add_up():
    parallel_state.initialize_model_parallel(1)
    layers = adapted(("q", "k", "row")).float()
    x = tensors(LENGTH, BATCH, HIDDEN, seed=0).float().requires_grad_()

    def step() -> dict[str, Tensor]:
        layers.zero_grad()
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                gate, up, _ = columns(layers)(x)
                output = fused_gated_mlp(gate, up, layers.row, "silu")
            assert output.dtype == torch.bfloat16
            output.float().square().sum().backward()
        return {name: p.grad.clone() for name, p in layers.named_parameters() if p.grad is not None}

    found = step()

    def plain() -> dict[str, Tensor]:
        called(layers)
        layers.zero_grad()
        gate, up, _ = columns(layers)(x)
        layers.row(gated_activation(gate, up, "silu")).square().sum().backward()
        return {name: 2 * p.grad for name, p in layers.named_parameters() if p.grad is not None}

    expected = plain()
    assert found.keys() == expected.keys() and all("lora" in name for name in found)
    for name, grad in expected.items():
        assert found[name].dtype == torch.float32
        # bf16 has 8 bits, and the gradient of a sum of squares has the errors of several matmuls
        assert (found[name] - grad).norm() <= 0.03 * grad.norm(), name
