"""The pool itself: distinct ranks, failures and hangs reach the parent, the next test works."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import RankError, distributed, run_on_ranks


@distributed(world_size=[1, 2, 4])
@pytest.mark.parametrize("value", [3, 5])
def test_body_runs_on_every_rank(world_size, value, tmp_path):
    total = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    assert dist.get_world_size() == world_size
    assert total.item() == value * world_size * (world_size + 1) // 2
    assert tmp_path.is_dir()


def identity(tag):
    return tag, dist.get_rank(), os.getpid(), torch.rand(()).item()


def fail_on_last_rank(then):
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        raise KeyError("planted")
    if then == "collective":
        dist.barrier()
    if then == "exit":
        os._exit(7)


def sleep(seconds):
    time.sleep(seconds)


def test_values_come_back_by_rank():
    first, second = run_on_ranks(identity, 2, "tag"), run_on_ranks(identity, 2, "tag")
    assert [value[:2] for value in first] == [("tag", 0), ("tag", 1)]
    assert len({value[2] for value in first}) == 2 and os.getpid() not in {value[2] for value in first}
    assert first == second, "ranks persist between runs and are seeded again before each"


@pytest.mark.parametrize("then", ["return", "collective"])
def test_failure_on_one_rank_is_raised_and_the_pool_recovers(then, monkeypatch):
    monkeypatch.setattr("tests.dist.pool.GRACE_S", 1.0)
    with pytest.raises(RankError, match=r"rank 1 of 2 failed(.|\n)*KeyError: 'planted'") as caught:
        run_on_ranks(fail_on_last_rank, 2, then)
    assert ("ranks [0] did not finish" in str(caught.value)) == (then == "collective")
    assert [value[1] for value in run_on_ranks(identity, 2, "again")] == [0, 1]


def test_dead_rank_is_reported():
    with pytest.raises(RankError, match=r"planted|exit code 7"):
        run_on_ranks(fail_on_last_rank, 2, "exit")


def test_hang_is_killed():
    with pytest.raises(RankError, match=r"ran past 1 s on 2 ranks; ranks \[0, 1\] did not finish"):
        run_on_ranks(sleep, 2, 60, timeout_s=1.0)
