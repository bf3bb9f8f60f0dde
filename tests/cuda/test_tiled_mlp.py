"""MLPs by tiles of tokens on a GPU: the Triton kernels and packed weights, and the memory that is left."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory
from tests.reference_models import VOCAB, gpt_neox_config, llama_config, parallel_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]


def built(config, **changes):
    settings = config(hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_hidden_layers=3, **changes)
    return parallel_model(settings).to(backend.device, torch.bfloat16)


def gradients(model, ids) -> tuple[torch.Tensor, int]:
    for _ in range(2):
        model.zero_grad()
        backend.synchronize()
        backend.reset_peak_memory_stats()
        model(ids, labels=ids).loss.backward()
    return torch.cat([param.grad.flatten().float() for param in model.parameters()]), backend.max_memory_allocated()


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_equals_the_modules_in_less_memory(config, recompute):
    model = built(config)
    ids = torch.randint(VOCAB, (1, 16000), generator=torch.Generator().manual_seed(1)).to(backend.device)
    apply_memory(model, MemoryConfig(recompute_granularity=recompute))
    expected, peak = gradients(model, ids)
    for tokens in (3000, "auto"):
        apply_memory(model, MemoryConfig(recompute_granularity=recompute, mlp_tile_tokens=tokens))
        found, lower = gradients(model, ids)
        assert (found - expected).norm() < 0.02 * expected.norm()  # bf16 activations of other kernels
        assert tokens == "auto" or lower < peak


def test_mlp_against_float64():
    """The relative error of every gradient is that of one rounding, with 9 tiles as with 1."""
    model = built(llama_config)
    mlp = model.recompute_modules()["mlp"][0]
    x = torch.randn(1, 9000, 512, device=backend.device, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn_like(x)
    gate, up, down = (layer.weight.detach().double() for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    leaves = [weight.requires_grad_() for weight in (gate, up, down)]
    inner = torch.nn.functional.silu(x.detach().double() @ gate.t()) * (x.detach().double() @ up.t())
    (inner @ down.t()).backward(upstream.double())
    apply_memory(model, MemoryConfig(mlp_tile_tokens=1000))
    mlp.zero_grad()
    mlp(x).backward(upstream)
    for leaf, param in zip(leaves, mlp.parameters(), strict=True):
        assert (param.grad.double() - leaf.grad).norm() < 0.01 * leaf.grad.norm()
