"""Tests the fused head and loss over sharded vocabularies and sequences against whole float64 logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.fused_loss.reference import reference_linear_cross_entropy
from nxd_memopt.parallel_layers.loss_functions import fused_linear_cross_entropy
from tests.dist.pool import distributed
from tests.parallel_layers.test_fused_loss import VARIANTS
from tests.reference import CountCollectives, assert_float64_close, assert_says, error_message, shard, tensors

HIDDEN = 24


def padded(weight: torch.Tensor) -> torch.Tensor:
    """This rank's rows; padding holds large numbers that must not count."""
    missing = -weight.size(0) % dist.get_world_size()
    return shard(F.pad(weight, (0, 0, 0, missing), value=50.0), 0).clone().requires_grad_()


@distributed([2, 4])
@pytest.mark.parametrize("logits_bytes", [0, 60_000])
@pytest.mark.parametrize("layout", ["sequence first", "batch first", "replicated"])
@pytest.mark.parametrize(
    ("vocab", "terms", "reduction"),
    [
        (123, {}, "mean"),
        (124, VARIANTS[-1], "mean"),
        (5, {"label_smoothing": 0.1}, "sum"),  # over 4 ranks one holds padding only
        (57, VARIANTS[-1], "none"),
    ],
)
def test_equals_the_whole_head(vocab, terms, reduction, layout, logits_bytes):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    batch, length = 3, 12 * 7
    full = tensors(length, batch, HIDDEN, seed=1).requires_grad_()
    weight = (tensors(vocab, HIDDEN, seed=2) * 0.3).requires_grad_()
    target = torch.arange(length * batch).view(length, batch) * 7 % vocab
    target[5:30] = -100
    expected = reference_linear_cross_entropy(
        full.flatten(0, 1), weight, target.flatten(), reduction=reduction, **terms
    )
    upstream = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64).view(expected.shape)
    dx, dw = torch.autograd.grad(expected, (full, weight), upstream)
    if reduction == "none":
        expected, upstream = expected.view(target.shape), upstream.view(target.shape)
    batch_first = layout == "batch first"
    x = full.detach() if layout == "replicated" else shard(full.detach(), 0)
    if batch_first:
        x, target = x.transpose(0, 1), target.t()
        expected, upstream = (t.t() if t.dim() else t for t in (expected, upstream))
    x, own = x.clone().requires_grad_(), padded(weight.detach())
    loss = fused_linear_cross_entropy(
        x,
        own,
        target,
        reduction=reduction,
        vocab_size=vocab,
        sequence_parallel_enabled=layout != "replicated",
        sequence_dimension=int(batch_first),
        logits_bytes=logits_bytes,
        **terms,
    )
    assert_float64_close(loss, expected)
    found_dx, found_dw = torch.autograd.grad(loss, (x, own), upstream)
    wanted = dx if layout == "replicated" else shard(dx, 0)
    assert_float64_close(found_dx.transpose(0, 1) if batch_first else found_dx, wanted)
    assert_float64_close(found_dw, shard(F.pad(dw, (0, 0, 0, -vocab % size)), 0))


@distributed(4)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_a_chunk_costs_two_gathers_and_a_reduction(reduce_dtype):
    parallel_state.initialize_model_parallel(4)
    x = tensors(64, HIDDEN, dtype=torch.bfloat16).requires_grad_()  # a shard of 256 tokens
    weight = tensors(32, HIDDEN, seed=dist.get_rank(), dtype=torch.bfloat16).requires_grad_()
    target = torch.arange(256) % 128
    with CountCollectives() as counts:
        loss = fused_linear_cross_entropy(x, weight, target, sequence_parallel_enabled=True, reduce_dtype=reduce_dtype)
        loss.backward()
    assert counts.calls == {"_allgather_base_": 2, "_reduce_scatter_base_": 1}
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


@distributed(2)
def test_labels_of_a_shard_are_refused():
    parallel_state.initialize_model_parallel(2)
    x, weight = tensors(6, HIDDEN), tensors(10, HIDDEN)
    target = torch.zeros(6, dtype=torch.long)
    message = error_message(
        lambda: fused_linear_cross_entropy(x, weight, target, sequence_parallel_enabled=True), ValueError
    )
    assert_says(message, "[6, 24]", "2 ranks", "full sequence")


@distributed(world_size=2)
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_narrow_labels(dtype):
    """A label minus the first row of the second rank, 35,000, is beyond int16."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    vocab, hidden = 70_000, tensors(4, 3)
    weight = tensors(vocab // 2, 3, seed=5 + parallel_state.get_tensor_model_parallel_rank())
    labels = torch.tensor([100, 30_000, 7, 32_000])
    found = [fused_linear_cross_entropy(hidden, weight, each, vocab_size=vocab) for each in (labels, labels.to(dtype))]
    assert torch.equal(*found)
