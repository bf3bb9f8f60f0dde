"""MLPs by tiles of tokens against the modules themselves: values, gradients, matmuls, and what is saved."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.planner.techniques.tiling import auto_tile_tokens
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message
from tests.reference_models import (
    BATCH,
    LENGTH,
    batch,
    full_parameters,
    gpt_neox_config,
    hugging_face,
    llama_config,
    loss_and_gradients,
    parallel_model,
)

CONFIGS = {
    "llama": llama_config,
    "llama biases, gelu": lambda: llama_config(mlp_bias=True, hidden_act="gelu"),
    "neox": gpt_neox_config,
    "neox sequential, tanh gelu": lambda: gpt_neox_config(use_parallel_residual=False, hidden_act="gelu_new"),
}
FULL = {"recompute_granularity": "full"}


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_equals_the_modules(name, world_size):
    """Tiles that divide the 36 tokens, that do not, of one token, and longer than the sequence."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    for sequence_parallel in [False, True][:world_size]:
        full = full_parameters(hugging_face(CONFIGS[name]()))
        model = parallel_model(CONFIGS[name](), full, sequence_parallel=sequence_parallel)
        want = loss_and_gradients(model)
        for tokens in (12, 14, 1, 1000, "auto"):
            for options in ({}, FULL)[: 1 + (tokens == 14)]:
                apply_memory(model, MemoryConfig(mlp_tile_tokens=tokens, **options))
                for key, value in loss_and_gradients(model).items():
                    # fp32 sums of tiles in another order: the bound of docs/numerics.md
                    error = (value - want[key]).norm() / want[key].norm()
                    assert error < 2e-5, f"{key}, {tokens} tokens, {options}: {error}"
        apply_memory(model, MemoryConfig())
        assert all(torch.equal(value, want[key]) for key, value in loss_and_gradients(model).items())


def mlp_of(config):
    model = parallel_model(config()).to(torch.bfloat16)
    return model, model.recompute_modules()["mlp"][0]


@distributed(world_size=1)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_weight_gradients_of_tiles_are_rounded_once(config):
    """bf16, 64 tiles: as near to the fp32 product as one rounding allows, and delivered once for each parameter."""
    parallel_state.initialize_model_parallel(1)
    model, mlp = mlp_of(config)
    x = torch.randn(1, 512, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).requires_grad_()
    upstream = torch.randn(1, 512, 32, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    deliveries: Counter[str] = Counter()
    for name, param in mlp.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: deliveries.update([name]))

    def run(tokens):
        apply_memory(model, MemoryConfig(mlp_tile_tokens=tokens))
        mlp.zero_grad()
        deliveries.clear()
        mlp(x).backward(upstream)
        assert set(deliveries.values()) == {1} and len(deliveries) == len(list(mlp.parameters()))
        return {name: param.grad.float().clone() for name, param in mlp.named_parameters()}

    one, many = run(512), run(8)
    for name, value in one.items():
        # Equal factors, summed in fp32: only ties of the last rounding differ. A sum in bf16 is off by 1e-2.
        assert (many[name] - value).norm() < 1e-3 * value.norm(), name


class Matmuls(TorchDispatchMode):
    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default):
            a, b = args[-2:]
            self.flops += a.size(0) * a.size(1) * b.size(1)
        return func(*args, **(kwargs or {}))


@distributed(world_size=1)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_a_recomputed_layer_runs_its_mlp_twice_and_its_last_matmul_once(config):
    """Column layers: forward, recompute, dX and dW; row layer: forward, dX and dW; no third forward."""
    parallel_state.initialize_model_parallel(1)
    counted = {}
    for tiled in (False, True):
        model = parallel_model(config(num_hidden_layers=1), fused_linear_cross_entropy=False)
        apply_memory(
            model, MemoryConfig(**FULL, mlp_tile_tokens=12 if tiled else None, fused_linear_cross_entropy=False)
        )
        loss = model(**batch()).loss
        with Matmuls() as matmuls:
            loss.backward()
        counted[tiled] = matmuls.flops
    # The plain recompute ends before the last matmul too, so backward has the same work: the
    # column layers once more, the row layer not. Without tiles GPT-NeoX's attention ends with its
    # MLP; with tiles its output projection, [H, H], runs again.
    extra = BATCH * LENGTH * 32 * 32 if config is gpt_neox_config else 0
    assert counted[True] == counted[False] + extra > 0


@distributed(world_size=1)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_only_the_input_is_saved(config):
    parallel_state.initialize_model_parallel(1)
    model = parallel_model(config(), mlp_tile_tokens=12)
    mlp = model.recompute_modules()["mlp"][0]
    x = torch.randn(BATCH, LENGTH, 32, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        mlp(x)
    allowed = {x.data_ptr(), *(param.data_ptr() for param in mlp.parameters())}
    assert {tensor.data_ptr() for tensor in kept} <= allowed


def test_frozen_weights_and_inputs():
    model = parallel_model(llama_config(mlp_bias=True), mlp_tile_tokens=12)
    mlp = model.recompute_modules()["mlp"][0]
    mlp.up_proj.weight.requires_grad_(False)
    mlp.gate_proj.bias.requires_grad_(False)
    x = torch.randn(BATCH, LENGTH, 32)
    mlp(x).sum().backward()
    want = {name: param.grad for name, param in mlp.named_parameters()}
    apply_memory(model, MemoryConfig())
    mlp.zero_grad()
    mlp(x).sum().backward()
    for name, param in mlp.named_parameters():
        assert (want[name] is None) == (param.grad is None) == (not param.requires_grad), name
        if param.grad is not None:
            torch.testing.assert_close(want[name], param.grad)


def test_sizes_of_tiles():
    # LLaMA-3-8B, bf16: (3 * 4096 + 4 * 14336) * 2 bytes a token; a tile of 32768 tokens has 4.2 GiB
    sizes = [auto_tile_tokens(free, 139264) for free in (None, 80 << 30, 16 << 30, 0)]
    assert sizes == [32768, 32768, 8192, 1024]


def test_refusals():
    model = parallel_model(llama_config())
    tiles = MemoryConfig(mlp_tile_tokens=12)
    assert_says(error_message(lambda: apply_memory(model, tiles, compile="layer")), "compile 'layer'", "null")
    assert_says(error_message(lambda: MemoryConfig(mlp_tile_tokens=0)), "at least 1, got 0")
    both = {"recompute_granularity": "selective", "recompute_modules": ("norm", "mlp")}
    assert_says(error_message(lambda: MemoryConfig(mlp_tile_tokens=12, **both)), "already", "['mlp']")
    apply_memory(model, tiles)
    handle = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *args: None)
    assert_says(error_message(lambda: model(**batch())), "mlp_tile_tokens", "ColumnParallelLinear", "remove it")
    handle.remove()
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(44, 32)
    assert_says(error_message(lambda: model(**batch())), "needs a RowParallelLinear", "Linear")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nxd_memopt.memory.tiles.backend.views_share_memory", False)
        assert_says(error_message(lambda: apply_memory(model, tiles)), "backend cpu", "leave it out")
