"""The ranks' environment: variables with their reasons, and how the present environment is merged in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nxd_memopt.launch.hosts import Hosts
from nxd_memopt.launch.machine import Machine
from nxd_memopt.training.config import TrainConfig


@dataclass(frozen=True)
class Run:
    """What a platform's variables depend on.

    Args:
        config: of the training script.
        processes: ranks on each host.
        hosts: of the run.
        environ: the present environment.
        machine: this host.
        root_comm_port: on host 0, for the Neuron runtime's collectives; ``None`` leaves the choice to the framework.
    """

    config: TrainConfig
    processes: int
    hosts: Hosts
    environ: Mapping[str, str]
    machine: Machine
    root_comm_port: int | None = None


@dataclass(frozen=True)
class Variable:
    """One variable of the ranks' environment.

    Args:
        origin: ``default`` gives way to a value in the environment; ``fixed`` follows from the configuration or the
            platform, and another value in the environment is an error; ``combined`` contains the environment's already.
        versions: of the software that reads it, where not all do.
    """

    name: str
    value: str
    reason: str
    origin: Literal["default", "fixed", "combined"] = "default"
    versions: str = ""

    def comment(self) -> str:
        return f"{self.reason} [{self.versions}]" if self.versions else self.reason


def merged(variables: list[Variable], environ: Mapping[str, str]) -> dict[str, str]:
    """Return values by name: the environment's own where it has one and the variable is not fixed.

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
