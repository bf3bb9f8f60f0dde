"""Adapters on a GPU: fused paths stay on, keep no activation, and equal factors that are called, in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.modules.lora import LoraConfig, add_adapters, is_adapter
from nxd_memopt.ops.parts import packed_view
from tests.reference_models import llama_config, parallel_model, qwen3_config
from tests.training.test_graphed_adapters import built, config_of, trained, written

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(config: Any, targets: tuple[str, ...], dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(0)
    model = parallel_model(config(**SIZES), **options).to(device="cuda", dtype=dtype)
    add_adapters(model, LoraConfig(16, 32, target_modules=targets))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


def step(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    ids = torch.randint(0, model.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1)).cuda()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {"loss": loss.detach().float()}
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == is_adapter(name), name
        if is_adapter(name):
            found[name] = parameter.grad.float().clone()
    return found


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Sum of the relative errors of all tensors."""
    return sum(float((found[name] - value).norm() / value.norm()) for name, value in exact.items())


def call_factors(model: Any) -> None:
    for layer in model.modules():
        if hasattr(layer, "fused_adapter"):
            layer.fused_adapter.unavailable = "compared"
    # The paths of the modules around the layers ask for their adapters when they are made.
    for layer in model.modules():
        if hasattr(layer, "share_input"):
            layer.share_input()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj"), ("gate_proj",), ("down_proj",)], ids=str)
@pytest.mark.parametrize("config", [llama_config, qwen3_config])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_equals_factors_that_are_called(config, targets, dtype, recompute):
    """fp32 may use TF32, with 11 bits. In bf16, with 8, both are compared with fp32: theirs is the larger error."""
    model = adapted(config, targets, dtype, recompute_granularity=recompute)
    found = step(model)
    call_factors(model)
    called = step(model)
    if dtype == torch.float32:
        for name, expected in called.items():
            assert (found[name] - expected).norm() <= 5e-3 * expected.norm(), name
        return
    exact = step(model.float())
    assert errors(found, exact) <= 1.1 * errors(called, exact)


def test_fused_paths_stay_on_and_keep_what_they_did():
    model = adapted(llama_config, ALL, torch.bfloat16)
    lines = {line.partition(":")[0]: line.partition(": ")[2] for line in model.fusions.describe()}
    layers = model.config.num_hidden_layers
    for name in ("gated activation with down projection", "in-place RoPE", "projection of gate_proj, up_proj"):
        assert lines[name] == f"on in {layers} of {layers}", lines
    assert lines["residual + norm"] == f"on in {2 * layers} of {2 * layers}", lines
    attention = model.model.layers[0].self_attn
    downs = [getattr(attention, name).lora_A.weight for name in attention.shared_input_layers]
    assert packed_view(downs, 0) is not None  # one matmul, without a copy
    mlp = model.model.layers[0].mlp
    hidden = torch.randn(2, 64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = mlp(hidden)
    parameters = {p.untyped_storage().data_ptr() for p in mlp.parameters()}
    own = sum(size for pointer, size in kept.items() if pointer not in parameters)
    # Input, gate and up, and r columns of three adapters.
    assert own == 2 * 64 * 2 * (256 + 2 * 704 + 3 * 16)
    output.sum().backward()


@pytest.mark.parametrize("base_dtype", [None, "fp8"])
@pytest.mark.parametrize("memory", [{}, {"recompute_granularity": "full"}])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_a_graph_trains_the_bits_of_eager_steps(tmp_path, precision, memory, base_dtype):
    """4 steps of 2 micro-batches through the training program, with evaluation and a merge after each."""
    base = written(tmp_path)
    options = {"precision": precision, "base_dtype": base_dtype, **memory}
    configs = [config_of(base, graph=graph, **options) for graph in (False, True)]
    eager, graphed = (trained(built(config), config) for config in configs)
    assert all(torch.equal(*pair) for pair in zip(eager, graphed, strict=True))
