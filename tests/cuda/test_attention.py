"""Every attention implementation of the GPU against the reference, and which of them runs."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.ops.attention import attention_implementation, core_attention
from nxd_memopt.ops.packed import PackedDocuments
from tests.reference import assert_says, error_message

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]

SHAPE = (2, 8, 512, 64)
CALL = {"query_shape": SHAPE, "kv_heads": 2, "dtype": torch.bfloat16}


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient", "tiled"])
@pytest.mark.parametrize("heads", [8, 2, 1])
@pytest.mark.parametrize(("length", "head_dim"), [(512, 64), (333, 96), (1000, 128)])
def test_equals_the_reference(name, heads, length, head_dim):
    check_against_reference(name, heads, length, head_dim)


@pytest.mark.parametrize("name", ["flash", "tiled"])
@pytest.mark.parametrize("heads", [8, 2, 1])
@pytest.mark.parametrize(("length", "head_dim"), [(512, 64), (333, 96)])
def test_packed_documents_equal_the_reference(name, heads, length, head_dim):
    boundaries = torch.tensor([0, 7, 8, length, length + 200, 2 * length], device=backend.device)
    check_against_reference(name, heads, length, head_dim, PackedDocuments.of(boundaries, 2, length))


def test_packed_documents_take_flash_and_make_no_mask():
    assert attention_implementation(**CALL, packed=True)[0] == "flash"
    refusal = error_message(lambda: attention_implementation(**CALL, packed=True, attention_backend="cudnn"))
    assert_says(refusal, "packed")
    query = torch.randn(1, 8, 32768, 64, device=backend.device, dtype=torch.bfloat16)
    packed = PackedDocuments.of(torch.tensor([0, 9, 32768], device=backend.device), 1, 32768)
    backend.reset_peak_memory_stats()
    before = backend.memory_allocated()
    core_attention(query, query, query, implementation="flash", mask=packed)
    assert backend.max_memory_allocated() - before < 32768 * 32768 / 8


def check_against_reference(name, heads, length, head_dim, mask=None):
    query = torch.randn(2, 8, length, head_dim, device=backend.device, dtype=torch.bfloat16, requires_grad=True)
    key, value = (
        torch.randn(2, heads, length, head_dim, device=backend.device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )
    upstream = torch.randn_like(query)
    found = core_attention(query, key, value, implementation=name, mask=mask)
    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    expected = core_attention(*exact, implementation="math", mask=mask)
    grads = torch.autograd.grad(found, (query, key, value), upstream)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    for a, b in zip((found, *grads), (expected, *wanted), strict=True):
        assert (a.double() - b).norm() / b.norm() < 1e-2  # bf16 keeps 8 bits


def test_the_generations_best_comes_first():
    newest = torch.cuda.get_device_capability() >= (9, 0)
    assert attention_implementation(**CALL)[0] == ("cudnn" if newest else "flash")
    assert attention_implementation(**CALL, masked=True)[0] == "efficient"
    assert attention_implementation(**CALL, dropout_p=0.1)[0] == "flash"
    assert attention_implementation(**(CALL | {"dtype": torch.float32}))[0] == "efficient"


def test_switches_of_transformer_engine_and_torch_are_honoured(monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    name, reason = attention_implementation(**CALL)
    assert name == "flash" and ("NVTE_FUSED_ATTN=0" in reason or torch.cuda.get_device_capability() < (9, 0))
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert attention_implementation(**CALL)[0] == "efficient"
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        assert attention_implementation(**CALL)[0] == "tiled"
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(True)


def test_an_impossible_choice_is_an_error(monkeypatch):
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    message = error_message(lambda: attention_implementation(**CALL, attention_backend="flash"), ValueError)
    assert_says(message, "'flash'", "NVTE_FLASH_ATTN=0", "auto")
    message = error_message(
        lambda: attention_implementation(**CALL, masked=True, attention_backend="cudnn"), ValueError
    )
    assert_says(message, "'cudnn'", "no mask")
