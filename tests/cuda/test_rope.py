"""The Triton kernels of RoPE against float64, in every layout of heads, and where they rotate in place."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nxd_memopt.backends import backend
from nxd_memopt.ops.cuda import rope
from nxd_memopt.ops.parts import packed_view, split_sizes
from nxd_memopt.ops.rope import apply_rope, apply_rope_qkv, rope_frequencies, rope_tables
from tests.cuda.against_float64 import DTYPES, compare, random
from tests.reference_models import gpt_neox_config, llama_config, parallel_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]


def split_thirds(x):
    return split_sizes(x, [x.size(-1) // 3] * 3, -1)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(8, 128, 128), (9, 64, 64), (3, 96, 24), (1, 80, 20)])
@pytest.mark.parametrize("layout", ["heads first", "sequence first", "part of qkv"])
def test_rope(layout, heads, head_dim, rotary_dim, dtype, bound):
    batch, length = 2, 33
    if layout == "heads first":
        x = random(batch, heads, length, head_dim, dtype=dtype)
    else:
        parts = 3 if layout == "part of qkv" else 1
        whole = random(length, batch, heads * parts * head_dim, dtype=dtype)
        x = whole.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)[..., :head_dim]
    frequencies = rope_frequencies(rotary_dim, {"rope_theta": 10000.0})
    for positions in (torch.arange(length).unsqueeze(0), torch.arange(2 * length).view(2, length)):
        tables = rope_tables(frequencies, positions.to(backend.device), dtype)
        compare(apply_rope, (x.detach().requires_grad_(), *tables), bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (3, 3)])
@pytest.mark.parametrize("layout", ["apart", "rows", "interleaved"])
def test_rope_of_a_projection(layout, heads, groups, dtype, bound):
    batch, length, head_dim = 2, 33, 32
    sizes = [heads * head_dim, groups * head_dim, groups * head_dim]
    tables = rope_tables(
        rope_frequencies(head_dim, {"rope_theta": 10000.0}), torch.arange(length, device=backend.device)[None], dtype
    )
    if layout == "interleaved":
        whole = random(length, batch, 3 * heads * head_dim, dtype=dtype).requires_grad_()
        split = lambda x: split_thirds(x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3))  # noqa: E731
    else:
        whole = random(length, batch, sum(sizes), dtype=dtype).requires_grad_()
        apart = (lambda x: x.clone()) if layout == "apart" else (lambda x: x)
        split = lambda x: [  # noqa: E731
            apart(part).unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3) for part in x.split(sizes, -1)
        ]
    for i in range(3):
        compare(lambda x, cos, sin, i=i: apply_rope_qkv(*split(x), cos, sin)[i], (whole, *tables), bound)
    parts = [part.detach().requires_grad_() for part in split(whole)]
    turned = apply_rope_qkv(*parts, *tables)
    grads = torch.autograd.grad(turned, parts, [torch.randn_like(t) for t in turned])
    rows = grads if layout == "interleaved" else [grad.permute(2, 0, 1, 3).flatten(-2) for grad in grads]
    assert (packed_view(rows, -1) is not None) == (layout != "apart")
    assert (turned[2].data_ptr() == parts[2].data_ptr()) == (layout == "apart")


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(3, 96, 24), (8, 32, 32)])
@pytest.mark.parametrize("joined_gradients", [True, False])
def test_rope_in_place(heads, head_dim, rotary_dim, joined_gradients, dtype, bound):
    def split(x):
        return split_thirds(x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3))

    tables = rope_tables(
        rope_frequencies(rotary_dim, {"rope_theta": 10000.0}), torch.arange(33, device=backend.device)[None], dtype
    )
    whole, upstream = (random(33, 2, 3 * heads * head_dim, dtype=dtype) for _ in range(2))
    leaf = whole.clone().requires_grad_()
    parts = split(leaf)
    exact = whole.double().requires_grad_()
    expected = apply_rope_qkv(*split(exact), *(table.double() for table in tables))
    turned = apply_rope_qkv(*parts, *tables, in_place=True)
    assert [x.data_ptr() for x in turned] == [x.data_ptr() for x in parts]
    assert all((a.double() - b).norm() / b.norm() < bound for a, b in zip(turned, expected, strict=True))
    upstreams = split(upstream.clone())
    (wanted,) = torch.autograd.grad(expected, exact, [x.double() for x in upstreams])
    given = upstreams if joined_gradients else [x.clone() for x in upstreams]
    (found,) = torch.autograd.grad(turned, leaf, given)
    assert (found.data_ptr() == given[0].data_ptr()) == joined_gradients
    assert (found.double() - wanted).norm() / wanted.norm() < bound
    with pytest.raises(RuntimeError, match="modified inplace"):
        _ = parts[0].grad_fn


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (3, 3)])
@pytest.mark.parametrize("joined_gradients", [True, False])
def test_rope_in_place_of_grouped_heads(joined_gradients, heads, groups, dtype, bound, monkeypatch):
    """Heads of query and of key lie in a row, as LLaMA's do: one kernel turns both."""
    head_dim, calls, original = 32, [], rope._rotate

    def rotate(*tensors, **options):
        calls.append(options.get("in_place", False))
        return original(*tensors, **options)

    def split(x):
        sizes = [heads * head_dim, groups * head_dim, groups * head_dim]
        return [part.unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3) for part in x.split(sizes, -1)]

    monkeypatch.setattr(rope, "_rotate", rotate)
    tables = rope_tables(
        rope_frequencies(head_dim, {"rope_theta": 10000.0}), torch.arange(33, device=backend.device)[None], dtype
    )
    whole, upstream = (random(33, 2, (heads + 2 * groups) * head_dim, dtype=dtype) for _ in range(2))
    exact = [part.double().requires_grad_() for part in split(whole)]
    parts = [part.detach().requires_grad_() for part in split(whole)]
    found = apply_rope_qkv(*parts, *tables, in_place=True)
    expected = apply_rope_qkv(*exact, *(table.double() for table in tables))
    assert calls == [True] and [x.data_ptr() for x in found] == [x.data_ptr() for x in parts]
    given = split(upstream.clone())
    given = given if joined_gradients else [x.clone() for x in given]
    wanted = torch.autograd.grad(expected, exact, [x.double() for x in given])
    grads = torch.autograd.grad(found, parts, given)
    assert (grads[0].data_ptr() == given[0].data_ptr()) == joined_gradients
    assert packed_view(grads[:2], 1) is not None
    for a, b in zip((*found, *grads), (*expected, *wanted), strict=True):
        assert (a.double() - b).norm() / b.norm() < bound


class KeepMatmuls(TorchDispatchMode):
    """What selective checkpointing does first."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


NEOX = {"hidden_size": 256, "num_attention_heads": 4}


@pytest.mark.parametrize("watch", ["output", "attention", "all modules", "dispatch"])
@pytest.mark.parametrize(
    "settings",
    [
        gpt_neox_config(**NEOX),
        gpt_neox_config(**NEOX, use_parallel_residual=False),
        llama_config(hidden_size=256),
    ],
    ids=["parallel residual", "serial residual", "llama"],
)
def test_rope_is_in_place_where_nobody_looks(watch, settings, monkeypatch):
    model = parallel_model(settings).to(backend.device)
    ids = torch.randint(0, 32, (1, 16), device=backend.device)
    calls, original = [], rope._rotate_all

    def rotate_all(*tensors, in_place, **options):
        calls.append(in_place)
        original(*tensors, in_place=in_place, **options)

    monkeypatch.setattr(rope, "_rotate_all", rotate_all)
    model(ids, labels=ids).loss.backward()
    assert calls and all(calls[: len(calls) // 2]), "forward, unwatched"
    calls.clear()
    kept, layer = [], model.decoder_layers()[0]
    is_llama = hasattr(layer, "self_attn")
    attention = layer.self_attn if is_llama else layer.attention
    seen = attention.v_proj if is_llama else attention.query_key_value
    hook = lambda module, args, output: kept.append((output, output.clone()))  # noqa: E731
    mode = KeepMatmuls() if watch == "dispatch" else contextlib.nullcontext()
    handle = None
    if watch == "output":
        handle = seen.register_forward_hook(hook)
    elif watch == "attention":
        handle = attention.core_attn.register_forward_hook(hook)
    elif watch == "all modules":
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, output: hook(module, args, output) if module is seen else None
        )
    try:
        with mode:
            model(ids, labels=ids)
    finally:
        if handle is not None:
            handle.remove()
    # One call a layer; the hook is in the first of two layers. LLaMA's hooked projections run one by
    # one: their outputs are no parts of one tensor, and are rotated by another function.
    expected = {
        "output": [True] if is_llama else [False, True],
        "attention": [False, True],
        "all modules": [] if is_llama else [False, False],
        "dispatch": [False, False],
    }
    assert calls == expected[watch]
    assert all(torch.equal(a, b) for a, b in kept) and (kept or watch == "dispatch")


def test_rope_of_transposed_heads():
    """Gradients of the reference attention's keys have the sequence innermost."""
    tables = rope_tables(
        rope_frequencies(32, {"rope_theta": 10000.0}), torch.arange(7, device=backend.device)[None], torch.float32
    )
    x = random(2, 3, 32, 7, dtype=torch.float32).detach().transpose(-1, -2).requires_grad_()
    y = apply_rope(x, *tables)
    upstream = torch.randn(2, 3, 32, 7, device=backend.device).transpose(-1, -2)
    (found,) = torch.autograd.grad(y, x, upstream)
    again = x.detach().contiguous().requires_grad_()
    expected = apply_rope(again, *tables)
    assert torch.equal(y, expected)
    assert torch.equal(found, torch.autograd.grad(expected, again, upstream.contiguous())[0])
