"""Lets ranks exchange short texts, fail together and act in turns, without a collective on the device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

MESSAGE_BYTES = 2048
"""Most bytes of one rank's text in ``share_texts``: 2 MiB in all at 1024 ranks."""


def share_texts(text: str) -> list[str]:
    """Return every rank's ``text``, by global rank, cut at ``MESSAGE_BYTES``. Every rank of the world calls.

    The texts travel through the key-value store that the ranks met in, on the host. A collective on the device would
    take part in the graph of a device that records graphs: torch_xla chains the collectives of a graph by a token, so
    that a collective between two steps makes the next training step another graph, which is compiled again. It would
    also keep ranks inside the device's runtime, which stops waiting after a time, while rank 0 prepares data or writes.

    Raises:
        RuntimeError: when a rank does not arrive within the process group's timeout.
    """
    if not dist.is_initialized():
        return [text]
    if dist.get_backend() == "fake":  # a pretended world has one process: every rank says the same
        return [_cut(text)] * dist.get_world_size()
    return _exchange(_cut(text))


def _cut(text: str) -> str:
    """Cut between characters; surrogates, which stand for bytes of a path that is not UTF-8, stay if the text fits."""
    encoded = text.encode(errors="surrogatepass")
    return text if len(encoded) <= MESSAGE_BYTES else encoded[:MESSAGE_BYTES].decode(errors="ignore")


def _exchange(text: str) -> list[str]:
    """Rank 0 collects the texts and publishes them under one key, so that each other rank reads one key only.

    Exchanges are numbered by counting arrivals, which needs no state in the processes: no rank arrives at exchange
    n + 1 before every rank has arrived at exchange n. Rank 0 stays until everybody has read, since the store may live
    in its process, and then deletes the exchange's keys, so that the store does not grow.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    world_size = dist.get_world_size()
    counter = f"nxd_memopt/texts/{world_size}/arrivals"
    number = (store.add(counter, 1) - 1) // world_size
    prefix = f"nxd_memopt/texts/{world_size}/{number}"
    if dist.get_rank() != 0:
        store.set(f"{prefix}/{dist.get_rank()}", json.dumps(text))  # ASCII, surrogates included
        _wait(store, {f"{prefix}/all": 0}, number)
        texts = json.loads(store.get(f"{prefix}/all"))
        if store.add(f"{prefix}/readers", 1) == world_size - 1:
            store.set(f"{prefix}/read", "")
        return texts
    keys = {f"{prefix}/{rank}": rank for rank in range(1, world_size)}
    _wait(store, keys, number)
    texts = [text, *(json.loads(store.get(key)) for key in keys)]
    if world_size > 1:
        store.set(f"{prefix}/all", json.dumps(texts))
        store.wait([f"{prefix}/read"])
        for key in (*keys, *(f"{prefix}/{name}" for name in ("all", "readers", "read"))):
            store.delete_key(key)
    return texts


def _wait(store: Any, keys: dict[str, int], number: int) -> None:
    """Wait for the keys, each set by the rank that it maps to, as long as the process group's timeout."""
    try:
        store.wait(list(keys))
    except RuntimeError as error:  # includes dist.DistStoreError
        missing = [rank for key, rank in keys.items() if not store.check([key])]
        if not missing:
            raise
        raise RuntimeError(
            f"rank {dist.get_rank()} waited {store.timeout.total_seconds():.0f} s for ranks {_spell(missing)} in "
            f"exchange {number} of texts: look for their errors, or raise the timeout of init_process_group if they "
            "still work"
        ) from error


def _spell(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


@contextmanager
def raise_together(task: str) -> Iterator[None]:
    """Run a block that has no collectives on every rank; when it raises on one, raise on all. Also a barrier.

    Raises:
        ValueError: on ranks whose own block succeeded; names ``task``, the failing rank and its message. A failing rank
            raises its own exception.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    reports = share_texts("" if failure is None else str(failure) or type(failure).__name__)
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report:
            raise ValueError(f"{task} failed on rank {rank}: {report}")


def turns(ranks_at_once: int) -> Iterator[bool]:
    """Yield, in each round of a host's ranks, whether this rank acts: ``ranks_at_once`` do. Every rank calls."""
    if ranks_at_once < 1:
        raise ValueError(f"ranks that act at the same time must be at least 1, got {ranks_at_once}")
    local_rank = dist.get_node_local_rank(fallback_rank=0) if dist.is_initialized() else 0  # pyright: ignore[reportPrivateImportUsage]
    last_local_rank = max(int(text) for text in share_texts(str(local_rank)))
    for turn in range(last_local_rank // ranks_at_once + 1):
        yield turn == local_rank // ranks_at_once
