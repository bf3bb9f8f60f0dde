"""Attention: tiles against the plain reference, what they save and materialise, and which implementation runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nxd_memopt.backends import backend
from nxd_memopt.modules.attention import CoreAttention
from nxd_memopt.ops import attention
from nxd_memopt.ops import tiled_attention as tiled
from nxd_memopt.ops.attention import (
    attention_dtype,
    attention_implementation,
    core_attention,
    select_attention,
)
from nxd_memopt.ops.autograd import cast_if_autocast_enabled
from nxd_memopt.ops.describe import describe_attention
from nxd_memopt.ops.math_attention import padding_and_causal_mask
from nxd_memopt.ops.packed import PackedDocuments
from nxd_memopt.ops.tiled_attention import tiled_attention
from tests.reference import (
    assert_float64_close,
    assert_says,
    error_message,
    gradients,
    relative_error,
    tensors,
    unchanged,
)

LENGTH = 47  # prime: the last tile is a part


def test_softmax_is_the_function_that_torch_neuronx_replaces(monkeypatch):
    """With NEURON_FUSE_SOFTMAX it sets torch.nn.functional.softmax to one operation of its compiler."""
    calls = []
    original = torch.nn.functional.softmax

    def softmax(*args, **options):
        calls.append(options)
        return original(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
    core_attention(*heads(6), implementation="math")
    assert calls == [{"dim": -1, "dtype": torch.float64}]


def heads(kv_heads: int, *, length: int = LENGTH, width: int = 5, dtype=torch.float64):
    shapes = ((6, 0), (kv_heads, 1), (kv_heads, 2))
    return [tensors(2, n, length, width, seed=seed, dtype=dtype).requires_grad_() for n, seed in shapes]


def padding(length: int = LENGTH):
    keep = torch.ones(2, length)
    keep[0, length - 9 :], keep[1, :11] = 0, 0
    return padding_and_causal_mask(keep)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


# ---- tiles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [7, 16, 64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_tiles_equal_the_reference(kv_heads, masked, tile):
    inputs, mask = heads(kv_heads), padding() if masked else None
    upstream = tensors(2, 6, LENGTH, 5, seed=3)
    want = core_attention(*inputs, implementation="math", mask=mask)
    with unchanged(*inputs, upstream):
        got = tiled_attention(*inputs, mask, tile=tile)
        got_grads = gradients(got, upstream, inputs)
    assert_float64_close(got, want)
    for name, a, b in zip(("dQ", "dK", "dV"), got_grads, gradients(want, upstream, inputs), strict=True):
        assert_float64_close(a, b, name)


@pytest.mark.parametrize("kind", ["causal", "padded", "documents"])
@pytest.mark.parametrize("window", [1, 16, 17, LENGTH])
def test_windows_equal_their_definition(window, kind):
    """Query i sees the keys i - window < j <= i, whatever the tiles; of its document, without padding; any scale."""
    inputs = heads(3)
    upstream = tensors(2, 6, LENGTH, 5, seed=3)
    rows = torch.arange(LENGTH)
    seen = (rows[None] <= rows[:, None]) & (rows[None] > rows[:, None] - window)
    mask, documents = None, None
    if kind == "padded":
        mask = padding()
        seen = seen & mask
    elif kind == "documents":
        documents = PackedDocuments.of(torch.tensor([0, 20, LENGTH, LENGTH + 7, 2 * LENGTH]), 2, LENGTH)
        seen = seen & documents.mask()
    query, key, value = inputs
    repeated = [x.repeat_interleave(2, dim=1) for x in (key, value)]
    scores = (query @ repeated[0].transpose(-1, -2) * 0.7).masked_fill(~seen, float("-inf"))
    want = scores.softmax(-1) @ repeated[1]
    wanted = gradients(want, upstream, inputs)
    for name in ("math", "tiled", "sdpa"):
        own = mask if documents is None else documents
        got = core_attention(*inputs, implementation=name, mask=own, window=window, scale=0.7)
        assert_float64_close(got, want, name)
        for a, b in zip(gradients(got, upstream, inputs), wanted, strict=True):
            assert_float64_close(a, b, name)
    if kind == "causal":
        for tile in (1, 7, 16):
            assert_float64_close(tiled_attention(*inputs, tile=tile, window=window, scale=0.7), want, f"tile {tile}")


def test_windows_leave_tiles_out(monkeypatch):
    """Forward and backward compute the tiles in which a query sees a key, and no others."""
    pairs = []
    compute = tiled._scores

    def counted(query, key, mask, rows, *others):
        pairs.append((rows, others[0]))
        return compute(query, key, mask, rows, *others)

    monkeypatch.setattr(tiled, "_scores", counted)
    inputs = heads(3, length=64)
    tiled_attention(*inputs, tile=8, window=9).sum().backward()
    # the first key that row 8 i sees is 8 i - 8: of two tiles, in forward and again in backward
    assert len(pairs) == 2 * (8 + 7) and len(set(pairs)) == 15


def test_causality_is_added_to_a_mask_without_it():
    inputs, everything = heads(3), torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    assert_float64_close(tiled_attention(*inputs, everything, tile=16), core_attention(*inputs, implementation="math"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_is_as_close_as_the_reference(dtype):
    """Both against float64: tiles may not lose more than the plain op does."""
    inputs = heads(2, length=131, width=16, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    upstream = tensors(2, 6, 131, 16, seed=3, dtype=dtype)
    truth = core_attention(*wide, implementation="math")
    truths = [truth, *gradients(truth, upstream.double(), wide)]
    errors = []
    for run in (lambda *x: core_attention(*x, implementation="math"), lambda *x: tiled_attention(*x, tile=32)):
        out = run(*inputs)
        results = [out, *gradients(out, upstream, inputs)]
        assert all(x.dtype == dtype for x in results)
        errors.append([relative_error(a, b) for a, b in zip(results, truths, strict=True)])
    for by_math, by_tiles in zip(*errors, strict=True):
        assert by_tiles < 2 * by_math  # other places of rounding, the same number of them


def test_large_scores_neither_overflow_nor_vanish():
    """Scores around +-1e4: exp without the running maximum would be inf or 0."""
    query, key, value = (x.detach().float() for x in heads(6))
    got = tiled_attention(100 * query, 100 * key, value, tile=16)
    want = core_attention((100 * query).double(), (100 * key).double(), value.double(), implementation="math")
    assert got.isfinite().all()
    assert relative_error(got, want) < 1e-2  # fp32 scores of 1e4 are good to 1e-3, and weights to as much


def test_tiles_save_inputs_output_and_one_number_per_query():
    inputs = heads(3, length=64, width=8, dtype=torch.float32)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = tiled_attention(*inputs, tile=16)
    others = [x for x in saved if x.data_ptr() not in {t.data_ptr() for t in (*inputs, out)}]
    assert [tuple(x.shape) for x in others] == [(2, 6, 64, 1)]


def test_tiles_never_materialise_all_scores():
    """1,024 positions: the largest tensor of the whole of forward and backward is a quarter of S x S for all heads."""
    inputs = heads(2, length=1024, width=4, dtype=torch.float32)
    largest = {}
    for name in ("tiled", "math"):
        with LargestTensor() as mode:
            core_attention(*inputs, implementation=name).sum().backward()
        largest[name] = mode.elements
    assert largest["math"] == 2 * 6 * 1024 * 1024
    assert largest["tiled"] == 2 * 6 * 512 * 512


def test_tiles_under_autocast():
    inputs = heads(3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = core_attention(*inputs, implementation="tiled")
    grads = gradients(got, torch.ones_like(got), inputs)
    want = tiled_attention(*(x.bfloat16() for x in inputs))
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)
    assert all(grad.dtype == torch.float32 for grad in grads)


# ---- selection -------------------------------------------------------------------------------------------------------

CALL = {"query_shape": (1, 4, 2048, 64), "kv_heads": 4, "dtype": torch.bfloat16}


@pytest.fixture
def trainium_order(monkeypatch):
    """The order of a device that has the NKI kernels."""
    monkeypatch.setattr(backend, "attention_implementations", ("nki", "tiled", "math"))
    monkeypatch.setitem(attention._UNAVAILABLE, "nki", lambda: None)


def test_the_devices_first_choice_runs():
    assert attention_implementation(**CALL) == ("sdpa", "sdpa can run")
    assert attention_implementation(**CALL, masked=True, dropout_p=0.1)[0] == "sdpa"
    assert describe_attention() == "sdpa > tiled > math"
    assert attention_implementation(**CALL, window=16)[0] == "tiled", "sdpa would take a mask of S x S"


@pytest.mark.parametrize(
    ("change", "name", "facts"),
    [
        ({}, "nki", ["nki can run"]),
        ({"query_shape": (1, 4, 2000, 64)}, "tiled", ["no nki", "2000", "2048", "pad to 2048"]),
        ({"masked": True}, "tiled", ["no nki", "mask"]),
        ({"dtype": torch.float16}, "tiled", ["no nki", "float16", "bfloat16"]),
        ({"dropout_p": 0.1}, "math", ["no nki", "no tiled", "dropout", "0.1"]),
    ],
)
def test_each_call_gets_what_can_serve_it(trainium_order, change, name, facts):
    chosen, reason = attention_implementation(**(CALL | change))
    assert chosen == name
    assert_says(reason, *facts)


def test_a_forced_choice_that_cannot_be_met_is_refused(trainium_order):
    def force(name, **change):
        return error_message(lambda: attention_implementation(**(CALL | change), attention_backend=name))

    assert_says(force("nki", query_shape=(1, 4, 47, 64)), "'nki'", "cannot be met", "47", "'auto'")
    assert_says(force("tiled", dropout_p=0.1), "'tiled'", "dropout")
    assert_says(force("sdpa"), "'sdpa'", backend.name, "tiled")
    assert_says(force("tield"), "did you mean 'tiled'")
    assert attention_implementation(**CALL, attention_backend="math")[0] == "math"


def test_dropout_without_a_kernel_warns(trainium_order):
    with pytest.warns(UserWarning, match="S x S weights.*attention_dropout"):
        assert select_attention("auto", 0.1) == "math"
    assert select_attention("auto", 0.0) == "nki"


def test_the_module_decides_for_each_call(trainium_order, monkeypatch):
    """Float64 is nothing for the NKI kernel: tiles run, and a model that insists on the kernel fails by name."""
    runs = []
    run = tiled_attention
    monkeypatch.setattr(tiled, "tiled_attention", lambda *x, **options: runs.append(x) or run(*x, **options))
    module, inputs = CoreAttention(attention_backend="auto", head_dim=64, dropout=0.0, sharded=False), heads(3)
    assert module.implementation == "nki"  # what a full-size model can count on
    assert_float64_close(module(*inputs, None), core_attention(*inputs, implementation="math"))
    assert len(runs) == 1
    forced = CoreAttention(attention_backend="nki", head_dim=64, dropout=0.0, sharded=False)
    assert_says(error_message(lambda: forced(*inputs, None)), "'nki'", "float64")


@pytest.mark.parametrize("implementation", ["math", "tiled"])
def test_fp16_products_above_its_largest_number(implementation):
    """q k^t is 73,728, and the score 6,517: the product must be scaled before it is rounded to fp16."""
    torch.manual_seed(0)
    query, key, value = torch.full((1, 1, 4, 128), 24.0), torch.full((1, 1, 4, 128), 24.0), torch.randn(1, 1, 4, 128)
    inputs = [x.half().requires_grad_() for x in (query, key, value)]
    output = core_attention(*inputs, implementation=implementation)
    # Equal scores: every query has the mean of the values before it.
    expected = value.cumsum(2) / torch.arange(1, 5).view(1, 1, 4, 1)
    torch.testing.assert_close(output.float(), expected, rtol=2e-3, atol=2e-3)  # fp16's rounding
    output.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_float64_is_not_cast_by_autocast():
    """As in torch's own autocast: a reference in float64 keeps its digits."""
    x = torch.ones(2, 2, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cast_if_autocast_enabled(x, x.float())[0].dtype == torch.float64
        assert cast_if_autocast_enabled(x, x.float())[1].dtype == torch.bfloat16
        assert attention_dtype(x) == torch.float64 and attention_dtype(x.float()) == torch.bfloat16
