"""Peer memory's operations of more ranks than GPUs: the order of four ranks' work is real on one GPU too."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from nxd_memopt.backends import backend
from nxd_memopt.backends.cuda.peer_memory import PeerAllGather, PeerMemory, PeerReduction

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]
RANKS, TURNS = 4, 12


def play(rank: int, port: int) -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    memory = PeerMemory(dist.group.WORLD, device)
    for turn in range(TURNS):
        rows = 64 + 32 * (turn % 3)
        generators = [torch.Generator().manual_seed(RANKS * turn + other) for other in range(RANKS)]
        parts = [torch.randn(RANKS * rows, 200, generator=generator).bfloat16() for generator in generators]
        own = parts[rank].to(device)
        if turn % RANKS == rank:
            torch.cuda._sleep(2_000_000)
        gathering = PeerAllGather(memory, own[:rows])
        expected = torch.cat([part[:rows] for part in parts])
        found = torch.full(expected.shape, torch.nan, device=device, dtype=own.dtype)
        for start, piece in gathering.chunks(20_000 if turn % 2 else 0):
            found[start : start + piece.size(0)] = piece
        reduction = PeerReduction(memory, RANKS * rows)
        for start, stop in reduction.chunks:
            reduction.put(start, own[start:stop])
        assert torch.equal(found.cpu(), expected)
        assert torch.equal(gathering.wait().cpu(), expected)
        summed = sum(part[rank * rows : (rank + 1) * rows].float() for part in parts).bfloat16()
        assert torch.equal(reduction.wait().cpu(), summed)
    memory.barrier()
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def test_four_ranks_gather_and_reduce():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(play, (port,), RANKS)
