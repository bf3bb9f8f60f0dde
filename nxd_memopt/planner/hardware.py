"""Devices: memory, rates and links of one rank, and the part of its memory that tensors cannot use.

Published rates are peaks; ``step_time.RATES`` has the parts that a step of this library reaches. Sources:

- [trn1] awsdocs-neuron, "AWS Trn1/Trn1n Architecture" and "Trainium Architecture".
- [trn2] awsdocs-neuron, "Trainium2 Architecture", "NeuronCore-v3 Architecture" and the EC2 page of Trn2.
- [trn3] awsdocs-neuron, "Trainium3 Architecture".
- [a100], [h100], [h200], [b200] NVIDIA's data sheets of A100, H100, H200 and HGX B200 (SXM, dense).
- [cc] NVIDIA's table of compute capabilities, developer.nvidia.com/cuda-gpus.
- [torch] the total capacity in PyTorch's out-of-memory errors.
- [rows] ``docs/benchmarks``; [measured] on this project's H200 with 128 GiB of host memory.
- [estimate] no published figure.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nxd_memopt.config import require_one_of

GIB = 2**30
RESERVE_GIB = 1.25
"""Memory of a NeuronCore that tensors cannot use: runtime microcode (0.1 to 0.2 GiB, [trn1]),
collective buffers and compiled programs. [estimate]"""
PAGE_LOCKING_S_PER_GIB = 0.5
"""Time to page-lock host memory: 32 to 50 s for 89.7 GiB on a host of an H200 [measured]."""
CUDA_CONTEXT_GIB = 0.61
"""CUDA context of one process: 621 MiB on an H200 [measured]."""
CUDA_LIBRARIES_GIB = 0.32
"""Kernels and workspaces of cuBLAS, Triton and FlashAttention-4 that a first step loads outside of PyTorch's
allocator. 325 MiB: 1,601 MiB after a step with T=4 on H200s minus context and communicator."""
CUDA_RESERVE_GIB = CUDA_CONTEXT_GIB + CUDA_LIBRARIES_GIB
NCCL_GIB = 0.66
"""Buffers of one NCCL communicator on H200s: 366 to 390 MiB when it is created [measured], and about 290 MiB with its
first collective, by which a step with two communicators took more than one with one."""

ONLY_HARDWARE_SHOWS = {
    "neuron": (
        f"the compiler's scratchpad and the runtime's buffers, for which {RESERVE_GIB:g} GiB of each device are left",
        "whether neuronx-cc keeps recomputation",
        "times",
    ),
    "cuda": (),
    "cpu": (),
}
"""Effects that no plan models, by kind of device. No Trainium was available to measure them."""

LAUNCH_S = 3.3e-5
"""``Device.launch_s`` on the hosts of the recorded steps (3.2e-5 and 3.4e-5)."""


@dataclass(frozen=True)
class Device:
    """One rank's device and its share of the host.

    Args:
        name: key of ``DEVICES``.
        kind: ``neuron``, ``cuda`` or ``cpu``.
        memory_gib: memory of one rank's device in GiB, as the runtime reports it.
        reserve_gib: part of it that tensors cannot use.
        matmul_flops: peak of dense matmuls in FLOP/s, by dtype of the factors.
        memory_bytes_per_s: bandwidth of the device's memory.
        link_bytes_per_s: what a rank sends to the other ranks of its host, one way.
        ranks_per_host: ranks of the largest host.
        host_link_bytes_per_s: what a rank sends to other hosts, one way: the host's network, shared.
        host_copy_bytes_per_s: copies between device and host memory, one way.
        host_memory_gib: memory of the host divided by its ranks.
        source: where the figures are from.
        measured: the rates are what this machine reaches, not what is published.
        launch_s: seconds of the host for a small operation's forward and backward.
        compute_capability: of an NVIDIA GPU, such as 9.0 for Hopper; 0.0 for other devices.

    Raises:
        ValueError: a GPU without a compute capability, or another device with one.
    """

    name: str
    kind: Literal["neuron", "cuda", "cpu"]
    memory_gib: float
    reserve_gib: float
    matmul_flops: dict[str, float]
    memory_bytes_per_s: float
    link_bytes_per_s: float
    ranks_per_host: int
    host_link_bytes_per_s: float
    host_copy_bytes_per_s: float
    host_memory_gib: float
    source: str
    measured: bool = False
    launch_s: float = LAUNCH_S
    compute_capability: float = 0.0

    def __post_init__(self) -> None:
        if (self.kind == "cuda") != (self.compute_capability > 0):
            wanted = "above 0, such as 9.0" if self.kind == "cuda" else "0.0"
            raise ValueError(
                f"compute_capability of a device of kind {self.kind} must be {wanted}, got {self.compute_capability}"
            )

    @property
    def memory_bytes(self) -> int:
        """Memory of the device in bytes."""
        return int(self.memory_gib * GIB)

    def usable_bytes(self, *, communicators: int = 0) -> int:
        """Return the bytes that tensors, and on a GPU the margin of the allocator, can use.

        Args:
            communicators: groups of several ranks with which a rank communicates, of NCCL on a GPU.
        """
        reserve_gib = self.reserve_gib
        if self.kind == "cuda":
            reserve_gib += communicators * NCCL_GIB
        return int((self.memory_gib - reserve_gib) * GIB)


def _matmul(bf16: float, fp32: float) -> dict[str, float]:
    """Return rates in FLOP/s from TFLOP/s; fp16 has the rate of bf16 on all devices here."""
    return {"bfloat16": bf16 * 1e12, "float16": bf16 * 1e12, "float32": fp32 * 1e12}


def _trainium(
    name: str,
    *,
    memory_gib: float,
    bf16: float,
    fp32: float,
    memory_gb_s: float,
    link_gb_s: float,
    ranks: int,
    efa_gbps: float,
    host_gib: float,
    source: str,
) -> Device:
    """Return a NeuronCore. Copies to the host: half of a PCIe gen-4 x16 link per chip. [estimate]"""
    return Device(
        name=name,
        kind="neuron",
        memory_gib=memory_gib,
        reserve_gib=RESERVE_GIB,
        matmul_flops=_matmul(bf16, fp32),
        memory_bytes_per_s=memory_gb_s * 1e9,
        link_bytes_per_s=link_gb_s * 1e9,
        ranks_per_host=ranks,
        host_link_bytes_per_s=efa_gbps / 8 * 1e9 / ranks,
        host_copy_bytes_per_s=16e9 * 16 / ranks,
        host_memory_gib=host_gib / ranks,
        source=source,
    )


def _gpu(
    name: str,
    *,
    memory_gib: float,
    bf16: float,
    fp32: float,
    memory_tb_s: float,
    nvlink_gb_s: float,
    copy_gb_s: float,
    host_gib: float,
    compute_capability: float,
    source: str,
) -> Device:
    """Return a GPU of a host with eight; its network has 400 Gbit/s per GPU (DGX; A100: 200)."""
    network_gbps = 200 if name.startswith("a100") else 400
    return Device(
        name=name,
        kind="cuda",
        memory_gib=memory_gib,
        reserve_gib=CUDA_RESERVE_GIB,
        matmul_flops=_matmul(bf16, fp32),
        memory_bytes_per_s=memory_tb_s * 1e12,
        link_bytes_per_s=nvlink_gb_s * 1e9,
        ranks_per_host=8,
        host_link_bytes_per_s=network_gbps / 8 * 1e9,
        host_copy_bytes_per_s=copy_gb_s * 1e9,
        host_memory_gib=host_gib / 8,
        source=f"{source}; compute capability [cc]",
        compute_capability=compute_capability,
    )


# Trainium. A chip of trn1 has 2 NeuronCores: 32 GiB, 190 TFLOP/s bf16, 47.5 fp32, 820 GB/s; NeuronLink
# 384 GB/s (trn1n: 768), EFA 800 (1,600) Gbit/s a host. A chip of trn2 has 8 physical cores: 96 GiB,
# 667 TFLOP/s bf16, 181 fp32, 2.9 TB/s, NeuronLink 1,024 GB/s over 4 links; LNC 2 joins two of them.
# A chip of trn3: 144 GiB, 671 and 183 TFLOP/s, 4.9 TB/s, NeuronLink 2,560 GB/s. NeuronLink's figures
# are both ways together, so that a core has a chip's figure divided by 2 and by its cores.
_TABLE = (
    _trainium(
        "trn1",
        memory_gib=16.0,
        bf16=95.0,
        fp32=23.75,
        memory_gb_s=410,
        link_gb_s=96,
        ranks=32,
        efa_gbps=800,
        host_gib=512,
        source="[trn1], a chip's figures halved",
    ),
    _trainium(
        "trn1n",
        memory_gib=16.0,
        bf16=95.0,
        fp32=23.75,
        memory_gb_s=410,
        link_gb_s=192,
        ranks=32,
        efa_gbps=1600,
        host_gib=512,
        source="[trn1], a chip's figures halved",
    ),
    _trainium(
        "trn1-2xlarge",
        memory_gib=16.0,
        bf16=95.0,
        fp32=23.75,
        memory_gb_s=410,
        link_gb_s=96,
        ranks=2,
        efa_gbps=25,
        host_gib=32,
        source="[trn1], a chip's figures halved; one chip, a network of up to 25 Gbit/s",
    ),
    _trainium(
        "trn2",
        memory_gib=24.0,
        bf16=166.75,
        fp32=45.25,
        memory_gb_s=725,
        link_gb_s=128,
        ranks=64,
        efa_gbps=3200,
        host_gib=2048,
        source="[trn2], a chip's figures over 4 logical cores (LNC 2)",
    ),
    _trainium(
        "trn2-lnc1",
        memory_gib=12.0,
        bf16=83.4,
        fp32=22.6,
        memory_gb_s=362,
        link_gb_s=64,
        ranks=128,
        efa_gbps=3200,
        host_gib=2048,
        source="[trn2], over 8 physical cores (LNC 1); two of them share a bank of 24 GiB",
    ),
    _trainium(
        "trn3",
        memory_gib=36.0,
        bf16=167.75,
        fp32=45.75,
        memory_gb_s=1225,
        link_gb_s=320,
        ranks=64,
        efa_gbps=3200,
        host_gib=2048,
        source="[trn3], over 4 logical cores (LNC 2); network and host memory as trn2's [estimate]",
    ),
    _trainium(
        "trn3-lnc1",
        memory_gib=18.0,
        bf16=83.9,
        fp32=22.9,
        memory_gb_s=612,
        link_gb_s=160,
        ranks=128,
        efa_gbps=3200,
        host_gib=2048,
        source="[trn3], over 8 physical cores (LNC 1); network and host memory as trn2's [estimate]",
    ),
    _gpu(
        "a100-40gb",
        memory_gib=39.5,
        bf16=312,
        fp32=19.5,
        memory_tb_s=1.555,
        nvlink_gb_s=300,
        copy_gb_s=25,
        host_gib=1024,
        compute_capability=8.0,
        source="[a100], memory [torch], copies over PCIe gen 4 [estimate], host of DGX A100",
    ),
    _gpu(
        "a100-80gb",
        memory_gib=79.2,
        bf16=312,
        fp32=19.5,
        memory_tb_s=2.039,
        nvlink_gb_s=300,
        copy_gb_s=25,
        host_gib=2048,
        compute_capability=8.0,
        source="[a100], memory [torch], copies over PCIe gen 4 [estimate], host of DGX A100",
    ),
    _gpu(
        "h100",
        memory_gib=79.1,
        bf16=989,
        fp32=67,
        memory_tb_s=3.35,
        nvlink_gb_s=450,
        copy_gb_s=50,
        host_gib=2048,
        compute_capability=9.0,
        source="[h100] SXM, memory [torch], copies as H200's [estimate], host of DGX H100",
    ),
    _gpu(
        "h200",
        memory_gib=139.8,
        bf16=989,
        fp32=67,
        memory_tb_s=4.8,
        nvlink_gb_s=450,
        copy_gb_s=50,
        host_gib=2048,
        compute_capability=9.0,
        source="[h200] SXM, memory [rows], copies [measured] (50 GB/s each way at once), host of DGX H200",
    ),
    _gpu(
        "b200",
        memory_gib=167.6,
        bf16=2250,
        fp32=75,
        memory_tb_s=8.0,
        nvlink_gb_s=900,
        copy_gb_s=50,
        host_gib=2048,
        compute_capability=10.0,
        source="[b200], 180 GB in GiB; copies as H200's [estimate], host of DGX B200",
    ),
)

DEVICES = {device.name: device for device in _TABLE}
"""Devices by name."""
DEVICE_GIB = {name: device.memory_gib for name, device in DEVICES.items() if device.kind == "neuron"}
"""Memory in GiB of one rank's device on Trainium."""


def read_device(path: Path) -> Device:
    """Return the device of a file of ``nxd-memopt plan --calibrate``.

    Raises:
        ValueError: there is no such file, or it describes no device.
    """
    if not path.is_file():
        raise ValueError(f"--device {path} does not exist: write it with nxd-memopt plan --calibrate {path}")
    try:
        content = dict(json.loads(path.read_text(encoding="utf-8")))
        content.pop("measurements", None)
        if content.get("kind") == "cuda":
            # Not measured by --calibrate: what the version that wrote the file assumed.
            content["reserve_gib"] = CUDA_RESERVE_GIB
        device = Device(**content)
        _require_valid(device)
        return device
    except (TypeError, ValueError) as error:
        raise ValueError(f"--device {path} describes no device ({error}): calibrate again") from error


_MAY_BE_0 = ("reserve_gib", "host_memory_gib", "compute_capability")


def _require_valid(device: Device) -> None:
    """Raise ``ValueError`` for a figure of a device that is not a positive number, or an unknown kind or dtype."""
    require_one_of("kind", device.kind, ("neuron", "cuda", "cpu"))
    if not isinstance(device.matmul_flops, dict) or set(device.matmul_flops) != {"bfloat16", "float16", "float32"}:
        raise ValueError(f"matmul_flops must have bfloat16, float16 and float32, got {device.matmul_flops!r}")
    figures = {f"matmul_flops of {dtype}": value for dtype, value in device.matmul_flops.items()}
    texts = ("name", "kind", "source", "matmul_flops", "measured")
    figures |= {name: value for name, value in dataclasses.asdict(device).items() if name not in texts}
    for name, value in figures.items():
        # type(), not isinstance(): a bool is an int too
        is_number = type(value) is int or (type(value) is float and math.isfinite(value))
        if not is_number or value < 0 or (value == 0 and name not in _MAY_BE_0):
            least = "at least" if name in _MAY_BE_0 else "above"
            raise ValueError(f"{name} must be a number {least} 0, got {value!r}")
    if device.ranks_per_host != int(device.ranks_per_host):
        raise ValueError(f"ranks_per_host must be an integer, got {device.ranks_per_host}")


def device_named(name: str) -> Device:
    """Return the device called ``name``, or that of a ``.json`` file (``read_device``).

    Raises:
        ValueError: the name is unknown; the message has the nearest one.
    """
    if name.endswith(".json"):
        return read_device(Path(name))
    aliases = {"a100": "a100-80gb"}
    name = aliases.get(name.lower(), name.lower())
    require_one_of("device", name, tuple(DEVICES))
    return DEVICES[name]


def host_device(memory_gib: float, ranks: int) -> Device:
    """Return one rank's part of a host that computes on its CPU.

    Its rates are of two cores [estimate]: they order the settings of a run on this host, no more.

    Args:
        memory_gib: memory that the rank can still allocate.
        ranks: ranks of the host.
    """
    return Device(
        name="cpu",
        kind="cpu",
        memory_gib=memory_gib,
        reserve_gib=0.0,
        matmul_flops=_matmul(0.05, 0.1),
        memory_bytes_per_s=10e9,
        link_bytes_per_s=1e9,
        ranks_per_host=ranks,
        host_link_bytes_per_s=1e9,
        host_copy_bytes_per_s=10e9,
        host_memory_gib=0.0,
        source="[estimate]",
    )


def gpu_named(name: str) -> Device | None:
    """Return the GPU of a name of the driver, such as ``NVIDIA H100 80GB HBM3``, or None."""
    words = name.lower().replace("-", " ").split()
    for device in DEVICES.values():
        family, _, size = device.name.partition("-")
        if device.kind == "cuda" and family in words and (not size or size in words):
            return device
    return None
