"""Measures what a machine reaches: matmuls by size, memory, launches, copies to the host, collectives."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from nxd_memopt.backends import HostTransfers, backend
from nxd_memopt.files import require_new, write_text
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.planner.hardware import GIB, Device, device_named, gpu_named, host_device

HOST_COPY_BYTES = 64 << 20
"""Bytes of one copy to or from the host."""
_LAUNCHES = 200
_LEAST_S = 0.05
"""A measurement repeats its work for at least this time, three times, and takes the median."""


def measure_device(*, largest: int | None = None, copy_bytes: int | None = None) -> tuple[Device, dict[str, Any]]:
    """Return this rank's device with measured rates, and the measurements. Every rank calls.

    What was not measured, such as links on one rank, is taken from the table of devices.

    Args:
        largest: largest matmul, rows and columns of square matrices; default 8,192, on a CPU 1,024.
        copy_bytes: bytes of the copies; default 1 GiB, on a CPU 64 MiB.
    """
    on_cpu = backend.device.type == "cpu"
    default_size, default_bytes = 8192, 1 << 30
    dtypes = ["bfloat16", "float32"]
    # GPUs have one rate for both half precisions, CPUs may have instructions for one of them. A CPU takes
    # minutes for a matmul that a GPU needs to reach its rate.
    if on_cpu:
        default_size, default_bytes = 1024, 64 << 20
        dtypes.append("float16")
    copy_bytes = copy_bytes or default_bytes
    found: dict[str, Any] = {"matmul_flops": {}}
    for name in dtypes:
        found["matmul_flops"][name] = _matmuls(getattr(torch, name), largest or default_size)
    found["memory_bytes_per_s"] = _memory(copy_bytes)
    found["launch_s"] = launch_seconds()
    transfers = backend.host_transfers()
    if transfers is not None and not on_cpu:
        found["host_copy_bytes_per_s"] = host_copies_per_s(transfers, min(copy_bytes, HOST_COPY_BYTES))
    if parallel_state.get_tensor_model_parallel_size() > 1:
        found["link_bytes_per_s"] = _collectives(copy_bytes)
    return _described(found), found


def _described(found: dict[str, Any]) -> Device:
    """Return the device of this machine with its rates replaced by measured ones."""
    if backend.device.type == "cpu":
        from nxd_memopt.memory.host_limits import available_host_bytes

        size = parallel_state.get_tensor_model_parallel_size()
        device = host_device((available_host_bytes() or 0) / GIB / size, size)
    else:
        device = gpu_named(backend.hardware_name()) or device_named("h200")
        if backend.device.type != "cuda":
            device = device_named(backend.hardware_name())
    matmuls = {dtype: max(by_size.values()) for dtype, by_size in found["matmul_flops"].items()}
    rates: dict[str, Any] = {"matmul_flops": {"float16": matmuls["bfloat16"], **matmuls}}
    for name in ("memory_bytes_per_s", "host_copy_bytes_per_s", "launch_s"):
        if name in found:
            rates[name] = found[name]
    if "link_bytes_per_s" in found:
        rates["link_bytes_per_s"] = max(found["link_bytes_per_s"].values())
    source = f"measured on {backend.description()}, torch {torch.__version__}; else: {device.source}"
    return dataclasses.replace(device, measured=True, source=source, **rates)


def write_device(path: Path, device: Device, found: dict[str, Any]) -> None:
    """Write a device for ``nxd-memopt plan --device FILE``.

    Raises:
        ValueError: the file exists.
    """
    require_new("--calibrate", path)
    write_text(path, json.dumps(dataclasses.asdict(device) | {"measurements": found}, indent=1))


def _seconds(work: Callable[[], object]) -> float:
    """Return the median seconds of one call of ``work``."""
    # The first call compiles and allocates; the second one tells how often to repeat the work.
    work()
    backend.synchronize()
    start = perf_counter()
    work()
    backend.synchronize()
    count = max(1, int(_LEAST_S / max(perf_counter() - start, 1e-6)))
    # Ranks of a collective repeat it equally often.
    if dist.is_initialized():
        counts = [0] * dist.get_world_size()
        dist.all_gather_object(counts, count)
        count = max(counts)
    measured: list[float] = []
    for _ in range(3):
        start = perf_counter()
        for _ in range(count):
            work()
        backend.synchronize()
        measured.append((perf_counter() - start) / count)
    return statistics.median(measured)


def _matmuls(dtype: torch.dtype, largest: int) -> dict[int, float]:
    """Return FLOP/s by the size of square matrices. Their values are random: zeros cost less power."""
    found: dict[int, float] = {}
    # Small matmuls wait for launches and large ones for the power limit: the best size is what the device reaches.
    size = min(256, largest)
    while size <= largest:
        a, b = (torch.randn(size, size, device=backend.device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        found[size] = 2 * size**3 / _seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
        size *= 2
    return found


def _memory(num_bytes: int) -> float:
    """Return the bytes per second that a copy reads and writes."""
    # fp32 elements; a copy reads each byte once and writes it once.
    source = torch.ones(num_bytes // 4, device=backend.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def launch_seconds() -> float:
    """Return the seconds that the host takes for a small operation's forward and backward.

    A step without a CUDA graph is at most as fast as its host launches operations.
    """
    weight = torch.ones(16, device=backend.device, requires_grad=True)

    def work() -> None:
        value = weight
        for _ in range(_LAUNCHES):
            value = value * weight
        value.sum().backward()
        weight.grad = None

    return _seconds(work) / _LAUNCHES


def host_copies_per_s(transfers: HostTransfers, num_bytes: int = HOST_COPY_BYTES) -> float:
    """Return the bytes per second of copies to and from the host, in each direction, both at the same time.

    All ranks copy at the same time: GPUs of a host share its memory, and may share a switch.
    """
    host = [transfers.host_buffer(num_bytes) for _ in range(2)]
    device = [torch.empty(num_bytes, dtype=torch.uint8, device=backend.device) for _ in range(2)]

    def work() -> None:
        transfers.copy_out([(host[0], device[0])], transfers.mark())
        transfers.copy_in([(device[1], host[1])], transfers.mark())

    return num_bytes / _seconds(work)


def _collectives(num_bytes: int) -> dict[int, float]:
    """Return the bytes per second that a rank sends in an all-gather, by the bytes of the result."""
    group: Any = parallel_state.get_tensor_model_parallel_group()
    size = backend.group_size(group)
    found: dict[int, float] = {}
    for result_bytes in (num_bytes // 16, num_bytes // 4, num_bytes):
        shard = torch.ones(result_bytes // 4 // size, device=backend.device)
        sent = shard.nbytes * (size - 1)
        found[result_bytes] = sent / _seconds(lambda shard=shard: backend.all_gather(shard, group))
    return found
