"""Owns what each platform's ranks need in their environment, every variable with its reason, and what they refuse."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from train_config import TrainConfig

TRN1_GROUP_SIZES = (1, 2, 4, 8, 32)  # for which trn1 has collectives: AWS's list, and 4 as strided groups
DOWNCASTS = ("XLA_DOWNCAST_BF16", "XLA_USE_BF16")


@dataclass(frozen=True)
class Variable:
    """One variable of the ranks' environment.

    Args:
        origin: ``default`` gives way to a value in the environment; ``fixed`` follows from the configuration or the
            platform, and another value in the environment is an error; ``combined`` contains the environment's already.
    """

    name: str
    value: str
    reason: str
    origin: Literal["default", "fixed", "combined"] = "default"


@dataclass(frozen=True)
class Platform:
    """Where ranks run.

    Args:
        processes: ranks per host; ``None`` starts one tensor-parallel group.
        variables: given the configuration, ranks per host, hosts and the environment.
        compiles: ``neuron_parallel_compile`` can compile the graphs beforehand.
    """

    name: str
    processes: int | None
    variables: Callable[[TrainConfig, int, int, Mapping[str, str]], list[Variable]]
    compiles: bool = False


def merged(variables: list[Variable], environ: Mapping[str, str]) -> dict[str, str]:
    """Values by name: the environment's own where it has one and the variable is not fixed.

    Raises:
        ValueError: the environment contradicts a fixed variable.
    """
    values = {}
    for variable in variables:
        given = variable.value if variable.origin == "combined" else environ.get(variable.name, variable.value)
        if variable.origin == "fixed" and given != variable.value:
            raise ValueError(
                f"{variable.name} is {given!r} in the environment, but this run needs {variable.value!r} "
                f"({variable.reason}): unset it, or change the configuration"
            )
        values[variable.name] = given
    return values


def stochastic_rounding(config: TrainConfig) -> bool:
    """bf16 weights without fp32 masters: rounding up or down at random keeps updates below a weight's rounding step."""
    return config.model.dtype == "bfloat16" and not config.optimizer.master_weights


def neuron_cc_flags(config: TrainConfig, given: str) -> str:
    """The configuration's flags, then those of the environment; with recompute ``-O1`` where neither names a level.

    Raises:
        ValueError: recompute is on and the last level is another one, or the flags cannot be read.
    """
    with _library_on_cpu():
        from nxd_memopt.backends.compiler_flags import optimization_level, recompute_error, with_optimization_level
    flags = f"{shlex.join(config.launch.neuron_cc_flags)} {given}".strip()
    if config.memory.recompute_granularity is None:
        return flags
    flags = f"-O1 {flags}"  # the last level wins
    error = recompute_error(flags)
    if error is not None:
        raise ValueError(f"{error} (launch.neuron_cc_flags, then the environment's NEURON_CC_FLAGS, and the last wins)")
    return with_optimization_level(flags, optimization_level(flags))


@contextlib.contextmanager
def _library_on_cpu() -> Iterator[None]:
    """Import the library's backends without opening a device, which on trn1 would keep it from the ranks."""
    before = os.environ.get("NXD_MEMOPT_BACKEND")
    os.environ["NXD_MEMOPT_BACKEND"] = "cpu"
    try:
        yield
    finally:
        del os.environ["NXD_MEMOPT_BACKEND"]
        if before is not None:
            os.environ["NXD_MEMOPT_BACKEND"] = before


def _trn1(config: TrainConfig, processes: int, nodes: int, environ: Mapping[str, str]) -> list[Variable]:
    _require_trn1_groups(config.parallel.tensor_model_parallel_size)
    _refuse_downcasts(environ)
    flags = neuron_cc_flags(config, environ.get("NEURON_CC_FLAGS", ""))
    rounding, cores = str(int(stochastic_rounding(config))), str(processes)
    return [
        Variable("NXD_MEMOPT_BACKEND", "xla", "fail rather than train on another device", "fixed"),
        Variable("PJRT_DEVICE", "NEURON", "torch-xla runs on NeuronCores, not on its CPU simulation", "fixed"),
        Variable("NEURON_CC_FLAGS", flags, "the compiler's options; recompute needs -O1", "combined"),
        Variable("NEURON_FUSE_SOFTMAX", "1", "softmax reaches the compiler as one operation"),
        Variable(
            "NEURON_RT_STOCHASTIC_ROUNDING_EN",
            rounding,
            "1 for bf16 weights without fp32 masters, 0 otherwise (model.dtype, optimizer.master_weights)",
            "fixed",
        ),
        Variable("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "3", "the host runs ahead by up to three graphs"),
        Variable("NEURON_RT_NUM_CORES", cores, "NeuronCores on this host, one per process", "fixed"),
        Variable("NUM_NEURONCORES", cores, "the same, as AWS's launchers name it", "fixed"),
        Variable("TPU_NUM_DEVICES", cores, "the same, for torch-xla's PJRT client", "fixed"),
        Variable("TPU_CHIPS_PER_HOST_BOUNDS", cores, "the same, for torch-xla's view of the topology", "fixed"),
        Variable("MALLOC_ARENA_MAX", "64", "bounds what glibc's malloc keeps per thread: many ranks share a host"),
        *(_efa() if nodes > 1 else []),
    ]


def _trn2(config: TrainConfig, processes: int, nodes: int, environ: Mapping[str, str]) -> list[Variable]:
    del config, processes, environ
    return [
        Variable("NXD_MEMOPT_BACKEND", "neuron", "fail rather than train on another device", "fixed"),
        Variable(
            "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS",
            "1",
            "an operation that fails on the device is an error, not a silent detour through the CPU",
        ),
        Variable("MALLOC_ARENA_MAX", "64", "bounds what glibc's malloc keeps per thread: many ranks share a host"),
        *(_efa() if nodes > 1 else []),
    ]


def _efa() -> list[Variable]:
    return [
        Variable("FI_PROVIDER", "efa", "collectives between hosts go through EFA, not TCP"),
        Variable("FI_EFA_USE_DEVICE_RDMA", "1", "the network card reads device memory without a copy through the host"),
        Variable("FI_EFA_FORK_SAFE", "1", "libfabric stays usable where Python forks, on older kernels"),
        Variable("CCOM_SOCKET_IFNAME", "eth0", "the network interface over which the ranks set up their collectives"),
    ]


def _cuda(config: TrainConfig, processes: int, nodes: int, environ: Mapping[str, str]) -> list[Variable]:
    del config, processes, nodes, environ
    return [
        Variable("NXD_MEMOPT_BACKEND", "cuda", "fail rather than train on another device", "fixed"),
        Variable("CUBLAS_WORKSPACE_CONFIG", ":0:0", "matmuls without a counter to be reset before each, a launch less"),
    ]


def _cpu(config: TrainConfig, processes: int, nodes: int, environ: Mapping[str, str]) -> list[Variable]:
    del config, nodes, environ
    return [
        Variable("NXD_MEMOPT_BACKEND", "cpu", "train on the CPU, whatever else there is", "fixed"),
        _threads(processes),
    ]


def _xla_cpu(config: TrainConfig, processes: int, nodes: int, environ: Mapping[str, str]) -> list[Variable]:
    flags = neuron_cc_flags(config, environ.get("NEURON_CC_FLAGS", ""))
    _refuse_downcasts(environ)
    del nodes
    return [
        Variable("NXD_MEMOPT_BACKEND", "xla", "the code path of trn1", "fixed"),
        Variable("PJRT_DEVICE", "CPU", "torch-xla compiles for the CPU, gloo carries the collectives", "fixed"),
        Variable("NEURON_CC_FLAGS", flags, "no compiler reads it here, but recompute checks it", "combined"),
        _threads(processes),
    ]


def _threads(processes: int) -> Variable:
    return Variable("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)), "the host's cores, shared")


def _require_trn1_groups(size: int) -> None:
    if size not in TRN1_GROUP_SIZES:
        raise ValueError(
            f"parallel.tensor_model_parallel_size {size} is not one of {list(TRN1_GROUP_SIZES)}, the group sizes for "
            "which trn1 has collectives: choose one of them"
        )


def _refuse_downcasts(environ: Mapping[str, str]) -> None:
    for name in DOWNCASTS:
        if environ.get(name, "0") != "0":
            raise ValueError(
                f"{name}={environ[name]} makes every fp32 tensor bf16, fp32 master weights too: unset it and set "
                "model.dtype to bfloat16"
            )


PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform("trn1", 32, _trn1, compiles=True),
        Platform("trn2", 64, _trn2),
        Platform("cuda", None, _cuda),
        Platform("cpu", None, _cpu),
        Platform("xla_cpu", None, _xla_cpu),
    )
}
