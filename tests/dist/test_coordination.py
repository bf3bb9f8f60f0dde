"""Texts that ranks exchange through the store: complete, in rank order, repeatable, without a device collective."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import coordination, parallel_state
from tests.dist.pool import distributed


def store_keys() -> int:
    store: Any = dist.distributed_c10d._get_default_store()
    return store.num_keys()


@distributed(world_size=[1, 2, 4])
def test_every_rank_gets_every_text_in_rank_order(world_size):
    rank = dist.get_rank()
    for number in range(5):
        texts = coordination.share_texts(f"{number} of {rank}: {'é' * rank}")
        assert texts == [f"{number} of {other}: {'é' * other}" for other in range(world_size)]


@distributed(world_size=2)
def test_an_exchange_leaves_no_keys():
    coordination.share_texts("first")
    before = store_keys()
    dist.barrier()
    for _ in range(3):
        coordination.share_texts("again")
    dist.barrier()
    assert store_keys() <= before + 2  # the barrier's own keys, if it has any


@distributed(world_size=2)
def test_a_long_text_is_cut_between_characters():
    texts = coordination.share_texts("é" * 5000)
    assert texts == ["é" * (coordination.MESSAGE_BYTES // 2)] * 2


@distributed(world_size=2)
def test_a_value_of_rank_zero_is_complete_on_every_rank():
    value = {"digests": [f"{number:064}" for number in range(100)], "rank": 0}
    assert coordination.from_rank_zero(value if dist.get_rank() == 0 else {}) == value


@distributed(world_size=2)
def test_a_path_that_is_not_utf_8_is_reported_on_all_ranks():
    path = os.fsdecode(b"/data/caf\xe9/x.pt")
    assert coordination.share_texts(path) == [path] * 2
    assert len(coordination.share_texts(path + "x" * 5000)[1]) <= coordination.MESSAGE_BYTES
    with pytest.raises(ValueError, match="is missing") as caught, coordination.raise_together("loading"):
        if dist.get_rank() == 1:
            raise ValueError(f"{path} is missing")
    assert path in str(caught.value)


@distributed(world_size=2)
def test_no_collective_runs_on_the_device(monkeypatch):
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a text exchange used a collective of the device")

    parallel_state.initialize_model_parallel(2)
    with monkeypatch.context() as patch:
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_gather_async"):
            patch.setattr(backend, name, refuse)
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier"):
            patch.setattr(dist, name, refuse)
        assert coordination.share_texts(str(dist.get_rank())) == ["0", "1"]
        with coordination.raise_together("nothing"):
            pass
        assert list(coordination.turns(2)) == [True]


@distributed(world_size=2)
def test_a_failure_is_raised_on_every_rank():
    expected = r"^the file is short" if dist.get_rank() == 1 else r"reading failed on rank 1: the file is short"
    with pytest.raises(ValueError, match=expected), coordination.raise_together("reading"):
        if dist.get_rank() == 1:
            raise ValueError("the file is short")
    assert coordination.share_texts("next") == ["next"] * 2


@distributed(world_size=2)
def test_a_rank_that_does_not_arrive_is_named():
    store: Any = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        before = store.timeout
        store.set_timeout(timedelta(seconds=1))
        with pytest.raises(RuntimeError, match=r"rank 0 waited 1 s for ranks 1 in exchange \d+ of texts"):
            coordination.share_texts("alone")
        store.set_timeout(before)
        dist.barrier()
    else:
        dist.barrier()
        # completes the exchange that rank 0 gave up, so that later exchanges are numbered alike
        store.add("nxd_memopt/texts/2/arrivals", 1)
    dist.barrier()
    assert coordination.share_texts("both") == ["both"] * 2
