"""Host memory in blocks of one size, with a bound and a ledger of who uses how many bytes of it."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from nxd_memopt.memory.host_limits import available_host_bytes
from nxd_memopt.planner.memory.activations import BLOCK_BYTES


class HostPool:
    """A pool of host memory blocks that keeps returned blocks for the next user.

    Blocks are allocated at the first ``take`` that needs them, or by ``reserve``. Pinning or first
    touching 1 GiB takes up to a second, which should not fall into a training step. The pool is
    thread-safe.

    Args:
        limit_bytes: upper bound of the pool's allocations in bytes; None limits it only by the
            available host memory.
        pinned: use page-locked memory, which a GPU copies to and from asynchronously.
        block_bytes: size of each block in bytes.
        limit_remedy: what the error says to do when the limit is reached.

    Raises:
        ValueError: ``limit_bytes`` is smaller than one block.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        *,
        pinned: bool = False,
        block_bytes: int = BLOCK_BYTES,
        limit_remedy: str = "raise the limit",
    ) -> None:
        if limit_bytes is not None and limit_bytes < block_bytes:
            raise ValueError(f"limit_bytes {limit_bytes} is less than one block of {block_bytes} bytes: raise it")
        self.block_bytes = block_bytes
        self._limit_bytes = limit_bytes
        self._limit_remedy = limit_remedy
        self._pinned = pinned
        self._free: list[Tensor] = []
        self._taken: dict[str, int] = {}  # blocks in use, by owner
        self._reserved: dict[str, int] = {}  # blocks promised in total, in use or free, by owner
        self._claimed: dict[str, int] = {}  # bytes outside the pool, by owner
        self._allocated = 0
        self._lock = threading.Lock()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all allocated blocks, in use or free."""
        return self._allocated * self.block_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all allocated blocks and of all claims."""
        with self._lock:
            return self.allocated_bytes + sum(self._claimed.values())

    def ledger(self) -> dict[str, int]:
        """Return the bytes in use, by owner."""
        with self._lock:
            return self._used()

    def reserve(self, size_bytes: int, owner: str) -> None:
        """Allocate blocks now, so that ``owner`` can hold ``size_bytes`` at any later time.

        The reservation covers the blocks that ``owner`` holds already. No other owner takes the
        reserved blocks while they are free. A later call replaces the reservation; 0 cancels it.

        Raises:
            ValueError: see ``take``; the earlier reservation of ``owner`` remains.
        """
        with self._lock:
            missing = self._missing_blocks(size_bytes, owner)
            if missing:
                self._require(missing * self.block_bytes, owner)
                for _ in range(missing):
                    # Appended one by one: after a failure the earlier blocks remain usable.
                    self._free.append(self._allocate())
            self._reserved[owner] = self._blocks(size_bytes)

    def missing_bytes(self, size_bytes: int, owner: str) -> int:
        """Return the bytes that ``reserve`` would allocate."""
        with self._lock:
            return self._missing_blocks(size_bytes, owner) * self.block_bytes

    def take(self, owner: str) -> Tensor:
        """Return a block, 1-D uint8 of ``block_bytes`` elements.

        Raises:
            ValueError: the limit or the host's memory is exhausted; the message has the required
                and the available bytes.
        """
        with self._lock:
            if not self._free_for(owner):
                self._require(self.block_bytes, owner)
                self._free.append(self._allocate())
            self._taken[owner] = self._taken.get(owner, 0) + 1
            return self._free.pop()

    def free_bytes(self, owner: str) -> int:
        """Return the bytes of the blocks that ``owner`` can take without an allocation."""
        with self._lock:
            return self._free_for(owner) * self.block_bytes

    def give_back(self, block: Tensor, owner: str) -> None:
        """Return ``block``, which ``owner`` took, to the pool.

        The pool may overwrite it from now on.
        """
        with self._lock:
            assert self._taken.get(owner, 0) > 0, f"{owner} holds no block"
            self._taken[owner] -= 1
            self._free.append(block)

    def claim(self, size_bytes: int, owner: str) -> None:
        """Count ``size_bytes`` of memory that ``owner`` allocates outside the pool against the
        limit.

        Raises:
            ValueError: see ``take``.
        """
        with self._lock:
            self._require(size_bytes, owner)
            self._claimed[owner] = self._claimed.get(owner, 0) + size_bytes

    def release(self, size_bytes: int, owner: str) -> None:
        """Remove ``size_bytes`` from the claims of ``owner``, which has freed the memory."""
        with self._lock:
            assert self._claimed.get(owner, 0) >= size_bytes, f"{owner} claims fewer bytes"
            self._claimed[owner] -= size_bytes

    def _blocks(self, size_bytes: int) -> int:
        return -(-size_bytes // self.block_bytes)

    def _missing_blocks(self, size_bytes: int, owner: str) -> int:
        """Return the blocks that ``owner`` lacks to hold ``size_bytes``. The caller holds the lock."""
        # Free blocks that are promised to other owners are not available to this one.
        return max(0, self._blocks(size_bytes) - self._taken.get(owner, 0) - self._free_for(owner))

    def _free_for(self, owner: str) -> int:
        """Return the number of free blocks that are not promised to another owner.

        The caller holds the lock.
        """
        promised = 0
        for other, blocks in self._reserved.items():
            if other != owner:
                promised += max(0, blocks - self._taken.get(other, 0))
        return max(0, len(self._free) - promised)

    def _used(self) -> dict[str, int]:
        """Return the bytes in use by owner, without owners that use none.

        The caller holds the lock.
        """
        used = {owner: count * self.block_bytes for owner, count in self._taken.items()}
        for owner, size_bytes in self._claimed.items():
            used[owner] = used.get(owner, 0) + size_bytes
        return {owner: size_bytes for owner, size_bytes in used.items() if size_bytes}

    def _require(self, required: int, owner: str) -> None:
        """Raise ``ValueError`` unless ``required`` more bytes fit the limit and the host."""
        # Free blocks count too: they stay allocated until the pool is collected.
        allocated = self.allocated_bytes + sum(self._claimed.values())
        # Two bounds: the pool's own limit counts all blocks and claims; the host's available memory
        # only has to hold the new allocation.
        if self._limit_bytes is not None and allocated + required > self._limit_bytes:
            raise ValueError(
                f"{owner} requires {required} more bytes of host memory, and {self._limit_bytes - allocated} of the "
                f"pool's {self._limit_bytes} are left (in use: {self._used()}): {self._limit_remedy}"
            )
        available = available_host_bytes()
        if available is not None and required > available:
            raise ValueError(
                f"{owner} requires {required} bytes of host memory, and {available} are available: "
                "use a host with more memory, or turn off what requires it"
            )

    def _allocate(self) -> Tensor:
        block = torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        if not self._pinned:
            block.zero_()  # first touched here, not in a training step
        self._allocated += 1  # after the allocation, which may fail
        return block
