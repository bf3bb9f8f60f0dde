"""Every attention implementation of the GPU against the reference, and which of them runs."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.ops.attention import attention_implementation, core_attention
from nxd_memopt.ops.cuda.attention import unavailable_reason
from nxd_memopt.ops.packed import PackedDocuments

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]

SHAPE = (2, 8, 512, 64)
CALL = {"query_shape": SHAPE, "kv_heads": 2, "dtype": torch.bfloat16}


HAS_FLASH4 = "flash4" in backend.attention_implementations and unavailable_reason() is None
IS_FLASH4_FIRST = HAS_FLASH4 and torch.cuda.get_device_capability()[0] == 9
FLASH4 = pytest.param(
    "flash4", marks=pytest.mark.skipif(not HAS_FLASH4, reason="needs flash-attn-4 on Hopper or newer")
)


@pytest.mark.parametrize("name", [FLASH4, "cudnn", "flash", "efficient", "tiled"])
@pytest.mark.parametrize("heads", [8, 2, 1])
@pytest.mark.parametrize(("length", "head_dim"), [(512, 64), (333, 96), (1000, 128)])
def test_equals_the_reference(name, heads, length, head_dim):
    check_against_reference(name, heads, length, head_dim)


@pytest.mark.parametrize("name", [FLASH4, "flash", "tiled"])
@pytest.mark.parametrize("heads", [8, 2, 1])
@pytest.mark.parametrize(("length", "head_dim"), [(512, 64), (333, 96)])
def test_packed_documents_equal_the_reference(name, heads, length, head_dim):
    starts = [0, 7, 8, 8, length, length + 200, 2 * length, 2 * length]  # two are empty
    check_against_reference(
        name, heads, length, head_dim, PackedDocuments.of(torch.tensor(starts, device=backend.device), 2, length)
    )


@pytest.mark.skipif(not HAS_FLASH4, reason="needs flash-attn-4 on Hopper or newer")
@pytest.mark.parametrize(("length", "head_dim"), [(1, 64), (129, 32), (1025, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash4_takes_odd_shapes(dtype, length, head_dim):
    check_against_reference("flash4", 2, length, head_dim, dtype=dtype)


@pytest.mark.skipif(not HAS_FLASH4, reason="needs flash-attn-4 on Hopper or newer")
@pytest.mark.parametrize("packed", [False, True])
def test_flash4_repeats_itself_where_that_was_asked_for(packed):
    columns = projected(512, 8, 2, 64)
    boundaries = torch.tensor([0, 100, 512, 1024], device=backend.device)
    mask = PackedDocuments.of(boundaries, 2, 512) if packed else None
    upstream = torch.randn_like(columns[0])
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (
            torch.autograd.grad(core_attention(*columns, implementation="flash4", mask=mask), columns, upstream)
            for _ in range(8)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_packed_documents_take_flash():
    assert attention_implementation(**CALL, packed=True)[0] == ("flash4" if IS_FLASH4_FIRST else "flash")


@pytest.mark.parametrize("name", [FLASH4, "flash"])
def test_packed_documents_make_no_mask(name):
    query = torch.randn(1, 8, 32768, 64, device=backend.device, dtype=torch.bfloat16)
    packed = PackedDocuments.of(torch.tensor([0, 9, 32768], device=backend.device), 1, 32768)
    backend.reset_peak_memory_stats()
    before = backend.memory_allocated()
    core_attention(query, query, query, implementation=name, mask=packed)
    assert backend.max_memory_allocated() - before < 32768 * 32768 / 8


def projected(length, heads, groups, head_dim, dtype=torch.bfloat16):
    """``[2, heads, length, head_dim]`` and twice ``[2, groups, ...]``, as models pass them: parts of one projection."""
    whole = torch.randn(length, 2, (heads + 2 * groups) * head_dim, device=backend.device, dtype=dtype)
    if heads == groups:  # GPT-NeoX's: of each head query, key and value lie side by side
        parts = whole.unflatten(-1, (heads, -1)).chunk(3, dim=-1)
    else:
        parts = [
            part.unflatten(-1, (-1, head_dim)) for part in whole.split([heads * head_dim, *[groups * head_dim] * 2], -1)
        ]
    return [part.permute(1, 2, 0, 3).detach().requires_grad_() for part in parts]


def check_against_reference(name, heads, length, head_dim, mask=None, dtype=torch.bfloat16):
    query, key, value = projected(length, 8, heads, head_dim, dtype)
    upstream = torch.randn_like(query)
    found = core_attention(query, key, value, implementation=name, mask=mask, scale=0.1)
    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    expected = core_attention(*exact, implementation="math", mask=mask, scale=0.1)
    grads = torch.autograd.grad(found, (query, key, value), upstream)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    for a, b in zip((found, *grads), (expected, *wanted), strict=True):
        assert (a.double() - b).norm() < 1e-2 * b.norm() + 1e-4  # bf16 keeps 8 bits; one token's dQ is 0


def test_the_generations_best_comes_first():
    newest = torch.cuda.get_device_capability() >= (9, 0)
    best = "flash4" if IS_FLASH4_FIRST else "cudnn"
    assert attention_implementation(**CALL)[0] == (best if newest else "flash")
    assert attention_implementation(**CALL, masked=True)[0] == "efficient"
    assert attention_implementation(**CALL, dropout_p=0.1)[0] == "flash"
    assert attention_implementation(**(CALL | {"dtype": torch.float32}))[0] == "efficient"
