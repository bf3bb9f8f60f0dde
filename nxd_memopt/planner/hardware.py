"""Devices: memory, rates and links of one rank, and the part of its memory that tensors cannot use.

Published rates are peaks; ``step_time.RATES`` has the parts that a step of this library reaches. ``devices.toml`` has
the table of devices, with the sources that are named here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nxd_memopt.options import require_one_of

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
allocator. 325 MiB: what a process had after a step with T=4 on H200s, 1,601 MiB, without context and communicator."""
CUDA_RESERVE_GIB = CUDA_CONTEXT_GIB + CUDA_LIBRARIES_GIB
NCCL_GIB = 0.66
"""Buffers of one NCCL communicator on H200s: 366 to 390 MiB when it is created [measured], and about 290 MiB with its
first collective, the difference between steps with two communicators and with one."""

NOT_MODELLED = {
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
"""``Device.launch_s`` where it is not measured: the hosts of the recorded steps have 3.2e-5 and 3.4e-5."""


@dataclass(frozen=True)
class Device:
    """One rank's device and its share of the host.

    Args:
        name: key of ``DEVICES``, ``cpu`` for a host, or the name in a file of ``plan --calibrate``.
        kind: ``neuron``, ``cuda`` or ``cpu``.
        memory_gib: memory of one rank's device in GiB, as the runtime reports it.
        reserve_gib: part of it that tensors cannot use.
        matmul_flops: peak of dense matmuls in FLOP/s, by dtype of the factors.
        memory_bytes_per_s: bandwidth of the device's memory.
        link_bytes_per_s: what a rank sends to the other ranks of its host, one way.
        ranks_per_host: ranks of a host of the largest instance type.
        host_link_bytes_per_s: what a rank sends to other hosts, one way: its part of the host's network.
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
    def backend(self) -> Literal["neuron", "xla", "cuda", "cpu"]:
        """Name of the backend that ranks on this device use: trn1 runs graphs of torch_xla."""
        if self.kind == "neuron" and self.name.startswith("trn1"):
            return "xla"
        return self.kind

    @property
    def memory_bytes(self) -> int:
        """Memory of the device in bytes."""
        return int(self.memory_gib * GIB)

    def with_given(self, **given: float | None) -> Device:
        """Return the device with the given fields, of which None is its own."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

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


def _read_table() -> dict[str, Device]:
    """Return the devices of ``devices.toml`` by name, in the units of ``Device``."""
    reserves = {"neuron": RESERVE_GIB, "cuda": CUDA_RESERVE_GIB}
    found: dict[str, Device] = {}
    for name, row in tomllib.loads(_TABLE.read_text(encoding="utf-8")).items():
        ranks = row["ranks_per_host"]
        found[name] = Device(
            name=name,
            kind=row["kind"],
            memory_gib=row["memory_gib"],
            reserve_gib=reserves[row["kind"]],
            matmul_flops=_matmul(row["matmul_bf16"], row["matmul_fp32"]),
            memory_bytes_per_s=row["memory_rate"] * 1e9,
            link_bytes_per_s=row["link_rate"] * 1e9,
            ranks_per_host=ranks,
            host_link_bytes_per_s=row["host_network"] / 8 * 1e9 / ranks,
            host_copy_bytes_per_s=row["copy_rate"] * 1e9,
            host_memory_gib=row["host_memory_gib"] / ranks,
            source=row["source"],
            compute_capability=row.get("compute_capability", 0.0),
        )
    return found


_TABLE = Path(__file__).with_name("devices.toml")
DEVICES = _read_table()
"""Devices by name."""
_ALIASES = {"a100": "a100-80gb"}
GPUS = (*(name for name, device in DEVICES.items() if device.kind == "cuda"), *_ALIASES)
"""Names of NVIDIA GPUs, with aliases."""
TRAINIUM = tuple(name for name, device in DEVICES.items() if device.kind == "neuron")
"""Names of Trainium devices."""


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
            # The file has what the version that wrote it assumed, and did not measure.
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
    not_figures = ("name", "kind", "source", "matmul_flops", "measured")
    figures |= {name: value for name, value in dataclasses.asdict(device).items() if name not in not_figures}
    for name, value in figures.items():
        # type(), not isinstance(): a bool is an int too
        is_number = type(value) is int or (type(value) is float and math.isfinite(value))
        if not is_number or value < 0 or (value == 0 and name not in _MAY_BE_0):
            raise ValueError(f"{name} must be a number above 0 ({', '.join(_MAY_BE_0)}: or 0), got {value!r}")
    if device.ranks_per_host != int(device.ranks_per_host):
        raise ValueError(f"ranks_per_host must be an integer, got {device.ranks_per_host}")


def device_named(name: str) -> Device:
    """Return the device called ``name``, or the device of a ``.json`` file (``read_device``).

    Raises:
        ValueError: the name is unknown; the message has the nearest one.
    """
    if name.endswith(".json"):
        return read_device(Path(name))
    name = _ALIASES.get(name.lower(), name.lower())
    require_one_of("device", name, tuple(DEVICES))
    return DEVICES[name]


def host_device(memory_gib: float, ranks: int) -> Device:
    """Return one rank's part of a host that computes on its CPU.

    Its rates are of two cores [estimate]: they rank the settings of a run on this host, and are no absolute times.

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
        if device.kind == "cuda" and all(word in words for word in device.name.split("-")):
            return device
    return None
