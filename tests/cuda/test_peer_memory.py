"""Gathers and reductions through peer memory: what NCCL's give, on ranks that run at different speeds."""

import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.backends import backend
from nxd_memopt.backends.cuda import backend as cuda
from nxd_memopt.backends.cuda.peer_memory import PeerAllGather, PeerReduction, sum_over_ranks, wait_for_signals
from nxd_memopt.parallel_layers import grads, parallel_state
from tests.dist.pool import distributed
from tests.reference_models import VOCAB, gpt_neox_config, llama_config, parallel_model

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
SIZES = [size for size in (2, 4) if size <= GPUS] or [2]
SMALL_CHUNKS = {"hides_launch_latency": True}  # go through peer memory from 1 MiB on


def group_of_all():
    parallel_state.initialize_model_parallel(dist.get_world_size())
    return parallel_state.get_tensor_model_parallel_group()


def delay(turn: int) -> None:
    """Let the ranks take turns in being late."""
    if turn % dist.get_world_size() == dist.get_rank():
        torch.cuda._sleep(2_000_000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_rounded_once(size, dtype):
    for rank in range(size):
        parts = torch.randn(size, 333, 77, device=backend.device).to(dtype)
        expected, own = sum(part.float() for part in parts).to(dtype), parts[rank].clone()
        parts[rank] = torch.nan
        assert torch.equal(sum_over_ranks(own, parts, rank), expected)


@pytest.mark.parametrize("ranks", [(1, 3), (0, 1, 2, 3)])
def test_one_kernel_waits_for_several_signals(ranks):
    pad = torch.zeros(4, dtype=torch.int32, device=backend.device)
    pad[1:2].fill_(1)  # a kernel that CUDA loads at its first use would wait for the one that waits
    waiting, done = torch.cuda.Stream(), torch.cuda.Event()
    for _ in range(3):
        pad.zero_()
        pad[0] = pad[2] = 1  # a signal may be there already, or be waited for by nobody
        torch.cuda.synchronize()
        with torch.cuda.stream(waiting):
            wait_for_signals(pad, ranks)
            done.record()
        time.sleep(0.01)
        assert not done.query()
        for rank in (1, 3):
            pad[rank : rank + 1].fill_(1)
        done.synchronize()
        assert pad.tolist() == [int(rank not in ranks and rank in (0, 2)) for rank in range(4)]


def test_a_signal_that_never_comes_is_an_error():
    """In a process of its own, whose device is of no use afterwards."""
    waiting = (
        "import torch; from nxd_memopt.backends.cuda.peer_memory import wait_for_signals; "
        "wait_for_signals(torch.zeros(4, dtype=torch.int32, device='cuda'), (1, 2), timeout_ms=200); "
        "torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", waiting], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode != 0 and "launch failure" in done.stderr


@two_gpus
@distributed(world_size=SIZES)
def test_gathers():
    group = group_of_all()
    for turn in range(24):
        rows, dtype = (256 + 64 * (turn % 5), torch.bfloat16 if turn % 2 else torch.float32)
        generator = torch.Generator(backend.device).manual_seed(100 * turn + dist.get_rank())
        shard = torch.randn(rows, 30, 800, device=backend.device, dtype=dtype, generator=generator)
        expected = backend.all_gather(shard, group)
        delay(turn)
        gathering = backend.start_all_gather(shard, group, **SMALL_CHUNKS)
        assert isinstance(gathering, PeerAllGather) and gathering.length == expected.size(0)
        if turn % 3:  # otherwise the whole is asked for at once
            found = torch.full_like(expected, torch.nan)
            for start, part in gathering.chunks():
                found[start : start + part.size(0)] = part
            assert torch.equal(found, expected)
        assert torch.equal(gathering.wait(), expected)


@two_gpus
@distributed(world_size=SIZES)
def test_reductions_sum_in_fp32_and_the_order_of_ranks():
    group = group_of_all()
    for turn in range(24):
        length = dist.get_world_size() * (256 + 64 * (turn % 5))
        generator = torch.Generator(backend.device).manual_seed(100 * turn + dist.get_rank())
        whole = torch.randn(length, 30, 800, device=backend.device, dtype=torch.bfloat16, generator=generator)
        parts = backend.all_gather(whole.unsqueeze(0), group)
        expected = backend.shard(sum(part.float() for part in parts).bfloat16(), 0, group)
        delay(turn)
        reduction = backend.start_reduction(whole.shape, whole.dtype, group, scattered=True, **SMALL_CHUNKS)
        assert isinstance(reduction, PeerReduction)
        for start, stop in reduction.chunks:
            reduction.put(start, whole[start:stop] * 1)  # memory that is free again at once
        assert torch.equal(reduction.wait(), expected)


@two_gpus
@distributed(world_size=SIZES)
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_models_learn_as_over_nccl(config, recompute):
    parallel_state.initialize_model_parallel(dist.get_world_size())
    settings = config(hidden_size=256, num_attention_heads=8, intermediate_size=512, max_position_embeddings=2048)
    model = parallel_model(settings, sequence_parallel=True, recompute_granularity=recompute).to(backend.device)
    ids = torch.randint(0, VOCAB, (2, 2048), generator=torch.Generator().manual_seed(3)).to(backend.device)

    def step():
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        grads.allreduce_sequence_parallel_gradients(model)
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_PEER_MEMORY_BYTES", 1)
        patch.setattr(cuda, "_PEER_MEMORY_BYTES_AHEAD", 1)  # the loss's
        found = step()
    assert backend.memory_allocated() >= torch.cuda.memory_allocated() + 4 * 2048 * 2 * 256
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_peer_memories", {})
        patch.setenv(cuda.PEER_MEMORY_SWITCH, "0")
        expected = step()
        assert backend.memory_allocated() == torch.cuda.memory_allocated()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
    dist.barrier()
