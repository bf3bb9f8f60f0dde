"""A stream of chunks that is dropped: its copies end before the memory does."""

from __future__ import annotations

import time

import torch

from nxd_memopt.memory.chunk_stream import ChunkStream
from nxd_memopt.memory.paced_copies import PacedCopies
from tests.deferred_transfers import DeferredTransfers

CHUNK = 4


def stream_of(copies) -> ChunkStream:
    """Return a stream of 3 chunks, one of which is being written and two are on their way."""
    stream = ChunkStream([torch.arange(3.0 * CHUNK)], chunk_elements=CHUNK, slots=2, transfers=copies)
    stream.take()
    stream.give_back()
    return stream


def test_copies_of_a_dropped_stream_are_done():
    transfers = DeferredTransfers()
    stream = stream_of(transfers)
    assert transfers.into and transfers.out
    del stream
    assert not transfers.into and not transfers.out


def test_the_queueing_thread_itself_can_drop_its_stream():
    transfers = DeferredTransfers()
    copies = PacedCopies(transfers)
    held = [stream_of(copies)]
    # The garbage collector may run there, before the queue's later copies.
    dropped = copies._out.thread.submit(held.clear)
    dropped.result(timeout=30)
    deadline = time.monotonic() + 30
    while (transfers.into or transfers.out) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not transfers.into and not transfers.out


def test_a_stream_that_was_not_made_is_dropped_without_an_error(recwarn):
    ChunkStream.__new__(ChunkStream).__del__()
    assert not recwarn.list


def test_another_order_of_the_chunks():
    """Also of chunks that have arrived already: each visit adds its number to the visited chunk."""
    host = torch.zeros(3 * CHUNK)
    stream = ChunkStream([host], chunk_elements=CHUNK, slots=2, transfers=DeferredTransfers())
    want = torch.zeros(3)
    visit = 0
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        stream.reorder(order)
        for chunk in order:
            visit += 1
            stream.take()[0].mul_(2).add_(visit)
            stream.give_back()
            want[chunk] = 2 * want[chunk] + visit
    stream.synchronize()
    assert torch.equal(host.view(3, CHUNK), want.unsqueeze(1).expand(3, CHUNK))
