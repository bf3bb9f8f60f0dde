"""parallel_cross_entropy against torch's dense cross entropy: loss and gradient, per token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.loss_functions import from_parallel_logits_to_logprobs, parallel_cross_entropy
from tests.dist.pool import distributed
from tests.reference import (
    CountCollectives,
    assert_float64_close,
    assert_same_on_all_ranks,
    assert_says,
    error_message,
    relative_error,
    shard,
    tensors,
    unchanged,
)

VOCAB = 29  # prime: padding at every T above 1


def padded_shard(logits: Tensor, size: int, fill: float = 50.0) -> Tensor:
    """This rank's columns; padding holds large numbers that must not count."""
    missing = -logits.size(-1) % size
    return shard(F.pad(logits, (0, missing), value=fill), -1).requires_grad_()


def labels(*shape: int, ignored: int | None = None) -> Tensor:
    """Every label of the vocabulary; some are ignored."""
    target = torch.arange(torch.Size(shape).numel()).remainder(VOCAB).view(shape)
    return target if ignored is None else target.masked_fill(target % 5 == 3, ignored)


def dense(logits: Tensor, target: Tensor, upstream: Tensor, **options) -> tuple[Tensor, Tensor]:
    logits = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none", **options).view(target.shape)
    return loss.detach(), torch.autograd.grad(loss, logits, upstream)[0]


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [None, -100, 7])
def test_equals_dense_cross_entropy(smoothing, ignored, world_size):
    """float64; labels 7 are in the vocabulary and ignored; logits of 100 need the maximum over all ranks."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    options = {"label_smoothing": smoothing} | ({} if ignored is None else {"ignore_index": ignored})
    logits = 30 * tensors(2, 37, VOCAB)
    target, upstream = labels(2, 37, ignored=ignored), tensors(2, 37, seed=1)
    want_loss, want_grad = dense(logits, target, upstream, **options)
    local = padded_shard(logits, world_size)
    with unchanged(local, target, upstream):  # the caller's logits are not overwritten
        loss = parallel_cross_entropy(local, target, vocab_size=VOCAB, **options)
        loss.backward(upstream)
    assert_float64_close(loss, want_loss, "loss")
    assert_same_on_all_ranks(loss, "loss")
    assert_float64_close(local.grad, padded_shard(want_grad, world_size, fill=0.0).detach(), "gradient")


@distributed(world_size=[1, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("dtype", "loss_tolerance", "grad_tolerance"),
    [
        (torch.float32, 1e-6, 1e-6),  # fp32 has 6e-8; sums of 29 terms
        # the logits are given in bf16, so the loss, made in fp32, is as exact as above; gradients are rounded
        # to bf16 (2^-9 = 2e-3), twice: with the upstream gradient's product
        (torch.bfloat16, 1e-6, 6e-3),
    ],
    ids=["fp32", "bf16"],
)
def test_dtypes(dtype, loss_tolerance, grad_tolerance, smoothing, world_size):
    """Exponentials are summed in fp32."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    logits, target = tensors(4, 29, VOCAB, dtype=dtype), labels(4, 29, ignored=-100)
    upstream = tensors(4, 29, seed=1, dtype=torch.float32)
    want_loss, want_grad = dense(logits, target, upstream.double(), label_smoothing=smoothing)
    local = padded_shard(logits, world_size)
    loss = parallel_cross_entropy(local, target, smoothing, vocab_size=VOCAB)
    loss.backward(upstream)
    assert loss.dtype == torch.float32 and local.grad.dtype == dtype
    assert relative_error(loss, want_loss) < loss_tolerance
    assert relative_error(local.grad, padded_shard(want_grad, world_size, fill=0.0)) < grad_tolerance


@distributed(world_size=4)
def test_few_collectives_of_one_number_per_token():
    """The maximum, then all sums together; none in backward."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
    local = padded_shard(tensors(3, VOCAB), 4)
    with CountCollectives() as forward:
        loss = parallel_cross_entropy(local, torch.tensor([0, 1, 2]), 0.1, vocab_size=VOCAB).sum()
    with CountCollectives() as backward:
        loss.backward()
    assert forward.calls == {"allreduce_": 2} and backward.total == 0


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"target": torch.zeros(2, 4, dtype=torch.long)}, ["[2, 4]", "[2, 3, 15]"]),
        ({"label_smoothing": 1.5}, ["label_smoothing", "1.5", "[0, 1]"]),
        ({"vocab_size": 31}, ["vocab_size", "31", "30"]),
        ({"target": torch.tensor([[0, 1, 30], [0, 1, 2]])}, ["label 30", "[0, 30)", "ignore_index -100"]),
        ({"target": torch.tensor([[0, 1, -1], [0, 1, 2]])}, ["label -1", "[0, 30)"]),
    ],
)
def test_refusals(change, facts):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    arguments = {"target": torch.zeros(2, 3, dtype=torch.long)} | change
    assert_says(error_message(lambda: parallel_cross_entropy(torch.zeros(2, 3, 15), **arguments)), *facts)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("inference", [True, False])
def test_log_probabilities_of_the_next_tokens(inference, world_size):
    """float64; with ``inference`` nothing is kept for a backward."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    logits = tensors(2, 7, 16).requires_grad_()
    target, upstream = labels(2, 7) % 16, tensors(2, 6, seed=1)
    want = logits.log_softmax(-1)[:, :-1].gather(-1, target[:, 1:, None]).squeeze(-1)
    local = shard(logits.detach(), -1).requires_grad_()
    got = from_parallel_logits_to_logprobs(local, target, inference)
    assert_float64_close(got, want)
    assert got.requires_grad is not inference
    if not inference:
        got.backward(upstream)
        assert_float64_close(local.grad, shard(torch.autograd.grad(want, logits, upstream)[0], -1))
