"""Random streams: ranks differ inside fork(), agree outside; recomputation replays both bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.memory.recompute import checkpoint
from nxd_memopt.modules.dropout import ParallelDropout
from nxd_memopt.parallel_layers import parallel_state, random
from tests.dist.pool import distributed
from tests.reference import assert_same_on_all_ranks, assert_says, error_message, from_all_ranks


def start(size: int | None = None, seed: int = 42) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size or dist.get_world_size())
    random.model_parallel_manual_seed(seed)


def assert_distinct(parts: list[torch.Tensor]) -> None:
    for i, part in enumerate(parts):
        assert not any(torch.equal(part, other) for other in parts[:i])


@distributed(world_size=2)
def test_fork_differs_per_rank_and_leaves_the_default_stream():
    start()
    with random.get_rng_tracker().fork():
        inside = [torch.rand(16), torch.rand(16)]
    outside = torch.rand(16)
    torch.manual_seed(42)
    assert torch.equal(outside, torch.rand(16)), "the replicated stream is seeded with the seed itself"
    assert_same_on_all_ranks(outside)
    for drawn in inside:
        assert_distinct(from_all_ranks(drawn))
    with random.get_rng_tracker().fork():
        assert not torch.equal(torch.rand(16), inside[0]), "the stream goes on at the next fork"
    generator = torch.Generator().manual_seed(42 + 2718 + dist.get_rank())
    assert torch.equal(inside[0], torch.rand(16, generator=generator))


@distributed(world_size=2)
def test_states_are_saved_and_restored():
    start()
    tracker = random.get_rng_tracker()
    saved, default = tracker.get_states(), torch.get_rng_state()

    def draw():
        with tracker.fork():
            forked = torch.rand(8)
        return forked, torch.rand(8)

    first = draw()
    tracker.set_states(saved)
    torch.set_rng_state(default)
    for a, b in zip(first, draw(), strict=True):
        assert torch.equal(a, b)


@distributed(world_size=2)
def test_default_stream_returns_after_an_error_inside():
    start()
    state = torch.get_rng_state()
    with pytest.raises(KeyError), random.get_rng_tracker().fork():
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)


@distributed(world_size=2)
def test_unseeded_fork_is_refused():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)

    def fork():
        with random.get_rng_tracker().fork():
            torch.rand(1)

    assert_says(error_message(fork, RuntimeError), "not seeded", "model_parallel_manual_seed")


@distributed(world_size=2)
def test_dropout_on_shards_differs_on_replicas_agrees():
    start()
    x = torch.ones(64)
    assert_distinct(from_all_ranks(ParallelDropout(0.5, sharded=True)(x)))
    assert_same_on_all_ranks(ParallelDropout(0.5, sharded=False)(x))
    assert torch.equal(ParallelDropout(0.5, sharded=True).eval()(x), x)
    assert torch.equal(ParallelDropout(0.0, sharded=True)(x), x)
    assert_same_on_all_ranks(torch.get_rng_state(), "default stream")


def both_dropouts(x: torch.Tensor) -> torch.Tensor:
    x = ParallelDropout(0.3, sharded=True)(torch.tanh(x))
    return ParallelDropout(0.3, sharded=True)(ParallelDropout(0.3, sharded=False)(x.square()))


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("nested", [False, True])
def test_recomputation_replays_both_streams(nested, world_size):
    """Outputs, gradients, and both streams afterwards are bit-equal, also with draws between forward and backward."""
    results = []
    x = torch.randn(64, requires_grad=True)
    for recompute in (False, True):
        parallel_state.destroy_model_parallel()
        start()
        inner = (lambda y: checkpoint(both_dropouts, y)) if nested and recompute else both_dropouts
        block = (lambda y, inner=inner: checkpoint(inner, y)) if recompute else inner
        hidden = block(block(x))
        both_dropouts(x)  # moves both streams on before the recomputation
        (grad,) = torch.autograd.grad(hidden.sum(), x)
        streams = list(random.get_rng_tracker().get_states().values())
        results.append((hidden, grad, torch.get_rng_state(), *streams))
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)
    assert (results[0][1] == 0).any(), "dropout was on"
