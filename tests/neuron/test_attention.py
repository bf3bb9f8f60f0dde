"""NKI flash attention on a stand-in that holds it to the kernels' contract: numerics, grids, what is saved, errors."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.ops.attention import attention_implementation, core_attention, select_attention
from nxd_memopt.ops.neuron import attention as nki
from tests.neuron import nki_kernels
from tests.reference import assert_says, error_message, gradients, relative_error, tensors, unchanged

LENGTH, WIDTH = 2048, 8


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(backend, "attention_implementations", ("nki", "tiled", "math"))
    return nki_kernels.install(monkeypatch)


def heads(query_heads, kv_heads, dtype=torch.float32):
    shapes = ((query_heads, 0), (kv_heads, 1), (kv_heads, 2))
    return [tensors(1, n, LENGTH, WIDTH, seed=seed, dtype=dtype).requires_grad_() for n, seed in shapes]


# fp32 sums of 2,048 terms; bf16 rounds inputs, weights and results by 2^-9 = 2e-3 each
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(2, 2), (3, 1), (4, 2)])
def test_equals_the_reference(kernels, query_heads, kv_heads, dtype, tolerance):
    inputs = heads(query_heads, kv_heads, dtype)
    upstream = tensors(1, query_heads, LENGTH, WIDTH, seed=3, dtype=dtype)
    assert attention_implementation(inputs[0].shape, kv_heads, dtype=dtype)[0] == "nki"
    with unchanged(*inputs, upstream):
        got = core_attention(*inputs, implementation="nki")
        grads = gradients(got, upstream, inputs)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    want = core_attention(
        *wide, implementation="tiled"
    )  # equal to the plain reference, see tests/ops/test_attention.py
    truths = gradients(want, upstream.float(), wide)
    for name, a, b in zip(("O", "dQ", "dK", "dV"), (got, *grads), (want, *truths), strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        assert relative_error(a, b) < tolerance, name
    assert kernels.flash_fwd.launches[0][0] == (1, kv_heads) and len(kernels.flash_fwd.launches) == 1
    assert kernels.flash_attn_bwd.launches[0][0] == (1, query_heads) and len(kernels.flash_attn_bwd.launches) == 1


def test_strided_inputs_reach_the_kernel_in_its_layout(kernels):
    """As models pass them: views of ``[S, B, h*d]``."""
    inputs = [x.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in heads(2, 1)]
    got = core_attention(*inputs, implementation="nki", scale=0.7)
    want = core_attention(*inputs, implementation="tiled", scale=0.7)
    assert relative_error(got, want) < 1e-5  # fp32, another order of sums


def test_saves_inputs_output_and_one_number_per_query(kernels):
    inputs, saved = heads(2, 1), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = core_attention(*inputs, implementation="nki")
    kept = {x.data_ptr() for x in (*inputs, out)}
    assert [tuple(x.shape) for x in saved if x.data_ptr() not in kept] == [(1, 2, 128, LENGTH // 128)]
    assert len(saved) == 5


def test_backward_reads_what_the_barrier_returns(kernels, monkeypatch):
    inputs, behind = heads(2, 1), []
    monkeypatch.setattr(backend, "optimization_barrier", lambda x: behind.extend(x) or [torch.zeros_like(y) for y in x])
    out = core_attention(*inputs, implementation="nki")
    grads = gradients(out, torch.ones_like(out), inputs)
    assert len(behind) == 6 and all(not grad.any() for grad in grads)


@pytest.mark.parametrize(("kind", "message"), [("ImportError", "no compiler"), ("RuntimeError", "gone in NKI 0.4.0")])
def test_any_error_of_the_import_is_a_reason(kernels, monkeypatch, tmp_path, kind, message):
    """NKI 0.4 raises where the kernels were."""
    monkeypatch.delitem(sys.modules, kernels.__name__)
    monkeypatch.setattr(sys.modules["neuronxcc.nki.kernels"], "__path__", [str(tmp_path)])
    (tmp_path / "attention.py").write_text(f"raise {kind}({message!r})\n", encoding="ascii")
    assert_says(nki.unavailable_reason() or "", kernels.__name__, f"{kind}: {message}")
    assert select_attention("auto") == "tiled"
    assert_says(error_message(lambda: select_attention("nki")), message)


def test_a_module_without_the_kernels_is_a_reason(kernels, monkeypatch):
    monkeypatch.setitem(sys.modules, kernels.__name__, types.ModuleType(kernels.__name__))
    assert_says(nki.unavailable_reason() or "", "flash_fwd", "flash_attn_bwd", "FlashConfig")
