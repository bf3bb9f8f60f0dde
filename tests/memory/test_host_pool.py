"""Host memory with a bound and a ledger."""

from __future__ import annotations

from nxd_memopt.memory import host_pool
from nxd_memopt.memory.host_pool import HostPool
from tests.reference import error_message


def test_blocks_are_used_again_and_owners_are_named():
    pool = HostPool(4 * 64, block_bytes=64)
    first, second = pool.take("snapshot"), pool.take("snapshot")
    third = pool.take("offload")
    assert pool.ledger() == {"snapshot": 128, "offload": 64} and pool.allocated_bytes == 192
    assert len({block.data_ptr() for block in (first, second, third)}) == 3
    pool.give_back(second, "snapshot")
    assert pool.take("offload").data_ptr() == second.data_ptr()
    assert pool.ledger() == {"snapshot": 64, "offload": 128} and pool.allocated_bytes == 192


def test_the_limit_holds_for_blocks_and_claims():
    pool = HostPool(4 * 64, block_bytes=64)
    pool.claim(100, "copies")
    pool.reserve(128, "snapshot")
    pool.reserve(128, "snapshot")  # they are there
    assert "offload requires 64 more bytes of host memory, and 28 of the pool's 256 are left" in error_message(
        lambda: pool.take("offload")  # the two free blocks are promised to the other owner
    )
    assert len([pool.take("snapshot") for _ in range(2)]) == 2
    assert pool.ledger() == {"copies": 100, "snapshot": 128}
    pool.release(100, "copies")
    pool.take("offload")
    assert pool.ledger() == {"snapshot": 128, "offload": 64}
    assert "less than one block of 64 bytes" in error_message(lambda: HostPool(10, block_bytes=64))


def test_a_free_block_is_promised_to_one_owner():
    pool = HostPool(5 * 64, block_bytes=64)
    pool.reserve(128, "snapshot")
    pool.reserve(128, "offload")
    assert pool.allocated_bytes == 256 and pool.free_bytes("other") == 0
    block = pool.take("snapshot")
    pool.reserve(128, "snapshot")  # covers the block in use
    assert pool.allocated_bytes == 256 and pool.free_bytes("snapshot") == 64
    pool.give_back(block, "snapshot")
    pool.take("other")
    assert pool.allocated_bytes == 320 and pool.free_bytes("snapshot") == 128
    assert "snapshot requires 64 more bytes" in error_message(lambda: pool.reserve(192, "snapshot"))
    pool.reserve(0, "snapshot")
    assert pool.free_bytes("other") == 128 and pool.free_bytes("offload") == 256


def test_the_hosts_memory_bounds_a_pool_without_a_limit(monkeypatch):
    monkeypatch.setattr(host_pool, "available_host_bytes", lambda: 100)
    pool = HostPool(block_bytes=64)
    pool.take("snapshot")  # one of the three blocks
    message = error_message(lambda: pool.reserve(130, "snapshot"))
    assert "snapshot requires 128 bytes of host memory, and 100 are available" in message
