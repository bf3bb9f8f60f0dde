"""Lets ranks exchange short texts, fail together and act in turns, without a collective on the device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

MESSAGE_BYTES = 2048
"""Maximum bytes of one rank's text in ``share_texts``: 2 MiB in total at 1024 ranks."""


def share_texts(text: str) -> list[str]:
    """Return the ``text`` of every rank, by global rank. Every rank of the world calls.

    Texts are cut at ``MESSAGE_BYTES`` and exchanged through the key-value store of the rendezvous,
    on the host. A collective on the device would be part of the recorded graph: torch_xla chains
    the collectives of a graph by a token, so a collective between two steps changes the graph of
    the next training step, which is compiled again. It would also block ranks inside the device
    runtime, which has a timeout, while rank 0 prepares data or writes.

    Raises:
        RuntimeError: a rank does not arrive within the process group's timeout.
    """
    if not dist.is_initialized():
        return [text]
    if dist.get_backend() == "fake":  # a simulated world has one process: all texts are equal
        return [_truncate(text)] * dist.get_world_size()
    return _exchange(_truncate(text))


def from_rank_zero(value: Any) -> Any:
    """Return rank 0's ``value``, of JSON's types, on every rank. Every rank of the world calls.

    It may be of any length, because the other ranks send nothing: the digests of a large model's weight files are more
    than ``MESSAGE_BYTES``.
    """
    text = json.dumps(value)
    if dist.is_initialized() and dist.get_backend() != "fake":
        text = _exchange(text if dist.get_rank() == 0 else "")[0]
    return json.loads(text)


def _truncate(text: str) -> str:
    """Cut ``text`` between characters; keep surrogates (non-UTF-8 bytes of paths) if it fits."""
    encoded = text.encode(errors="surrogatepass")
    if len(encoded) <= MESSAGE_BYTES:
        return text
    # ``ignore`` drops the incomplete character at the cut, and surrogates.
    return encoded[:MESSAGE_BYTES].decode(errors="ignore")


def _exchange(text: str) -> list[str]:
    """Collect the texts on rank 0, which publishes them under one key for all other ranks.

    Counting arrivals numbers the exchanges without state in the processes: no rank arrives at
    exchange n + 1 before every rank has arrived at exchange n. Rank 0 waits until all ranks have
    read, because its process may host the store. It then deletes the keys, so the store does not
    grow.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    world_size = dist.get_world_size()
    # ``store.add`` returns the counter after the addition: arrivals n * W + 1 to (n + 1) * W
    # belong to exchange n. The world size W in the name separates runs that share a store.
    counter = f"nxd_memopt/texts/{world_size}/arrivals"
    number = (store.add(counter, 1) - 1) // world_size
    prefix = f"nxd_memopt/texts/{world_size}/{number}"
    if dist.get_rank() != 0:
        store.set(f"{prefix}/{dist.get_rank()}", json.dumps(text))  # ASCII, surrogates included
        _wait(store, {f"{prefix}/all": 0}, number)
        # The last reader among the W - 1 ranks releases rank 0, which then deletes the keys.
        texts = json.loads(store.get(f"{prefix}/all"))
        if store.add(f"{prefix}/readers", 1) == world_size - 1:
            store.set(f"{prefix}/read", "")
        return texts
    # Rank 0: W - 1 reads and one write, instead of W reads on each of W ranks.
    keys = {f"{prefix}/{rank}": rank for rank in range(1, world_size)}
    _wait(store, keys, number)
    texts = [text, *(json.loads(store.get(key)) for key in keys)]
    if world_size > 1:
        store.set(f"{prefix}/all", json.dumps(texts))
        store.wait([f"{prefix}/read"])
        for key in (*keys, f"{prefix}/all", f"{prefix}/readers", f"{prefix}/read"):
            store.delete_key(key)
    return texts


def _wait(store: Any, keys: dict[str, int], number: int) -> None:
    """Wait for the keys, each set by its rank, up to the timeout of the process group.

    Args:
        store: key-value store.
        keys: maps each key to the rank that sets it.
        number: number of the exchange, for the message.
    """
    try:
        store.wait(list(keys))
    except RuntimeError as error:  # includes dist.DistStoreError
        missing = [str(rank) for key, rank in keys.items() if not store.check([key])]
        if not missing:
            raise
        raise RuntimeError(
            f"rank {dist.get_rank()} waited {store.timeout.total_seconds():.0f} s for ranks "
            f"{', '.join(missing)} in exchange {number} of texts: look for their errors, or "
            "raise the timeout of init_process_group if they still work"
        ) from error


@contextmanager
def raise_together(task: str) -> Iterator[None]:
    """Run a block without collectives on every rank; if it raises on one, raise on all.

    Also a barrier.

    Raises:
        ValueError: on ranks with a successful block; names ``task``, the failing rank and its
            message. A failing rank raises its own exception.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    # An empty text reports success, so an exception without a message reports its class.
    report = ""
    if failure is not None:
        report = str(failure) or type(failure).__name__
    reports = share_texts(report)
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report:
            raise ValueError(f"{task} failed on rank {rank}: {report}")


def turns(ranks_at_once: int) -> Iterator[bool]:
    """Yield in each round whether this rank acts; ``ranks_at_once`` ranks per host act at a time.

    Every rank calls this function and takes part in all rounds.
    """
    if ranks_at_once < 1:
        raise ValueError(f"ranks that act at the same time must be at least 1, got {ranks_at_once}")
    local_rank = 0
    if dist.is_initialized():
        local_rank = dist.get_node_local_rank(fallback_rank=0)  # pyright: ignore[reportPrivateImportUsage]
    # Hosts may have different numbers of ranks: all ranks take part in the rounds of the largest
    # one, because the block of each round usually contains ``raise_together``.
    last_local_rank = max(int(text) for text in share_texts(str(local_rank)))
    for turn in range(last_local_rank // ranks_at_once + 1):
        yield turn == local_rank // ranks_at_once
