"""backends: selection at import, refusals without fallback, and the CPU backend's contract in one process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.backends import BACKEND_REASON, BACKENDS, backend, rank_wait, select_backend
from nxd_memopt.backends.cpu import CpuBackend
from tests.reference import assert_says, error_message, tensors


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "NXD_MEMOPT_BACKEND"}
    return subprocess.run([sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True)


def test_the_chosen_backend_and_its_reason():
    assert backend.name == os.environ["NXD_MEMOPT_BACKEND"]
    assert f"NXD_MEMOPT_BACKEND={backend.name}" in BACKEND_REASON
    assert isinstance(backend.device, torch.device) and backend.device.type == backend.name


def test_without_a_request_the_best_available_is_taken():
    chosen, reason = select_backend(None)
    expected = next(name for name, cls in BACKENDS.items() if cls.unavailable_reason() is None)
    assert chosen.name == expected
    assert_says(
        reason, expected, "best available", *[name for name, cls in BACKENDS.items() if cls.unavailable_reason()]
    )


@pytest.mark.skipif(BACKENDS["cuda"].unavailable_reason() is None, reason="this machine has CUDA")
def test_unknown_and_absent_backends_are_refused_and_never_replaced():
    assert_says(error_message(lambda: select_backend("cud")), "NXD_MEMOPT_BACKEND", "'cud'", "did you mean 'cuda'")
    for name in ("cuda", "gpu"):
        message = error_message(lambda name=name: select_backend(name))
        assert_says(message, f"NXD_MEMOPT_BACKEND={name} cannot be met", "CUDA", "unset NXD_MEMOPT_BACKEND")


@pytest.mark.parametrize("has_server", [True, False])
def test_a_wait_for_other_ranks_says_which_variables_ask_for_them(has_server, monkeypatch, capsys):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(server.port)
    if not has_server:
        del server
    environment = {
        "RANK": "0" if has_server else "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(rank_wait, "ARRIVAL_S", 0.2)
    with rank_wait.reported_wait(0.1):
        time.sleep(0.1)
        for _ in range(100):  # of a busy machine
            time.sleep(0.1)
            if line := capsys.readouterr().err:
                break
    found = f"1 of 2 ranks have joined at 127.0.0.1:{port}" if has_server else "rank 0 does not answer"
    assert_says(
        line, found, f"WORLD_SIZE=2 RANK={environment['RANK']}", "unset WORLD_SIZE RANK MASTER_ADDR MASTER_PORT"
    )
    with rank_wait.reported_wait(60.0):
        pass
    assert capsys.readouterr().err == ""


def test_single_process_world_needs_no_process_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    backend.init_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_no_group_returns_the_input(collective):
    x = tensors(4, 3)
    assert torch.equal(getattr(backend, collective)(x, None), x)
    assert torch.equal(getattr(backend, f"{collective}_async")(x, None).wait(), x)


def test_port_in_use_is_a_clear_error():
    code = """
import os, socket
from nxd_memopt.backends import backend
taken = socket.create_server(("127.0.0.1", 0))
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]))
try:
    backend.init_process_group()
except ValueError as error:
    print("PORT", os.environ["MASTER_PORT"], "SAID", error)
"""
    result = run_python(code, NXD_MEMOPT_BACKEND="cpu")
    port = result.stdout.split()[1] if result.stdout else "no output"
    assert_says(result.stdout + result.stderr[-500:], f"MASTER_PORT {port} is in use", "--master_port")


def test_all_groups_have_the_timeout_of_the_world(monkeypatch):
    """torch.distributed gives a new group the default one: 10 minutes with NCCL."""
    given = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, timeout: given.append(timeout))
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout: given.append(timeout))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    cpu = CpuBackend()
    cpu.init_process_group(timeout=timedelta(minutes=77))
    cpu.new_group([[0], [1]])
    assert given == [timedelta(minutes=77)] * 3


def test_memory_figures_follow_an_allocation():
    backend.reset_peak_memory_stats()
    before, size = backend.memory_allocated(), 256 * 2**20
    block = torch.ones(size, dtype=torch.uint8, device=backend.device)
    held = backend.memory_allocated() - before
    del block
    peak = backend.max_memory_allocated() - before
    # the process may give back or take other pages meanwhile: far less than the 64 MiB allowed here
    assert held > size - 64 * 2**20
    assert peak > size - 64 * 2**20
    assert backend.memory_allocated() - before < 64 * 2**20
    backend.reset_peak_memory_stats()
    assert backend.max_memory_allocated() - before < 64 * 2**20  # the peak was forgotten


def test_freed_blocks_between_others_are_counted():
    backend = CpuBackend()
    before = backend.freed_bytes_kept()
    if before is None:
        pytest.skip("not glibc 2.33 or newer")
    size = 60_000  # below the 128 KiB from which malloc maps a block by itself
    tensors = [torch.ones(size // 4) for _ in range(2000)]
    in_use = backend.freed_bytes_kept()
    assert in_use is not None and in_use <= before + (1 << 20)
    # Every other one: malloc can give none of the gaps back.
    del tensors[::2]
    kept = backend.freed_bytes_kept()
    assert kept is not None and 1000 * size <= kept - in_use <= 1001 * (size + 2000)


def test_a_device_that_is_absent_has_the_facts_of_the_one_that_runs():
    """Certificates and written plans refuse by them what training refuses by the backend itself."""
    absent = type(backend).of_device(9.0)
    refusals = [name for name in dir(backend) if name.endswith("_refusal") and name != "attention_refusal"]
    assert "gradient_sharding_refusal" in refusals and "host_transfers_refusal" in refusals
    for name in set(refusals) - {"peer_memory_refusal"}:
        assert getattr(absent, name)() == getattr(backend, name)(), name
    assert absent.views_share_memory == backend.views_share_memory
    gpu = BACKENDS["cuda"]
    assert gpu.of_device(7.5).tf32_refusal() and not gpu.of_device(8.0).tf32_refusal()
