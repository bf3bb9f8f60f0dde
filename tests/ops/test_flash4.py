"""FlashAttention-4 on a stand-in for its kernels: numerics, layouts, recompute, compilation, and when it is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from nxd_memopt._optional import why_missing
from nxd_memopt.backends import backend
from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.backends.cuda import attention as cuda_attention
from nxd_memopt.modules.attention import CoreAttention, split_heads
from nxd_memopt.ops import attention
from nxd_memopt.ops.attention import attention_implementation, core_attention
from nxd_memopt.ops.cuda import attention as flash4_module
from nxd_memopt.ops.cuda.attention import flash4, unavailable_reason
from nxd_memopt.ops.describe import describe_attention
from nxd_memopt.ops.packed import PackedDocuments
from nxd_memopt.ops.parts import packed_view, split_sizes
from tests import flash4_kernels
from tests.reference import assert_float64_close, assert_says, gradients, tensors
from tests.reference_models import batch, gpt_neox_config, llama_config, parallel_model

CALL = {"query_shape": (1, 4, 2048, 64), "kv_heads": 4, "dtype": torch.bfloat16}
WIDTH = 32


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(backend, "attention_implementations", ("flash4", "sdpa", "tiled", "math"))
    monkeypatch.setattr(flash4_module, "_DTYPES", (torch.bfloat16, torch.float32, torch.float64))  # numerics are exact
    return flash4_kernels.install(monkeypatch)


def heads(query_heads, kv_heads, length=13, width=WIDTH):
    """As models pass them: views of ``[S, B, heads * d]``."""
    shapes = ((query_heads, 0), (kv_heads, 1), (kv_heads, 2))
    columns = [tensors(length, 2, n, width, seed=seed) for n, seed in shapes]
    return [x.permute(1, 2, 0, 3).detach().requires_grad_() for x in columns]


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize(("starts", "scale"), [(None, None), ([0, 5, 5, 13, 14, 26, 26], 0.7)], ids=["rows", "packed"])
def test_equals_the_reference(kernels, query_heads, kv_heads, starts, scale):
    inputs, upstream = heads(query_heads, kv_heads), tensors(2, query_heads, 13, WIDTH, seed=3)
    documents = None if starts is None else PackedDocuments.of(torch.tensor(starts), 2, 13)
    found = core_attention(*inputs, implementation="flash4", mask=documents, scale=scale)
    expected = core_attention(*inputs, implementation="math", mask=documents, scale=scale)
    assert_float64_close(found, expected)
    for a, b in zip(gradients(found, upstream, inputs), gradients(expected, upstream, inputs), strict=True):
        assert_float64_close(a, b)
    assert kernels.calls == [None, False]


def test_deterministic_algorithms_are_asked_of_the_kernel(kernels):
    inputs = heads(2, 2)
    torch.use_deterministic_algorithms(True)
    try:
        core_attention(*inputs, implementation="flash4").sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernels.calls == [None, True]


@pytest.mark.parametrize("settings", [llama_config, gpt_neox_config])
@pytest.mark.parametrize("attention_backend", ["auto", "flash4"])
def test_under_autocast_the_kernel_gets_its_dtype(kernels, monkeypatch, settings, attention_backend):
    monkeypatch.setattr(flash4_module, "_DTYPES", (torch.bfloat16,))
    model = parallel_model(settings(hidden_size=256), attention_backend=attention_backend)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch()).loss
    loss.backward()
    assert kernels.calls.count(False) == kernels.calls.count(None) == len(model.decoder_layers())


@pytest.mark.parametrize("packed", [False, True])
def test_the_operators_keep_torchs_rules(kernels, packed):
    """Schemas, shapes without data, gradients under a compiler: ``torch.library.opcheck``."""
    columns = [x.transpose(1, 2).detach().to(torch.bfloat16).requires_grad_() for x in heads(4, 2)]
    boundaries = torch.tensor([0, 13, 20, 26], dtype=torch.int32) if packed else None
    if packed:
        columns = [x.flatten(0, 1).detach().requires_grad_() for x in columns]
    torch.library.opcheck(flash4, (*columns, boundaries, 13))
    assert not flash4(*columns, boundaries, 13)[1].requires_grad, "its gradient would be lost"


def test_a_compiled_call_takes_any_length(kernels):
    counter = CompileCounter()
    compiled = torch.compile(lambda *x: core_attention(*x, implementation="flash4"), backend=counter)
    for length in range(13, 18):
        compiled(*heads(2, 2, length))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("packed", [False, True])
def test_neither_mask_nor_dropout_is_lost(kernels, packed):
    """Whoever calls the operation by name meets the kernel's limits too."""
    inputs = heads(2, 2)
    documents = PackedDocuments.of(torch.tensor([0, 13, 26]), 2, 13)
    with pytest.raises(AssertionError, match="no dropout"):
        core_attention(*inputs, implementation="flash4", mask=documents if packed else None, dropout_p=0.5)
    with pytest.raises(AssertionError, match="takes no mask"):
        core_attention(*inputs, implementation="flash4", mask=torch.ones(2, 1, 13, 13, dtype=torch.bool).tril())


@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_kept_attention_runs_once_and_compiles_whole(kernels, config):
    variants = {"none": {}, "kept": {"recompute_granularity": "full", "recompute_keep_core_attn": True}, "compiled": {}}
    results = {}
    for variant, options in variants.items():
        torch.manual_seed(0)
        net = parallel_model(
            config(num_hidden_layers=2, hidden_size=256, num_attention_heads=8), attention_backend="flash4", **options
        )
        if variant == "compiled":
            torch._dynamo.reset()
            for layer in net.decoder_layers():
                layer.compile(fullgraph=True, backend="aot_eager")
        kernels.calls.clear()
        net(**batch()).loss.backward()
        assert kernels.calls == [None, None, False, False], variant
        results[variant] = {name: parameter.grad for name, parameter in net.named_parameters()}
    for name, value in results["none"].items():
        assert torch.equal(results["kept"][name], value), name
        torch.testing.assert_close(results["compiled"][name], value)


def test_a_gpus_choice_does_not_break_the_graph(kernels, monkeypatch):
    monkeypatch.setattr(backend, "attention_implementations", cuda_attention.implementations(9))
    monkeypatch.setattr(backend, "attention_refusal", cuda_attention.refusal)
    module = CoreAttention(attention_backend="auto", head_dim=WIDTH, dropout=0.0, sharded=False)
    module.compile(fullgraph=True, backend="aot_eager")
    documents = PackedDocuments.of(torch.tensor([0, 5, 13, 26]), 2, 13)
    for mask in (None, documents):
        kernels.calls.clear()
        inputs = heads(4, 2)
        found = module(*inputs, mask)
        assert kernels.calls == [None]
        assert_float64_close(found, core_attention(*inputs, implementation="math", mask=mask))


def test_other_layouts_are_served(kernels):
    """Of AWS's kernels, ``[B, heads, d, S]``, repeated heads, and boundaries that are a column of a table."""
    inputs = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in heads(4, 2)]
    inputs[1] = inputs[1][:, :1].expand_as(inputs[1])
    assert inputs[0].stride(-1) != 1 and inputs[1].stride(1) == 0
    table = torch.tensor([[0, 1], [13, 1], [20, 1], [26, 1]], dtype=torch.int32)
    documents = PackedDocuments.of(table[:, 0], 2, 13)
    for mask in (None, documents):
        found, expected = (core_attention(*inputs, implementation=name, mask=mask) for name in ("flash4", "math"))
        assert_float64_close(found, expected)
        grads = [torch.autograd.grad(x.sum(), inputs) for x in (found, expected)]  # of a sum: repeated too
        for a, b in zip(*grads, strict=True):
            assert_float64_close(a, b)


def test_second_derivatives_are_refused(kernels):
    query, key, value = heads(2, 2)
    total = core_attention(query, key, value, implementation="flash4").square().sum()
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(total, query, create_graph=True)


def test_gradients_of_one_projection_lie_in_one_memory(kernels):
    whole = tensors(13, 2, 4 * 3 * WIDTH).requires_grad_()
    parts = split_sizes(split_heads(whole, 3 * WIDTH, sequence_first=True), [WIDTH] * 3, -1)
    found = core_attention(*parts, implementation="flash4")
    grads = torch.autograd.grad(found, parts, tensors(*found.shape, seed=3))
    assert packed_view(grads, -1) is not None
    expected = core_attention(*parts, implementation="math")
    for a, b in zip(grads, torch.autograd.grad(expected, parts, tensors(*found.shape, seed=3)), strict=True):
        assert_float64_close(a, b)


def test_it_is_said_why_the_kernels_are_not_there(monkeypatch):
    monkeypatch.setattr(backend, "attention_implementations", ("flash4", "math"))
    assert_says(unavailable_reason(), "flash-attn-4 is not installed", "flash-attn-4==4.0.0b36", "[cu13]")
    assert_says(describe_attention(), "no flash4: flash-attn-4")
    assert attention_implementation(**CALL)[0] == "math"
    why_missing.cache_clear()
    flash4_kernels.set_version(monkeypatch, "4.0.0b27")
    assert_says(unavailable_reason(), "flash-attn-4 4.0.0b27 is older than 4.0.0b36")


@pytest.mark.parametrize("name", ["_flash_attn_fwd", "_flash_attn_bwd"])
def test_kernels_of_another_version_are_refused(kernels, monkeypatch, name):
    monkeypatch.setattr(kernels, name, lambda q, k, v, out, dout, lse: None)
    assert_says(unavailable_reason(), f"{name} takes no softmax_scale", "cu_seqlens_k", "flash-attn-4==")


# ---- what each of a GPU's kernels serves -----------------------------------------------------------------------------


def refusal(name, **change):
    """Of the operation's own limits and the device's, as ``attention_implementation`` asks them."""
    call = AttentionCall(**{"query_shape": (1, 4, 47, 64), "kv_heads": 4, "masked": False, "dropout_p": 0.0,
                            "dtype": torch.bfloat16, **change})  # fmt: skip
    own = flash4_module.refusal(call) if name == "flash4" else None
    return own or cuda_attention.refusal(name, call)


@pytest.mark.parametrize(
    ("name", "change", "facts"),
    [
        ("flash4", {"dtype": torch.float32}, ["float32", "bfloat16"]),
        ("flash4", {"masked": True}, ["no mask"]),
        ("flash4", {"dropout_p": 0.1, "packed": True}, ["no dropout", "0.1"]),
        ("flash4", {"query_shape": (1, 4, 47, 80)}, ["80", "not a multiple of", "32"]),
        ("cudnn", {"packed": True}, ["no packed documents"]),
        ("cudnn", {"dropout_p": 0.1}, ["without dropout", "0.1"]),
        ("cudnn", {"query_shape": (1, 4, 47, 136)}, ["136", "128"]),
        ("flash", {"dropout_p": 0.1, "packed": True}, ["without dropout for packed documents", "0.1"]),
        ("flash", {"query_shape": (1, 4, 47, 20)}, ["20", "multiple of 8"]),
        ("efficient", {"packed": True}, ["no packed documents"]),
        ("efficient", {"dtype": torch.float64}, ["float64", "float32"]),
    ],
)
def test_what_a_kernel_cannot_do_is_refused(name, change, facts):
    assert_says(refusal(name, **change), *facts)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("flash4", {"packed": True}),
        ("flash4", {"query_shape": (1, 4, 47, 96), "dtype": torch.float16}),
        ("flash", {"dropout_p": 0.1}),
        ("efficient", {"masked": True, "dropout_p": 0.1, "dtype": torch.float32}),
    ],
)
def test_what_it_can_is_not(name, change):
    assert refusal(name, **change) is None


def test_what_is_switched_off_is_not_imported(kernels, monkeypatch):
    monkeypatch.setattr(backend, "attention_refusal", cuda_attention.refusal)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setitem(attention._UNAVAILABLE, "flash4", lambda: pytest.fail("imported"))
    assert_says(describe_attention(), "no flash4: NVTE_FLASH_ATTN=0")
    assert attention_implementation(**CALL)[0] == "sdpa"


@pytest.mark.parametrize(
    ("name", "torch_switch", "variable"),
    [("flash4", "flash", "NVTE_FLASH_ATTN"), ("cudnn", "cudnn", "NVTE_FUSED_ATTN")],
)
def test_switches_of_torch_and_of_transformer_engine(monkeypatch, name, torch_switch, variable):
    switch = getattr(torch.backends.cuda, f"enable_{torch_switch}_sdp")
    switch(False)
    try:
        assert_says(refusal(name), f"enable_{torch_switch}_sdp(False)")
    finally:
        switch(True)
    assert refusal(name) is None
    monkeypatch.setenv(variable, "0")
    assert_says(refusal(name), f"{variable}=0")


def test_the_library_is_imported_without_the_compiler():
    """torch._dynamo takes seconds, in every process. The fused loss and this attention import it where it traces."""
    code = (
        "import sys, nxd_memopt.memory, nxd_memopt.modules.causal_lm, nxd_memopt.optimizer; "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
