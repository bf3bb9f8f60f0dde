"""Defines the platforms to launch on: ranks per host, environment, and options that are refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

from nxd_memopt.command_line import INSTANCES
from nxd_memopt.launch.machine import Machine
from nxd_memopt.launch.trainium import (
    TRN1_2XLARGE_GROUP_SIZES,
    functionalization,
    isolation_note,
    neuron_cc_flags,
    refuse_downcasts,
    torch_neuron,
    trn1,
)
from nxd_memopt.launch.variables import Run, Variable
from nxd_memopt.options import require_one_of
from nxd_memopt.planner.hardware import GPUS

ROOT_COMM_PORT = 62182  # the Neuron runtime's default with torch_xla
TORCH_NEURON_PACKAGE = "torch_neuronx"
TORCH_XLA_PACKAGE = "torch_xla"


@dataclass(frozen=True)
class Platform:
    """Hardware and software that ranks run on.

    Args:
        name: value of ``--platform``.
        variables: returns the environment variables of the ranks.
        processes: ranks per host, one per logical NeuronCore. ``None`` means ``chip_processes``
            for each chip of the host, or one tensor-parallel group if ``chip_processes`` is None
            too.
        chip_processes: ranks per Trainium chip, which is also the largest tensor-parallel group
            that AWS advises.
        is_trainium: whether many ranks share a host and the Neuron runtime.
        compiles: whether ``neuron_parallel_compile`` can compile the graphs ahead of time.
        package: module of the platform's PyTorch integration, which ranks import.
        root_comm_port: port on host 0 of the Neuron runtime's collectives, unless
            ``--root-comm-port`` is given; ``None`` takes a free port.
        certified_as: device of ``nxd-memopt certify``, if its name is another one.
    """

    name: str
    variables: Callable[[Run], list[Variable]]
    processes: int | None = None
    chip_processes: int | None = None
    is_trainium: bool = False
    compiles: bool = False
    package: str | None = None
    root_comm_port: int | None = None
    certified_as: str | None = None

    def require_package(self) -> None:
        """Raise ``ValueError`` if the platform's package is not installed."""
        if self.package is not None and find_spec(self.package) is None:
            raise ValueError(
                f"--platform {self.name} needs {self.package}, which is not installed for {sys.executable}: activate "
                "the environment that has it, or choose another --platform"
            )

    def processes_per_host(self, requested: int | None, tensor_model_parallel_size: int, machine: Machine) -> int:
        """Return the number of ranks per host.

        Args:
            requested: value of ``--nproc``, or None.
            tensor_model_parallel_size: T, the default on platforms without Trainium chips.
            machine: this host.

        Raises:
            ValueError: the number exceeds the host's logical cores, or cannot be determined.
        """
        if requested is not None and self.processes is not None and requested > self.processes:
            raise ValueError(
                f"--nproc {requested} exceeds the {self.processes} logical NeuronCores that a host of --platform "
                f"{self.name} has, one for each process: lower it, or name this instance's platform"
            )
        if requested is not None or self.processes is not None:
            return requested or self.processes or 1
        # GPUs and CPUs: devices are not counted, because a host may be shared. One
        # tensor-parallel group is the smallest run that the configuration allows.
        if self.chip_processes is None:
            return tensor_model_parallel_size
        # A host without the driver's device files has no chips, or is not the host that will run
        # the ranks (a login node, --dry-run on a laptop), so its count would be of no use.
        if machine.chips() == 0:
            raise ValueError(
                f"--platform {self.name} has hosts of several sizes, and this one has no /dev/neuron*: pass --nproc, "
                f"{self.chip_processes} for each chip of a host"
            )
        return machine.chips() * self.chip_processes

    def notes(self, run: Run) -> list[str]:
        """Return advice on a configuration that runs, but slowly or with a risk."""
        notes = []
        size = run.config.parallel.tensor_model_parallel_size
        if self.chip_processes is not None and size > self.chip_processes:
            notes.append(
                f"parallel.tensor_model_parallel_size {size} spans chips: a chip has "
                f"{self.chip_processes} ranks on --platform {self.name}, and AWS advises to keep "
                "a tensor-parallel group within a chip (recipe llama3_8b_trn2)"
            )
        if self.compiles:
            note = isolation_note(run)
            if note is not None:
                notes.append(note)
        return notes


def _cuda(run: Run) -> list[Variable]:
    """Return the environment variables of ranks on NVIDIA GPUs."""
    del run
    return [
        Variable("NXD_MEMOPT_BACKEND", "cuda", "fail rather than train on another device", "fixed"),
        Variable("CUBLAS_WORKSPACE_CONFIG", ":0:0", "matmuls without a counter to be reset before each, a launch less"),
    ]


def _cpu(run: Run) -> list[Variable]:
    """Return the environment variables of ranks on the CPU."""
    return [
        Variable("NXD_MEMOPT_BACKEND", "cpu", "train on the CPU, whatever else there is", "fixed"),
        _threads(run.processes),
    ]


def _xla_cpu(run: Run) -> list[Variable]:
    """Return the environment variables of ranks that run trn1's code path on the CPU."""
    # trn1's checks of flags and variables. Its check of group sizes is left out: gloo has no such
    # limit.
    flags = neuron_cc_flags(run.config, run.environ.get("NEURON_CC_FLAGS", ""))
    refuse_downcasts(run.environ)
    return [
        Variable("NXD_MEMOPT_BACKEND", "xla", "the code path of trn1", "fixed"),
        Variable("PJRT_DEVICE", "CPU", "torch-xla compiles for the CPU, gloo carries the collectives", "fixed"),
        functionalization(),
        Variable("NEURON_CC_FLAGS", flags, "no compiler reads it here, but recompute checks it", "combined"),
        _threads(run.processes),
    ]


def _threads(processes: int) -> Variable:
    """Return the variable that divides the host's cores among its ranks."""
    # torchrun's own default is one thread per rank, which leaves cores idle; PyTorch's default is
    # one per core in every rank. cpu_count returns None if the number is unknown.
    threads = max(1, (os.cpu_count() or 1) // processes)
    return Variable("OMP_NUM_THREADS", str(threads), "the host's cores, shared")


# Physical cores of each rank.
_LNC1 = partial(torch_neuron, logical_nc_config=1)
_LNC2 = partial(torch_neuron, logical_nc_config=2)


# Ranks that run graphs of torch_xla, and ranks that run TorchNeuron.
_TRN1 = partial(Platform, is_trainium=True, compiles=True, package=TORCH_XLA_PACKAGE, root_comm_port=ROOT_COMM_PORT)
_TRN2 = partial(Platform, is_trainium=True, package=TORCH_NEURON_PACKAGE)

PLATFORMS = {
    platform.name: platform
    for platform in (
        # trn1.32xlarge: 16 chips x 2 cores = 32 ranks. Tensor-parallel groups of 8 and 32 span
        # chips by design, so there is no chip_processes and no advice to stay within a chip.
        _TRN1("trn1", trn1, 32),
        # The cheapest instance with Trainium: one chip, 2 cores, 32 GiB of host memory.
        _TRN1("trn1-2xlarge", partial(trn1, group_sizes=TRN1_2XLARGE_GROUP_SIZES), 2),
        # A Trainium2 chip has 8 physical cores: 4 ranks with LNC 2, 8 with LNC 1. trn2.48xlarge
        # has 16 chips, trn2.3xlarge one.
        _TRN2("trn2", _LNC2, 64, 4),
        _TRN2("trn2-lnc1", _LNC1, 128, 8),
        _TRN2("trn2-3xlarge", _LNC2, 4, 4),
        # Servers of an UltraServer have 4 or 16 Trainium3 chips of 8 physical cores each, so the
        # number of ranks depends on the host.
        _TRN2("trn3", _LNC2, None, 4),
        Platform("cuda", _cuda),
        Platform("cpu", _cpu),
        Platform("xla_cpu", _xla_cpu, package=TORCH_XLA_PACKAGE, certified_as="trn1"),
    )
}


def platform_named(name: str) -> Platform:
    """Return the platform of a name, which may be an AWS instance's or a GPU's.

    Raises:
        ValueError: there is no such platform.
    """
    name = INSTANCES.get(name, name)
    # The same ranks with faster links.
    if name == "trn1n":
        name = "trn1"
    # A GPU is certified with its own memory.
    if name not in PLATFORMS and name.lower() in GPUS:
        return replace(PLATFORMS["cuda"], certified_as=name)
    require_one_of("--platform", name, (*PLATFORMS, *GPUS))
    return PLATFORMS[name]
